"""Corners that a review found: each was wrong or unclear once."""

import math

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, reference, testing
from dilated_attention.backends import aten, sdpa
from tests.cases import leaves

PATTERN = DilatedPattern.longnet([8, 20], [1, 3])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vanishing_scale_when_causal(backend: str, dtype: torch.dtype) -> None:
    """The table has such scales; here the gradients are exactly 0."""
    given = leaves(*testing.make_qkv(2, 33, 3, 4, dtype=dtype))
    out = dilated_attention(*given, PATTERN, scale=0.0, is_causal=True, backend=backend)
    dq, dk, _ = torch.autograd.grad(out.sum(), given)
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_keys_send_nothing_back_whatever_they_are_sent(backend: str, bad: float) -> None:
    given = leaves(*testing.make_qkv(1, 24, 2, 4))
    mask = (torch.arange(24) < 9).unsqueeze(0)  # left padding: causal rows before it see nothing
    results = dilated_attention(
        *given, PATTERN, is_causal=True, key_padding_mask=mask, backend=backend, return_lse=True
    )
    empty = results[1] == -math.inf
    assert empty.any()
    dout, dlse = (torch.randn_like(x) for x in results)
    wanted, got = (
        torch.autograd.grad(
            results, given, (dout.masked_fill(empty[..., None], sent), dlse.masked_fill(empty, sent)), retain_graph=True
        )
        for sent in (0.0, bad)
    )
    assert all(map(torch.equal, got, wanted))


def test_explain_tells_of_blocks_that_the_first_kernel_does_not_take() -> None:
    kernels = (aten.cudnn(), aten.flash("FA3"))
    assert sdpa.describe(kernels, {2, 7}) == "cudnn"
    assert sdpa.describe(kernels, {1, 7}) == "cudnn; flash (FA3) for blocks of 1 row"
    assert sdpa.describe(kernels[:1], {1, 7}) == "cudnn; eager for blocks of 1 row"


def test_a_large_gradient_of_lse_keeps_its_digits_in_half_precision() -> None:
    """The second pass of the library kernels, with numbers that float16 does not hold."""
    kernel = (aten.flash_on_cpu(),)
    q, k, v = (x.half().double() for x in testing.make_qkv(1, 8, 2, 4))
    q = q / 8  # even weights: what the kernel multiplies with dlse then fits
    out, lse = reference.attention(q, k, v, DilatedPattern.longnet([8], [1]))
    dlse = torch.randn_like(lse).sign() * 1e5
    wanted = testing.oracle((q, k, v), DilatedPattern.longnet([8], [1]), torch.zeros_like(q), dlse)
    half = tuple(x.half() for x in (torch.zeros_like(q), q, k, v, out))
    dq, dk, _ = sdpa.backward(kernel, *half, lse.float(), dlse.float(), sdpa.Masking(0.5))
    for got, exact in ((dq, wanted.dq), (dk, wanted.dk)):
        assert (got.double() - exact).abs().max() < 5e-3 * exact.abs().max()


@pytest.mark.parametrize("number", [2**48 + 1, 10**20])
def test_numbers_that_strides_cannot_hold(number: int) -> None:
    for lists in (([number], [1]), ([8], [number])):
        with pytest.raises(ValueError, match=r"at most 2\*\*48"):
            DilatedPattern.longnet(*lists)


@pytest.mark.parametrize("queries", [4, 2])
@pytest.mark.parametrize(("width", "rate"), [(4, 2**48), (2**48, 1), (2**48, 2**48)])
def test_the_longest_segments_of_the_widest_rows(width: int, rate: int, queries: int) -> None:
    """A stride of such a view, of one row or one segment, would not be a number of 64 bits."""
    q, k, v = testing.make_qkv(1, 4, 128, 256)
    pattern = DilatedPattern.longnet([width], [rate])
    out = dilated_attention(q[:, :queries], k, v, pattern, query_offset=0)
    wanted = reference.attention(q, k, v, pattern)[0][:, :queries]
    assert testing.error(out, wanted) <= testing.TOLERANCE[torch.float32]
