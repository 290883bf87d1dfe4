"""Corners that a review found: each was wrong or unclear once."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention import (
    DilatedAttention,
    DilatedPattern,
    MultiheadDilatedAttention,
    dilated_attention,
    explain,
    reference,
    testing,
)
from dilated_attention.backends import aten, sdpa

PATTERN = DilatedPattern.longnet([8, 20], [1, 3])


@pytest.mark.parametrize("scale", [0.0, 1e-46, 1e-20])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vanishing_scale_when_causal(scale: float, backend: str, dtype: torch.dtype) -> None:
    qkv = testing.make_qkv(2, 33, 3, 4, dtype=dtype)
    testing.check(qkv, PATTERN, scale=scale, is_causal=True, backend=backend)
    if scale == 0:
        leaves = [x.requires_grad_() for x in qkv]
        dq, dk, _ = torch.autograd.grad(
            dilated_attention(*leaves, PATTERN, scale=0.0, is_causal=True, backend=backend).sum(), leaves
        )
        assert not dq.any()
        assert not dk.any()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_keys_send_nothing_back_whatever_they_are_sent(backend: str, bad: float) -> None:
    qkv = tuple(x.requires_grad_() for x in testing.make_qkv(1, 24, 2, 4))
    mask = (torch.arange(24) < 9).unsqueeze(0)  # left padding: causal rows before it see nothing
    out, lse = dilated_attention(*qkv, PATTERN, is_causal=True, key_padding_mask=mask, backend=backend, return_lse=True)
    empty = lse == -math.inf
    assert empty.any()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad(
        (out, lse), qkv, (dout.masked_fill(empty[..., None], 0), dlse.masked_fill(empty, 0)), retain_graph=True
    )
    got = torch.autograd.grad((out, lse), qkv, (dout.masked_fill(empty[..., None], bad), dlse.masked_fill(empty, bad)))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_forward_mode_is_refused_not_ignored() -> None:
    q, k, v = testing.make_qkv(1, 9, 2, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        dilated_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, PATTERN)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: dilated_attention(q, x, v, PATTERN), (k,), (k,))


def test_a_kernel_switched_off_is_not_used_on_a_cpu_either() -> None:
    qkv = testing.make_qkv(1, 9, 2, 4)
    with sdpa_kernel(SDPBackend.MATH):
        told = explain(*qkv, PATTERN)
        assert told.backend == "eager"
        assert "switched off" in str(told)
        with pytest.raises(ValueError, match="switched off"):
            dilated_attention(*qkv, PATTERN, backend="sdpa")


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


def test_no_tokens_with_a_mask() -> None:
    qkv = testing.make_qkv(2, 0, 3, 4)
    mask = torch.zeros(2, 0, dtype=torch.bool)
    for rule in ("longnet", "torchscale", "head_groups"):
        testing.check(qkv, DilatedPattern(rule, (8, 20), (1, 3)), key_padding_mask=mask)


def test_numbers_of_numpy_are_numbers() -> None:
    qkv = testing.make_qkv(1, 9, 2, 4)
    pattern = DilatedPattern.longnet(np.array([8, 20]), np.array([1, 3]))
    assert pattern == PATTERN
    got = dilated_attention(*qkv, pattern, scale=np.float32(0.5), dropout_p=np.float64(0.0))
    assert torch.equal(got, dilated_attention(*qkv, PATTERN, scale=0.5))


@pytest.mark.parametrize("number", [2**48 + 1, 10**20])
def test_numbers_that_strides_cannot_hold(number: int) -> None:
    with pytest.raises(ValueError, match=r"at most 2\*\*48"):
        DilatedPattern.longnet([number], [1])
    with pytest.raises(ValueError, match=r"at most 2\*\*48"):
        DilatedPattern.longnet([8], [number])


@pytest.mark.parametrize("largest", [(2**48, 1), (8, 2**48), (2**48, 2**48)])
def test_the_largest_numbers(largest: tuple[int, int]) -> None:
    testing.check(testing.make_qkv(2, 9, 2, 4), DilatedPattern.longnet([3, largest[0]], [1, largest[1]]))


def test_what_is_no_tensor() -> None:
    q, k, v = testing.make_qkv(1, 9, 2, 4)
    with pytest.raises(TypeError, match="key must be a tensor, got NoneType"):
        dilated_attention(q, None, v, PATTERN)
    with pytest.raises(TypeError, match="query must be a tensor, got ndarray"):
        dilated_attention(q.numpy(), k, v, PATTERN)
    with pytest.raises(TypeError, match="key_padding_mask must be a tensor, got bool"):
        dilated_attention(q, k, v, PATTERN, key_padding_mask=False)
    with pytest.raises(TypeError, match="is_causal must be True or False, got 'no'"):
        dilated_attention(q, k, v, PATTERN, is_causal="no")
    with pytest.raises(TypeError, match="every entry of segment_lengths must be a whole number"):
        DilatedPattern.longnet([torch.tensor(True)], [1])
    for entries in (torch.tensor([8.0]), b"12"):
        with pytest.raises(TypeError, match="segment_lengths must be a list of whole numbers"):
            DilatedPattern.longnet(entries, [1, 1])


def test_messages_name_what_the_caller_wrote() -> None:
    with pytest.raises(ValueError, match="attention_dropout must be a number"):
        DilatedAttention([8], [1], attention_dropout=2)


def test_multihead_refuses_before_it_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MultiheadDilatedAttention(8, 2, [4], [1])
    monkeypatch.setattr(module, "_project", lambda *x: pytest.fail("it projected first"))
    x = torch.randn(2, 9, 8)
    with pytest.raises(ValueError, match="needs equal lengths"):
        module(x, x[:, :5], x[:, :5])
    with pytest.raises(ValueError, match="key_padding_mask must be"):
        module(x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))


@pytest.mark.parametrize("queries", [4, 2])
@pytest.mark.parametrize(("width", "rate"), [(4, 2**48), (2**48, 1), (2**48, 2**48)])
def test_the_longest_segments_of_the_widest_rows(width: int, rate: int, queries: int) -> None:
    """A stride of such a view, of one row or one segment, would not be a number of 64 bits."""
    q, k, v = testing.make_qkv(1, 4, 128, 256)
    pattern = DilatedPattern.longnet([width], [rate])
    out = dilated_attention(q[:, :queries], k, v, pattern, query_offset=0)
    wanted = reference.attention(q, k, v, pattern)[0][:, :queries]
    assert testing.error(out, wanted) <= testing.TOLERANCE[torch.float32]
