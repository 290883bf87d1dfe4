"""The exchanges in one process: ranks are threads and every message is seen.

First the engine itself on drawn problems against the oracle, beyond what the table of cases has. Then what is sent,
received and held.

Legend as in `circulate` and `alltoall`; P ranks, N tokens.
"""

from __future__ import annotations

import graphlib
import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention import DilatedPattern, testing
from dilated_attention import call as calls
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call
from dilated_attention.distributed.fake import FakeTransport, run_threads
from dilated_attention.pattern import RULES, Heads
from dilated_attention.ring import packing
from dilated_attention.ring import run as ring
from dilated_attention.ring.alltoall import bundles
from dilated_attention.ring.circulate import Messages, traffic
from dilated_attention.ring.packing import Field
from dilated_attention.ring.shards import Channel, Shards, channels

EXCHANGES = ("ring", "allgather", "alltoall")


def few(examples: int) -> settings:
    return settings(deadline=None, derandomize=True, database=None, max_examples=examples)


@dataclass(frozen=True)
class Problem:
    lengths: tuple[int, ...]
    pattern: DilatedPattern
    kv_heads: int
    group: int
    samples: int
    is_causal: bool
    exchange: str
    use_checkpointing: bool
    mask: str
    dropout_p: float
    lse_gradient: bool
    backend: str
    seed: int

    @property
    def shards(self) -> Shards:
        return Shards.of(self.lengths)

    @property
    def ranks(self) -> range:
        return range(len(self.lengths))

    @property
    def heads(self) -> Heads:
        return Heads(0, self.kv_heads, self.kv_heads)

    def call(self, rank: int) -> Call:
        """The call of one rank, on one sample and a head dim of 1."""
        first, last = self.shards.starts[rank : rank + 2]
        return Call(
            self.pattern, self.is_causal, samples=1, queries=last - first, keys=last - first,
            heads=self.kv_heads * self.group, kv_heads=self.kv_heads, head_dim=1, dtype=torch.float64,
            start=first, key_start=first, total=self.shards.tokens, in_parts=True,
        )  # fmt: skip

    def channels(self, rank: int) -> tuple[Channel, ...]:
        return channels(self.pattern, self.shards, self.heads, rank)

    def inputs(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        tokens, heads = self.shards.tokens, self.kv_heads * self.group
        qkv = testing.make_qkv(
            self.samples, tokens, heads, 3, kv_heads=self.kv_heads, dtype=torch.float64, seed=self.seed
        )
        draws = torch.Generator().manual_seed(self.seed)
        dout = torch.randn(qkv[0].shape, generator=draws, dtype=torch.float64)
        dlse = torch.randn(dout.shape[:3], generator=draws, dtype=torch.float64) if self.lse_gradient else None
        return qkv, dout, dlse

    def options(self) -> dict[str, Any]:
        draws = torch.Generator().manual_seed(self.seed)
        tokens = self.shards.tokens
        padding = {
            "none": None,
            "random": torch.rand(self.samples, tokens, generator=draws) < 0.4,
            "right": torch.arange(tokens) >= torch.randint(0, tokens + 1, (self.samples, 1), generator=draws),
        }[self.mask]
        seed = torch.tensor(self.seed * 2654435761 - 2**62) if self.dropout_p else None
        return {
            "is_causal": self.is_causal,
            "key_padding_mask": padding,
            "dropout_p": self.dropout_p,
            "seed": seed,
        }

    def run(self) -> tuple[testing.Results, list[FakeTransport]]:
        qkv, dout, dlse = self.inputs()
        return testing.run_sharded(
            qkv, self.lengths, self.pattern, dout, dlse, exchange=self.exchange, backend=self.backend,
            use_checkpointing=self.use_checkpointing, **self.options(),
        )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 8, most_tokens: int = 60) -> Problem:
    """Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly."""
    seed = draw(st.integers(0, 2**32 - 1))
    pick = random.Random(seed)
    rule, branches = pick.choice(RULES), pick.randint(1, 3)
    tokens = pick.randint(1, most_tokens)
    ranks = pick.choice((pick.randint(1, min(8, most_ranks)), pick.randint(1, most_ranks)))
    lengths = tuple(b - a for a, b in itertools.pairwise(Shards.even(tokens, ranks).starts))
    if pick.random() < 0.7:  # unequal ones, also empty
        borders = sorted(pick.randint(0, tokens) for _ in range(ranks - 1))
        lengths = tuple(b - a for a, b in itertools.pairwise([0, *borders, tokens]))
    width = pick.choice((tokens // 2, tokens + 5, 2 * tokens))
    pattern = DilatedPattern(
        rule,
        tuple(pick.randint(1, max(1, width)) for _ in range(branches)),
        tuple(pick.choice((1, pick.randint(1, 4), pick.randint(1, 9))) for _ in range(branches)),
    )
    dropout_p = pick.choice((0.0, 0.0, 0.4))
    return Problem(
        lengths,
        pattern,
        kv_heads=pick.randint(branches if rule == "head_groups" else 1, 6),
        group=pick.choice((1, 1, 2, 3)),
        samples=pick.choice((1, 1, 2)),
        is_causal=pick.random() < 0.5,
        exchange=pick.choice(EXCHANGES),
        use_checkpointing=pick.random() < 0.5,
        mask=pick.choice(("none", "random", "right")),
        dropout_p=dropout_p,
        lse_gradient=pick.random() < 0.7,
        backend=pick.choice(("auto", "eager")),
        seed=seed,
    )


# --- the engine -------------------------------------------------------------------------------------------------


@few(120)
@given(problems(most_ranks=12))
def test_the_engine_against_the_oracle(problem: Problem) -> None:
    got, transports = problem.run()
    qkv, dout, dlse = problem.inputs()
    testing.assert_exact(got, testing.oracle(qkv, problem.pattern, dout, dlse, **problem.options()))
    for transport in transports:
        assert not problem.use_checkpointing or transport.stats.buffer_bytes == 0
        assert not transport.office.waiting


@few(12)
@given(problems(most_ranks=5, most_tokens=40))
def test_exchanges_agree_and_keeping_rows_changes_no_bit(problem: Problem) -> None:
    results = {}
    for exchange in EXCHANGES:
        pair = [replace(problem, exchange=exchange, use_checkpointing=x).run()[0] for x in (False, True)]
        for (name, kept), (_, sent_again) in zip(*(x.items() for x in pair), strict=True):
            assert torch.equal(kept, sent_again), name
        results[exchange] = pair[0]
    for exchange in EXCHANGES[1:]:
        testing.assert_exact(results[exchange], results["ring"])


# --- whole segments ---------------------------------------------------------------------------------------------


@few(100)
@given(problems(), st.booleans())
def test_every_head_of_a_channel_is_in_one_bundle(problem: Problem, apart: bool) -> None:
    for channel in {channel for rank in problem.ranks for channel in problem.channels(rank)}:
        found = bundles((channel,), problem.shards, apart)
        assert sorted(head for one in found for head in one.channel.heads) == sorted(channel.heads)
        dealt = Counter(dict.fromkeys(channel.members, 0))
        for one in found:
            dealt[one.target] += len(one.channel.heads)
            assert not apart or len({offset for _, offset in one.channel.heads}) == 1
            for member in channel.members:
                piece = channel.piece(problem.shards, member)
                assert len({channel.rows(offset, piece) for _, offset in one.channel.heads}) == 1
        assert set(dealt) == set(channel.members)
        assert max(dealt.values()) - min(dealt.values()) <= 1, "as even as can be"


# --- what is sent and held --------------------------------------------------------------------------------------


def message_sizes(
    pattern: DilatedPattern, shards: Shards, heads: Heads, exchange: str, is_causal: bool, row_bytes: int
) -> tuple[list[dict[tuple[int, int], int]], list[dict[tuple[int, int], int]]]:
    """For blocks and for sums, what ranks say that they send: (step, target) -> bytes, and what they say they get."""
    sent: list[dict[tuple[int, int], int]] = []
    received: list[dict[tuple[int, int], int]] = []
    for rank in range(shards.ranks):
        mine = channels(pattern, shards, heads, rank)
        plans = traffic(mine, exchange, is_causal, rank)

        def sizes(steps: tuple[Messages, ...], mine: tuple[Channel, ...] = mine) -> dict[tuple[int, int], int]:
            return {
                (step, peer): row_bytes * sum(mine[part.channel].packed_rows(shards, part.owner) for part in parts)
                for step, messages in enumerate(steps, 1)
                for peer, parts in messages.items()
            }

        sent += [sizes(plans.sends), sizes(plans.sum_sends)]
        received += [sizes(plans.receives), sizes(plans.sum_receives)]
    return sent, received


def check_both_ends(sent: list[dict[tuple[int, int], int]], received: list[dict[tuple[int, int], int]]) -> None:
    for kind in (0, 1):
        leaving = {
            (step, source, target): count
            for source, one in enumerate(sent[kind::2])
            for (step, target), count in one.items()
        }
        coming = {
            (step, source, target): count
            for target, one in enumerate(received[kind::2])
            for (step, source), count in one.items()
        }
        assert leaving == coming


@pytest.mark.parametrize(
    ("exchange", "ranks", "spanned", "rate", "is_causal"),
    [
        ("ring", 1024, 8, 1, False), ("allgather", 1024, 16, 4, True), ("ring", 96, 96, 5, True),
        ("ring", 1024, 3, 8, True), ("allgather", 96, 96, 5, False),
    ],
)  # fmt: skip
def test_bytes_of_many_ranks(exchange: str, ranks: int, spanned: int, rate: int, is_causal: bool) -> None:
    c, Hk, D, e = 40, 2, 64, 2  # c is a multiple of all rates
    w = spanned * c
    shards, pattern = Shards.even(ranks * c, ranks), DilatedPattern.longnet([20, w], [1, rate])
    sent, received = message_sizes(pattern, shards, Heads(0, Hk, Hk), exchange, is_causal, 2 * D * e)
    check_both_ends(sent, received)
    for rank, one in enumerate(received[0::2]):
        start = rank // spanned * spanned
        others = rank - start if is_causal else min(spanned, ranks - start) - 1
        assert sum(one.values()) == 2 * Hk * D * e * others * c // rate


@few(40)
@given(problems(most_ranks=64, most_tokens=3000))
def test_both_ends_of_every_message_agree(problem: Problem) -> None:
    for exchange in ("ring", "allgather"):
        check_both_ends(
            *message_sizes(problem.pattern, problem.shards, problem.heads, exchange, problem.is_causal, 1)
        )  # fmt: skip


def spanning(**changes: Any) -> Problem:
    """Every segment lies on all ranks."""
    problem = Problem(
        (10,) * 6, DilatedPattern.longnet([60], [2]), 3, 2, 1, False, "ring", True, "none", 0.0, True, "auto", 0
    )
    return replace(problem, **changes)


def forward_only(problem: Problem) -> list[FakeTransport]:
    qkv, _, _ = problem.inputs()

    def rank(transport: FakeTransport) -> None:
        first, last = problem.shards.starts[transport.rank : transport.rank + 2]
        q, k, v = (x[:, first:last] for x in qkv)
        call = Call(problem.pattern, problem.is_causal, backend=problem.backend, in_parts=True).of(q, k, None, 0)
        ring.attend(Inputs(q, k, v), call, testing._FakeLink(transport, exchange=problem.exchange))

    return run_threads(len(problem.lengths), rank)[1]


def block_bytes(problem: Problem, rank: int) -> int:
    """Keys and values of one rank's rows; the sums of their gradients are as large."""
    rows = sum(channel.packed_rows(problem.shards, rank) for channel in problem.channels(rank))
    return packing.part_bytes((Field(torch.float64, 1, (3,)),) * 2, rows)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(10,) * 6, (20, 3, 7, 0, 25, 5), (1, 58, 1)], ids=str)
def test_a_ring_holds_two_blocks_and_the_sums_of_one_step(lengths: tuple[int, ...], is_causal: bool) -> None:
    problem = spanning(lengths=lengths, is_causal=is_causal)
    blocks = [block_bytes(problem, rank) for rank in problem.ranks]
    # on a line the sum to go on with and the one that comes home may come in the same step
    for sums, transports in ((0, forward_only(problem)), (2 if is_causal else 1, problem.run()[1])):
        for transport in transports:
            assert transport.stats.buffer_bytes == 0
            assert transport.stats.peak_buffer_bytes <= sum(sorted(blocks)[-2:]) + sums * max(blocks)
    assert max(transport.stats.peak_buffer_bytes for transport in transports) > 0


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_kept_rows_are_held_and_others_are_not(exchange: str) -> None:
    kept, again = (spanning(kv_heads=6, exchange=exchange, use_checkpointing=x).run()[1] for x in (False, True))
    for one, other in zip(kept, again, strict=True):
        assert other.stats.buffer_bytes == 0
        assert one.stats.bytes_received < other.stats.bytes_received
        assert one.stats.bytes_sent < other.stats.bytes_sent


def test_on_a_ring_blocks_go_to_the_next_rank_only() -> None:
    problem = spanning(lengths=(20, 3, 7, 0, 25, 5))
    after = {0: 1, 1: 2, 2: 4, 4: 5, 5: 0, 3: None}
    for transport in problem.run()[1]:
        hops = [(name, set(sends)) for name, collective, sends, _ in transport.log if not collective]
        assert len(hops) == len(transport.log)
        blocks = [peers for name, peers in hops if "gradients'" not in name]
        sums = [peers for name, peers in hops if "gradients'" in name]
        if after[transport.rank] is None:
            assert not any(blocks) and not any(sums)  # noqa: PT018 - one thought
            continue
        assert blocks == [{after[transport.rank]}] * 8  # four steps, forward and again backward
        assert sums == [{after[transport.rank]}] * 4  # the last user is the rank before the owner


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(20, 3, 7, 0, 25, 5), (1, 50, 2, 60)], ids=str)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_ranks_post_in_one_order(exchange: str, lengths: tuple[int, ...], is_causal: bool) -> None:
    """NCCL runs what is posted in that order: two ranks that differ in it wait for each other for ever."""
    pattern = DilatedPattern.longnet([8, 24, 200], [1, 2, 3])
    problem = spanning(exchange=exchange, lengths=lengths, is_causal=is_causal, pattern=pattern)
    logs = [transport.log for transport in problem.run()[1]]
    order: dict[str, set[str]] = {}
    for log in logs:
        names = [name for name, collective, sends, receives in log if collective or sends or receives]
        assert len(names) == len(set(names))
        for before, after in itertools.pairwise(names):
            order.setdefault(after, set()).add(before)
    graphlib.TopologicalSorter(order).prepare()  # raises where two ranks disagree
    for source, target in itertools.permutations(range(len(logs)), 2):
        sent = [(name, sends[target]) for name, _, sends, _ in logs[source] if target in sends]
        assert sent == [(name, receives[source]) for name, _, _, receives in logs[target] if source in receives]


@pytest.mark.parametrize(("exchange", "hops"), [("ring", (5, 10)), ("allgather", (1, 2)), ("alltoall", (2, 2))])
def test_hops(exchange: str, hops: tuple[int, int]) -> None:
    problem = spanning(exchange=exchange)
    assert [one.stats.hops for one in forward_only(problem)] == [hops[0]] * 6
    assert [one.stats.hops for one in problem.run()[1]] == [sum(hops)] * 6


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_nothing_is_posted_where_no_segment_crosses_a_border(exchange: str) -> None:
    problem = spanning(exchange=exchange, lengths=(20, 40, 0, 7), pattern=DilatedPattern.longnet([10, 20], [1, 3]))
    for transport in problem.run()[1]:
        assert transport.log == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_nan_in_what_is_allocated_never_comes_out(exchange: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and results are written in full before they are read."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        x = empty(*args, **options)
        return x.fill_(255) if x.dtype == torch.uint8 else x.fill_(torch.nan) if x.is_floating_point() else x

    problem = spanning(
        exchange=exchange, pattern=DilatedPattern(rule, (7, 30), (2, 5)), lengths=(11, 0, 29, 20), mask="random"
    )
    plain = problem.run()[0]
    monkeypatch.setattr(torch, "empty", poisoned)
    for (name, got), (_, wanted) in zip(problem.run()[0].items(), plain.items(), strict=True):
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_blocks_travel_in_the_dtype_computed_in_and_sums_in_float32(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_has_amx", lambda: True)  # else a CPU computes bfloat16 in float32
    problem = spanning(exchange=exchange, lengths=(8,) * 8, pattern=DilatedPattern.longnet([64], [1]), group=1)
    qkv, dout, _ = problem.inputs()
    qkv, dout = tuple(x.bfloat16() for x in qkv), dout.bfloat16()
    got, transports = testing.run_sharded(qkv, problem.lengths, problem.pattern, dout, exchange=exchange)
    plain = testing.oracle(qkv, problem.pattern, dout, dtype=None)
    testing.assert_exact(got, testing.oracle(qkv, problem.pattern, dout), plain)
    for transport in transports:
        sizes = {"forward": 2, "backward": 2, "gradients'": 4}
        for name, _, sends, _ in transport.log:
            (kind,) = (kind for kind in sizes if kind in name)
            assert set(sends.values()) == {2 * 8 * 3 * 3 * sizes[kind]}, name  # keys and values of 8 rows, 3 heads
