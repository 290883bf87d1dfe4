"""What `advice` suggests: always a pattern that can run and covers every token, with numbers that hold when counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dilated_attention import Dense, Dilated, DilatedPattern, Global, Pattern, Prefix, Window, advice
from dilated_attention.advice import MOST_TRIED, Workload, suggest, verdict
from dilated_attention.branches import Branch
from dilated_attention.context_parallel import EXCHANGES
from dilated_attention.pattern import RULES
from dilated_attention.units import bytes_text

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RUNS = json.loads((RESULTS / "ring.json").read_text())["runs"]
ONE_DEVICE = [
    x for x in json.loads((RESULTS / "h200" / "results.json").read_text())["measurements"]
    if x["implementation"].endswith(", auto") and x["tokens"] == 2**20 and x["suite"] == "scaling" and x["peak_bytes"]
]  # fmt: skip
PATTERN = DilatedPattern.longnet([2048, 2**20], [1, 64])
lengths = st.one_of(st.integers(1, 10_000), st.integers(1, 2**40), st.integers(0, 40).map(lambda power: 2**power))


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """The numbers are the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def gpu(monkeypatch: pytest.MonkeyPatch, *, forward: bool = True, backward: bool = True) -> None:
    """A CUDA device on which our own kernels run these passes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runs = {False: SimpleNamespace(is_whole=forward), True: SimpleNamespace(is_whole=backward)}
    monkeypatch.setattr(advice, "choose", lambda call, backward=False: runs[backward])


# --- the pattern --------------------------------------------------------------------------------------------------


@example(1 << 32, 1, 1, "head_groups", False)  # 2^64 pairs
@given(lengths, st.integers(1, 130), st.integers(1, 4), st.sampled_from(RULES), st.booleans())
def test_any_length_gets_a_pattern_that_can_run(
    tokens: int, kv_heads: int, group: int, rule: Any, causal: bool
) -> None:
    found = suggest(Workload(tokens, kv_heads * group, 64, kv_heads, is_causal=causal), rule)
    widths, rates = found.pattern.segment_lengths, found.pattern.dilation_rates
    assert rates[0] == 1, "which covers every token"
    assert max(widths) == widths[-1] == tokens, "every distance, and no more"
    if len(widths) > 1:
        assert {width // rate for width, rate in found.pattern.branches[:-1]} == {2048}
        assert 1024 < -(-tokens // rates[-1]) <= 2048
        assert [*rates] == sorted({*rates}), "none does what another does"
    assert max(map(len, str(found).splitlines())) <= 80


@pytest.mark.parametrize(
    ("tokens", "rule", "heads", "widths", "rates"),
    [
        (2048, "longnet", 12, [2048], [1]),
        (2049, "longnet", 12, [2048, 2049], [1, 2]),
        (9000, "torchscale", 12, [2048, 4096, 8192, 9000], [1, 2, 4, 8]),
        (2**20, "head_groups", 12, [2**11, 2**13, 2**15, 2**17, 2**19, 2**20], [1, 4, 16, 64, 256, 512]),
        (2**20, "head_groups", 2, [2048, 2**20], [1, 512]),
        (2**20, "head_groups", 1, [2**20], [1]),
    ],
)
def test_some_lengths(tokens: int, rule: Any, heads: int, widths: list[int], rates: list[int]) -> None:
    assert suggest(Workload(tokens, heads, 64), rule).pattern == DilatedPattern.of(rule, widths, rates)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(2049, 1), (4100, 3)])
def test_a_union_reaches_every_token(tokens: int, heads: int, is_causal: bool) -> None:
    """By the definitions alone: the last token sees near ones and the first, and in some layers all that it may."""
    branches, token = Pattern.suggest(tokens, heads, is_causal=is_causal).branches_for(heads), torch.arange(tokens)
    seen, new = torch.zeros(2, tokens, dtype=torch.bool)
    new[-1] = True
    for layer in range(4):
        query, shown = token[new, None], torch.zeros(tokens, dtype=torch.bool)
        for head, branch in itertools.product(range(heads), branches):
            pairs = branch.sees(head, query, token).expand(-1, tokens)
            shown |= (pairs & (token <= query) if is_causal else pairs).any(0)
        if layer == 0:
            assert shown[-1024 if is_causal else -513 :].all()
            assert shown[: 4 if is_causal else 1].all()
        seen, new = seen | shown, shown & ~seen
    assert seen.all()


@pytest.mark.parametrize(
    ("tokens", "more", "branches"),
    [
        (2048, {}, [Dense()]),
        (5000, {}, [Global(1), Window(512), Dilated(4096, 2), Dilated(5000, 4)]),
        (5000, {"is_causal": True}, [Window(1023), Prefix(4), Dilated(4096, 2), Dilated(5000, 4)]),
        (2**40, {"kv_heads": 1}, [Global(1), Window(512), *(Dilated(2048 << i, 1 << i) for i in range(1, 30))]),
    ],
)
def test_some_unions(tokens: int, more: dict[str, Any], branches: list[Branch]) -> None:
    assert Pattern.suggest(tokens, 8, **more) == Pattern(branches)
    kv_heads, is_causal = more.get("kv_heads", 8), more.get("is_causal", False)
    for index in range(len(branches)):
        parts = Pattern(branches).parts(index, 0, range(tokens), tokens, kv_heads, is_causal)
        assert not any(but for _, but in parts), "no masks: kernels run what is left"
    assert Pattern(branches).pairs(tokens, 8, **{"num_kv_heads": kv_heads, "is_causal": is_causal}) < 2600 * 8 * tokens


# --- the reasons --------------------------------------------------------------------------------------------------


def test_the_figures_hold() -> None:
    found = suggest(Workload(2**20, 12, 64, ranks=8))
    flops, dense = (x.flops(2**20, 12, 64) for x in (found.pattern, DilatedPattern.longnet([2**20], [1])))
    for said in (
        f"{flops / 1e12:.3g} TFLOP forward",
        f"dense: {dense / flops:.3g} times that",
        f"{found.pattern.pairs(2**20, 12) / 12 / 2**20:,.0f} on average",
        f"{found.cost.best} is the fastest",
    ):
        assert said in "\n".join(found.figures)


@pytest.mark.parametrize(
    ("workload", "rule", "said", "unsaid"),
    [
        (Workload(2**16, 12, 64), "head_groups", "1 of every 32 of the", "zero keys"),
        (Workload(2**14, 8, 64), "longnet", "8 of every 8 of the 16,384 tokens", "Later layers"),
        (Workload(2**14, 7, 64), "longnet", "Later layers connect the others", "zero keys"),
        (Workload(5000, 4, 8), "torchscale", "a multiple of 4,096", "dense segment"),
        (Workload(8192, 4, 8), "torchscale", "4 of every 4", "zero keys"),
        (Workload(5000, 4, 8, is_causal=True), "torchscale", "4 of every 4", "zero keys"),
        (Workload(2**20, 1, 8), "head_groups", "With rule longnet", "as sparse"),
        (Workload(2**20, 1, 8), "head_groups", "dense: 1.00 times that", "branches"),
        (Workload(100, 4, 8), "longnet", "100 tokens are at most 2,048", "branches"),
        (Workload(100, 4, 8), "union", "100 tokens are at most 2,048", "branches"),
        (Workload(2**14, 8, 64, 4), "union", "4 of every 8 of the 16,384 tokens, each in 2 of 8 heads", "class token"),
        (Workload(2**14, 8, 64), "union", "a token sees 512 on either side", "one of"),
        (Workload(2**14, 8, 64, is_causal=True), "union", "a token sees 1,024 near ones", "token 0"),
        (Workload(2**14, 8, 64), "longnet", "each in 1 of 8 heads", "near ones"),
        (Workload(2**13, 8, 64), "longnet", "A class token at the start sees far in 2 of 8 heads only", "near ones"),
        (Workload(2**13, 8, 64), "head_groups", "A class token at the start sees far in 0 of 8 heads", "near ones"),
        (Workload(2**13, 8, 64, is_causal=True), "head_groups", "each in 2 of 8 heads", "class token"),
    ],
)
def test_what_is_said(workload: Workload, rule: Any, said: str, unsaid: str) -> None:
    text = " ".join(str(suggest(workload, rule)).split())
    assert said in text
    assert unsaid not in text


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['tokens']}-{run['ranks']}-{run['exchange']}")
def test_memory_is_what_was_measured_and_not_much_more(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond q, k, v (and dout in the backward pass), which the measurement does not count.

    The pattern of the measurement is that of 2048 rows in every segment. One rank ran our own kernels.
    """
    exchange, above = run["exchange"], (1.1, 1.15)
    if run["ranks"] == 1:
        gpu(monkeypatch)
        exchange, above = None, (1.01, 1.05)
    workload = Workload(run["tokens"], run["heads"], run["dim"], ranks=run["ranks"])
    need = workload.need(suggest(workload).cost, exchange)
    inference = (run["inputs_mib"] + run["forward/peak_mib"]) * 2**20
    training = (run["inputs_mib"] * 4 / 3 + run["forward + backward/peak_mib"]) * 2**20
    assert inference <= need.inference <= above[0] * inference
    assert training <= need.training <= above[1] * training


# Which passes of these our own kernels run on an H200; the others are PyTorch's. Causal ones are all our own.
OWN = {"longnet": (True, True), "torchscale": (True, False), "head_groups": (True, False)}


@pytest.mark.parametrize("run", ONE_DEVICE, ids=lambda x: f"{x['rule']}-{x['causal']}-{x['direction']}")
def test_memory_of_one_gpu_is_what_was_measured_and_not_much_more(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = DilatedPattern.of(run["rule"], run["lengths"], run["rates"])
    workload = Workload(run["tokens"], run["heads"], run["head_dim"], is_causal=run["causal"])
    forward, backward = (run["causal"] or own for own in OWN[run["rule"]])
    gpu(monkeypatch, forward=forward, backward=backward)
    need = workload.need(workload.cost(pattern))
    qkv = 3 * run["tokens"] * run["heads"] * run["head_dim"] * 2
    inputs, needed, above = qkv, need.inference, 1.01
    if run["direction"] != "forward":
        inputs, needed, above = qkv * 4 / 3, need.training, 1.05
    measured = inputs + run["peak_bytes"]
    assert measured <= 1.001 * needed <= above * measured


def test_our_kernels_are_counted_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(2**20, 12, 64)
    cost, over_ranks = workload.cost(PATTERN), replace(workload, ranks=2)
    assumed, blockwise = workload.need(cost), over_ranks.need(cost)
    union = workload.cost(Pattern.suggest(2**20, 12, is_causal=True))
    assumed_of_union = workload.need(union)
    gpu(monkeypatch)
    assert workload.need(union) < assumed_of_union
    assert workload.need(cost) < assumed
    assert over_ranks.need(cost) == blockwise, "our own kernels run on one device only"


# --- what to change -----------------------------------------------------------------------------------------------


def told(workload: Workload, memory: float, pattern: DilatedPattern = PATTERN) -> list[str]:
    return verdict(workload, workload.cost(pattern), int(memory))


def changes(*args: Any) -> list[str]:
    """The single changes with which training fits, as they are said."""
    lines = [line for line in told(*args) if "fits with" in line]
    return [line.removeprefix("training fits with ").rpartition(": ")[0] for line in lines]


def test_each_change_is_the_smallest_of_its_kind() -> None:
    workload = Workload(2**20, 12, 64, batch=4, dtype=torch.float64)
    need, halved = (one.need(one.cost(PATTERN)) for one in (workload, replace(workload, batch=2)))
    whole, inference = bytes_text(need.training), bytes_text(need.inference)
    assert told(workload, need.training) == [f"training fits: it needs {whole} of {whole}"]
    fits = f"training fits with a batch of 2 instead of 4: {bytes_text(halved.training)}"
    assert told(workload, 0.9 * need.training)[2] == fits
    assert changes(workload, 0.9 * need.training)[1:] == ["float32 instead of float64", "2 ranks instead of 1"]
    assert changes(workload, 0.3 * need.training) == [
        "a batch of 1 instead of 4", "bfloat16 instead of float64", "4 ranks instead of 1",
    ]  # fmt: skip
    assert told(workload, 100) == [
        f"training does not fit: it needs {whole}, and there are 100 B",
        f"inference does not fit: it needs {inference}",
        f"no single change fits: another exchange, a smaller batch, another dtype, up to {MOST_TRIED:,} ranks",
    ]
    assert told(workload, need.inference)[1] == f"inference fits: it needs {inference}"


def test_another_exchange() -> None:
    grouped = Workload(2**20, 12, 64, kv_heads=1, ranks=64)
    cost = grouped.cost(PATTERN)
    least, name = min((grouped.need(cost, name).training, name) for name in EXCHANGES)
    assert name != cost.best, "or this shows nothing"
    assert changes(grouped, least)[0] == f"exchange={name!r} instead of {cost.best!r}"


def test_more_ranks_than_tokens_are_not_suggested() -> None:
    dense, most = DilatedPattern.longnet([64], [1]), Workload(64, 1, 8, ranks=64)
    one_each = most.need(most.cost(dense)).training
    assert changes(Workload(64, 1, 8), one_each, dense) == ["64 ranks instead of 1"]
    assert changes(Workload(64, 1, 8), one_each - 1, dense) == []
