"""What the tests on a GPU share: inputs there, calls, comparisons and graphs.

With TRITON_INTERPRET=1 the device is the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.testing import Results
from tests.cases import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BF16 = torch.bfloat16
GIB = 2**30


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2 * GIB:
        torch.cuda.empty_cache()


# --- inputs -----------------------------------------------------------------------------------------------------


def make_qkv(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return testing.make_qkv(*args, device=DEVICE, **kwargs)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Drawn in its own dtype: by way of float32 it would take three times the memory."""
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=dtype)


def gradients(q: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """dout and dlse for these queries."""
    return normal(*q.shape, seed=seed, dtype=q.dtype), normal(*q.shape[:3], seed=seed + 1)


def make_mask(samples: int, tokens: int) -> Tensor:
    mask = torch.rand(samples, tokens, generator=torch.Generator().manual_seed(tokens)) < 0.3
    mask[-1] |= samples > 1  # a sample with nothing to see
    return mask.to(DEVICE)


# --- calls ------------------------------------------------------------------------------------------------------


def attend(pattern: DilatedPattern, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    given = {"enable_gqa": True, "return_lse": True, "backend": "triton", **options}
    return lambda query, key, value: dilated_attention(query, key, value, pattern, **given)


def hold(
    got: Results, qkv: tuple[Tensor, ...], pattern: DilatedPattern, dout: Tensor, dlse: Tensor | None, **options: Any
) -> None:
    """By the rule of `testing`."""
    plain = None
    if qkv[0].dtype not in testing.TOLERANCE:
        plain = testing.oracle(qkv, pattern, dout, dlse, dtype=None, **options)
    testing.assert_exact(got, testing.oracle(qkv, pattern, dout, dlse, **options), plain)


def bits(x: Tensor) -> Tensor:
    return x.detach().view({2: torch.int16, 4: torch.int32}[x.itemsize])


def same_bits(one: Any, two: Any) -> None:
    """Of tensors in the same order."""
    for which, (x, y) in enumerate(zip(one, two, strict=True)):
        assert torch.equal(bits(x), bits(y)), which


# --- around a call ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Everything that is allocated and not written holds NaN: torch does so for deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler, for seconds
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of it, and the results that the graph writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results
