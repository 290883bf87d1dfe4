"""The dropout hash against a transcription on Python's integers, its statistics, and what the operation makes of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.backends import eager
from dilated_attention.dropout import Dropout, row_words
from dilated_attention.pattern import RULES

WORD = 2**32


def keep_mask(
    seed: int, *, branch: int = 0, sample: int = 0, head: int = 0, p: float = 0.5, rows: int = 64, keys: int = 64
) -> Tensor:
    """(rows, keys) bool of one branch, sample and head."""
    query = torch.arange(rows).view(1, rows, 1)
    fixed = torch.zeros_like(query)
    words = row_words(torch.tensor(seed), branch, fixed + sample, fixed + head, query)
    return Dropout(p, *words, torch.arange(keys).view(1, keys, 1)).keep()[0, 0]


# --- the hash ---------------------------------------------------------------------------------------------------


def python_mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D % WORD
    word = (word ^ word >> 15) * 0x846CA68B % WORD
    return word ^ word >> 16


def python_keep(seed: int, branch: int, sample: int, head: int, query: int, key: int, p: float) -> bool:
    low, high = seed % WORD, (seed >> 32) % WORD
    for index in (branch, sample, head, query):
        step = index * 0x9E3779B1 % WORD
        low, high = python_mix(low ^ step), python_mix((high + step) % WORD)
    word = python_mix((python_mix(key * 0x9E3779B1 % WORD ^ low) + high) % WORD)
    return word >= round(p * WORD)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 2, -(2**63), 0x0123456789ABCDEF])
def test_the_hash_is_exact_on_unsigned_words(seed: int) -> None:
    sample, head, query, key = 3, 11, 2**20 + 7, 2**21 + 5
    index = [torch.full((1, 1, 1), i) for i in (sample, head, query)]
    for branch, (p, factor) in itertools.product(
        range(10), {0.0: 1.0, 0.2: 1.25, 0.5: 2.0, 0.75: 4.0, 1.0: 0.0}.items()
    ):
        drop = Dropout(p, *row_words(torch.tensor(seed), branch, *index), torch.full((1, 1, 1), key))
        assert drop.keep().item() == python_keep(seed, branch, sample, head, query, key, p)
        assert drop.factor == factor


def test_masks_of_another_seed_branch_sample_head_row_or_key_are_independent() -> None:
    p, rows = 0.3, 256
    one, above = keep_mask(0, p=p, rows=rows, keys=rows), torch.ones(rows, rows, dtype=torch.bool).triu(1)
    others = [{"seed": 1}, {"seed": 1 << 32}, {"seed": -5}, {"branch": 1}, {"sample": 1}, {"head": 1}]
    pairs = [(one, keep_mask(**{"seed": 0, **other}, p=p, rows=rows, keys=rows)) for other in others]
    pairs += [(one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[1:, 1:], one[:-1, :-1]), (one[above], one.T[above])]
    expected = p**2 + (1 - p) ** 2
    for this, that in pairs:
        assert abs((this == that).double().mean().item() - expected) < 5 * math.sqrt(
            expected * (1 - expected) / this.numel()
        )


# --- in the operation -------------------------------------------------------------------------------------------

BY_PATTERN = pytest.mark.parametrize("pattern", [DilatedPattern(rule, (8, 20), (1, 3)) for rule in RULES], ids=repr)


def call(qkv: tuple[Tensor, ...], pattern: DilatedPattern, seed: int, p: float = 0.4, **options):
    torch.manual_seed(seed)
    return dilated_attention(*qkv, pattern, dropout_p=p, return_lse=True, **options)


@BY_PATTERN
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiling_changes_nothing(pattern: DilatedPattern, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = testing.make_qkv(2, 33, 4, 8, kv_heads=2, dtype=torch.float64)
    mask = torch.rand(2, 33, generator=torch.Generator().manual_seed(0)) < 0.3
    options = {"is_causal": is_causal, "key_padding_mask": mask, "enable_gqa": True, "backend": "eager"}

    def results() -> testing.Results:
        return testing.run(lambda *x: call(x, pattern, 5, **options), qkv, qkv[0])

    whole = results()
    for size in (1, 64, 300):
        monkeypatch.setattr(eager, "TILE_ELEMENTS", {"cpu": size})
        testing.assert_exact(results(), whole)


@BY_PATTERN
def test_what_follows_the_seed_and_what_does_not(pattern: DilatedPattern) -> None:
    """lse is that of the undropped softmax; and p = 1 drops everything else."""
    qkv = testing.make_qkv(2, 33, 4, 8, dtype=torch.float64)
    (one, lse), (again, _), (other, _) = (call(qkv, pattern, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    second = dilated_attention(*qkv, pattern, dropout_p=0.4)  # the generator has moved on
    assert not any(torch.allclose(x, other) for x in (one, second))

    expected = dilated_attention(*qkv, pattern, return_lse=True)[1]
    out, all_dropped, *grads = testing.run(lambda *x: call(x, pattern, 0, 1.0), qkv, torch.ones_like(qkv[0]))
    assert max(testing.error(x, expected) for x in (lse, all_dropped)) < 1e-12
    assert not any(x.any() for x in (out, *grads))
