"""Blocks read as the pattern says: ids seen through every view are exactly the keys of the pattern.

Legend as in `blocks`. Ids are unique per (sample, token, head), so a view that reads anything else shows it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention import DilatedPattern
from dilated_attention.blocks import Block, Plan, View, folds, plan
from dilated_attention.call import Call
from dilated_attention.pattern import RULES, Rule

FEW = settings(deadline=None, derandomize=True, database=None, max_examples=150)


def call_of(
    pattern: DilatedPattern, samples: int = 1, tokens: int = 64, kv_heads: int = 8, group: int = 1, **given: Any
) -> Call:
    """A whole call, unless more is given."""
    whole = Call(
        pattern, scale=1.0, samples=samples, queries=tokens, keys=tokens, total=tokens, heads=kv_heads * group,
        kv_heads=kv_heads, head_dim=8,
    )  # fmt: skip
    return whole._replace(**given)


@st.composite
def calls(draw: st.DrawFn, kinds: tuple[str, ...] = ("whole", "shard", "few")) -> Call:
    """Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly."""
    pick = random.Random(draw(st.integers(0, 2**32 - 1)))
    rule, branches, kind = pick.choice(RULES), pick.randint(1, 3), pick.choice(kinds)
    lengths, rates = ([pick.randint(1, most) for _ in range(branches)] for most in (40, 7))
    fewest = branches if rule == "head_groups" else 1
    tokens = pick.randint(1, 33)
    call = call_of(
        DilatedPattern.of(rule, lengths, rates), pick.randint(1, 3), tokens, pick.randint(fewest, 8),
        pick.randint(1, 3), is_causal=pick.random() < 0.5,
    )  # fmt: skip
    if kind == "whole":
        return call
    start = pick.randrange(tokens)
    queries = pick.randint(1, tokens - start)
    return call._replace(
        start=start, queries=queries, **({"key_start": start, "keys": queries} if kind == "shard" else {})
    )


def ids(samples: int, tokens: int, heads: int, fold: bool) -> Tensor:
    """(B, n, H) of unique numbers; without fold, cut out of a longer tensor so that (B, n) is not one stride."""
    rows = torch.arange(samples * tokens * heads).view(samples, tokens, heads)
    if fold:
        return rows
    longer = torch.full((samples, tokens + 3, heads + 1), -1)
    longer[:, 1 : tokens + 1, 1:] = rows
    return longer[:, 1 : tokens + 1, 1:]


def place(number: int, tokens: int, heads: int) -> tuple[int, int, int]:
    return number // (tokens * heads), number // heads % tokens, number % heads


Row = tuple[int, int, int, int, int]  # branch, segment, sample, query head, query


def seen_through(call: Call, blocks: Iterable[Block], fold: bool) -> tuple[Counter[tuple[Row, int]], Counter[Row]]:
    """How often the blocks show each (row, key), and how many zero keys they add to a row; positions are global."""
    query_ids = ids(call.samples, call.queries, call.heads, fold)
    key_ids = ids(call.samples, call.keys, call.kv_heads, fold)
    pairs: Counter[tuple[Row, int]] = Counter()
    zeros: Counter[Row] = Counter()
    for block in blocks:
        width = min(call.pattern.segment_lengths[block.branch], call.total)
        q, k = block.queries.of(query_ids, call.q_per_kv), block.keys.of(key_ids)
        assert all(
            x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for x, y in ((q, query_ids), (k, key_ids))
        )
        assert all(x.unique().numel() == x.numel() for x in (q, k)), "an element would be written twice"
        assert q.shape == (block.batch, block.queries.rows, block.heads * call.q_per_kv)
        assert k.shape == (block.batch, block.keys.rows, block.heads)
        for batch, head in torch.cartesian_prod(torch.arange(block.batch), torch.arange(block.heads)).tolist():
            shown = [place(x, call.keys, call.kv_heads) for x in k[batch, :, head].tolist()]
            for i, row in enumerate(q[batch, :, head * call.q_per_kv : (head + 1) * call.q_per_kv].tolist()):
                for number in row:
                    sample, token, query_head = place(number, call.queries, call.heads)
                    query = call.start + token
                    assert {(s, h) for s, _, h in shown} == {(sample, query_head // call.q_per_kv)}
                    at = (block.branch, query - query % width, sample, query_head, query)
                    visible = shown[: i + 1] if block.is_causal else shown
                    pairs.update((at, call.key_start + token) for _, token, _ in visible)
                    zeros[at] += block.zeros
                    if batch == i == 0:  # what dropout and the zero keys of padded samples go by
                        assert block.query_at[head] == query
                        assert block.key_at[head] == call.key_start + shown[0][1]
                        assert block.segment == query - query % width
                        assert block.head_numbers[head] == query_head // call.q_per_kv
                        assert block.rate == call.pattern.dilation_rates[block.branch]
    return pairs, zeros


@FEW
@given(calls(), st.booleans())
@example(call_of(DilatedPattern.longnet([4, 8], [1, 2]), 2, 8, 4), True)
@example(call_of(DilatedPattern.longnet([8], [4]), 3, 19, 8), False)
@example(call_of(DilatedPattern.longnet([8, 4], [4, 3]), 2, 16, 6, 2), True)
@example(call_of(DilatedPattern.torchscale([6, 32], [2, 4]), 2, 21, 8), True)
@example(call_of(DilatedPattern.torchscale([6, 32], [2, 4]), 2, 21, 8, start=5, queries=9), True)
@example(call_of(DilatedPattern.longnet([8, 16], [1, 4]), 2, 33, 8, start=5, queries=9, is_causal=True), True)
@example(call_of(DilatedPattern.head_groups([5, 3, 30], [1, 7, 2]), 3, 23, 7, 3), False)
def test_blocks_show_exactly_the_keys_of_the_pattern(call: Call, fold: bool) -> None:
    """Of a shard those keys that are here."""
    pairs, zeros = seen_through(call, plan(call, fold).blocks, fold)
    keys, rows = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for ((_, _, *row), key), count in pairs.items():
        keys[*row, key] += count
    for (_, _, *row), count in zeros.items():
        rows[*row] += count
    here = range(call.key_start, call.key_start + call.keys)
    shape = {"num_tokens": call.total, "num_heads": call.heads, "num_kv_heads": call.kv_heads}
    expected, zero_keys = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for row in itertools.product(range(call.samples), range(call.heads), range(call.start, call.start + call.queries)):
        given = row[2], row[1]
        expected.update(
            (*row, key) for key in call.pattern.keys(*given, is_causal=call.is_causal, **shape) if key in here
        )
        zero_keys[*row] = call.pattern.zero_keys(*given, is_causal=call.is_causal, **shape)
    assert keys == expected
    assert +rows == +zero_keys


@FEW
@given(calls(), st.booleans(), st.sampled_from([None, 1, 4, 12, 40]), *[st.sampled_from([None, 1, 2, 3])] * 2)
@example(call_of(DilatedPattern.longnet([4, 8], [1, 2]), 3, 8, 4), True, 16, None, None)  # two segments of one sample
@example(call_of(DilatedPattern.longnet([8], [4]), 3, 19, 8), False, 6, None, None)  # three heads on a diagonal
@example(call_of(DilatedPattern.longnet([4], [1]), 3, 16, 2), True, None, None, 3)  # a sample is taken apart
@example(call_of(DilatedPattern.longnet([4], [1]), 3, 16, 2), True, None, None, 5)  # whole samples
def test_parts_of_blocks_show_the_same_pairs(
    call: Call, fold: bool, rows: int | None, heads: int | None, batch: int | None
) -> None:
    blocks = plan(call, fold).blocks
    parts = [block.cut(rows, heads, batch) for block in blocks]
    assert seen_through(call, itertools.chain(*parts), fold) == seen_through(call, blocks, fold)
    for block, cut in zip(blocks, parts, strict=True):
        for part in cut:
            assert part.heads <= (heads or part.heads)
            assert part.batch <= (batch or part.batch)
            assert rows is None or part.batch * part.heads * part.queries.rows <= max(rows, part.queries.rows)
        assert (rows, heads, batch) != (None, None, None) or cut == [block]


def test_parts_are_as_large_as_they_may_be() -> None:
    (block,) = plan(call_of(DilatedPattern.longnet([16], [1]), 3)).blocks  # 3 samples of 4 segments, 8 heads, 16 rows

    def shapes(**most: int) -> set[tuple[int, int, int]]:
        return {(b.queries.samples, b.queries.segments, b.heads) for b in block.cut(**most)}

    assert block.cut(1536, 8, 12) == [block]
    assert shapes(rows=1535) == shapes(rows=1024) == {(2, 4, 8), (1, 4, 8)}
    assert shapes(rows=300) == {(1, 2, 8)}
    assert shapes(rows=40) == {(1, 1, 2)}
    assert shapes(rows=1) == {(1, 1, 1)}
    assert shapes(heads=3) == {(3, 4, 3), (3, 4, 2)}
    assert shapes(batch=11) == {(2, 4, 8), (1, 4, 8)}
    assert shapes(batch=3, heads=4) == {(1, 3, 4), (1, 1, 4)}


def test_strides_that_no_element_uses_stay_within_64_bits() -> None:
    view = View(0, 1, 0, 1, 2**48, 1, 2**48, 0, 1, 1, 0)
    assert view.of(torch.zeros(1, 4, 1, 2**16)).shape == (1, 1, 1, 2**16)


# --- few blocks: each costs kernel launches ---------------------------------------------------------------------


def blocks_of(pattern: DilatedPattern, *, fold: bool = True, **given: Any) -> tuple[Block, ...]:
    return plan(call_of(pattern, **given), fold).blocks


def test_few_blocks() -> None:
    dense = DilatedPattern.longnet([16], [1])
    assert len(blocks_of(dense, samples=3)) == 1
    assert len(blocks_of(dense, samples=3, tokens=70)) == 3 + 1  # per sample, and tails
    # heads on a diagonal share a block
    assert len(blocks_of(DilatedPattern.longnet([16], [4]))) == 2  # heads 0-3 and 4-7, offsets 0-3
    assert len(blocks_of(DilatedPattern.longnet([16], [8]))) == 1
    assert len(blocks_of(DilatedPattern.torchscale([16], [4]))) == 2  # offsets 0, 0, 1, 1, ...: evens and odds
    assert len(blocks_of(DilatedPattern.longnet([16], [2]))) == 2  # by offset, four heads each
    # unfolded samples loop over the shorter axis
    few_segments = blocks_of(DilatedPattern.longnet([32], [1]), samples=5, fold=False)
    assert [(b.queries.samples, b.queries.segments) for b in few_segments] == [(5, 1), (5, 1)]
    few_samples = blocks_of(DilatedPattern.longnet([4], [1]), samples=2, fold=False)
    assert [(b.queries.samples, b.queries.segments) for b in few_samples] == [(1, 16), (1, 16)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("kv_heads", "group", "most"), [(8, 1, 2), (4, 2, 4)], ids=["heads", "GQA"])
def test_many_short_segments_are_few_blocks(rule: Rule, kv_heads: int, group: int, most: int) -> None:
    """However many segments there are: in a branch a block for each view of heads, at most per sample, and tails."""
    for tokens, samples in ((32768, 1), (32768, 3), (32770, 1), (32770, 3)):
        for length, rate in ((16, 1), (32, 2), (64, 4)):
            blocks = plan(call_of(DilatedPattern.of(rule, [length], [rate]), samples, tokens, kv_heads, group)).blocks
            whole = [block for block in blocks if block.segment + length <= tokens]
            assert len(whole) <= most * (1 if tokens % length == 0 else samples)
            assert len(blocks) - len(whole) <= kv_heads


def test_a_step_of_decoding_is_one_problem_per_branch() -> None:
    """With few launches: heads at one offset, and a query with all of its keys, are one."""
    pattern = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
    for first in (2**20 - 1, 5, 12345):
        blocks = blocks_of(pattern, tokens=2**20, kv_heads=12, is_causal=True, start=first, queries=1)
        assert 0 < len(blocks) <= 5
        assert all(block.keys.rows <= 2048 for block in blocks)


def test_the_densest_branch_goes_first() -> None:
    blocks = blocks_of(DilatedPattern.longnet([64, 32, 16], [4, 2, 1]))
    assert [block.rate for block in blocks] == sorted(block.rate for block in blocks)
    for rule, lengths, rates, bare in (
        ("longnet", [64, 16], [4, 1], (0, 0)), ("longnet", [64, 16], [4, 2], (0, 8)),
        ("head_groups", [16, 64], [1, 4], (4, 8)), ("head_groups", [64, 16], [4, 1], (0, 4)),
    ):  # fmt: skip
        assert plan(call_of(DilatedPattern.of(rule, lengths, rates))).bare == bare


def test_what_a_plan_says_of_itself() -> None:
    for rule, merges in (("longnet", True), ("torchscale", True), ("head_groups", False)):  # several branches of a head
        call = call_of(DilatedPattern.of(rule, (16, 32), (1, 2)))
        assert plan(call).merges == merges
        assert plan(call, keys_follow=True).merges
        assert not plan(call_of(DilatedPattern.of(rule, (16,), (2,)), 2, 70)).merges
    for samples, tokens in ((0, 5), (5, 0), (0, 0)):
        assert plan(call_of(DilatedPattern.longnet([4], [2]), samples, tokens, 2)) == Plan((), (0, 0), False)
    one, two = (plan(call_of(DilatedPattern.longnet(lengths, (1, 2)), 2, 19, 4)) for lengths in ((4, 8), [4, 8]))
    assert one is two, "plans are cached by value"


def test_folds() -> None:
    x = torch.zeros(3, 8, 2, 4)
    assert folds(x, x[..., 1:], x[:, :, :1])
    assert folds(x[:1, :5])
    assert not any(
        folds(x, other)
        for other in (x[:, :5], x[:1].expand(3, -1, -1, -1), x.transpose(0, 1).contiguous().transpose(0, 1))
    )
