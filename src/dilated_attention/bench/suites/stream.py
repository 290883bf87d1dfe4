"""A sequence longer than memory: a billion tokens on CUDA, chunk after chunk, causal and not.

Only the attention is timed: the device is waited for before and after, and neither the drawing of chunks nor the checks
count. Before that, a short stream in odd chunks is checked against the oracle. Rows of some chunks are checked, too.

Legend: a chunk is q, k, v, each (1, n, H, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import timer

from dilated_attention.bench import probes
from dilated_attention.bench.run import Expected, oracle
from dilated_attention.bench.session import Session, Step
from dilated_attention.bench.setting import Setting
from dilated_attention.pattern import DilatedPattern
from dilated_attention.streaming import stream
from dilated_attention.units import GIB

Chunk = tuple[Tensor, Tensor, Tensor]
SUITE, HEADS, DIM = "stream", 12, 64
LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
SIZES = {"cuda": (1 << 30, 1 << 20), "cpu": (1 << 16, 1 << 15)}  # tokens, and those of a chunk: all segments divide it
CHECKED = 4  # chunks of which rows are checked: 32 rows each
TITLE = "A stream of chunks"
COLUMNS = ["tokens", "chunk", "causal", "s", "million tokens/s", "TFLOP/s", "peak GiB", "rows checked", "largest error"]


def steps(session: Session) -> list[Step]:
    return [Step(table, 80.0)]


def table(session: Session) -> None:
    rows = []
    for causal in (False, True):
        session.pace.step(f"{TITLE}{', causal' if causal else ''}", 40.0)
        if not is_exact(session, causal):
            session.pace.say(f"{TITLE}: wrong, so it is not timed")
            continue
        rows.append(measure(session, causal))
        note = f"{HEADS} heads of {DIM}, {DilatedPattern.longnet(LENGTHS, RATES)}, {session.results['dtypes'][0]}. "
        session.table(SUITE, TITLE, note + "A row that is wrong has no time.", COLUMNS, rows)


def is_exact(session: Session, causal: bool) -> bool:
    """Chunks of 100 tokens, which no segment divides, against the oracle on the whole."""
    small = Setting(1, (1,), (1,), session.device, session.dtypes[0], heads=HEADS, causal=causal).checks()[0]
    pattern, qkv = small.pattern("longnet"), small.qkv()
    chunks = zip(*(torch.split(x, 100, dim=1) for x in qkv), strict=True)
    with torch.no_grad():
        found = torch.cat(list(stream(chunks, pattern, is_causal=causal)), dim=1)
    check = Expected.of(oracle(pattern, causal), qkv, small.dout()).compare({"out": found})
    return session.judge("stream", check.errors["out"], check.limits["out"], causal)


@torch.no_grad()
def measure(session: Session, causal: bool) -> list[Any]:
    (tokens, size), device, pattern = SIZES[session.device.type], session.device, DilatedPattern.longnet(LENGTHS, RATES)
    count, drawing, seconds, worst, wrong = tokens // size, 0.0, 0.0, 0.0, False
    checked = {index * (count - 1) // (CHECKED - 1) for index in range(CHECKED)}  # the first and the last among them

    def chunks() -> Iterator[Chunk]:
        nonlocal drawing
        for index in range(count):
            start = timer()
            drawn = [draw(session, size, index)]
            drawing += timer() - start
            yield drawn.pop()  # kept in no variable: it would be there while the next one is drawn

    list(stream([draw(session, size, 0)], pattern, is_causal=causal))  # kernels are compiled and chosen once
    if session.on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    outputs = stream(chunks(), pattern, is_causal=causal)
    for index in range(count):
        start = timer()
        out = next(outputs)
        synchronise(device)
        seconds += timer() - start
        if index in checked:  # a chunk begins where all segments do, so its rows see no other chunk
            rows = probes.check_rows(out, draw(session, size, index), pattern, causal)
            worst, wrong = max(worst, rows["worst"]), wrong or not rows["right"]
        del out  # it would be there while the next chunk is
    seconds -= drawing
    wrong |= not session.judge("stream", worst, rows["limit"], causal)
    flops = pattern.flops(tokens, HEADS, DIM, is_causal=causal)
    peak = torch.cuda.max_memory_allocated(device) / GIB if session.on_cuda else None
    figures = [None] * 4 if wrong else [seconds, tokens / seconds / 1e6, flops / seconds / 1e12, peak]
    return [tokens, size, "yes" if causal else "no", *figures, len(checked) * probes.ROWS, worst]


def draw(session: Session, size: int, index: int) -> Chunk:
    """The same chunk whenever it is drawn."""
    generator = torch.Generator(session.device).manual_seed(index)
    options: dict[str, Any] = {"generator": generator, "device": session.device, "dtype": session.dtypes[0]}
    synchronise(session.device)
    q, k, v = (torch.randn(1, size, HEADS, DIM, **options) for _ in range(3))
    synchronise(session.device)
    return q, k, v


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
