"""What `advice` suggests: always a pattern that can run and covers every token, with numbers that hold when counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, plan_cost
from dilated_attention.advice import MOST_TRIED, ROWS, Change, Need, Workload, amount, in_words, suggest, what_fits
from dilated_attention.pattern import RULES
from dilated_attention.ring.cost import EXCHANGES
from dilated_attention.testing import check, make_qkv

MEASURED = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "ring.json").read_text())["runs"]
lengths = st.one_of(st.integers(1, 10_000), st.integers(1, 2**40), st.integers(0, 40).map(lambda power: 2**power))


# --- the pattern --------------------------------------------------------------------------------------------------


@given(lengths, st.integers(1, 130), st.integers(1, 4), st.sampled_from(RULES), st.booleans())
def test_any_length_gets_a_pattern_that_can_run(
    tokens: int, kv_heads: int, group: int, rule: str, causal: bool
) -> None:
    found = suggest(tokens, heads=kv_heads * group, kv_heads=kv_heads, head_dim=64, rule=rule, is_causal=causal)
    pattern = found.pattern
    assert pattern.rule == rule
    assert pattern.check_heads(kv_heads * group, kv_heads) == group
    assert pattern.dilation_rates[0] == 1, "which covers every token"
    assert pattern.segment_lengths[-1] >= tokens, "so that every distance is within reach"
    assert len({width // rate for width, rate in pattern.branches}) == 1
    assert all(width % rate == 0 for width, rate in pattern.branches)
    assert all(wide < tokens for wide in pattern.segment_lengths[:-1]), "none stands for what another does"


@settings(max_examples=30)
@given(st.integers(1, 9000), st.integers(1, 9), st.sampled_from(RULES))
def test_every_token_is_covered(tokens: int, heads: int, rule: str) -> None:
    covered = suggest(tokens, heads=heads, head_dim=8, rule=rule).pattern.coverage(tokens, heads)
    assert bool(covered.all() if rule != "head_groups" else covered.any(1).all())


@pytest.mark.parametrize(
    ("tokens", "rule", "heads", "widths", "rates"),
    [
        (1, "longnet", 12, [1], [1]),
        (2048, "longnet", 12, [2048], [1]),
        (2049, "longnet", 12, [2048, 4096], [1, 2]),
        (8192, "torchscale", 12, [2048, 4096, 8192], [1, 2, 4]),
        (2**20, "head_groups", 12, [2**11, 2**13, 2**15, 2**17, 2**19, 2**21], [1, 4, 16, 64, 256, 1024]),
        (2**20, "head_groups", 2, [2048, 2**20], [1, 512]),
        (2**20, "head_groups", 1, [2**20], [1]),
    ],
)
def test_some_lengths(tokens: int, rule: str, heads: int, widths: list[int], rates: list[int]) -> None:
    assert suggest(tokens, heads=heads, head_dim=64, rule=rule).pattern == DilatedPattern.of(rule, widths, rates)


def test_what_is_suggested_runs_and_is_exact() -> None:
    check(make_qkv(1, 2100, 2, 8), suggest(2100, heads=2, head_dim=8).pattern)


def test_the_line_of_python_is_the_pattern() -> None:
    found = suggest(10**6, heads=12, head_dim=64, rule="head_groups")
    line = str(found).splitlines()[0].removeprefix("pattern = ")
    rule, lengths, rates = re.fullmatch(
        r"DilatedPattern\.(\w+)\(segment_lengths=(.*), dilation_rates=(.*)\)", line
    ).groups()  # type: ignore[union-attr]
    assert DilatedPattern.of(rule, json.loads(lengths), json.loads(rates)) == found.pattern


# --- the reasons --------------------------------------------------------------------------------------------------


def test_reasons_are_numbers_that_hold() -> None:
    found = suggest(2**20, heads=12, head_dim=64, ranks=8)
    text, pattern = "\n".join(found.reasons), found.pattern
    dense = DilatedPattern.longnet([2**20], [1])
    assert f"{dense.flops(2**20, 12, 64) / pattern.flops(2**20, 12, 64):.3g} times less than dense" in text
    assert f"{pattern.flops(2**20, 12, 64) / 1e12:.3g} TFLOP forward" in text
    assert f"on average: {pattern.pairs(2**20, 12) / 12 / 2**20:,.0f}" in text
    cost = plan_cost(pattern, 2**20, 8, num_heads=12, head_dim=64)
    assert found.costs == cost
    assert f"{cost.best} is the fastest exchange" in text
    assert "segments up to 131,072 lie inside a shard of 131,072" in text


def test_reasons_for_more_than_dense() -> None:
    """Where branches overlap more than they leave out, suggesting them would be a poor joke."""
    found = suggest(2049, heads=4, head_dim=8)
    assert "times dense attention" in "\n".join(found.reasons)


def test_zero_keys_are_told_of_where_there_are_some() -> None:
    def text(tokens: int, **more: bool) -> str:
        return str(suggest(tokens, heads=4, head_dim=8, rule="torchscale", **more))

    assert "take a multiple of 4,096" in text(5000)
    assert "zero keys" not in text(8192)
    assert "zero keys" not in text(5000, is_causal=True)
    assert "zero keys" not in str(suggest(5000, heads=4, head_dim=8))


def test_one_head_of_head_groups_is_told_what_it_costs() -> None:
    text = str(suggest(2**20, heads=1, head_dim=8, rule="head_groups"))
    assert "or rule longnet" in text
    assert "as much as dense attention" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens must be 1 or more, got 0"),
        ({"tokens": 1.5}, "tokens must be a whole number"),
        ({"heads": 0}, "heads must be 1 or more, got 0"),
        ({"kv_heads": 5}, "12 query heads cannot be shared evenly by 5"),
        ({"rule": "short"}, "unknown rule 'short'"),
        ({"head_dim": 0}, "head_dim must be 1 or more"),
        ({"ranks": 0}, "num_ranks must be 1 or more"),
        ({"dtype": torch.int8}, "dtype must be a floating point"),
    ],
)
def test_errors(change: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        suggest(**{"tokens": 100, "heads": 12, "head_dim": 64, **change})  # type: ignore[arg-type]


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", MEASURED, ids=lambda run: f"{run['tokens']}-{run['ranks']}-{run['exchange']}")
def test_the_allowance_for_kernels_is_what_was_measured_and_not_much_more(run: dict[str, float]) -> None:
    """Beyond q, k, v (and dout in the backward pass), which the measurement does not count."""
    workload = Workload(int(run["tokens"]), int(run["heads"]), int(run["dim"]), ranks=int(run["ranks"]))
    found = suggest(workload.tokens, heads=workload.heads, head_dim=workload.head_dim, ranks=workload.ranks)
    need = Need.of(found.costs, str(run["exchange"]))
    inference = (run["inputs_mib"] + run["forward/peak_mib"]) * 2**20
    training = (run["inputs_mib"] * 4 / 3 + run["forward + backward/peak_mib"]) * 2**20
    assert inference <= need.inference <= 1.1 * inference
    assert training <= need.training <= 1.15 * training


def test_what_is_counted_as_needed() -> None:
    cost = Workload(1000, 4, 16, ranks=4, batch=2).cost(DilatedPattern.longnet([1000], [1]))
    memory, rows = cost.memory, 2 * 250 * 4
    saved = 4 * rows * 16 * 2 + rows * 4  # q, k, v and out in bfloat16, lse in float32
    for name in EXCHANGES:
        received = memory.received[name]
        assert received > 0
        need = Need.of(cost, name)
        assert need.inference == round(1.1 * (saved + rows * 16 * 4 + received))  # out is summed up in float32
        assert need.training == round(1.3 * (saved + 4 * rows * 16 * 2 + memory.sums[name] + received))


@settings(max_examples=40)
@given(
    lengths.filter(lambda tokens: tokens > 8), st.sampled_from([1, 4, 12]), st.sampled_from([1, 2, 8, 100]),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]), st.integers(1, 9), st.floats(0.001, 3.0),
)  # fmt: skip
def test_it_fits_if_it_says_so(
    tokens: int, heads: int, ranks: int, dtype: torch.dtype, batch: int, share: float
) -> None:
    def suggested(memory: int | None):  # type: ignore[no-untyped-def]
        return suggest(tokens, heads=heads, head_dim=64, ranks=ranks, dtype=dtype, batch=batch, memory=memory)

    memory = int(share * suggested(None).need.training)
    found = suggested(memory)
    assert found.fits == (found.need.training <= memory)
    assert not (found.fits and found.changes)
    for change in found.changes:
        again = change.workload.cost(found.pattern)
        assert Need.of(again, change.exchange).training == change.needed <= memory
        assert change.text
        assert f"training fits with {change.text}" in "\n".join(found.reasons)
    if share > 0.5 and batch > 1 and not found.fits:
        assert any(change.workload.batch == batch // 2 for change in found.changes)


def test_half_the_batch_may_need_its_exchange_named() -> None:
    """Of the half another one is the fastest, and needs more than there is."""
    found = suggest(37, heads=12, head_dim=64, ranks=2, dtype=torch.bfloat16, batch=9, memory=3_311_271)
    assert "a batch of 4 instead of 9 and still exchange='alltoall'" in [change.text for change in found.changes]


PATTERN = DilatedPattern.longnet([2048, 2**20], [1, 64])


def texts(workload: Workload, memory: float) -> list[str]:
    return [change.text for change in what_fits(PATTERN, workload, int(memory))]


def test_nothing_is_to_be_changed_where_it_fits() -> None:
    assert texts(Workload(2**20, 12, 64), 1e12) == []


def test_each_single_change_is_the_smallest_of_its_kind() -> None:
    workload = Workload(2**20, 12, 64, batch=4, dtype=torch.float64)
    whole = Need.of(workload.cost(PATTERN), "ring").training
    assert texts(workload, 0.9 * whole) == [
        "a batch of 2 instead of 4",
        "float32 instead of float64",
        "2 ranks instead of 1",
    ]
    assert texts(workload, 0.35 * whole) == [
        "a batch of 1 instead of 4",
        "bfloat16 instead of float64",
        "3 ranks instead of 1",
    ]


def test_another_exchange() -> None:
    """Dense attention over everything: an all-gather holds what a ring passes on."""
    dense, workload = DilatedPattern.longnet([2**20], [1]), Workload(2**20, 1, 64, ranks=64)
    cost = workload.cost(dense)
    needs = {name: Need.of(cost, name).training for name in EXCHANGES}
    assert cost.best == "ring"  # the others hold too much for "auto" to take them
    found = what_fits(dense, workload, needs["ring"] - 1)
    assert [change.text for change in found] == ["128 ranks instead of 64"]
    grouped = Workload(2**20, 12, 64, kv_heads=1, ranks=64)
    cost = grouped.cost(PATTERN)
    needs = {name: Need.of(cost, name).training for name in EXCHANGES}
    least = min(needs, key=lambda name: needs[name])
    assert least != cost.best, "or this shows nothing"
    found = what_fits(PATTERN, grouped, needs[least])
    assert found[0].exchange == least
    assert found[0].text == f"exchange={least!r} instead of {cost.best!r}"
    assert found[0].workload == grouped


def test_all_together_where_nothing_alone_is_enough() -> None:
    workload = Workload(64, 12, 64, batch=64, dtype=torch.float32)
    least = Need.of(Workload(64, 12, 64, ranks=64).cost(PATTERN), "ring").training
    (change,) = what_fits(PATTERN, workload, int(1.5 * least))
    assert change.text == "64 ranks instead of 1 and a batch of 1 instead of 64 and bfloat16 instead of float32"
    assert what_fits(PATTERN, workload, 100) == ()


def test_more_ranks_than_tokens_are_not_suggested() -> None:
    dense = DilatedPattern.longnet([64], [1])
    one_each = Need.of(Workload(64, 1, 8, ranks=64).cost(dense), "ring").training
    assert [x.workload.ranks for x in suggest(64, heads=1, head_dim=8, memory=one_each).changes] == [64]
    assert suggest(64, heads=1, head_dim=8, memory=one_each - 1).changes == ()


def test_words() -> None:
    change = Change("2 ranks instead of 1", Workload(1, 1, 1), "ring", 5 * 10**9)
    need = Need(6 * 10**9, 10 * 10**9)
    assert list(in_words(need, 10**10, ())) == ["training fits: 10 GB of 10 GB"]
    assert list(in_words(need, 8 * 10**9, (change,))) == [
        "training does not fit: it needs 10 GB of 8 GB; inference fits",
        "training fits with 2 ranks instead of 1: 5 GB",
    ]
    first, last = in_words(need, 5 * 10**9, ())
    assert first.endswith("nor does inference, with 6 GB")
    assert f"up to {MOST_TRIED:,}" in last


def test_amounts() -> None:
    assert [amount(x) for x in (0, 3, 999, 999.6, 1234, 13.2e12, 5.9e20, 1e30)] == [
        "0 ", "3 ", "999 ", "1 k", "1.23 k", "13.2 T", "590 E", "1,000,000 Y",
    ]  # fmt: skip
    assert ROWS == 2048


@pytest.mark.parametrize(
    ("tokens", "heads", "rule", "told"),
    [
        (2**20, 12, "longnet", "these are 12 of every 512,"),
        (2**16, 12, "head_groups", "these are 1 of every 32,"),
        (2**20, 12, "torchscale", "these are 12 of every 512,"),
        (2**14, 8, "longnet", ""),  # eight heads take all offsets of the rate 8
        (2**14, 7, "longnet", "these are 7 of every 8,"),
    ],
)
def test_it_tells_which_rows_the_longest_segment_has(tokens: int, heads: int, rule: str, told: str) -> None:
    (line,) = (x for x in suggest(tokens, heads=heads, head_dim=64, rule=rule).reasons if "from one end" in x)
    assert told in line if told else line.endswith("from one end to the other")
