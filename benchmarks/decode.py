"""One token more at a context of a million: python benchmarks/decode.py [--out DIR]. From the source tree, torch alone.

Sixteen steps in a row, as heads take part in other branches from one position to the next. Each is held against float64
first; one that is wrong ends the run. Then: the time of its kernels with nothing in the cache of the GPU, the time of a
replayed CUDA graph (keys and values may stay in that cache, as in a model that is small), and what a call from Python
takes. The general way on PyTorch's kernels and dense attention to all keys stand beside.

Legend: q, out (1, 1, H, D); k, v (1, N, H, D); times in microseconds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.bench import machine, probes, run
from dilated_attention.testing import make_qkv

TARGET_US = 60.0  # of kernel time, for the slowest of the steps
TOKENS, HEADS, DIM = 1 << 20, 12, 64
LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
STEPS = 16  # the largest rate: after so many steps everything repeats
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # in the norm of a row, as in `probes.check_rows`
REPEATS = 20


def exact_row(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, position: int, head: int) -> Tensor:
    """(D,) in float64 from the pattern's own list of keys."""
    keys = pattern.keys(position, head, num_tokens=k.shape[1], num_heads=k.shape[2], is_causal=True)
    index = torch.tensor(keys, device=q.device)
    key, value = (x[0, :, head][index].double() for x in (k, v))
    return torch.softmax(key @ q[0, 0, head].double() / math.sqrt(q.shape[-1]), 0) @ value


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, position: int) -> dict[str, Any]:
    """The largest relative error of a head, and how many rows of key and of value all heads together need."""
    worst = 0.0
    for head in range(HEADS):
        exact = exact_row(q, k, v, pattern, position, head)
        error = ((out[0, 0, head].double() - exact).norm() / exact.norm()).item()
        worst = max(worst, error if error == error else math.inf)  # NaN is as wrong as can be
    shape: dict[str, Any] = {"num_tokens": k.shape[1], "num_heads": HEADS, "is_causal": True}
    rows = sum(len(pattern.keys(position, head, **shape)) for head in range(HEADS))
    return {"position": position, "rows": rows, "error": worst, "right": worst < LIMIT[out.dtype]}


def kernel_us(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Microseconds of each kernel of a call that finds nothing in the cache, the mean of some calls."""
    names = [name for name, _, _ in probes.kernel_times(call, device)]
    if device.type != "cuda":
        return {name: 1000 * ms for name, _, ms in probes.kernel_times(call, device)}
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(REPEATS):
            torch.empty(run.FLUSH_BYTES, dtype=torch.int8, device=device).zero_()
            call()
        torch.cuda.synchronize()
    events: list[Any] = [event for event in recorded.key_averages() if event.key in names]
    return {event.key: event.self_device_time_total / REPEATS for event in events}


def graph_us(call: Callable[[], Any], device: torch.device) -> float | None:
    """Of one replay of a captured call, the best of some rounds of many replays; None on a CPU."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    rounds = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(100):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(10 * float(start.elapsed_time(end)))
    return min(rounds)


def call_us(call: Callable[[], Any], device: torch.device, seconds: float) -> dict[str, float]:
    """From the call in Python to the end of its last kernel."""
    timing = run.time_calls({"": call}, device, seconds=seconds, warmups=3)[""]
    return {"median": 1000 * timing.median, "lower": 1000 * timing.lower, "upper": 1000 * timing.upper}


class Step:
    """A one-token step at position ``at`` of a cache, in the ways that are timed."""

    def __init__(self, device: torch.device, scale: int) -> None:
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.tokens, self.device = TOKENS // scale, device
        self.pattern = DilatedPattern.longnet([w // scale for w in LENGTHS], RATES)
        _, self.k, self.v = make_qkv(1, self.tokens, HEADS, DIM, dtype=self.dtype, device=device)
        self.q = make_qkv(1, 1, HEADS, DIM, dtype=self.dtype, device=device, seed=1)[0]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    def dilated(self, backend: str = "auto") -> Tensor:
        options: dict[str, Any] = {"is_causal": True, "query_offset": self.at, "backend": backend}
        return dilated_attention(self.q, self.k, self.v, self.pattern, **options)

    def dense(self) -> Tensor:
        """To all keys."""
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (self.q, self.k, self.v)))

    def measure(self, position: int) -> dict[str, Any]:
        self.at.fill_(position)
        record = check(self.dilated(), self.q, self.k, self.v, self.pattern, position)
        if record["right"]:
            record["kernels_us"] = kernel_us(self.dilated, self.device)
            record["kernel_us"] = sum(record["kernels_us"].values())
            record["graph_us"] = graph_us(self.dilated, self.device)
        return record

    def calls(self, seconds: float) -> dict[str, dict[str, float]]:
        calls = {"auto": self.dilated, "sdpa": lambda: self.dilated("sdpa"), "dense SDPA": self.dense}
        return {name: call_us(call, self.device, seconds) for name, call in calls.items()}


def line(record: dict[str, Any]) -> str:
    found = f"position {record['position']}: {record['rows']:6} rows, error {record['error']:.1e}"
    if not record["right"]:
        return f"{found}: wrong, nothing else is timed"
    replayed = "" if record["graph_us"] is None else f", replayed {record['graph_us']:.1f} us"
    return f"{found}, kernels {record['kernel_us']:.1f} us{replayed}"


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and time one-token steps of dilated attention.")
    parser.add_argument("--out", default="report", metavar="DIR", help="folder of decode.json (default: report)")
    parser.add_argument("--commit", help="the commit, where the tree has no .git")
    parser.add_argument("--seconds", type=float, default=0.5, help="measured per timing (default: 0.5)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script (default: cuda)")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths, to try the script")
    options = parser.parse_args(arguments)
    step = Step(torch.device(options.device), options.scale)
    file = Path(options.out) / "decode.json"
    results: dict[str, Any] = {
        "machine": machine.describe(step.device, options.commit), "dtype": str(step.dtype), "scale": options.scale,
        "shape": {"tokens": step.tokens, "heads": HEADS, "head_dim": DIM}, "pattern": repr(step.pattern),
        "target_us": TARGET_US, "steps": [],
    }  # fmt: skip
    print(machine.one_line(results["machine"]), flush=True)
    for position in range(step.tokens - STEPS, step.tokens):
        results["steps"].append(step.measure(position))
        machine.write_json(file, results)
        print(line(results["steps"][-1]), flush=True)
        if not results["steps"][-1]["right"]:
            return 1
    results["call_us"] = step.calls(options.seconds)
    times = [record["kernel_us"] for record in results["steps"]]
    results |= {"slowest_us": max(times), "median_us": statistics.median(times)}
    machine.write_json(file, results)
    for name, timing in results["call_us"].items():
        print(f"a call, {name}: {timing['median']:.1f} us")
    target = f"; target {TARGET_US:.0f} us: {'met' if max(times) <= TARGET_US else 'missed'}"
    print(f"kernels {results['median_us']:.1f} us, slowest step {max(times):.1f} us{target * (options.scale == 1)}")
    print(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
