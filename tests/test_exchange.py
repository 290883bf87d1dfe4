"""The exchanges in one process: ranks are threads and every message is seen.

First the engine itself on drawn problems against the oracle, beyond what the table of cases has. Then what is sent,
received and held.
"""

from __future__ import annotations

import graphlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from dilated_attention import Blocks, Dilated, DilatedPattern, Pattern, Prefix, Strided, Window
from dilated_attention import call as calls
from dilated_attention.branches import Branch
from tests.cases import EXCHANGES, Case
from tests.drawn import drawn, few

# --- the engine -------------------------------------------------------------------------------------------------


@few(40)
@given(drawn(most_ranks=12))
def test_the_engine_against_the_oracle(case: Case) -> None:
    got, transports = case.on_threads()
    case.check(got)
    for transport in transports:
        assert not case.recompute or transport.stats.buffer_bytes == 0
        assert not transport.office.waiting


# --- patterns of any branches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_listed_dilated_branches(exchange: str) -> None:
    """Summed, they go by every exchange."""
    pattern = Pattern([Dilated(16), Dilated(48, 3, 1), Dilated(60, 2, heads=[0, 2])], counts="sum")
    case = spanning(11, 25, 0, 24, exchange=exchange, is_causal=True, pattern=pattern, mask="right", dropout_p=0.3)
    case.check(case.on_threads()[0])


@pytest.mark.parametrize("branches", [[Window(3)], [Dilated(8), Prefix(2)]])
def test_what_an_alltoall_cannot_do(branches: list[Branch]) -> None:
    for counts in ("once", "sum"):
        case = spanning(8, 8, exchange="alltoall", pattern=Pattern(branches, counts=counts))
        with pytest.raises(
            ValueError, match="exchange='alltoall' is for patterns of Dilated branches with counts='sum'"
        ):
            case.on_threads()


def sent(pattern: Pattern, is_causal: bool, exchange: str = "ring") -> list[dict[int, int]]:
    """Rows of K that each of four ranks with 16 tokens sends to the others in the forward pass; one head."""
    case = spanning(*(16,) * 4, exchange=exchange, pattern=pattern, is_causal=is_causal, own_heads=(1, 1), dtype="f64")
    got, transports = case.on_threads()
    case.check(got)
    found: list[dict[int, int]] = [{} for _ in transports]
    for rank, transport in enumerate(transports):
        for name, sends, _ in transport.log:
            if "forward" in name:
                found[rank] |= {peer: count // (2 * 3 * 8) for peer, count in sends.items()}
    return found


@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_rows_go_only_to_whom_needs_them(exchange: str) -> None:
    assert sent(Pattern([Window(5)]), True, exchange) == [{1: 5}, {2: 5}, {3: 5}, {}]
    assert sent(Pattern([Window(2, 20)]), False, exchange) == [
        {1: 2},
        {0: 16, 2: 2},
        {1: 16, 0: 4, 3: 2},
        {2: 16, 1: 4},
    ]
    assert sent(Pattern([Prefix(3)]), False, exchange) == [{1: 3, 2: 3, 3: 3}, {}, {}, {}]
    assert sent(Pattern([Strided(8, 1)]), False, exchange) == [{x: 2 for x in range(4) if x != y} for y in range(4)]
    assert sent(Pattern([Blocks(8, [(7, 0), (6, 0), (3, 1)])]), True, exchange) == [{3: 8, 1: 8}, {}, {}, {}]
    assert sent(Pattern([Window(2), Dilated(64, 16, 3), Prefix(2)]), True, exchange) == [
        {1: 2 + 1 + 2, 2: 1 + 2, 3: 1 + 2}, {2: 2 + 1, 3: 1}, {3: 2 + 1}, {},
    ]  # fmt: skip


# --- what is sent and held --------------------------------------------------------------------------------------


ZEROS = {  # segments that do not divide by their rate, so that zero keys fill their rows up: tokens, then the pattern
    "one segment": (7, [8], [3]),
    "a tail": (23, [8], [3]),
    "several branches": (61, [7, 20, 64], [2, 3, 5]),
    "rates over lengths": (29, [4, 30], [1, 7]),
}


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ZEROS)
def test_zero_keys_without_a_mask(name: str, exchange: str, ranks: int) -> None:
    """They are counted from the pattern alone there; with a mask, from what it leaves of each sample."""
    tokens, lengths, rates = ZEROS[name]
    pattern = DilatedPattern.torchscale(lengths, rates)
    case = Case(
        "threads", 0, "torchscale", False, "nested", tokens, own_pattern=pattern, own_heads=(6, 3), ranks=ranks,
        exchange=exchange,
    )  # fmt: skip
    without = replace(case, own_pattern=DilatedPattern.longnet(lengths, rates), rule="longnet")
    assert not torch.allclose(case.expected().out, without.expected().out)
    case.check(case.on_threads()[0])


def spanning(*lengths: int, pattern: Pattern | None = None, **more: Any) -> Case:
    """Every segment lies on all ranks."""
    given = {"is_causal": False, "samples": 1, "own_heads": (6, 3), "head_dim": 3, **more}
    return Case(
        "spanning", 0, "longnet", pattern="own", tokens=sum(lengths), ranks=len(lengths), own_lengths=lengths,
        own_pattern=pattern or DilatedPattern.longnet([60], [2]), **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "is_causal"), [((20, 3, 7, 0, 25, 5), False), ((20, 3, 7, 0, 25, 5), True), ((1, 50, 2, 60), True)]
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_ranks_post_in_one_order(exchange: str, lengths: tuple[int, ...], is_causal: bool) -> None:
    """NCCL runs what is posted in that order: two ranks that differ in it wait for each other for ever."""
    pattern = DilatedPattern.longnet([8, 24, 200], [1, 2, 3])
    case = spanning(*lengths, exchange=exchange, is_causal=is_causal, pattern=pattern)
    logs = [transport.log for transport in case.on_threads()[1]]
    order: dict[str, set[str]] = {}
    for log in logs:
        names = [name for name, *_ in log]
        assert len(names) == len(set(names))
        for before, after in itertools.pairwise(names):
            order.setdefault(after, set()).add(before)
    graphlib.TopologicalSorter(order).prepare()  # raises where two ranks disagree
    for source, target in itertools.permutations(range(len(logs)), 2):
        sent = [(name, sends[target]) for name, sends, _ in logs[source] if target in sends]
        assert sent == [(name, receives[source]) for name, _, receives in logs[target] if source in receives]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_nothing_is_posted_where_no_segment_crosses_a_border(exchange: str) -> None:
    case = spanning(20, 40, 0, 7, exchange=exchange, pattern=DilatedPattern.longnet([10, 20], [1, 3]))
    for transport in case.on_threads()[1]:
        assert transport.log == []


@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_blocks_travel_in_the_dtype_computed_in_and_sums_in_float32(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_has_amx", lambda: True)  # else a CPU computes bfloat16 in float32
    pattern = DilatedPattern.longnet([64], [1])
    case = spanning(*(8,) * 8, exchange=exchange, pattern=pattern, own_heads=(3, 3), dtype="bf16", dlse=False)
    got, transports = case.on_threads()
    case.check(got)
    for transport in transports:
        sizes = {"forward": 2, "backward": 2, "gradients'": 4}
        for name, sends, _ in transport.log:
            (kind,) = (kind for kind in sizes if kind in name)
            assert set(sends.values()) == {2 * 8 * 3 * 3 * sizes[kind]}, name  # keys and values of 8 rows, 3 heads
