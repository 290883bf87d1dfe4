"""What docs/migration.md says of other packages, where no code of theirs is needed to check it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dilated_attention as da
from dilated_attention import testing


def by_its_published_formula(qkv: tuple[Tensor, ...], lengths: list[int], rates: list[int], causal: bool) -> Tensor:
    """dilated-attention-pytorch: each branch has its share of the heads, and is divided by its sum over all tokens."""
    samples, tokens, heads, dim = qkv[0].shape
    share = heads // len(lengths)
    out = torch.zeros_like(qkv[0])
    for branch, (length, rate) in enumerate(zip(lengths, rates, strict=True)):
        rows = (slice(None), slice(None), slice(branch % rate, None, rate), slice(branch * share, (branch + 1) * share))
        parts = [x.view(samples, tokens // length, length, heads, dim)[rows].transpose(2, 3) for x in qkv]
        found = F.scaled_dot_product_attention(*parts, is_causal=causal).transpose(2, 3)
        out.view(samples, tokens // length, length, heads, dim)[rows] = found / found.sum((1, 2), keepdim=True)
    return out / len(lengths)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("lengths", "rates"), [([16, 64], [1, 2]), ([8, 16, 64], [1, 3, 4])])
def test_the_other_normalisation_is_two_lines(lengths: list[int], rates: list[int], causal: bool) -> None:
    qkv = testing.make_qkv(2, 128, 6, 8, dtype=torch.float64)
    x = da.dilated_attention(*qkv, da.DilatedPattern.head_groups(lengths, rates), is_causal=causal)
    x = x / x.sum(1, keepdim=True) / len(rates)
    expected = by_its_published_formula(qkv, lengths, rates, causal)
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-12)
