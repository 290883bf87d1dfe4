"""Blocks read as the pattern says: ids seen through every view are those that the oracle counts.

Legend as in `blocks`. Ids are unique per (sample, token, head), so a view that reads anything else shows it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention import DilatedPattern
from dilated_attention.blocks import Block
from dilated_attention.call import Call
from dilated_attention.pattern import RULES
from dilated_attention.plan import plan
from dilated_attention.reference import key_counts

LONGNET, TORCHSCALE = DilatedPattern.longnet, DilatedPattern.torchscale


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
def calls(draw: st.DrawFn) -> Call:
    """Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly."""
    pick = random.Random(draw(st.integers(0, 2**32 - 1)))
    rule, branches, kind = pick.choice(RULES), pick.randint(1, 3), pick.choice(["whole", "shard", ""])  # few queries
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
    return call._replace(start=start, queries=queries, **({"key_start": start, "keys": queries} if kind else {}))


def ids(samples: int, tokens: int, heads: int, fold: bool) -> Tensor:
    """(B, n, H) of unique numbers; without fold, cut out of a longer tensor so that (B, n) is not one stride."""
    rows = torch.arange(samples * tokens * heads).view(samples, tokens, heads)
    return rows if fold else torch.nn.functional.pad(rows, (1, 0, 1, 2), value=-1)[:, 1:-2, 1:]


def seen_through(call: Call, parts: list[Block], fold: bool) -> Tensor:
    """How often each row sees each key, and behind the keys its zero keys: (B n H, B n Hk + 1)."""
    query_ids, key_ids = (
        ids(call.samples, *shape, fold) for shape in ((call.queries, call.heads), (call.keys, call.kv_heads))
    )
    seen = torch.zeros(query_ids.numel(), key_ids.numel() + 1)
    for part in parts:
        q = part.queries.of(query_ids, call.q_per_kv).unflatten(2, (part.heads, -1)).transpose(1, 2)  # (b, h, L, g)
        k = part.keys.of(key_ids).transpose(1, 2)  # (b, h, L)
        visible = torch.ones(q.shape[2], k.shape[2]).tril(10**9 if part.high is None else part.high)
        seen.index_put_((q[..., None], k[:, :, None, None]), visible[:, None], accumulate=True)
        seen.index_put_((q, torch.tensor(-1)), torch.tensor(float(part.zeros)), accumulate=True)
        # what dropout goes by
        for view, x, count in (
            (part.queries, q[..., 0] // call.heads, call.queries),
            (part.keys, k // call.kv_heads, call.keys),
        ):
            tokens = view.positions(torch.device("cpu")).transpose(1, 2).repeat(view.samples, 1, 1)
            assert torch.equal(x % count + view.start, tokens)
    return seen


@settings(deadline=None, derandomize=True, database=None, max_examples=250)
@given(calls(), st.booleans(), st.sampled_from([None, 1, 4, 12, 40]), *[st.sampled_from([None, 1, 2, 3])] * 2)
@example(call_of(TORCHSCALE([6, 32], [2, 4]), 2, 21, 8, start=5, queries=9), True, None, None, None)
@example(call_of(DilatedPattern.head_groups([5, 3, 30], [1, 7, 2]), 3, 23, 7, 3), False, None, None, None)
@example(call_of(LONGNET([4, 8], [1, 2]), 3, 8, 4), True, 16, None, None)  # two segments of one sample
@example(call_of(LONGNET([8], [4]), 3, 19, 8), False, 6, None, None)  # three heads on a diagonal
@example(call_of(LONGNET([4], [1]), 3, 16, 2), True, None, None, 3)  # a sample is taken apart
@example(call_of(LONGNET([4], [1]), 3, 16, 2), True, None, None, 5)  # whole samples
def test_blocks_and_their_parts_show_what_the_oracle_counts(
    call: Call, fold: bool, rows: int | None, heads: int | None, batch: int | None
) -> None:
    """Of a shard those keys that are here. Parts know their rows of queries in a packed tensor, too."""
    x, shown = ids(call.samples, call.queries, call.heads, fold), []
    for block in plan(call, fold).blocks:
        view = block.queries
        packed = view.of(x, call.q_per_kv).contiguous()
        for part in block.cut(rows, heads, batch):
            shown.append(part)
            assert torch.equal(part.queries.within(view).of(packed, call.q_per_kv), part.queries.of(x, call.q_per_kv))
            assert part.heads <= (heads or part.heads)
            assert part.batch <= (batch or part.batch)
            assert rows is None or part.batch * part.heads * part.queries.rows <= max(rows, part.queries.rows)

    counts, zeros = key_counts(
        call.pattern, call.total, call.heads, None, call.is_causal, call.q_per_kv, torch.zeros(())
    )
    queries = slice(call.start, call.start + call.queries)
    count = counts.sum(0)[0, :, queries, call.key_start : call.key_start + call.keys]
    sample, kv_head = torch.eye(call.samples), torch.eye(call.kv_heads).repeat_interleave(call.q_per_kv, 0)
    keys = torch.einsum("hij,st,hk->sihtjk", count, sample, kv_head).reshape(
        -1, call.samples * call.keys * call.kv_heads
    )
    filled = zeros[0, :, queries, 0].T.expand(call.samples, -1, -1).reshape(-1, 1)
    assert torch.equal(seen_through(call, shown, fold), torch.cat([keys, filled], 1))


# --- few blocks: each costs kernel launches ---------------------------------------------------------------------

FIVE = LONGNET([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
DECODED = {"tokens": 2**20, "kv_heads": 12, "is_causal": True, "start": 12345, "queries": 1}


@pytest.mark.parametrize(
    ("pattern", "fold", "given", "shapes"),  # samples and segments of each block
    [
        (LONGNET([16], [1]), True, {"samples": 3}, [(3, 4)]),
        (LONGNET([16], [1]), True, {"samples": 3, "tokens": 70}, [(1, 4)] * 3 + [(3, 1)]),  # per sample, and tails
        (LONGNET([16], [4]), True, {}, [(1, 4)] * 2),  # heads 0-3 and 4-7, offsets 0-3: a diagonal is one block
        (TORCHSCALE([16], [4]), True, {}, [(1, 4)] * 2),  # offsets 0, 0, 1, 1, ...: evens and odds
        (LONGNET([32], [1]), False, {"samples": 5}, [(5, 1)] * 2),  # the shorter axis is looped over
        (LONGNET([4], [1]), False, {"samples": 2}, [(1, 16)] * 2),
        (LONGNET([32], [2]), True, {"kv_heads": 4, "group": 2}, [(1, 2)] * 4),  # key heads, one by one
        (LONGNET([16], [1]), True, {"tokens": 1000, "cu_seqlens": tuple(range(0, 1001, 20))}, [(1, 50)] * 2),
        (FIVE, True, DECODED, [(1, 1)] * 5),  # heads at one offset, and a query with all of its keys
    ],
)
def test_few_blocks(pattern: DilatedPattern, fold: bool, given: dict[str, Any], shapes: list[tuple[int, int]]) -> None:
    blocks = plan(call_of(pattern, **given), fold).blocks
    assert [(block.queries.samples, block.queries.segments) for block in blocks] == shapes


def test_the_densest_branch_goes_first_and_is_written() -> None:
    for rule, lengths, rates, alone in (
        ("longnet", [64, 16], [4, 1], False), ("longnet", [64, 32, 16], [8, 4, 2], False),
        ("head_groups", [16, 64], [1, 4], True), ("head_groups", [64, 16], [4, 1], True),
    ):  # fmt: skip
        blocks = plan(call_of(DilatedPattern.of(rule, lengths, rates))).blocks
        assert [x.keys.row_step for x in blocks] == sorted(x.keys.row_step for x in blocks)
        assert all(x.is_first == (alone or x.branch == blocks[0].branch) for x in blocks)


def test_what_a_plan_says_of_itself() -> None:
    for rule, merges in (("longnet", True), ("head_groups", False)):  # several branches of a head
        call = call_of(DilatedPattern.of(rule, (16, 32), (1, 2)))
        assert (plan(call).merges, plan(call, keys_follow=True).merges) == (merges, True)
        assert plan(call) is plan(call_of(DilatedPattern.of(rule, [16, 32], [1, 2]))), "plans are cached by value"
