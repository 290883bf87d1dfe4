"""Any pattern: hypothesis draws a seed, and patterns and numbers follow it. The table of cases has named patterns."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES

# Drawn one by one, numbers would mostly be small or equal; those that follow a seed are even.
SEEDS = given(st.integers(0, 2**32 - 1))
SOME = settings(deadline=None, derandomize=True, database=None, max_examples=150)


def draw_pattern(pick: random.Random, rules: tuple[str, ...] = RULES, most: int = 3) -> DilatedPattern:
    branches = pick.randint(1, most)
    lengths, rates = (tuple(pick.randint(1, largest) for _ in range(branches)) for largest in (24, 5))
    return DilatedPattern(pick.choice(rules), lengths, rates)


@pytest.mark.filterwarnings("ignore::dilated_attention.DilatedAttentionWarning")
@SOME
@SEEDS
def test_any_pattern(seed: int) -> None:
    """Branches may come in any order, and twice they only raise lse."""
    pick = random.Random(seed)
    pattern, tokens, group = draw_pattern(pick), pick.randint(1, 30), pick.randint(1, 2)
    kv_heads = pick.randint(len(pattern.branches), 5)
    qkv = testing.make_qkv(2, tokens, kv_heads * group, 3, kv_heads=kv_heads, dtype=torch.float64, seed=seed)
    mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed)) < 0.3 if seed % 3 else None
    options = {"is_causal": pick.random() < 0.5, "key_padding_mask": mask, "backend": pick.choice(["sdpa", "eager"])}
    testing.check(qkv, pattern, **options)

    if pattern.rule == "head_groups":
        return
    times, options = pick.randint(1, 3), {**options, "enable_gqa": True, "return_lse": True}
    lengths, rates = zip(*pick.sample(pattern.branches * times, times * len(pattern.branches)), strict=True)
    out, lse = dilated_attention(*qkv, pattern, **options)
    got, got_lse = dilated_attention(*qkv, DilatedPattern(pattern.rule, lengths, rates), **options)
    assert testing.error(got, out) < 1e-12
    assert testing.error(got_lse, lse + math.log(times)) < 1e-12


@pytest.mark.filterwarnings("ignore::dilated_attention.DilatedAttentionWarning")
@SOME
@SEEDS
def test_one_branch_is_plain_attention_on_its_rows(seed: int) -> None:
    """Without an oracle in between."""
    pick = random.Random(seed)
    pattern = draw_pattern(pick, ("longnet", "head_groups"), most=1)
    tokens, kv_heads, group, is_causal = pick.randint(1, 30), pick.randint(1, 5), pick.randint(1, 2), seed % 2 == 0
    q, k, v = testing.make_qkv(2, tokens, kv_heads * group, 3, kv_heads=kv_heads, dtype=torch.float64, seed=seed)
    ((width, rate),) = pattern.branches
    expected = torch.zeros_like(q)
    for start, head in itertools.product(range(0, tokens, width), range(kv_heads * group)):
        offset = pattern.offset(0, head // group, kv_heads)
        rows = slice(start + offset, min(start + width, tokens), rate)
        if expected[:, rows].shape[1]:
            part = q[:, rows, head], k[:, rows, head // group], v[:, rows, head // group]
            expected[:, rows, head] = F.scaled_dot_product_attention(*part, is_causal=is_causal)
    got = dilated_attention(q, k, v, pattern, is_causal=is_causal, enable_gqa=True)
    assert testing.error(got, expected) < 1e-12
