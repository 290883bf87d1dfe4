"""Train a LongNet language model on text files, on one device or many ranks.

    python examples/train_lm.py TEXT ... --out runs/one
    torchrun --nproc-per-node 8 examples/train_lm.py TEXT ... --out runs/long --sequence 8 --tokens 1048576 --size 125M

A row is one packed sequence of --tokens tokens. It is spread over --sequence ranks; the other ranks take other rows.
Started again with the same arguments, or with more --steps, training goes on from its last checkpoint, on any number of
ranks. docs/language-models.md shows how to use what is trained.
"""

import argparse
import contextlib
import math
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import witten_bell
from texts import BEGIN, BYTES, PIECE, PackedRows, held_out_rows, read_texts, summary, tokens_of
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import Checkpoints, Log, together

import dilated_attention as da
from dilated_attention.cli.options import branches, count, flag, index, number, option
from dilated_attention.models import LMConfig, LongNetLM, document_positions, shifted, weights
from dilated_attention.models.loss import IGNORED
from dilated_attention.models.transformer import SIZES
from dilated_attention.show import charts

ANSWER = 20.0  # the weight of an answer: there are few, and the rest of a text says little of what is far
OPTIONS = (
    option("text", "FILE", "files, or folders whose files are read", Path, nargs="+"),
    option("--suffix", "ENDING", "of files in folders", default=[".txt", ".md", ".py"], nargs="+"),
    option("--out", "FOLDER", "for checkpoints, log.jsonl and loss.svg", Path, required=True),
    option("--tokenizer", "NAME", "a Hugging Face tokenizer, by name or folder; bytes by default"),
    option("--from", "FILE", "a checkpoint to begin with: its model and its pattern", Path, dest="start"),
    option("--size", None, "of the model, instead of the next three", choices=list(SIZES)),
    option("--dim", "CHANNELS", "the width of the model", count, 128),
    option("--depth", "LAYERS", "how many there are", count, 2),
    option("--heads", "HEADS", "of each layer", count, 4),
    option("--segments", "TOKENS", "lengths; by default as suggested for --tokens", count, nargs="+"),
    option("--rates", "RATE", "dilation rates, one per segment length", count, nargs="+"),
    option("--pattern", "BRANCHES", "one for all layers or one for each, instead of the last two, such as "
           "'Window(63), Strided(8)'", branches, nargs="+"),
    option("--tokens", "TOKENS", "the length of a row", partial(count, least=2), 512),
    option("--rows", "ROWS", "in a step", count, 4),
    option("--steps", "STEPS", "in all; give more, and a training goes on", count, 450),
    option("--sequence", "RANKS", "that share a row", count, 1),
    option("--lr", "RATE", "the highest learning rate", number, 6e-3),
    option("--warmup", "STEPS", "in which it rises", index, 30),
    option("--short", "STEPS", f"at first, with rows of pieces of {PIECE} tokens: what is near is learned sooner",
           count),
    option("--ask", "TEXT", "bytes that ask: what follows one weighs more, and is counted"),
    option("--seed", "N", "of weights, order and samples", int, 0),
    option("--save-every", "STEPS", "between two checkpoints", count, 200),
    option("--evaluate", "TOKENS", "lengths of held-out rows; --tokens, if that fits", partial(count, least=2),
           nargs="+"),
    option("--device", None, "cuda if any", default="cuda" if torch.cuda.is_available() else "cpu",
           choices=["cpu", "cuda"]),
    flag("--float32", "also on CUDA, instead of bfloat16 with float32 weights"),
    flag("--checkpointing", "compute blocks again in the backward pass"),
    flag("--plot", "draw loss.svg; needs the extra bench"),
    option("--sample", "TOKENS", "of a text that is written at the end", index, 0),
    option("--prompt", "TEXT", "what it goes on from; by default how a training text begins"),
)  # fmt: skip


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a LongNet language model on text files.")
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")  # in one line
    for names, how in OPTIONS:
        parser.add_argument(*names, **how)
    options = parser.parse_args(given)
    if len(options.segments or []) != len(options.rates or []):
        parser.error("--segments and --rates belong together: give as many rates as segment lengths")
    if options.pattern and options.segments:
        parser.error("--pattern says all branches: leave out --segments and --rates")
    if options.ask and options.tokenizer:
        parser.error("--ask needs bytes: leave out --tokenizer")
    model = ("size", "dim", "depth", "heads", "segments", "pattern")
    if options.start and any(getattr(options, name) != parser.get_default(name) for name in model):
        parser.error(f"--from names a whole model: leave out --{', --'.join(model)}")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # not LOCAL_RANK: all ranks of a machine must say the same
    if options.device == "cuda" and there < needed:
        parser.error(f"--device cuda needs a GPU per rank, {needed} here, and torch sees {there}: give --device cpu")
    return options


class Trainer:
    """The model on its ranks, its optimizer and its checkpoints."""

    kind = LongNetLM  # of the model

    def __init__(self, options: argparse.Namespace, config: LMConfig, **facts: str) -> None:
        self.options, self.config, self.step, device = options, config, 0, options.device
        world, sequence = dist.get_world_size(), options.sequence
        if world % sequence or options.rows % (world // sequence):
            raise ValueError(f"{world} ranks: --sequence must divide them, and --rows be a multiple of the quotient")
        self.mesh = init_device_mesh(device, (world // sequence, sequence), mesh_dim_names=("data", "sequence"))
        self.group = self.mesh["sequence"].get_group()
        self.asks = torch.tensor([*(options.ask or "").encode()], dtype=torch.int64, device=device)
        torch.manual_seed(options.seed)
        self.model = self.kind(config, device=device)
        if options.start is not None:
            self.model.load_state_dict(LongNetLM.from_checkpoint(options.start).state_dict())
        self.model.checkpointing = options.checkpointing
        half = device == "cuda" and not options.float32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        every = init_device_mesh(device, (world,), mesh_dim_names=("all",))
        for part in (*self.model.blocks, self.model):
            fully_shard(part, mesh=every, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.lr, (0.9, 0.95), weight_decay=0.1)
        same = {name: getattr(options, name) for name in ("tokens", "rows", "seed", "lr", "warmup", "short", "ask")}
        self.checkpoints = Checkpoints(options.out, {**config.to_dict(), **same, **facts})  # in which both must agree
        if saved := self.checkpoints.load():
            states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
            set_state_dict(self.model, self.optimizer, **states, options=StateDictOptions(full_state_dict=True))
            self.step = saved["step"]

    def done(self) -> float:  # 1 at the end
        return self.step / self.options.steps

    def state(self) -> dict[str, Any]:
        """All weights and the state of the optimizer, on the first rank; every rank calls it."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=whole)
        others = {"config": self.config.to_dict(), "tokenizer": self.options.tokenizer}
        return {**others, "model": model, "optimizer": optimizer}

    def losses(self, row: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank's part of a row, which of them count, and which are answers. Labels are shifted before a cut."""
        whole = row, shifted(row, documents), document_positions(documents).unsqueeze(0)
        tokens, labels, positions = (da.shard_sequence(x, self.group).to(self.options.device) for x in whole)
        over = da.ContextParallel(self.group, total_length=row.shape[1])
        counted = labels != IGNORED
        answers = counted & torch.isin(tokens, self.asks)
        return self.model(tokens, labels, positions=positions, cu_seqlens=documents, group=over), counted, answers

    def gradients(self, rows: PackedRows) -> Tensor:
        """The loss of a step, averaged over its rows; gradients are those of one device."""
        first, total = self.step * self.options.rows, torch.zeros((), device=self.options.device)
        mine = range(first + self.mesh["data"].get_local_rank(), first + self.options.rows, self.mesh["data"].size())
        for row in mine:
            self.model.set_requires_gradient_sync(row == mine[-1])
            losses, counted, answers = self.losses(*rows[row])
            if self.options.ask:  # the loss itself stays what it is
                losses.register_hook(torch.where(answers, ANSWER, 1.0).mul)
            loss = da.global_mean_for_ddp(losses, self.group, counted) / len(mine)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=self.mesh["data"].get_group())
        return total / self.mesh["data"].size()

    def update(self) -> float:
        """One step of the optimizer: cosine schedule, clipped gradients. Their norm before that, or NaN: see `run`."""
        rising = min(1.0, (self.step + 1) / max(1, self.options.warmup))
        falling = 0.55 + 0.45 * math.cos(math.pi * self.done())
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * rising * falling
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        weights: Any = torch.nn.utils.get_total_norm(self.model.parameters())  # finite if all of them are
        return float(norm.full_tensor() + 0 * weights.full_tensor())

    @torch.no_grad()
    def judged(self, rows: PackedRows) -> tuple[float, float]:
        """Of held-out rows: bits per token, and the share of answers that are known: likelier than all else."""
        sums, data = torch.zeros(4, dtype=torch.float64, device=self.options.device), self.mesh["data"]
        for first in range(0, rows.count, data.size()):  # every rank calls the model equally often
            mine = first + data.get_local_rank()
            losses, counted, answers = self.losses(*rows[mine])
            found = losses.double().sum(), counted.sum(), (answers & (losses < math.log(2))).sum(), answers.sum()
            sums += torch.stack(found) * (mine < rows.count)
        dist.all_reduce(sums)
        return float(sums[0] / sums[1] / math.log(2)), float(sums[2] / sums[3])


def run(trainer: Trainer, rows: PackedRows, log: Log) -> bool:
    """Train to the end; False: SIGTERM came, and all is saved."""
    asked, stops = [], 0.0
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        while trainer.done() < 1 and not stops:
            loss, norm = trainer.gradients(rows), trainer.update()
            told = torch.tensor([float(bool(asked)), float(not math.isfinite(loss + norm))], device=loss.device)
            dist.all_reduce(told, dist.ReduceOp.MAX)  # what one rank has seen, all do
            stops, broken = told.tolist()
            if broken:
                then = f"with a lower --lr and another --out; the last good checkpoint is {trainer.checkpoints.last()}"
                what = f"a loss, gradients or weights that are not finite (loss {loss:.4g}, norm {norm:.4g})"
                raise ValueError(f"step {trainer.step} has {what}: start again {then}")
            with together("Log.add()", device=loss.device.type):  # the disk may be full
                log.add(trainer.step, loss=float(loss), norm=norm)
            if stops or trainer.step % trainer.options.save_every == 0 or trainer.done() >= 1:
                trainer.checkpoints.save(trainer.step, trainer.state())
        return trainer.done() >= 1
    finally:
        signal.signal(signal.SIGTERM, before)


def train(options: argparse.Namespace) -> None:
    with together("train()", device=options.device) as same:
        tokenizer, texts = None, read_texts(options.text, options.suffix)
        if options.plot:
            charts.library("vl_convert")  # better missed now than after the training
        if options.tokenizer is not None:
            transformers = charts.library("transformers", "--tokenizer needs", "models")
            tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer)
        vocabulary = len(tokenizer) if tokenizer else BYTES
        if options.pattern:
            pattern = options.pattern[0] if len(options.pattern) == 1 else tuple(options.pattern)
        elif options.segments:
            pattern = da.DilatedPattern.longnet(options.segments, options.rates)
        else:
            pattern = da.DilatedPattern.suggest(options.tokens, options.heads)
        config = LMConfig(vocabulary, options.dim, options.depth, options.heads, pattern)
        if options.size is not None:
            most = max(vocabulary, SIZES[options.size]["vocab_size"])
            config = LMConfig.of(options.size, pattern, vocab_size=most)
        if options.start is not None:
            found, said = weights.checkpoint(options.start)
            if (trained := found.get("tokenizer")) != options.tokenizer:
                how = f"with --tokenizer {trained}" if trained else "on bytes"
                raise ValueError(f"{said} was trained {how}: so go on")
            config = LongNetLM.of_checkpoint(found, said).config
        held_out = texts[9::10] or texts[-1:]
        rest = [text for index, text in enumerate(texts) if index % 10 != 9] if len(texts) > 9 else texts[:-1]
        parts = rest, held_out, [options.prompt.encode()] if options.prompt else []
        documents, unseen, prompts = (tokens_of(part, config.vocab_size, tokenizer) for part in parts)
        if options.prompt and not prompts:
            raise ValueError(f"--prompt {options.prompt!r} has no tokens")
        rows = PackedRows(documents, options.tokens, options.seed, (options.short or 0) * options.rows)
        unseen_tokens = sum(map(len, unseen))
        by_length = held_out_rows(unseen, options.evaluate or [max(2, min(options.tokens, unseen_tokens))])
        same["texts"] = f"{summary(documents)} and, held out, {summary(unseen)}"
    trainer = Trainer(options, config, texts=str(same["texts"]))
    with together("Log()", device=options.device):
        log = Log(options.out / "log.jsonl", options.steps, trainer.step, options.rows * options.tokens)
    if not run(trainer, rows, log):
        if log.speaks:
            print(f"stopped after step {trainer.step}, which is saved: the same command goes on")
        return
    per_byte = 1.0 if tokenizer is None else unseen_tokens / sum(map(len, held_out))
    judged = {length: trainer.judged(part) for length, part in by_length.items()}
    found = {f"bits_per_byte_{length}": bits * per_byte for length, (bits, _) in judged.items()}
    found |= {f"answers_known_{length}": known for length, (_, known) in judged.items() if options.ask}
    if log.speaks:
        log.add(trainer.step, **found)
        scored = max(part.tokens * part.count for part in by_length.values()) / per_byte  # bytes, by the model
        orders = witten_bell.bits_per_byte(b"".join(rest), b"".join(held_out)[: round(scored)])
        print("\nheld-out rows of   bits per byte", "  answers known" if options.ask else "")
        for length, (bits, known) in judged.items():
            print(f"{length:16,} {bits * per_byte:15.3f}", f"{known:15.0%}" if options.ask else "")
        print("Witten-Bell models:", ", ".join(f"{x:.3f} of order {n}" for n, x in orders.items()))
        if options.sample:
            drawn, model = torch.Generator().manual_seed(options.seed), LongNetLM.from_checkpoint(options.out)
            prompt = (prompts or [documents[0][:64]])[0]
            written = model.generate_tokens([prompt], options.sample, temperature=0.8, generator=drawn)
            ids = torch.cat((prompt, written[0])).tolist()
            print(tokenizer.decode(ids) if tokenizer else bytes(x for x in ids if x < BEGIN).decode(errors="replace"))
        if options.plot:
            levels = {f"Witten-Bell, order {n}": x for n, x in orders.items()}
            log.plot(options.out / "loss.svg", {"held out": judged[max(judged)][0] * per_byte, **levels})


@contextlib.contextmanager
def ranks(device: str) -> Iterator[None]:
    """The ranks that torchrun has started, or this process alone."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # checkpoints are agreed on by the hosts
    one = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **one)  # type: ignore[arg-type]
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    try:
        with contextlib.nullcontext() if dist.is_initialized() else ranks(options.device):
            train(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(f"error: {' '.join(str(error).split())}") from error


if __name__ == "__main__":
    main()
