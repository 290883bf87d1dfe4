"""The pattern against its definition: a brute force that walks over every token, sharing no formula with the code."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention import DilatedPattern, reference
from dilated_attention.pattern import RULES

PATTERNS = [
    ([4, 8], [1, 2]),
    ([5], [2]),
    ([7, 3], [3, 1]),
    ([3, 9], [5, 4]),  # r > w, and r no divisor of w
    ([1, 2, 40], [1, 3, 7]),
    ([4, 4], [2, 2]),  # the same branch twice
    ([6, 12, 24], [1, 2, 6]),
]
HEADS = [(4, 4), (5, 5), (6, 3), (12, 3)]  # query heads, key/value heads
LENGTHS = (1, 2, 7, 12, 23)

CASES = [
    pytest.param(DilatedPattern(rule, tuple(w), tuple(r)), *heads, n, causal, id=f"{rule}-{w}-{r}-{heads}-{n}-{causal}")
    for rule, (w, r), heads, n, causal in itertools.product(RULES, PATTERNS, HEADS, LENGTHS, (False, True))
    if rule != "head_groups" or heads[1] >= len(w)
]


def offset_of(rule: str, branch: int, rate: int, head: int, kv_heads: int, branches: int) -> int | None:
    """The head's offset in a branch as the table of rules says it, or None where it does not run the branch."""
    if rule == "longnet":
        return head % rate
    if rule == "torchscale":
        per_offset = kv_heads // rate + (kv_heads % rate > 0)
        return head // per_offset
    owners = [b for b in range(branches) for _ in range(kv_heads // branches + (b < kv_heads % branches))]
    return branch % rate if owners[head] == branch else None


def brute_force(
    pattern: DilatedPattern, query: int, head: int, tokens: int, heads: int, kv_heads: int, is_causal: bool
) -> tuple[list[int], int]:
    """The tokens a row sees, one by one, and its zero keys."""
    keys, zeros = [], 0
    kv_head = head // (heads // kv_heads)
    for branch, (width, rate) in enumerate(pattern.branches):
        offset = offset_of(pattern.rule, branch, rate, kv_head, kv_heads, len(pattern.branches))
        width = min(width, tokens)
        segment = [p for p in range(tokens) if p // width == query // width]
        rows = [p for p in segment if (p - segment[0]) % rate == offset]
        if query not in rows:
            continue
        keys += [p for p in rows if not is_causal or p <= query]
        if pattern.rule == "torchscale" and not is_causal:
            filled = -(-width // rate) * rate
            zeros += sum(p % rate == offset for p in range(len(segment), filled))
    return sorted(keys), zeros


# --- against brute force ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "heads", "kv_heads", "tokens", "is_causal"), CASES)
def test_questions_against_brute_force(
    pattern: DilatedPattern, heads: int, kv_heads: int, tokens: int, is_causal: bool
) -> None:
    """The pattern's, and those of the oracle."""
    options = {"num_kv_heads": kv_heads, "is_causal": is_causal}
    like = torch.zeros((), dtype=torch.float64)
    counts, zero_counts = reference.key_counts(pattern, tokens, heads, None, is_causal, heads // kv_heads, like)
    expected = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for query, head in itertools.product(range(tokens), range(heads)):
        keys, zeros = brute_force(pattern, query, head, tokens, heads, kv_heads, is_causal)
        assert list(pattern.keys(query, head, num_tokens=tokens, num_heads=heads, **options)) == keys
        assert pattern.zero_keys(query, head, num_tokens=tokens, num_heads=heads, **options) == zeros
        expected[head, query] = torch.from_numpy(np.bincount(keys, minlength=tokens))
        assert zero_counts[0, head, query, 0].item() == zeros

    assert torch.equal(counts.sum(0)[0], expected)
    pairs = expected.sum()
    assert pattern.pairs(tokens, heads, **options) == pairs
    assert pattern.flops(tokens, heads, 16, **options) == 4 * 16 * pairs
    assert pattern.flops(tokens, heads, 16, **options, backward=True) == (4 + 10) * 16 * pairs
    assert torch.equal(pattern.coverage(tokens, heads, num_kv_heads=kv_heads), expected.any(-1).T)


@pytest.mark.parametrize("name", ["pairs", "flops", "saved_bytes", "coverage"])
def test_counts_without_kv_heads_or_tokens(name: str) -> None:
    more = {"num_heads": 4, **({"head_dim": 8} if name in ("flops", "saved_bytes") else {})}
    count = functools.partial(getattr(DilatedPattern.torchscale([4, 8], [1, 2]), name), **more)
    assert torch.equal(torch.as_tensor(count(9)), torch.as_tensor(count(9, num_kv_heads=4)))
    assert not torch.as_tensor(count(0)).any()


# --- a value object ---------------------------------------------------------------------------------------------

ONE = DilatedPattern.longnet([4, 8], [1, 2])


def test_patterns_are_equal_by_value_and_by_rule() -> None:
    others = [DilatedPattern.torchscale([4, 8], [1, 2]), DilatedPattern.longnet([8, 4], [1, 2])]
    assert len({ONE, *others, DilatedPattern.longnet((4, 8), (1, 2))}) == 3
    assert [eval(repr(pattern)) for pattern in others] == others


def test_frozen_and_checked_again_when_replaced() -> None:
    with pytest.raises(AttributeError):
        ONE.rule = "torchscale"  # type: ignore[misc]
    assert dataclasses.replace(ONE, rule="torchscale") == DilatedPattern.torchscale([4, 8], [1, 2])
    with pytest.raises(ValueError, match="2 entries and dilation_rates 1"):
        dataclasses.replace(ONE, dilation_rates=(1,))
    for again in (dataclasses.replace(ONE), copy.deepcopy(ONE), pickle.loads(pickle.dumps(ONE))):
        assert (again, again.text) == (ONE, ONE.text)


def test_any_iterable_of_whole_numbers_will_do() -> None:
    pattern = DilatedPattern.longnet((2**i for i in (2, 3)), np.array([1, 2]))
    assert pattern == ONE
    assert all(type(number) is int for branch in pattern.branches for number in branch)


# --- errors -----------------------------------------------------------------------------------------------------

NOT_WHOLE = "every entry of segment_lengths must be a whole number, got"
NO_ORDER = "segment_lengths must be a list of whole numbers, one per branch and in their order"
BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "fewer rates": ([4, 8], [1], ValueError, "segment_lengths has 2 entries and dilation_rates 1"),
    "more rates": ([4], [1, 2], ValueError, r"give one rate per length, got \[4\] and \[1, 2\]"),
    "empty": ([], [], ValueError, "segment_lengths is empty"),
    "empty rates": ([4], [], ValueError, "dilation_rates is empty"),
    "zero": ([0], [1], ValueError, "segment_lengths must be 1 or more, got 0"),
    "negative rate": ([4, 8], [1, -2], ValueError, "dilation_rates must be 1 or more, got -2"),
    "float": ([1.5], [1], TypeError, rf"{NOT_WHOLE} 1\.5"),
    "bool": ([True], [1], TypeError, f"{NOT_WHOLE} True"),
    "text": (["3"], [1], TypeError, f"{NOT_WHOLE} '3'"),
    "bool in a tensor": ([torch.tensor(True)], [1], TypeError, NOT_WHOLE.removesuffix(", got")),
    "tensor": (torch.tensor([4]), [1], TypeError, "must be a list of whole numbers"),
    "too long": ([2**48 + 1], [1], ValueError, r"at most 2\*\*48"),  # strides could not hold them
    "too large a rate": ([8], [10**20], ValueError, r"at most 2\*\*48"),
    "text for a list": ("12", [1, 1], TypeError, "segment_lengths must be a list of whole numbers"),
    "set": ({4, 8}, [1, 2], TypeError, NO_ORDER),
    "dict": ({4: 1, 8: 2}, [1, 2], TypeError, NO_ORDER),
    "65 branches": ([4] * 65, [1] * 65, ValueError, "at most 64 branches, got 65"),
}


@pytest.mark.parametrize("name", BAD)
def test_constructor_errors(name: str) -> None:
    lengths, rates, kind, match = BAD[name]
    with pytest.raises(kind, match=match):
        DilatedPattern.longnet(lengths, rates)


def test_unknown_rules() -> None:
    for rule in ("", "LongNet", None):
        with pytest.raises(ValueError, match=r"unknown rule .*use one of longnet, torchscale, head_groups"):
            DilatedPattern(rule, (4,), (1,))


def test_heads_that_do_not_fit() -> None:
    pattern = DilatedPattern.head_groups([2, 4, 8], [1, 2, 4])
    assert pattern.check_heads(6, 3) == 2
    fewer = ((pattern.check_heads, 2), (pattern.check_heads, 8, 2), (pattern.pairs, 8, 2), (pattern.coverage, 8, 2))
    for question, *counts in fewer:  # the key/value heads count
        with pytest.raises(ValueError, match=r"at least one key/value head per branch, got 3 branches and 2 key/value"):
            question(*counts)
    for heads, kv_heads in ((4, 3), (2, 4), (4, 0), (0, 4), (-4, 2)):
        with pytest.raises(ValueError, match=f"{heads} query heads cannot be shared evenly by {kv_heads} key/value"):
            ONE.check_heads(heads, kv_heads)


def test_keys_of_a_row_that_is_not_there() -> None:
    for query, head in ((-1, 0), (8, 0), (0, -1), (0, 4)):
        for question in (ONE.keys, ONE.zero_keys):
            with pytest.raises(ValueError, match=rf"no row \(query {query}, head {head}\) among 8 tokens and 4 heads"):
                question(query, head, num_tokens=8, num_heads=4)


@pytest.mark.parametrize("name", ["pairs", "flops", "saved_bytes"])
@pytest.mark.parametrize(
    ("which", "value"),
    [("num_tokens", -1), ("num_tokens", 2.5), ("num_heads", 0), ("num_heads", True), ("num_kv_heads", 3)],
)
def test_wrong_counts_are_refused(name: str, which: str, value: Any) -> None:
    counts = {"num_tokens": 64, "num_heads": 4} | ({} if name == "pairs" else {"head_dim": 8})
    with pytest.raises((TypeError, ValueError), match=f"{which} must be|cannot be shared evenly"):
        getattr(ONE, name)(**counts | {which: value})
