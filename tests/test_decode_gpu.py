"""Decoding on a CUDA device, where the table of cases leaves something out: sizes, long caches, what is around."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends.choose import Backend
from dilated_attention.pattern import RULES

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = 509
PAPER = DilatedPattern.longnet([32, 64, 256], [1, 2, 4])
LONG = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


def make_qkv(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return testing.make_qkv(*args, device=DEVICE, **kwargs)


def positions(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def make_mask(tokens: int = TOKENS) -> Tensor:
    mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[1, tokens * 2 // 3 :] = True
    return mask.to(DEVICE)


def runs_kernel(query: Tensor, on_device: bool = False, backend: Backend = "auto", **options: Any) -> bool:
    key = query[:, :1].expand(-1, TOKENS, -1, -1)
    offset = positions(0) if on_device else None
    told = explain(query, key, key, PAPER, is_causal=True, query_offset=offset, backend=backend, **options)
    return told.backend == "triton"


def test_the_kernel_runs() -> None:
    """Otherwise the tests below would check something else against the oracle."""
    pytest.importorskip("triton")
    q = torch.zeros(1, 1, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    assert runs_kernel(q)
    assert runs_kernel(q.expand(-1, 64, -1, -1))
    assert runs_kernel(q.expand(-1, 65, -1, -1), on_device=True)
    assert not runs_kernel(q.expand(-1, 65, -1, -1))
    assert not runs_kernel(q, dropout_p=0.1)
    assert not runs_kernel(q, backend="sdpa")
    assert not runs_kernel(q.double())
    assert not runs_kernel(q.new_zeros(1, 1, 2, 264))


# --- against the oracle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 8, 16, 20, 32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 20])
def test_head_dims(head_dim: int, dtype: str, queries: int) -> None:
    q, k, v = make_qkv(2, TOKENS, 4, head_dim, kv_heads=2, dtype=DTYPES[dtype])
    inference((q[:, :queries], k, v), PAPER, None)


@pytest.mark.parametrize("queries", [15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_numbers_of_queries(queries: int, group: int) -> None:
    """Tiles of queries, with positions on the device: also where an int would go the general way."""
    q, k, v = make_qkv(2, TOKENS, 4 * group, 64, kv_heads=4, dtype=torch.bfloat16)
    inference((q[:, :queries], k, v), PAPER, positions(0, TOKENS - queries))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 127, 128, 129])
def test_numbers_of_keys(tokens: int) -> None:
    q, k, v = make_qkv(2, tokens, 4, 64, dtype=torch.float16)
    inference((q[:, :1], k, v), DilatedPattern.longnet([256], [1]), tokens - 1)


@pytest.mark.parametrize("samples", [1, 5, 400])
def test_numbers_of_splits(samples: int) -> None:
    """Many samples are not split, and a few are."""
    q, k, v = make_qkv(samples, TOKENS, 4, 64, dtype=torch.bfloat16)
    inference((q[:, :1], k, v), PAPER, None)


@torch.no_grad()
def inference(qkv: tuple[Tensor, ...], pattern: DilatedPattern, offset: int | Tensor | None) -> None:
    """Out and lse by the rule of `testing`."""
    out, lse = dilated_attention(
        *qkv, pattern, is_causal=True, query_offset=offset, enable_gqa=True, return_lse=True
    )  # fmt: skip
    given: dict[str, Any] = {"is_causal": True, "query_offset": offset}
    exact = reference.attention(*qkv, pattern, **given)
    plain = reference.attention(*qkv, pattern, dtype=None, **given)
    for got, expected, alike in zip((out, lse), exact, plain, strict=True):
        limit = testing.TOLERANCE.get(out.dtype) or 2 * testing.plain_error(alike, expected, out.dtype)
        assert testing.error(got, expected) <= limit


# --- long -------------------------------------------------------------------------------------------------------


def exact_row(q: Tensor, k: Tensor, v: Tensor, position: int, head: int, tokens: int, heads: int) -> Tensor | None:
    """(D,) in float64 from the pattern's own list of keys; q (D), k and v (N, D)."""
    keys = LONG.keys(position, head, num_tokens=tokens, num_heads=heads, is_causal=True)
    if not keys:
        return None
    index = torch.tensor(keys, device=q.device)
    scores = k[index].double() @ q.double() / math.sqrt(len(q))
    return torch.softmax(scores, 0) @ v[index].double()


@pytest.mark.parametrize("position", [0, 2047, 2048, 65535, 40000, 32768])
def test_a_long_cache(position: int) -> None:
    tokens, heads = 65536, 12
    q, k, v = make_qkv(1, tokens, heads, 64, dtype=torch.bfloat16)
    out = dilated_attention(q[:, :1], k, v, LONG, is_causal=True, query_offset=position)
    check_rows(out, q, k, v, position, heads)


def test_offsets_beyond_32_bits() -> None:
    """More than 2**31 elements from the first row to the last that is read; nothing else is even set."""
    tokens, heads, dim = 1 << 21, 16, 128
    q = torch.randn(1, 1, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.empty(1, tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    assert k.numel() > 2**31
    for x in (k, v):
        x[:, -32768:].normal_()
    out = dilated_attention(q, k, v, LONG, is_causal=True)
    check_rows(out, q, k, v, tokens - 1, heads)


def check_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, position: int, heads: int) -> None:
    for head in range(heads):
        exact = exact_row(q[0, 0, head], k[0, :, head], v[0, :, head], position, head, k.shape[1], heads)
        assert exact is not None
        assert (out[0, 0, head].double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("rule", RULES)
def test_step_by_step_in_a_cache_that_is_there(rule: str) -> None:
    """What is not yet filled may hold anything."""
    pattern = DilatedPattern.of(rule, [32, 64], [1, 3])
    q, k, v = make_qkv(2, 130, 4, 64)
    whole = dilated_attention(q, k, v, pattern, is_causal=True)
    caches = [torch.full_like(x, math.nan) for x in (k, v)]
    at = positions(0, 0)
    for step in range(130):
        for cache, x in zip(caches, (k, v), strict=True):
            cache[:, step] = x[:, step]
        out = dilated_attention(q[:, step : step + 1], *caches, pattern, is_causal=True, query_offset=at)
        assert testing.error(out, whole[:, step : step + 1]) < 5e-6
        at += 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_other_rows_may_hold_anything(rule: str, is_causal: bool) -> None:
    pattern = DilatedPattern.of(rule, [32, 64], [2, 3])
    q, k, v = make_qkv(1, 200, 4, 64, dtype=torch.bfloat16)
    q, mask = q[:, :3], make_mask(200)[:1]
    seen = torch.zeros(200, 4, dtype=torch.bool)
    for i, head in itertools.product(range(3), range(4)):
        seen[list(pattern.keys(90 + i, head, num_tokens=200, num_heads=4, is_causal=is_causal)), head] = True
    unseen = ~seen.to(DEVICE) | mask[0].unsqueeze(1)
    poisoned = [x.masked_fill(unseen[None, :, :, None], math.nan) for x in (k, v)]
    given: dict[str, Any] = {"is_causal": is_causal, "key_padding_mask": mask, "query_offset": 90}
    assert torch.equal(dilated_attention(q, *poisoned, pattern, **given), dilated_attention(q, k, v, pattern, **given))


def test_positions_outside_the_keys_see_nothing() -> None:
    q, k, v = make_qkv(4, 100, 4, 64)
    out, lse = dilated_attention(
        q[:, :2], k, v, PAPER, is_causal=True, query_offset=positions(50, -3, 99, 2**40), return_lse=True
    )
    assert lse[0].isfinite().all()
    assert lse[2, 0].isfinite().all()
    for nothing in (out[1], out[3], out[2, 1]):
        assert (nothing == 0).all()
    assert (lse[1] == -math.inf).all()


# --- around it --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_host_never_waits(no_waiting: None) -> None:
    q, k, v = make_qkv(2, TOKENS, 4, 64, dtype=torch.bfloat16)
    mask = make_mask()
    torchscale = DilatedPattern.torchscale([32, 64], [1, 3])
    at = positions(17, 300)

    def calls() -> None:
        dilated_attention(q[:, :1], k, v, PAPER, is_causal=True, query_offset=at)
        dilated_attention(q[:, :1], k, v, PAPER, is_causal=True)
        dilated_attention(q[:, :100], k, v, PAPER, is_causal=True, query_offset=at)
        dilated_attention(q[:, :3], k, v, torchscale, query_offset=at, key_padding_mask=mask)

    calls()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    calls()


@pytest.mark.parametrize("masked", [False, True])
def test_a_captured_graph_follows_the_positions(masked: bool) -> None:
    q, k, v = make_qkv(2, TOKENS, 4, 64, dtype=torch.bfloat16)
    q, at = q[:, :1].contiguous(), positions(5, 9)
    mask = make_mask() if masked else None

    def step() -> tuple[Tensor, Tensor]:
        return dilated_attention(
            q, k, v, PAPER, is_causal=True, query_offset=at, key_padding_mask=mask, return_lse=True
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for first, second in ((5, 9), (31, 32), (508, 0), (256, 300)):
        at.copy_(positions(first, second))
        q.normal_()
        graph.replay()
        expected, expected_lse = step()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


def test_the_same_call_twice_is_equal_to_the_bit() -> None:
    q, k, v = make_qkv(1, 65536, 12, 64, dtype=torch.bfloat16)
    first = dilated_attention(q[:, :1], k, v, LONG, is_causal=True)
    for _ in range(10):
        assert torch.equal(dilated_attention(q[:, :1], k, v, LONG, is_causal=True), first)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(backend: str) -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return dilated_attention(q * 2, k, v, PAPER, is_causal=True, query_offset=at).tanh()

    q, k, v = make_qkv(2, TOKENS, 4, 64)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with torch.no_grad():
        for at in (positions(5, 9), positions(100, 300)):
            assert testing.error(compiled(q[:, :1], k, v, at), step(q[:, :1], k, v, at)) < 1e-6
    leaves = [x.requires_grad_() for x in (q[:, :1].detach(), k, v)]
    got, expected = (
        torch.autograd.grad(function(*leaves, positions(5, 9)).sum(), leaves) for function in (compiled, step)
    )
    for x, y in zip(got, expected, strict=True):
        assert testing.error(x, y) < 1e-6
    torch._dynamo.reset()


def test_autocast_leaves_the_cache_as_it_is() -> None:
    q, k, v = make_qkv(2, TOKENS, 4, 64)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = dilated_attention(q[:, :1], k, v, PAPER, is_causal=True)
    low = [x.bfloat16() for x in (q[:, :1], k, v)]
    assert torch.equal(out, dilated_attention(*low, PAPER, is_causal=True))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast(DEVICE, torch.bfloat16):
        dilated_attention(q[:, :1], k, v, PAPER, is_causal=True)
    assert torch.cuda.max_memory_allocated() - before < k.nbytes // 2
