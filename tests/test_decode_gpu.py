"""Decoding on a CUDA device, where the table and decode_cases.py leave something out: long caches, what is around."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, explain, testing
from dilated_attention.backends.choose import Backend
from tests.on_gpu import BF16, DEVICE, captured, make_mask, make_qkv, without_waiting

pytestmark = pytest.mark.gpu

TOKENS = 509
PAPER = DilatedPattern.longnet([32, 64, 256], [1, 2, 4])
LONG = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


def positions(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def runs_kernel(query: Tensor, on_device: bool = False, backend: Backend = "auto", **options: Any) -> bool:
    key = query[:, :1].expand(-1, TOKENS, -1, -1)
    offset = positions(0) if on_device else None
    told = explain(query, key, key, PAPER, is_causal=True, query_offset=offset, backend=backend, **options)
    return told.backend == "triton"


def test_the_kernel_runs() -> None:
    """Otherwise the tests below would check something else against the oracle."""
    pytest.importorskip("triton")
    q = torch.zeros(1, 1, 2, 64, device=DEVICE, dtype=BF16)
    assert runs_kernel(q)
    assert runs_kernel(q.expand(-1, 64, -1, -1))
    assert runs_kernel(q.expand(-1, 65, -1, -1), on_device=True)
    assert not runs_kernel(q.expand(-1, 65, -1, -1))
    assert not runs_kernel(q, dropout_p=0.1)
    assert not runs_kernel(q, backend="sdpa")
    assert not runs_kernel(q.double())
    assert not runs_kernel(q.new_zeros(1, 1, 2, 264))


# --- long -------------------------------------------------------------------------------------------------------


def check_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, position: int) -> None:
    """One query, head by head, in float64 from the pattern's own list of keys."""
    tokens, heads, dim = k.shape[1:]
    for head in range(heads):
        keys = LONG.keys(position, head, num_tokens=tokens, num_heads=heads, is_causal=True)
        index = torch.tensor(keys, device=q.device)
        scores = k[0, index, head].double() @ q[0, 0, head].double() / math.sqrt(dim)
        exact = torch.softmax(scores, 0) @ v[0, index, head].double()
        assert (out[0, 0, head].double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("position", [0, 2047, 2048, 65535, 40000, 32768])
def test_a_long_cache(position: int) -> None:
    """The same bits every time."""
    q, k, v = make_qkv(1, 65536, 12, 64, dtype=BF16)
    outs = [dilated_attention(q[:, :1], k, v, LONG, is_causal=True, query_offset=position) for _ in range(10)]
    check_rows(outs[0], q, k, v, position)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_offsets_beyond_32_bits() -> None:
    """More than 2**31 elements from the first row to the last that is read; nothing else is even set."""
    tokens, heads, dim = 1 << 21, 16, 128
    q = torch.randn(1, 1, heads, dim, device=DEVICE, dtype=BF16)
    k, v = (torch.empty(1, tokens, heads, dim, device=DEVICE, dtype=BF16) for _ in range(2))
    assert k.numel() > 2**31
    for x in (k, v):
        x[:, -32768:].normal_()
    check_rows(dilated_attention(q, k, v, LONG, is_causal=True), q, k, v, tokens - 1)


# --- around it --------------------------------------------------------------------------------------------------


def test_the_host_never_waits() -> None:
    q, k, v = make_qkv(2, TOKENS, 4, 64, dtype=BF16)
    mask, at = make_mask(2, TOKENS), positions(17, 300)
    torchscale = DilatedPattern.torchscale([32, 64], [1, 3])

    def calls() -> None:
        dilated_attention(q[:, :1], k, v, PAPER, is_causal=True, query_offset=at)
        dilated_attention(q[:, :1], k, v, PAPER, is_causal=True)
        dilated_attention(q[:, :100], k, v, PAPER, is_causal=True, query_offset=at)
        dilated_attention(q[:, :3], k, v, torchscale, query_offset=at, key_padding_mask=mask)

    without_waiting(calls)


@pytest.mark.parametrize("masked", [False, True])
def test_a_captured_graph_follows_the_positions(masked: bool) -> None:
    q, k, v = make_qkv(2, TOKENS, 4, 64, dtype=BF16)
    q, at = q[:, :1].contiguous(), positions(5, 9)
    given = {"is_causal": True, "key_padding_mask": make_mask(2, TOKENS) if masked else None, "return_lse": True}

    def step() -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PAPER, query_offset=at, **given)

    graph, (out, lse) = captured(step)
    for first, second in ((5, 9), (31, 32), (508, 0), (256, 300)):
        at.copy_(positions(first, second))
        q.normal_()
        graph.replay()
        expected, expected_lse = step()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return dilated_attention(q * 2, k, v, PAPER, is_causal=True, query_offset=at).tanh()

    q, k, v = make_qkv(2, TOKENS, 4, 64)
    compiled = torch.compile(step, fullgraph=True)
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
