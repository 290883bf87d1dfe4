"""The baselines compute what they claim: exact where they are, and wrong exactly where the released way is."""

from __future__ import annotations

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.bench import baselines
from dilated_attention.bench.run import Check, Expected, oracle
from dilated_attention.testing import make_qkv


def checked(function, pattern: DilatedPattern, tokens: int, is_causal: bool, heads: int = 5) -> Check:
    qkv = make_qkv(2, tokens, heads, 8)
    expected = Expected.of(oracle(pattern, is_causal), qkv, torch.randn(qkv[0].shape))
    return expected.check(lambda *x: function(*x, pattern, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 31, 64, 101])
def test_copy_and_gather_is_exact(tokens: int, is_causal: bool) -> None:
    pattern = DilatedPattern.head_groups([8, 19, 64], [1, 3, 5])
    assert checked(baselines.copy_and_gather, pattern, tokens, is_causal).verdict == "exact"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [31, 64, 101])
def test_gather_pad_scatter_has_the_right_out_and_wrong_gradients(tokens: int, is_causal: bool) -> None:
    pattern = DilatedPattern.torchscale([8, 19, 64], [1, 3, 5])
    check = checked(baselines.gather_pad_scatter, pattern, tokens, is_causal)
    assert check.verdict == "wrong gradients"
    assert check.right("out", "d v")  # the mixing weights do not depend on the values
    assert min(check.errors["d q"], check.errors["d k"]) > 1e-3


def test_gather_pad_scatter_is_exact_with_one_branch() -> None:  # nothing to mix, no gradient to lose
    pattern = DilatedPattern.torchscale([16], [1])
    assert checked(baselines.gather_pad_scatter, pattern, 48, False).verdict == "exact"


def test_dense_is_its_own_pattern() -> None:
    def dense(*qkv_and_pattern, is_causal: bool):
        return baselines.dense(*qkv_and_pattern[:3], is_causal=is_causal)

    for is_causal in (False, True):
        assert checked(dense, baselines.dense_pattern(37), 37, is_causal).verdict == "exact"


@pytest.mark.parametrize(
    ("function", "rule"), [(baselines.copy_and_gather, "longnet"), (baselines.gather_pad_scatter, "head_groups")]
)
def test_a_rule_it_does_not_follow_is_refused(function, rule: str) -> None:
    with pytest.raises(ValueError, match=f"got '{rule}'"):
        function(*make_qkv(1, 8, 2, 4), DilatedPattern(rule, (4,), (1,)))
