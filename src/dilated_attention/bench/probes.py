"""What else is measured of a call: rows at full length, memory, and the kernels that ran.

Legend: q, k, v, out (B, N, H, D); rows are checked in the first sample.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from dilated_attention.bench.run import Call, synchronise
from dilated_attention.pattern import DilatedPattern

ROWS = 32  # at most, of those that see a key
Row = tuple[int, int]  # head, and query


def check_rows(
    out: Tensor, qkv: Sequence[Tensor], pattern: DilatedPattern, is_causal: bool, rows: Iterable[Row] | None = None
) -> tuple[float, float]:
    """The largest relative error of rows against float64, and its limit. A row without keys must be 0.

    Rows are drawn at random by default. ``out`` may have but one token: the one that is asked for.
    """
    _, tokens, heads, _ = qkv[0].shape
    draw, errors, seen = random.Random(0), [0.0], 0
    drawn = ((draw.randrange(heads), draw.randrange(tokens)) for _ in itertools.count())
    for head, query in rows or drawn:
        exact = exact_row(qkv, pattern, query, head, is_causal)
        got = out[0, query if out.shape[1] > 1 else 0, head].double()
        wrong = got.any() if exact is None else (got - exact).norm() / exact.norm()
        errors.append(math.inf if wrong.isnan() or (exact is None and wrong) else float(wrong))
        seen += exact is not None
        if seen == ROWS:
            break
    return max(errors), 1e-2 if out.itemsize == 2 else 1e-4  # bfloat16 rounds a number by up to 4e-3


def exact_row(qkv: Sequence[Tensor], pattern: DilatedPattern, query: int, head: int, is_causal: bool) -> Tensor | None:
    """(D,) in float64 from the pattern's own list of keys; None for a row that sees nothing."""
    q, k, v = (x[0, :, head] for x in qkv)
    shape: dict[str, Any] = {"num_tokens": len(q), "num_heads": qkv[0].shape[2], "is_causal": is_causal}
    keys = pattern.keys(query, head, **shape)
    if not keys:
        return None
    more = (0, 0, 0, pattern.zero_keys(query, head, **shape))
    key, value = (F.pad(x[torch.tensor(keys, device=q.device)].double(), more) for x in (k, v))
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
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(itertools.accumulate((count for _, count in changes), initial=0)))


def kernel_times(call: Call, device: torch.device) -> list[tuple[str, int, float]]:
    """(name, calls, milliseconds) of every kernel of one call, slowest first; on a CPU of every operator."""
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]) as recorded:
        call()
        synchronise(device)
    spent = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    there = [event for event in recorded.key_averages() if event.device_type.name == device.type.upper()]
    own = [event for event in there if not getattr(event, "is_user_annotation", False)]  # those enclose listed kernels
    return sorted(((x.key, x.count, getattr(x, spent) / 1e3) for x in own), key=lambda entry: -entry[2])
