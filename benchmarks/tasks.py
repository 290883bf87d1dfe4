"""Two real tasks on one GPU: a byte model of source code, LongNet beside dense attention, and a model of one genome.

    python benchmarks/tasks.py code                                 # the baselines and all runs, a process for each
    python benchmarks/tasks.py code longnet-32k dense-8k --seconds 180
    python benchmarks/tasks.py genome --fasta NC_008253.fna.gz
    python benchmarks/tasks.py draw --out benchmarks/results/tasks  # tables and pictures of docs/results.md

Equal compute is equal time: every run of a task trains for as many seconds of the same GPU. The clock begins after the
first steps, in which kernels are compiled, and stands still while held-out text is judged. The learning rate follows
it, on a cosine. Tokens and operations are written beside the seconds. A run writes its file every few seconds, so one
that is cut leaves its curve.
"""

from __future__ import annotations

import argparse
import lzma
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import tasks_data
import tasks_shown
import train_lm
import witten_bell
from tasks_model import Run, Timed, judged

from dilated_attention import DilatedPattern
from dilated_attention.bench import machine
from dilated_attention.bench.suites.models import operations
from dilated_attention.models import LMConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
SHORTEST = 2048  # segments double from here, and each has so many rows
SEQUENCES = 64  # of code, held out
K, FAR = 1 << 10, 1 << 20


class Task(NamedTuple):
    runs: dict[str, Run]
    windows: tuple[int, ...]  # in which held-out text is judged
    seconds: float
    rotary_base: float
    given: dict[str, float]  # options of examples/train_lm.py


TASKS = {
    "code": Task(
        {"longnet-32k": Run("longnet", 32 * K), "dense-8k": Run("dense", 8 * K), "dense-32k": Run("dense", 32 * K),
         "longnet-8k": Run("longnet", 8 * K), "longnet-128k": Run("longnet", 128 * K)},
        (8 * K, 32 * K, 128 * K), 180.0, 1e6, {"dim": 512, "depth": 5, "heads": 8, "lr": 2e-3},
    ),
    "genome": Task(
        {"longnet-8k": Run("longnet", 8 * K, reach=FAR),
         "longnet-1m": Run("longnet", FAR, step=FAR, reach=FAR, warmup=20),
         "longnet-8k-large-steps": Run("longnet", 8 * K, step=FAR, reach=FAR, warmup=20)},
        (8 * K, FAR), 100.0, 1e7, {"dim": 256, "depth": 4, "heads": 8, "lr": 2e-3},
    ),
}  # fmt: skip
# options of examples/train_lm.py that can be given here, too
TAKEN = {"dim": int, "depth": int, "heads": int, "lr": float, "seed": int, "device": str}
SWITCHES = ("float32", "checkpointing")


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=[*TASKS, "draw"])
    parser.add_argument("runs", nargs="*", help="some of the runs, or baselines; all by default")
    parser.add_argument("--out", type=Path, default=Path("report/tasks"), help="the folder of the results")
    parser.add_argument("--seconds", type=float, help="of training, for each run")
    parser.add_argument("--code", nargs="+", type=Path, help="folders of packages; by default those of this Python")
    parser.add_argument("--fasta", type=Path, help="the genome")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this, for a test")
    parser.add_argument("--commit", help="for a tree without its .git")
    for name, kind in TAKEN.items():
        parser.add_argument(f"--{name}", type=kind, help="as of examples/train_lm.py")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help="as of examples/train_lm.py")
    options = parser.parse_args(words)
    known = ["baselines", *TASKS[options.task].runs] if options.task in TASKS else []
    if wrong := [name for name in options.runs if name not in known]:
        parser.error(f"{options.task} has no run {wrong[0]!r}: there are {', '.join(known) or 'none'}")
    if options.task == "genome" and options.fasta is None:
        parser.error("genome needs --fasta FILE")
    options.runs = options.runs or known
    return options


def training_options(options: argparse.Namespace, folder: str) -> argparse.Namespace:
    """Those of examples/train_lm.py. A step is one row of windows, and nothing is saved before the end."""
    given = TASKS[options.task].given | {name: x for name in TAKEN if (x := getattr(options, name)) is not None}
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    words += [f"--{name}" for name in SWITCHES if getattr(options, name)]
    return train_lm.arguments(["none", "--out", folder, "--rows", "1", "--save-every", str(sys.maxsize), *words])


def pattern_of(run: Run, shortest: int) -> DilatedPattern:
    if run.attention == "dense":
        return DilatedPattern.longnet([run.window], [1])
    rates = [1 << i for i in range((max(run.window, run.reach) // shortest).bit_length())]
    return DilatedPattern.longnet([shortest * rate for rate in rates], rates)


def baselines_of(task: str, data: tasks_data.Data, device: str) -> dict[str, float]:
    """What needs no network: xz on the held-out text, and Witten-Bell models of the training text, in bits."""
    text, held_out = data.text, data.held_out.numpy().tobytes()
    orders, width, shown = tuple(range(7)), 8, held_out
    if task == "genome":  # one byte a base, as in the file
        orders, width, text = (1, 2, 4, 8, 10, 11, 12, 14, 16), 2, tasks_data.both_strands(text)
        shown = held_out.translate(bytes.maketrans(bytes(range(4)), tasks_data.BASES))
    packed = lzma.compress(shown, preset=9 | lzma.PRESET_EXTREME)
    found = witten_bell.bits_per_byte(text.numpy().tobytes(), held_out, orders, width=width, device=device)
    return {"xz -9e": 8 * len(packed) / len(shown), **{f"order {order}": bits for order, bits in found.items()}}


def train(options: argparse.Namespace, given: argparse.Namespace, name: str, data: Any, about: dict[str, Any]) -> None:
    """One run: train, judge, and write as it goes."""
    task, small = TASKS[options.task], options.shrink
    run = task.runs[name]
    run = run._replace(window=run.window // small, step=run.step // small, reach=run.reach // small)
    shortest, pattern = SHORTEST // small, pattern_of(run, SHORTEST // small)
    config = LMConfig(data.begin + 1, given.dim, given.depth, given.heads, pattern, rotary_base=task.rotary_base)
    given.warmup, given.seconds = run.warmup, options.seconds or task.seconds
    data = data._replace(text=data.text.to(given.device))
    rows = tasks_data.Windows(data, run.window, run.step // run.window, given.seed, options.task == "genome")
    with train_lm.ranks(given.device):
        trainer = Timed(given, config, run, data, options.out / f"{options.task}-{name}.json")
        trainer.write(
            **about, **run._asdict(), config=config.to_dict(), parameters=trainer.parameters, lr=given.lr,
            operations_per_token=operations(config, trainer.parameters, run.window) / run.window,
        )  # fmt: skip
        if train_lm.run(trainer, rows, trainer):  # type: ignore[arg-type]
            trainer.write(peak_gib=torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else None)
            trainer.write(held_out=judged(trainer, [x // small for x in task.windows], shortest), complete=True)


def perform(options: argparse.Namespace, name: str) -> None:
    """One run, or the baselines, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        given = training_options(options, folder)
        try:
            if options.task == "genome":
                data = tasks_data.genome(options.fasta)
            else:
                longest = max(TASKS["code"].windows) // options.shrink
                data = tasks_data.code(options.code or tasks_data.installed(), SEQUENCES, longest)
            about = {"task": options.task, "run": name, "data": data.facts}
            about["machine"] = machine.describe(torch.device(given.device), options.commit)
            if name != "baselines":
                train(options, given, name, data, about)
                return
            bits = baselines_of(options.task, data, given.device)
            machine.write_json(options.out / f"{options.task}-{name}.json", {**about, "bits": bits, "complete": True})
        except (ValueError, OSError) as error:
            raise SystemExit(f"error: {error}") from error


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    if options.task == "draw":
        tasks_shown.show(options.out, DOCS)
    elif len(options.runs) == 1:
        perform(options, options.runs[0])
    else:  # a process for each: what one leaves behind, or breaks, does not touch the next
        failed = []
        for name in options.runs:
            process = multiprocessing.get_context("spawn").Process(target=perform, args=(options, name))
            process.start()
            process.join()
            failed += [name] if process.exitcode else []
        if failed:
            raise SystemExit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
