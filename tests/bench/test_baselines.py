"""The baselines compute what they claim: exact where they are, and wrong exactly where the released way is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend

from dilated_attention import DilatedPattern
from dilated_attention.bench import baselines
from dilated_attention.bench.run import Check, Expected, oracle, results
from dilated_attention.testing import make_qkv


def checked(function, pattern: DilatedPattern, tokens: int, is_causal: bool, heads: int = 5) -> Check:
    qkv = make_qkv(2, tokens, heads, 8)
    dout = torch.randn(qkv[0].shape)
    found = results(lambda *x: function(*x, pattern, is_causal=is_causal), qkv, dout)
    return Expected.of(oracle(pattern, is_causal), qkv, dout).compare(found)


@pytest.mark.parametrize("function", [baselines.copy_and_gather, baselines.copy_slices])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 31, 64, 101])
def test_copying_is_exact(function, tokens: int, is_causal: bool) -> None:
    pattern = DilatedPattern.head_groups([8, 19, 64], [1, 3, 5])
    assert checked(function, pattern, tokens, is_causal).verdict == "exact"


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_mask_of_flex_attention_is_the_pattern(is_causal: bool) -> None:
    """The mask alone: on a CPU FlexAttention has no backward, and compiling it takes long."""
    pattern, tokens, heads = DilatedPattern.head_groups([32, 50, 128], [1, 2, 3]), 140, 5
    mask = baselines._block_mask(pattern, tokens, heads, is_causal, torch.device("cpu"))
    index = torch.arange(tokens)
    for head, query in itertools.product(range(heads), range(0, tokens, 7)):
        seen = mask.mask_mod(torch.tensor(0), torch.tensor(head), torch.tensor(query), index).nonzero().flatten()
        expected = pattern.keys(query, head, num_tokens=tokens, num_heads=heads, is_causal=is_causal)
        assert tuple(seen.tolist()) == expected


def test_dense_with_a_kernel_that_cannot_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="kernel"):
        baselines.dense(*make_qkv(1, 8, 2, 4), kernel=SDPBackend.CUDNN_ATTENTION)


@pytest.mark.parametrize(("is_causal", "tokens"), [(False, 31), (True, 64), (True, 101)])
def test_gather_pad_scatter_has_the_right_out_and_wrong_gradients(tokens: int, is_causal: bool) -> None:
    pattern = DilatedPattern.torchscale([8, 19, 64], [1, 3, 5])
    check = checked(baselines.gather_pad_scatter, pattern, tokens, is_causal)
    assert check.verdict == "wrong gradients"
    assert check.right("out", "d v")  # the mixing weights do not depend on the values
    assert min(check.errors["d q"], check.errors["d k"]) > 1e-3


@pytest.mark.parametrize(
    ("function", "rule"),
    [(baselines.copy_and_gather, "longnet"), (baselines.copy_slices, "torchscale"), (baselines.flex, "longnet"),
     (baselines.gather_pad_scatter, "head_groups")],
)  # fmt: skip
def test_a_rule_it_does_not_follow_is_refused(function, rule: str) -> None:
    with pytest.raises(ValueError, match=f"got '{rule}'"):
        function(*make_qkv(1, 8, 2, 4), DilatedPattern(rule, (4,), (1,)))
