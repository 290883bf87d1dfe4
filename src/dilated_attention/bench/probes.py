"""What else is measured of a call: rows at full length, memory, and the kernels that ran.

Legend: q, k, v, out (B, N, H, D); rows are checked in the first sample.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dilated_attention.bench.run import Call, time_calls
from dilated_attention.pattern import DilatedPattern

ROWS = 32


def check_rows(out: Tensor, qkv: tuple[Tensor, ...], pattern: DilatedPattern, is_causal: bool) -> dict[str, Any]:
    """Rows drawn at random against float64: the largest relative error, and rows without keys that are not 0."""
    _, tokens, heads, _ = out.shape
    draw, worst, seen, not_zero = random.Random(0), 0.0, 0, 0
    while seen < ROWS:
        head, query = draw.randrange(heads), draw.randrange(tokens)
        exact = exact_row(qkv, pattern, query, head, is_causal)
        got = out[0, query, head]
        if exact is None:
            not_zero += bool(got.any())
            continue
        seen += 1
        worst = max(worst, row_error(got, exact))
    limit = row_limit(out)
    right = worst < limit and not not_zero
    return {"rows": seen, "worst": worst, "limit": limit, "empty_not_zero": not_zero, "right": right}


def row_error(got: Tensor, exact: Tensor) -> float:
    """In the norm of the row. NaN is as wrong as can be."""
    error = float((got.double() - exact).norm() / exact.norm())
    return math.inf if math.isnan(error) else error


def row_limit(out: Tensor) -> float:
    return 1e-2 if out.itemsize == 2 else 1e-4  # bfloat16 rounds a number by up to 4e-3


def exact_row(
    qkv: tuple[Tensor, ...], pattern: DilatedPattern, query: int, head: int, is_causal: bool
) -> Tensor | None:
    """(D,) in float64 from the pattern's own list of keys; None for a row that sees nothing."""
    q, k, v = (x[0, :, head] for x in qkv)
    shape: dict[str, Any] = {"num_tokens": len(q), "num_heads": qkv[0].shape[2], "is_causal": is_causal}
    keys = pattern.keys(query, head, **shape)
    if not keys:
        return None
    index = torch.tensor(keys, device=q.device)
    zeros = q.new_zeros(pattern.zero_keys(query, head, **shape), q.shape[1]).double()
    key, value = (torch.cat([x[index].double(), zeros]) for x in (k, v))
    return torch.softmax(key @ q[query].double() / math.sqrt(q.shape[1]), 0) @ value


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most that PyTorch's allocator held during a call beyond what was there before it, its results included."""
    gc.collect()  # memory that is freed during the call would hide what the call takes
    if device.type == "cuda":
        call()  # what is allocated once and stays is not part of it
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None
    events: list[Any] = list(recorded.profiler.kineto_results.events())
    changes: list[tuple[int, int]] = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(itertools.accumulate((count for _, count in changes), initial=0))


def kernel_times(call: Call, device: torch.device) -> list[tuple[str, int, float]]:
    """(name, calls, milliseconds) of every kernel of one call, slowest first; on a CPU of every operator."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as recorded:
        call()
        if on_cuda:
            torch.cuda.synchronize()
    averages: list[Any] = list(recorded.key_averages())
    events = [event for event in averages if event.device_type.name == device.type.upper()]
    times = [
        (event.key, event.count, (event.self_device_time_total if on_cuda else event.self_cpu_time_total) / 1e3)
        for event in events
        if not getattr(event, "is_user_annotation", False)  # those enclose kernels that are listed themselves
    ]
    return sorted(times, key=lambda entry: -entry[2])


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What the machine can do at most, measured: a large matrix product in this dtype, and a large copy."""
    size, count = (16384, 4 << 30) if device.type == "cuda" else (1536, 256 << 20)
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    source = torch.ones(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"matmul": lambda: left @ right, "copy": lambda: target.copy_(source)}
    found = time_calls(calls, device, seconds=1.0, most=50, warmups=2)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "matmul_tflops": 2 * size**3 / found["matmul"].median / 1e9,
        "copy_gb_per_s": 2 * count / found["copy"].median / 1e6,
    }
