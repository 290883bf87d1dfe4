"""LongNet as a language model: training steps by length beside dense attention, a million tokens, generation.

A step is forward and backward of one row, with checkpointing and the loss in chunks; weights are in the main dtype, and
there is no optimiser. Its attention is checked against float64 first. TFLOP/s count the model's operations, not those
of checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention.bench import baselines
from dilated_attention.bench.run import Call
from dilated_attention.bench.session import LONG as PATTERN
from dilated_attention.bench.session import Row, Session, Step
from dilated_attention.models import LMConfig, LongNetLM, summed_loss
from dilated_attention.models.layers import attend_whole
from dilated_attention.models.transformer import Attend
from dilated_attention.pattern import DilatedPattern
from dilated_attention.testing import make_qkv

SUITE = "language"
FAR = DilatedPattern.longnet([2048 << i for i in range(10)], [1 << i for i in range(10)])
MODELS: dict[str, dict[str, tuple[DilatedPattern, tuple[int, ...]]]] = {  # patterns, and tokens of a step
    "cuda": {"125M": (PATTERN, (1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 20)),
             "0.6B": (FAR, (1 << 17, 1 << 19, 1 << 20))},
    "cpu": {"125M": (PATTERN, (1 << 10,))},
}  # fmt: skip
MOST_DENSE = 1 << 19  # tokens: beyond, a step with dense attention takes minutes
COMPILED = (1 << 13, 1 << 17, 1 << 20)  # tokens of the steps that are compiled as well, which takes a while for each
PROMPTS = {"cuda": (10_000, 1_000_000), "cpu": (1_000,)}
SMALL: dict[str, Any] = {"dim": 64, "depth": 2, "heads": 4, "kv_heads": 4, "vocab_size": 256}  # on a CPU
GENERATED = {"cuda": 1024, "cpu": 64}


def steps(session: Session) -> list[Step]:
    """One for each length: they are long, and a run that dies keeps those that were done."""
    kind, found = session.device.type, list[Step]()
    columns = ["tokens", "attention", "s", "tokens/s", "peak GiB", "TFLOP/s"]
    for size, (pattern, lengths) in MODELS[kind].items():
        note = f"Causal, {pattern}{'' if session.on_cuda else ', with smaller layers'}."
        rows = {f"{size}, {n:,} tokens": partial(of_training, session, size, pattern, n) for n in lengths}
        found += session.table(SUITE, f"A training step, {size}", note, columns, rows)
    columns = ["prompt", "prompt and 16 tokens, s", "tokens/s"]
    rest = {f"generation after {n:,} tokens": partial(of_generation, session, n) for n in PROMPTS[kind]}
    return found + session.table(SUITE, "Generation", "Batch of 1, the likeliest token.", columns, rest)


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention to every earlier token; nothing asks for its lse."""
    return baselines.dense(q, k, v, is_causal=True), q.new_empty(0)


def longnet(pattern: DilatedPattern) -> Attend:
    return partial(attend_whole, pattern, True, None, None, None, "auto")


def model_of(session: Session, size: str, pattern: DilatedPattern) -> LongNetLM:
    changes = {} if session.on_cuda else SMALL
    torch.manual_seed(0)
    with torch.device(session.device):
        model = LongNetLM(LMConfig.of(size, pattern, **changes), dtype=session.dtypes[0])
    model.checkpointing = True
    return model


def operations(config: LMConfig, parameters: int, tokens: int) -> float:
    """Of a step on one row: 6 per weight and token, and 12 per pair of query and key, for each channel of a head."""
    pairs = config.patterns[0].pairs(tokens, config.heads, num_kv_heads=config.kv_heads, is_causal=True)
    return 6 * parameters * tokens + 12 * pairs * config.head_dim * config.depth


def training_step(model: LongNetLM, tokens: int, attend: Attend, is_compiled: bool) -> Call:
    torch.compiler.reset()  # what was compiled for another length is of no use for this one
    if is_compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    weight = model.head.weight
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), device=weight.device)
    positions = torch.arange(tokens, device=weight.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        states = [model.states(ids[:, :-1], positions, [attend] * model.config.depth)]
        loss = summed_loss(states.pop(), weight, ids[:, 1:]) / tokens
        torch.autograd.backward(loss)

    return step


def of_training(session: Session, size: str, pattern: DilatedPattern, tokens: int) -> Iterator[Row]:
    config = model_of(session, size, pattern).config
    qkv = make_qkv(1, tokens, config.heads, config.head_dim, **session.options)
    ways: dict[str, tuple[Attend, LMConfig]] = {"longnet": (longnet(pattern), config)}
    with torch.no_grad():
        out, _ = ways["longnet"][0](*qkv)
    if not session.rows_are_right("language model", out, qkv, pattern, True)[0]:
        return
    if pattern is PATTERN and tokens <= MOST_DENSE:
        ways["dense SDPA"] = dense, replace(config, pattern=DilatedPattern.longnet([tokens], [1]))
    for is_compiled in (False, True)[: 1 + (tokens in COMPILED)]:
        for name, (attend, counted) in ways.items():
            model = model_of(session, size, pattern)
            step = training_step(model, tokens, attend, is_compiled)
            # with weights, and gradients of the step before
            peak = session.peak(step, 2 * sum(x.nbytes for x in model.parameters()))
            seconds = session.median(step, warmups=0) / 1000  # the peak took a call or two
            tflops = operations(counted, sum(x.numel() for x in model.parameters()), tokens) / seconds / 1e12
            yield [tokens, name + ", compiled" * is_compiled, seconds, tokens / seconds, peak, tflops]


@torch.no_grad()
def of_generation(session: Session, prompt: int) -> list[Row]:
    """Tokens per second after a prompt: the time of many new tokens less that of a few."""
    model = model_of(session, "125M", PATTERN).eval()
    ids = torch.randint(model.config.vocab_size, (1, prompt), device=session.device)
    few, many = 16, 16 + GENERATED[session.device.type]  # both have captured their graph
    ways = {count: partial(model.generate_tokens, ids, count) for count in (few, many)}
    found = {count: timing.median for count, timing in session.time(ways, 2.0).items()}
    return [[prompt, found[few] / 1000, (many - few) / (found[many] - found[few]) * 1000]]
