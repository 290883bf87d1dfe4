"""What the table of cases leaves out: any pattern, drawn from a seed; large scores; corners that were once wrong."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given

from dilated_attention import DilatedPattern, dilated_attention, reference, testing
from dilated_attention.backends import aten, sdpa
from dilated_attention.backends.problem import Outputs, Problem
from dilated_attention.pattern import RULES
from tests.cases import Case, finite, leaves
from tests.drawn import drawn, few

PATTERN = DilatedPattern.longnet([8, 20], [1, 3])
BY_BACKEND = pytest.mark.parametrize("backend", ["sdpa", "eager"])


@pytest.mark.filterwarnings("ignore::dilated_attention.DilatedAttentionWarning")
@few(150)
@given(drawn(most_ranks=1, most_tokens=30))
def test_any_pattern(case: Case) -> None:
    """Branches may come in any order, and twice they only raise lse."""
    qkv, pattern, pick = case.qkv(), case.the_pattern(), case.draw("order")
    options = {"is_causal": case.is_causal, "key_padding_mask": case.padding(), "backend": case.backend}
    testing.check(qkv, pattern, **options)
    if pattern.rule != "head_groups":
        times = pick.randint(1, 3)
        lists = zip(*pick.sample(pattern.branches * times, times * len(pattern.branches)), strict=True)
        attention = partial(dilated_attention, *qkv, enable_gqa=True, return_lse=True, **options)
        (out, lse), (got, got_lse) = attention(pattern), attention(DilatedPattern(pattern.rule, *lists))
        assert testing.error(got, out) < 1e-12
        assert testing.error(got_lse, lse + math.log(times)) < 1e-12


@BY_BACKEND
@pytest.mark.parametrize("rule", RULES)
def test_large_scores_wide_heads_and_a_gradient_of_lse_alone(rule: str, backend: str) -> None:
    q, k, v = testing.make_qkv(2, 21, 4, 300, dtype=torch.float64)
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    testing.check((q * 10, k * 10, v), pattern, backend=backend)

    dlse, qkv = torch.randn(2, 21, 4, dtype=torch.float64), leaves(q, k, v)
    lse = dilated_attention(*qkv, pattern, backend=backend, return_lse=True)[1]
    grads = torch.autograd.grad(finite(lse), qkv, dlse)
    expected = testing.oracle((q, k, v), pattern, torch.zeros_like(q), dlse)[2:]
    assert all(testing.error(x, y) < 1e-12 for x, y in zip(grads, expected, strict=True))
    assert not grads[2].any()


@BY_BACKEND
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_keys_send_nothing_back_whatever_they_are_sent(backend: str, bad: float) -> None:
    qkv = leaves(*testing.make_qkv(1, 24, 2, 4))
    options = {"key_padding_mask": torch.arange(24)[None] < 9, "backend": backend}  # causal rows before 9 see nothing
    results = dilated_attention(*qkv, PATTERN, is_causal=True, return_lse=True, **options)
    empty = results[1] == -math.inf
    assert empty.any()
    dout, dlse = map(torch.randn_like, results)
    wanted, got = (
        torch.autograd.grad(
            results, qkv, (dout.masked_fill(empty[..., None], sent), dlse.masked_fill(empty, sent)), retain_graph=True
        )
        for sent in (0.0, bad)
    )
    assert all(map(torch.equal, got, wanted))


def test_explain_tells_of_blocks_that_the_first_kernel_does_not_take() -> None:
    kernels = (aten.CUDNN, aten.FLASH)
    assert sdpa.describe(kernels, {2, 7}) == "cudnn"
    assert sdpa.describe(kernels, {1, 7}) == "cudnn; flash (FA2) for blocks of 1 row"
    assert sdpa.describe(kernels[:1], {1, 7}) == "cudnn; eager for blocks of 1 row"


def test_a_large_gradient_of_lse_keeps_its_digits_in_half_precision() -> None:
    """The second pass of the library kernels, with numbers that float16 does not hold."""
    q, k, v = (x.half().double() for x in testing.make_qkv(1, 8, 2, 4))
    q, none = q / 8, torch.zeros_like(q)  # even weights: what the kernel multiplies with dlse then fits
    pattern = DilatedPattern.longnet([8], [1])
    out, lse = reference.attention(q, k, v, pattern)
    dlse = torch.randn_like(lse).sign() * 1e5
    wanted = testing.oracle((q, k, v), pattern, none, dlse)
    *qkv, out, none = (x.half() for x in (q, k, v, out, none))
    results = Outputs(out, lse.float(), none, dlse.float())
    grads = sdpa.backward((aten.FLASH_ON_CPU,), Problem(*qkv, 0.5), results)
    for got, exact in zip(grads[:2], (wanted.dq, wanted.dk), strict=True):
        assert (got.double() - exact).abs().max() < 5e-3 * exact.abs().max()


@pytest.mark.parametrize("queries", [4, 2])
@pytest.mark.parametrize(("width", "rate"), [(4, 2**48), (2**48, 1), (2**48, 2**48)])
def test_the_longest_segments_of_the_widest_rows(width: int, rate: int, queries: int) -> None:
    """A stride of such a view, of one row or one segment, would not be a number of 64 bits."""
    q, k, v = testing.make_qkv(1, 4, 128, 256)
    pattern = DilatedPattern.longnet([width], [rate])
    out = dilated_attention(q[:, :queries], k, v, pattern, query_offset=0)
    wanted = reference.attention(q, k, v, pattern)[0][:, :queries]
    assert testing.error(out, wanted) <= testing.TOLERANCE[torch.float32]
