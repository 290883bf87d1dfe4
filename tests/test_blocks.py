"""Blocks read as the pattern says: ids seen through every view are exactly the keys of the pattern.

Legend as in `blocks`. Ids are unique per (sample, token, head), so a view that reads anything else shows it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention import DilatedPattern, blocks
from dilated_attention.blocks import Block, Plan, folds
from dilated_attention.call import Call
from dilated_attention.pattern import RULES

FEW = settings(deadline=None, derandomize=True, database=None, max_examples=150)


def call_of(pattern: DilatedPattern, samples: int, tokens: int, kv_heads: int, group: int) -> Call:
    sizes = {"samples": samples, "queries": tokens, "keys": tokens, "total": tokens}
    return Call(pattern, heads=kv_heads * group, kv_heads=kv_heads, **sizes)


def plan(pattern: DilatedPattern, samples: int, tokens: int, kv_heads: int, group: int, fold: bool, cut=None) -> Plan:
    """The plan of a whole call; ``cut``: blocks of so many rows, or more, in parts of at most that many in all."""
    found = blocks.plan(call_of(pattern, samples, tokens, kv_heads, group), fold)
    if cut is None:
        return found
    long, most = cut
    parts = [part for one in found.blocks for part in (one.cut(rows=most) if one.queries.rows >= long else [one])]
    return found._replace(blocks=tuple(parts))


@st.composite
def plans(draw: st.DrawFn) -> tuple[DilatedPattern, int, int, int, int, bool]:
    """Arguments of `plan`: pattern, samples, tokens, kv_heads, group, fold.

    Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly.
    """
    pick = random.Random(draw(st.integers(0, 2**32 - 1)))
    rule, branches = pick.choice(RULES), pick.randint(1, 3)
    lengths = tuple(pick.randint(1, 40) for _ in range(branches))
    rates = tuple(pick.randint(1, 7) for _ in range(branches))
    fewest = branches if rule == "head_groups" else 1
    return (
        DilatedPattern(rule, lengths, rates),
        pick.randint(1, 3),
        pick.randint(1, 33),
        pick.randint(fewest, 8),
        pick.randint(1, 3),
        pick.random() < 0.5,
    )


def ids(samples: int, tokens: int, heads: int, fold: bool) -> Tensor:
    """(B, N, H) of unique numbers; without fold, cut out of a longer tensor so that (B, N) is no single stride."""
    rows = torch.arange(samples * tokens * heads).view(samples, tokens, heads)
    if fold:
        return rows
    longer = torch.full((samples, tokens + 3, heads + 1), -1)
    longer[:, 1 : tokens + 1, 1:] = rows
    return longer[:, 1 : tokens + 1, 1:]


def place(number: int, tokens: int, heads: int) -> tuple[int, int, int]:
    return number // (tokens * heads), number // heads % tokens, number % heads


def seen_through(work: Plan, samples: int, tokens: int, kv_heads: int, group: int, fold: bool):
    """For every (sample, query head, query): the key tokens and zero keys that the blocks show it."""
    query_ids, key_ids = (ids(samples, tokens, heads, fold) for heads in (kv_heads * group, kv_heads))
    keys, zeros = defaultdict(list), Counter()
    for block in work.blocks:
        q, k = block.queries.of(query_ids, group), block.keys.of(key_ids)
        assert q.shape == (block.batch, block.queries.rows, block.heads * group)
        assert k.shape == (block.batch, block.keys.rows, block.heads)
        shown_at = [place(x, tokens, kv_heads)[1] for x in k[0, 0].tolist()]
        assert tuple(shown_at) == block.key_at == block.query_at
        for batch, head in torch.cartesian_prod(torch.arange(k.shape[0]), torch.arange(k.shape[2])).tolist():
            shown = [place(x, tokens, kv_heads) for x in k[batch, :, head].tolist()]
            for row in q[batch, :, head * group : (head + 1) * group].reshape(-1).tolist():
                sample, query, query_head = place(row, tokens, kv_heads * group)
                assert {(s, h) for s, _, h in shown} == {(sample, query_head // group)}
                keys[sample, query_head, query] += [token for _, token, _ in shown]
                zeros[sample, query_head, query] += block.zeros
    return keys, zeros


@FEW
@given(plans(), st.sampled_from([None, (1, 1), (1, 5), (2, 12), (3, 40)]))
@example((DilatedPattern.longnet([4, 8], [1, 2]), 2, 8, 4, 1, True), None)
@example((DilatedPattern.longnet([4, 8], [1, 2]), 3, 8, 4, 1, True), (1, 16))  # a part of one sample, of two segments
@example((DilatedPattern.longnet([8], [4]), 3, 19, 8, 1, False), None)
@example((DilatedPattern.longnet([8], [4]), 3, 19, 8, 1, False), (1, 6))  # a part of three heads on a diagonal
@example((DilatedPattern.longnet([8, 4], [4, 3]), 2, 16, 6, 2, True), (1, 4))
@example((DilatedPattern.torchscale([6, 32], [2, 4]), 2, 21, 8, 1, True), (2, 9))
@example((DilatedPattern.head_groups([5, 3, 30], [1, 7, 2]), 3, 23, 7, 3, False), (3, 7))
def test_blocks_show_exactly_the_keys_of_the_pattern(case, cut) -> None:
    pattern, samples, tokens, kv_heads, group, fold = case
    keys, zeros = seen_through(plan(*case, cut), samples, tokens, kv_heads, group, fold)
    for sample in range(samples):
        for head in range(kv_heads * group):
            for query in range(tokens):
                row = {"num_tokens": tokens, "num_heads": kv_heads * group, "num_kv_heads": kv_heads}
                assert tuple(sorted(keys[sample, head, query])) == pattern.keys(query, head, **row)
                assert zeros[sample, head, query] == pattern.zero_keys(query, head, **row)


@FEW
@given(plans())
def test_a_view_is_a_view_and_writes_no_element_twice(case) -> None:
    _, samples, tokens, kv_heads, group, fold = case
    for heads, per_head in ((kv_heads * group, group), (kv_heads, 1)):
        x = ids(samples, tokens, heads, fold)
        everywhere = set(x.reshape(-1).tolist())
        for block in plan(*case).blocks:
            view = block.queries.of(x, per_head)
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert view._base is x or view._base is x._base
            elements = view.reshape(-1).tolist()
            assert len(elements) == len(set(elements))
            assert set(elements) <= everywhere


@FEW
@given(plans())
def test_first_blocks_come_first_and_never_overlap(case) -> None:
    _, samples, tokens, kv_heads, _, fold = case
    work = plan(*case)
    x = ids(samples, tokens, kv_heads, fold)
    written: set[int] = set()
    later_heads: set[int] = set()
    for block in work.blocks:
        elements = block.queries.of(x).reshape(-1).tolist()
        heads = {place(number, tokens, kv_heads)[2] for number in elements}
        if block.is_first:
            assert not written.intersection(elements), "a first block overwrites what another one wrote"
            assert not later_heads & heads, "a first block of a head comes after one that merges into it"
            written.update(elements)
        else:
            later_heads |= heads
    missing = set(x.reshape(-1).tolist()) - written
    # Filling rows that need none is only a waste, and happens at most where a segment is a single token.
    bare = {place(number, tokens, kv_heads)[2] for number in missing}
    assert bare <= set(range(*work.bare))
    one_token = tokens == 1 or 1 in case[0].segment_lengths
    assert one_token or work.bare == ((min(bare), max(bare) + 1) if bare else (0, 0))


@FEW
@given(plans())
def test_covers_means_the_whole_tensor_in_order(case) -> None:
    _, samples, tokens, kv_heads, _, fold = case
    x = ids(samples, tokens, kv_heads, fold)
    for block in plan(*case).blocks:
        view = block.queries.of(x)
        if block.covers(call_of(*case[:5])):
            assert torch.equal(view.reshape(x.shape), x)
        elif block.rate == 1:  # a block with r > 1 may cover a short sequence and is simply merged
            assert view.numel() < x.numel() or not torch.equal(view.reshape(x.shape), x)


@pytest.mark.parametrize("rule", RULES)
def test_values_of_any_trailing_shape(rule: str) -> None:
    pattern = DilatedPattern(rule, (8, 5), (2, 3))
    x = torch.randn(2, 21, 4, 3, 2)
    for block in plan(pattern, 2, 21, 4, 1, True).blocks:
        view = block.queries.of(x)
        assert view.shape[3:] == (3, 2)
        for part in range(6):
            flat = x.flatten(3)[..., part]
            assert torch.equal(view.flatten(3)[..., part], block.queries.of(flat))


def test_writing_through_a_view_reaches_the_tensor() -> None:
    x = torch.zeros(2, 10, 4, 3)
    for block in plan(DilatedPattern.longnet([4], [2]), 2, 10, 4, 1, True).blocks:
        block.queries.of(x).add_(1)
    covered = DilatedPattern.longnet([4], [2]).coverage(10, 4)
    assert torch.equal(x, covered[None, :, :, None].expand_as(x).float())


# --- few blocks: each costs kernel launches ---------------------------------------------------------------------


def blocks_of(pattern: DilatedPattern, *, samples=1, tokens=64, kv_heads=8, group=1, fold=True) -> tuple[Block, ...]:
    return plan(pattern, samples, tokens, kv_heads, group, fold).blocks


def test_one_block_for_a_dense_branch() -> None:
    assert len(blocks_of(DilatedPattern.longnet([16], [1]), samples=3)) == 1
    assert len(blocks_of(DilatedPattern.longnet([16], [1]), samples=3, tokens=70)) == 3 + 1  # per sample, and tails


def test_heads_on_a_diagonal_share_a_block() -> None:
    assert len(blocks_of(DilatedPattern.longnet([16], [4]))) == 2  # heads 0-3 and 4-7, offsets 0-3
    assert len(blocks_of(DilatedPattern.longnet([16], [8]))) == 1
    assert len(blocks_of(DilatedPattern.torchscale([16], [4]))) == 2  # offsets 0, 0, 1, 1, ...: evens and odds
    assert len(blocks_of(DilatedPattern.longnet([16], [2]))) == 2  # by offset, four heads each


def test_unfolded_samples_loop_over_the_shorter_axis() -> None:
    few_segments = blocks_of(DilatedPattern.longnet([32], [1]), samples=5, fold=False)
    assert [(b.queries.samples, b.queries.segments) for b in few_segments] == [(5, 1), (5, 1)]
    few_samples = blocks_of(DilatedPattern.longnet([4], [1]), samples=2, fold=False)
    assert [(b.queries.samples, b.queries.segments) for b in few_samples] == [(1, 16), (1, 16)]


@FEW
@given(plans(), st.integers(1, 8), st.integers(1, 60))
def test_long_blocks_are_cut_and_short_ones_are_not(case, long: int, most: int) -> None:
    whole, parts = plan(*case), plan(*case, (long, most))
    assert (parts.bare, parts.fillable, parts.merges) == (whole.bare, whole.fillable, whole.merges)
    for block in parts.blocks:
        if block.queries.rows >= long:
            assert block.batch * block.heads * block.queries.rows <= most or block.batch * block.heads == 1


@FEW
@given(plans(), st.integers(1, 4), st.integers(1, 7))
def test_cut_by_heads_and_batch(case, heads: int, batch: int) -> None:
    """Parts show each query the same keys as their block, and stay within both limits."""
    _, samples, tokens, kv_heads, group, fold = case
    whole = plan(*case)
    parts = whole._replace(blocks=tuple(part for one in whole.blocks for part in one.cut(heads=heads, batch=batch)))
    assert all(part.heads <= heads and part.batch <= batch for part in parts.blocks)
    size = (samples, tokens, kv_heads, group, fold)
    (keys, zeros), (cut_keys, cut_zeros) = seen_through(whole, *size), seen_through(parts, *size)
    assert {row: sorted(some) for row, some in keys.items()} == {row: sorted(some) for row, some in cut_keys.items()}
    assert zeros == cut_zeros


@FEW
@given(plans(), st.integers(0, 2**32 - 1), st.booleans())
def test_few_queries_see_what_they_see_in_the_whole(case, seed: int, is_causal: bool) -> None:
    """Blocks of few queries: all keys of the segment, or when causal the earlier ones and a triangle."""
    pattern, samples, tokens, kv_heads, group, _ = case
    pick = random.Random(seed)
    start = pick.randrange(tokens)
    queries = pick.randint(1, tokens - start)
    call = call_of(*case[:5])._replace(queries=queries, start=start, is_causal=is_causal)
    if not call.is_few:
        return
    query_ids = ids(samples, queries, kv_heads * group, False)
    key_ids, seen = ids(samples, tokens, kv_heads, False), defaultdict(list)
    for block in blocks.plan(call, False).blocks:
        q, k = block.queries.of(query_ids, group), block.keys.of(key_ids)
        assert [start + place(x, queries, kv_heads * group)[1] for x in q[0, 0, ::group].tolist()] == [*block.query_at]
        assert [place(x, tokens, kv_heads)[1] for x in k[0, 0].tolist()] == [*block.key_at]
        for batch, head, row in itertools.product(range(k.shape[0]), range(k.shape[2]), range(q.shape[1])):
            shown = k[batch, : row + 1 if block.is_causal else None, head].tolist()
            for number in q[batch, row, head * group : (head + 1) * group].tolist():
                sample, query, query_head = place(number, queries, kv_heads * group)
                seen[sample, query_head, start + query] += [place(x, tokens, kv_heads)[1] for x in shown]
    for sample, head, query in itertools.product(
        range(samples), range(kv_heads * group), range(start, start + queries)
    ):
        row = {"num_tokens": tokens, "num_heads": kv_heads * group, "num_kv_heads": kv_heads, "is_causal": is_causal}
        assert tuple(sorted(seen[sample, head, query])) == pattern.keys(query, head, **row)


def test_parts_are_as_large_as_they_may_be() -> None:
    (block,) = blocks_of(DilatedPattern.longnet([16], [1]), samples=3)  # 3 samples of 4 segments, 8 heads, 16 rows
    shapes = {
        most: {(b.queries.samples, b.queries.segments, b.heads) for b in block.cut(most)}
        for most in (1535, 1024, 300, 40, 1)
    }
    assert shapes == {1535: {(2, 4, 8), (1, 4, 8)}, 1024: {(2, 4, 8), (1, 4, 8)}, 300: {(1, 2, 8)}, 40: {(1, 1, 2)},
                      1: {(1, 1, 1)}}  # fmt: skip
    assert block.cut(1536) == [block]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("kv_heads", "group", "most"), [(8, 1, 2), (4, 2, 4)], ids=["heads", "GQA"])
def test_many_short_segments_are_few_blocks(rule: str, kv_heads: int, group: int, most: int) -> None:
    """However many segments there are: in a branch a block for each view of heads, at most per sample, and tails."""
    for tokens, samples in ((32768, 1), (32768, 3), (32770, 1), (32770, 3)):
        for length, rate in ((16, 1), (32, 2), (64, 4)):
            pattern = DilatedPattern(rule, (length,), (rate,))
            found = plan(pattern, samples, tokens, kv_heads, group, True).blocks
            whole = [block for block in found if block.queries.segment_step == length]
            assert len(whole) <= most * (1 if tokens % length == 0 else samples)
            assert len(found) - len(whole) <= kv_heads


def test_the_densest_branch_goes_first() -> None:
    rates = [block.rate for block in blocks_of(DilatedPattern.longnet([64, 32, 16], [4, 2, 1]))]
    assert rates == sorted(rates)
    assert plan(DilatedPattern.longnet([64, 16], [4, 1]), 1, 64, 8, 1, True).bare == (0, 0)
    assert plan(DilatedPattern.longnet([64, 16], [4, 2]), 1, 64, 8, 1, True).bare == (0, 8)
    assert plan(DilatedPattern.head_groups([16, 64], [1, 4]), 1, 64, 8, 1, True).bare == (4, 8)
    assert plan(DilatedPattern.head_groups([64, 16], [4, 1]), 1, 64, 8, 1, True).bare == (0, 4)


@FEW
@given(plans())
def test_gaps_and_rows_are_whole_segments(case) -> None:
    """Where a plan says so, the blocks that write first and their gaps are all rows, each of them once."""
    _, samples, tokens, kv_heads, _, fold = case
    work = plan(*case)
    if not work.fillable:
        return
    x = ids(samples, tokens, kv_heads, fold)
    filled: list[int] = []
    for block in work.blocks:
        if block.is_first:
            filled += block.queries.of(x).reshape(-1).tolist()
        if block.gaps() is not None:
            rate, offset, step, width = block.gaps()
            whole = block.queries._replace(token=block.start, row_step=1, token_step=0, rows=width).of(x)
            for head in range(block.heads):
                away = [i for i in range(width) if i % rate != offset + head * step]
                filled += whole[:, away, head].reshape(-1).tolist()
    assert sorted(filled) == sorted(x.reshape(-1).tolist())


def test_a_segment_shorter_than_its_rate_has_heads_in_no_block() -> None:
    assert not plan(DilatedPattern.longnet([4], [9]), 1, 8, 3, 1, True).fillable
    assert not plan(DilatedPattern.longnet([16], [9]), 1, 20, 3, 1, True).fillable  # the tail
    assert plan(DilatedPattern.longnet([16], [9]), 1, 25, 3, 1, True).fillable


def test_merges_where_some_head_runs_several_branches() -> None:
    for rule, merges in (("longnet", True), ("torchscale", True), ("head_groups", False)):
        assert plan(DilatedPattern(rule, (16, 32), (1, 2)), 1, 64, 8, 1, True).merges == merges
        assert not plan(DilatedPattern(rule, (16,), (2,)), 2, 70, 8, 1, True).merges


def test_nothing_to_do() -> None:
    pattern = DilatedPattern.longnet([4], [2])
    for samples, tokens in ((0, 5), (5, 0), (0, 0)):
        assert plan(pattern, samples, tokens, 2, 1, True) == Plan((), (0, 0), False, False)


def test_plans_are_cached_by_value() -> None:
    one = plan(DilatedPattern.longnet([4, 8], [1, 2]), 2, 19, 4, 1, True)
    assert plan(DilatedPattern.longnet((4, 8), (1, 2)), 2, 19, 4, 1, True) is one


def test_folds() -> None:
    x = torch.zeros(3, 8, 2, 4)
    assert folds(x)
    assert folds(x, x[..., 1:], x[:, :, :1])
    assert not folds(x[:, :5])
    assert folds(x[:1, :5])
    assert not folds(x, x[:, :5])
    assert not folds(torch.zeros(1, 8, 2, 4).expand(3, -1, -1, -1))
    assert not folds(torch.zeros(8, 3, 2, 4).transpose(0, 1))
