"""The closed forms of `cost` against the messages themselves, listed one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from dilated_attention import Blocks, Dense, DilatedPattern, Pattern, Window
from dilated_attention.blocks import View
from dilated_attention.call import Call, checked_cu_seqlens
from dilated_attention.ring.alltoall import bundles_of
from dilated_attention.ring.circulate import steps_of
from dilated_attention.ring.cost import PlanCost, fastest_exchange
from dilated_attention.ring.shards import Shards
from tests.cases import DTYPES, EXCHANGES, Case
from tests.drawn import drawn, few
from tests.table import cover

CASES = drawn(most_ranks=12, most_tokens=200, dtypes=("bf16", "f32", "f64"))


def make(
    pattern: DilatedPattern,
    lengths: tuple[int, ...],
    kv_heads: int,
    group: int = 1,
    *,
    padded: bool = False,
    **more: Any,
) -> Case:
    given = {"is_causal": False, "samples": 1, "head_dim": 3, "dtype": "bf16", **more}
    return Case(
        "cost", 0, pattern.rule, pattern="own", tokens=sum(lengths), own_pattern=pattern, ranks=len(lengths),
        own_lengths=lengths, own_heads=(kv_heads * group, kv_heads), mask="random" if padded else "none", **given,
    )  # fmt: skip


def group_of(case: Case) -> int:
    heads, kv_heads = case.head_counts()
    return heads // kv_heads


# --- the messages, one by one -----------------------------------------------------------------------------------


def bytes_of(case: Case) -> dict[str, int]:
    """What a row of one key/value head and its query heads takes in each kind of message."""
    dtype, group, dim = DTYPES[case.dtype], group_of(case), case.head_dim
    exact = torch.promote_types(dtype, torch.float32).itemsize
    q, k, padding = group * dim * dtype.itemsize, dim * dtype.itemsize, int(case.mask != "none")
    there, back = q + 2 * k + padding, group * exact + q
    return {
        "blocks": 2 * k + padding, "sums": 2 * dim * exact, "there": there, "back": back,
        "backward there": group * exact + 2 * q + there, "backward back": q + 2 * k,
    }  # fmt: skip


def call_of(case: Case) -> Call:
    heads, kv_heads = case.head_counts()
    return Call(
        case.the_pattern(), case.is_causal, samples=case.samples, heads=heads, kv_heads=kv_heads,
        head_dim=case.head_dim, dtype=DTYPES[case.dtype], total=case.tokens,
        cu_seqlens=shards_of(case).cu_seqlens if case.packing else (),
    )  # fmt: skip


def shards_of(case: Case) -> Shards:
    return Shards.of(case.lengths(), checked_cu_seqlens(case.cu_seqlens(), case.tokens) if case.packing else ())


def enumerated(case: Case, rank: int, exchange: str) -> list[int]:
    """Hops, bytes sent and bytes received, forward and backward."""
    call, shards, sizes = call_of(case), shards_of(case), bytes_of(case)

    def rows(views: Iterable[View]) -> int:
        return sum(view.samples * view.segments * view.rows * view.heads for view in views)

    if exchange == "alltoall":
        sent = received = 0
        for bundle in bundles_of(call, shards, rank):
            if bundle.target == rank:
                received += rows(view for member, view in bundle.members.items() if member != rank)
            else:
                sent += rows([bundle.members[rank]])
        steps = [(sent, received)]
        passes = [[("there", steps), ("back", [(received, sent)])]]
        passes.append([("backward there", steps), ("backward back", [(received, sent)])])
    else:
        steps = [
            (
                rows(view for views in step.sends.values() for view in views),
                rows(view for views in step.receives.values() for view in views),
            )
            for step in steps_of(call, shards, exchange == "ring", rank)
        ]
        passes = [[("blocks", steps)], [("blocks", steps), ("sums", [(b, a) for a, b in steps])]]
    numbers = []
    for kinds in passes:
        moved = [(sizes[kind] * sent, sizes[kind] * received) for kind, some in kinds for sent, received in some]
        numbers += [sum(map(any, moved)), *(sum(both[way] for both in moved) for way in (0, 1))]
    return numbers


def told(cost: PlanCost, rank: int, exchange: str) -> list[int]:
    """Hops, bytes sent and bytes received, forward and backward."""
    return [number for x in cost.of_rank(rank, exchange) for number in (x.hops, x.bytes_sent, x.bytes_received)]


@pytest.mark.parametrize("name", ["union_threads", "union_packed_threads", "packed_threads"])
def test_every_kind_and_every_union(name: str) -> None:
    for case in cover(name):
        check_every_rank(case)


SENT = [x for name in ("union_threads", "union_packed_threads") for x in cover(name) if x.recompute and not x.dropout_p]


HYBRID = [  # layers of decoders, some of whose query heads share the one head of keys
    Case(
        "hybrid", 0, "once", True, str(branch), 64, own_pattern=Pattern([branch]), own_heads=(4, 1), ranks=4,
        own_lengths=(9, 30, 0, 25), exchange=exchange, packing=packing,
    )
    for branch, exchange, packing in itertools.product((Window(15), Dense()), ("ring", "allgather"), ("", "mixed"))
]  # fmt: skip
# blocks that are repeated go sample by sample, and others that read the same keys with all samples at once
BLOCKS = replace(
    HYBRID[0], own_pattern=Pattern([Blocks(8, [(4, 0), (4, 1), (5, 1)])]), own_lengths=(32, 32), ranks=2, samples=2
)


@pytest.mark.filterwarnings("ignore:key_padding_mask ignores every key")
@pytest.mark.parametrize("case", [*SENT[::3], *HYBRID, BLOCKS], ids=lambda case: case.id)
def test_what_is_sent(case: Case) -> None:
    cost = case.cost()
    for rank, transport in enumerate(case.on_threads()[1]):
        there, back = cost.of_rank(rank, case.exchange)
        stats = transport.stats
        assert stats.hops == there.hops + back.hops
        assert stats.bytes_sent == there.bytes_sent + back.bytes_sent
        assert stats.bytes_received == there.bytes_received + back.bytes_received
        assert stats.peak_buffer_bytes <= cost.exchanges[case.exchange].held


@few(60)
@given(CASES)
def test_every_rank_of_every_exchange(case: Case) -> None:
    check_every_rank(case)


def check_every_rank(case: Case) -> None:
    cost = case.cost()
    for exchange in cost.exchanges:
        ranks = [told(cost, rank, exchange) for rank in range(case.ranks)]
        assert ranks == [enumerated(case, rank, exchange) for rank in range(case.ranks)], (exchange, case)
        _, sent, received, _, back_sent, back_received = map(sum, zip(*ranks, strict=True))
        found = cost.exchanges[exchange]
        assert (sent, back_sent) == (received, back_received)
        assert found.bytes_total == received + back_received
        most = [x for way in (found.forward, found.backward) for x in (way.hops, way.bytes_sent, way.bytes_received)]
        assert most == [max(numbers) for numbers in zip(*ranks, strict=True)]


LARGE = [
    make(DilatedPattern.longnet([64, 256, 1024, 4096], [1, 3, 16, 64]), (64,) * 64, 8, is_causal=True),
    make(DilatedPattern.longnet([100, 1000, 10000], [1, 7, 90]), (37, 52, 61) * 33, 6, 2, padded=True),
    make(DilatedPattern.torchscale([128, 512, 4096], [1, 4, 32]), (16,) * 255 + (9,), 12, is_causal=True),
    make(DilatedPattern.head_groups([8, 64, 10**6], [1, 5, 100]), (8,) * 1024, 5, 2, samples=2),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case.ranks} ranks")
def test_many_ranks(case: Case) -> None:
    cost, ranks = case.cost(), case.ranks
    for exchange in EXCHANGES:
        for rank in (0, 1, ranks // 3, ranks - 1):
            assert told(cost, rank, exchange) == enumerated(case, rank, exchange), (exchange, rank)


# --- operations ----------------------------------------------------------------------------


def computed(case: Case, exchange: str) -> list[int]:
    """(query, key) pairs by rank: whole segments head by head."""
    found, call, shards = [0] * case.ranks, call_of(case), shards_of(case)
    owner_of = [rank for rank, length in enumerate(case.lengths()) for _ in range(length)]
    dealt = {
        (bundle.block.branch, bundle.block.origin, head): bundle.target
        for rank in range(case.ranks)
        for bundle in bundles_of(call, shards, rank)
        for head in bundle.block.queries.numbers
    }
    for branch, start, head, tokens in segments(case):
        for index, token in enumerate(tokens):
            rank = owner_of[token]
            if exchange == "alltoall":
                rank = dealt.get((branch, start, head), rank)
            found[rank] += group_of(case) * (index + 1 if case.is_causal else len(tokens))
    return found


def segments(case: Case) -> Iterator[tuple[int, int, int, range]]:
    pattern, (_, kv_heads) = case.the_pattern(), case.head_counts()
    for branch, (width, rate) in enumerate(pattern.branches):
        for start in range(0, case.tokens, width):
            for head in pattern.heads(branch, kv_heads):
                offset = pattern.offset(branch, head, kv_heads)
                yield branch, start, head, range(start + offset, min(start + width, case.tokens), rate)


@few(60)
@given(CASES)
def test_operations(case: Case) -> None:
    cost, (heads, kv_heads) = case.cost(), case.head_counts()
    for exchange in EXCHANGES:
        pairs = computed(case, exchange)
        every = case.the_pattern().pairs(case.tokens, heads, num_kv_heads=kv_heads, is_causal=case.is_causal)
        assert sum(pairs) == every
        found = cost.exchanges[exchange]
        assert found.forward.flops == 4 * case.head_dim * case.samples * max(pairs)
        assert found.backward.flops == 10 * case.head_dim * case.samples * max(pairs)


# --- the choice -------------------------------------------------------------------------------------------------


def choice(case: Case, backend: str = "nccl") -> str:
    heads, kv_heads = case.head_counts()
    call = Call(
        case.the_pattern(), case.is_causal, samples=1, heads=heads, kv_heads=kv_heads, head_dim=case.head_dim,
        dtype=DTYPES[case.dtype],
    )  # fmt: skip
    return fastest_exchange(call, shards_of(case), backend)


def test_choices() -> None:
    dense = make(DilatedPattern.longnet([2**20], [1]), (2**14,) * 64, 4, head_dim=64)
    assert choice(dense) == "ring"  # undilated, one segment would be the whole sequence on every rank
    assert choice(replace(dense, own_pattern=DilatedPattern.longnet([2**20], [64]))) != "ring"
    pair = make(DilatedPattern.longnet([64], [1]), (32, 32), 1, head_dim=64)
    assert choice(pair) == "ring"  # an allgather sends the same; one head cannot be dealt to two ranks
    with torch.device("meta"):  # it is made on the host, whatever device new tensors go to by default
        assert choice(make(DilatedPattern.longnet([64, 128], [1, 2]), (32,) * 8, 5, head_dim=24)) in EXCHANGES


def test_heads_split_over_processes() -> None:
    """A process may hold no head of a branch that crosses borders."""
    pattern, shards = DilatedPattern.head_groups([16, 24, 96], [1, 2, 4]), Shards.even(96, 6)
    for first in range(3):
        call = Call(pattern, samples=1, heads=1, kv_heads=1, head_dim=8, first_head=first, total_heads=3)
        chosen = fastest_exchange(call, shards, "gloo")
        assert chosen == "ring" if first == 0 else chosen in EXCHANGES
