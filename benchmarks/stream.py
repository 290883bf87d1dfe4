"""One billion tokens on one GPU: python benchmarks/stream.py [--out DIR]. Runs from the source tree with torch alone.

`stream` over chunks drawn on the device, causal and not. Only its own work is timed: the device is waited for before
and after, and neither the drawing of chunks nor the checks count. Rows drawn at random are held against float64, their
keys drawn again from their chunks' seeds. The results are written after every measurement.

Legend: N tokens, H heads, D head dim, w segment lengths, r dilation rates; a chunk is q, k, v, each (1, n, H, D).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dilated_attention import DilatedPattern, explain, stream
from dilated_attention.bench import machine

HEADS, DIM = 12, 64
LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
TOKENS, CHUNK = 1 << 30, 1 << 20
TARGETS = {"seconds": 35.0, "causal_seconds": 20.0, "peak_bytes": 16 << 30}
ROWS = 64
GIB = 1 << 30

Chunk = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Source:
    """A sequence that is never there as a whole: each chunk is drawn from a seed of its own, again and again alike."""

    tokens: int
    chunk: int
    device: torch.device
    dtype: torch.dtype
    seed: int

    @property
    def count(self) -> int:
        return -(-self.tokens // self.chunk)

    def draw(self, index: int) -> Chunk:
        length = min(self.chunk, self.tokens - index * self.chunk)
        generator = torch.Generator(self.device).manual_seed(self.seed * (1 << 32) + index)
        shape, options = (1, length, HEADS, DIM), {"device": self.device, "dtype": self.dtype}
        q, k, v = (torch.randn(shape, generator=generator, **options) for _ in range(3))
        return q, k, v

    def exact_row(self, pattern: DilatedPattern, token: int, head: int, is_causal: bool) -> Tensor:
        """(D,) in float64, from the pattern's own list of keys, of which the token itself is one (a rate is 1)."""
        keys = pattern.keys(token, head, num_tokens=self.tokens, num_heads=HEADS, is_causal=is_causal)
        found: list[tuple[Tensor, Tensor]] = []
        for index, some in itertools.groupby(keys, key=lambda key: key // self.chunk):
            q, k, v = self.draw(index)  # one chunk at a time
            if index == token // self.chunk:
                query = q[0, token % self.chunk, head].double()
            where = torch.tensor(list(some), device=self.device) - index * self.chunk
            found.append((k[0, where, head].double(), v[0, where, head].double()))
            del q, k, v
        key, value = (torch.cat(parts) for parts in zip(*found, strict=True))
        return torch.softmax(key @ query / math.sqrt(DIM), 0) @ value


class Clock:
    """Seconds between go() and pause(), the device being idle at both."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.since = device, 0.0, 0.0
        self.runs = False

    def go(self) -> None:
        self.wait()
        self.runs, self.since = True, time.perf_counter()

    def pause(self) -> None:
        if self.runs:
            self.wait()
            self.seconds, self.runs = self.seconds + time.perf_counter() - self.since, False

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Rows:
    """Some rows of the whole sequence, its first and its last among them, held against float64."""

    def __init__(self, source: Source, pattern: DilatedPattern, is_causal: bool) -> None:
        self.source, self.pattern, self.is_causal = source, pattern, is_causal
        draw = random.Random(source.seed)
        tokens = [0, source.tokens - 1, *(draw.randrange(source.tokens) for _ in range(ROWS - 2))]
        self.left = sorted((token, draw.randrange(HEADS)) for token in tokens)
        self.worst, self.seen = 0.0, 0

    def check(self, index: int, out: Tensor) -> None:
        """Those that lie in this chunk."""
        while self.left and self.left[0][0] // self.source.chunk == index:
            token, head = self.left.pop(0)
            exact = self.source.exact_row(self.pattern, token, head, self.is_causal)
            error = ((out[0, token % self.source.chunk, head].double() - exact).norm() / exact.norm()).item()
            self.worst = max(self.worst, error if error == error else math.inf)  # NaN is as wrong as can be
            self.seen += 1

    def verdict(self) -> dict[str, Any]:
        limit = 1e-2 if self.source.dtype.itemsize == 2 else 1e-4  # in the norm of a row
        right = self.worst < limit and self.seen == ROWS
        return {"rows": self.seen, "worst": self.worst, "limit": limit, "right": right}


def measure(source: Source, pattern: DilatedPattern, is_causal: bool, backend: str) -> dict[str, Any]:
    """All figures of one stream."""
    clock, rows = Clock(source.device), Rows(source, pattern, is_causal)

    def drawn(index: int) -> Chunk:
        clock.pause()
        chunk = source.draw(index)
        clock.go()
        return chunk

    def run(count: int) -> Iterator[Tensor]:
        chunks = (drawn(index) for index in range(count))  # keeps none of them
        return stream(chunks, pattern, is_causal=is_causal, backend=backend)

    kernel = explain(*source.draw(0), pattern, is_causal=is_causal, backend=backend).kernel
    list(run(1))  # kernels are compiled and chosen once
    clock.pause()
    clock.seconds = 0.0
    if source.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(source.device)
    started, outputs = time.perf_counter(), run(source.count)
    with progress("causal" if is_causal else "not causal", source.count) as advance:
        for index in range(source.count):
            out = next(outputs)
            clock.pause()
            rows.check(index, out)
            del out  # not to be there while the next chunk is
            advance(f"{clock.seconds:.1f} s of attention, rows off by {rows.worst:.1e}")
    flops = pattern.flops(source.tokens, HEADS, DIM, is_causal=is_causal)
    on_cuda = source.device.type == "cuda"
    return {
        "causal": is_causal,
        "seconds": clock.seconds,
        "with_drawing_and_checks": time.perf_counter() - started,
        "tokens_per_second": source.tokens / clock.seconds,
        "tflops": flops / clock.seconds / 1e12,
        "peak_bytes": torch.cuda.max_memory_allocated(source.device) if on_cuda else None,
        "kernel": kernel,
        "rows": rows.verdict(),
    }


# --- for people -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal with rich, else about twenty lines."""
    if importlib.util.find_spec("rich") and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=total)
            yield lambda text: bar.update(task, advance=1, description=f"{name}: {text}")
        return
    done = 0

    def line(text: str) -> None:
        nonlocal done
        done += 1
        if done == total or done * 20 // total > (done - 1) * 20 // total:
            print(f"{name}: {done}/{total} chunks, {text}", file=sys.stderr, flush=True)

    yield line


def row(record: dict[str, Any]) -> str:
    peak = record["peak_bytes"]
    return (
        f"{'causal' if record['causal'] else 'not causal':10} {record['seconds']:8.2f} s "
        f"{record['tokens_per_second'] / 1e6:8.2f} M tokens/s {record['tflops']:7.1f} TFLOP/s "
        f"peak {'-' if peak is None else f'{peak / GIB:.2f} GiB'}, {record['rows']['rows']} rows "
        f"{'right' if record['rows']['right'] else 'WRONG'} ({record['rows']['worst']:.1e}), {record['kernel']}"
    )


def print_targets(records: list[dict[str, Any]]) -> None:
    for record in records:
        for name, found in (
            ("causal_seconds" if record["causal"] else "seconds", record["seconds"]),
            ("peak_bytes", record["peak_bytes"]),
        ):
            verdict = "not measured" if found is None else "met" if found <= TARGETS[name] else "missed"
            print(f"  {name:14} at most {TARGETS[name]:,.0f}: {'-' if found is None else f'{found:,.1f}'}, {verdict}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Stream a billion tokens through one GPU, check and time it.")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="how many (default: 2^30)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens at a time (default: 2^20)")
    parser.add_argument("--out", default="report", metavar="DIR", help="folder of stream.json (default: report)")
    parser.add_argument("--commit", help="the commit, where the tree has no .git")
    parser.add_argument("--backend", default="auto", help="of stream (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the chunks and of the rows that are checked")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script (default: cuda)")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths, to try the script")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens, chunk = max(1, options.tokens // options.scale), max(1, options.chunk // options.scale)
    source = Source(tokens, chunk, device, dtype, options.seed)
    lengths = (max(w // options.scale, 2 * r) for w, r in zip(LENGTHS, RATES, strict=True))
    pattern = DilatedPattern.longnet(lengths, RATES)
    results: dict[str, Any] = {
        "machine": machine.describe(device, options.commit),
        "dtype": str(dtype),
        "tokens": tokens,
        "chunk": chunk,
        "scale": options.scale,
        "shape": {"heads": HEADS, "head_dim": DIM},
        "pattern": repr(pattern),
        "targets": TARGETS,
        "streams": [],
    }
    print(machine.one_line(results["machine"]))
    print(f"{tokens:,} tokens in chunks of {chunk:,}, {pattern}, H = {HEADS}, D = {DIM}, {dtype}", flush=True)
    file = Path(options.out) / "stream.json"
    for is_causal in (False, True):
        results["streams"].append(measure(source, pattern, is_causal, options.backend))
        machine.write_json(file, results)
        print(row(results["streams"][-1]), flush=True)
    if (tokens, chunk, options.scale) == (TOKENS, CHUNK, 1):
        print_targets(results["streams"])
    print(f"written: {file}")
    return int(not all(record["rows"]["right"] for record in results["streams"]))


if __name__ == "__main__":
    sys.exit(main())
