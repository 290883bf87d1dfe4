"""The comparison gives no time to whatever is wrong, in whatever way it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import dilated_attention
from dilated_attention.bench import compare, implementations, memory, multihead, runners
from dilated_attention.bench.compare import FAILED, FAR, Comparison
from dilated_attention.bench.implementations import GATHER, RELEASED, everything, named
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.steps import Quiet
from dilated_attention.bench.subject import BOTH, DIRECTIONS, FORWARD, Implementation, Subject, least_work
from dilated_attention.nn import MultiheadDilatedAttention
from dilated_attention.pattern import RULES

CPU = torch.device("cpu")
SETTING = Setting(128, (32, 64, 128), (1, 2, 4), CPU, heads=4, head_dim=8)
Change = Callable[[Tensor], Tensor]


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process for each would take long, and has tests of its own."""
    monkeypatch.setattr(memory, "peaks", lambda build, setting, ways, ranks=1, limit=None: dict.fromkeys(ways, 7))


def build(change: Change, only_at: int | None, seen: list[int], setting: Setting) -> Subject:
    pattern = setting.pattern("longnet")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(query.shape[1])
        out = dilated_attention(query, key, value, pattern, is_causal=setting.causal)
        return change(out) if only_at in (None, query.shape[1]) else out

    return implementations._subject(attention, pattern, setting)


def changed(change: Change, seen: list[int] | None = None, only_at: int | None = None) -> Implementation:
    made = partial(build, change, only_at, [] if seen is None else seen)
    return Implementation("changed", "function", "longnet", made)


def results() -> dict[str, Any]:
    ceilings = [{"dtype": "float32", "matmul_tflops": 0.1, "copy_gb_per_s": 10.0}]
    return {"checks": [], "measurements": [], "ceilings": ceilings}


def compared(
    *which: Implementation, setting: Setting = SETTING, limit_ms: float = 1e9, seconds: float | None = 0.0
) -> dict[str, Any]:
    found = results()
    Comparison(found, Quiet(), limit_ms).run("suite", which, setting, DIRECTIONS, seconds=seconds)
    return found


def by_direction(found: dict[str, Any], name: str = "changed") -> dict[str, dict[str, Any]]:
    return {x["direction"]: x for x in found["measurements"] if x["implementation"] == name}


@pytest.mark.parametrize(
    "change",
    [lambda out: out * 1.001, lambda out: out.roll(1, dims=1), lambda out: out / 0 * 0, lambda out: out[:, :-1]],
    ids=["scaled", "shifted", "nan", "short"],
)
def test_a_wrong_out_gets_no_time(change: Change, no_processes: None) -> None:
    seen: list[int] = []
    found = compared(changed(partial(_like_dout, change), seen))
    for record in by_direction(found).values():
        assert record["status"] == "wrong"
        assert "out off by" in record["why"]
        assert all(record[name] is None for name in ("ms", "tokens_per_s", "tflops", "of_matmul", "peak_bytes"))
    assert found["checks"][0]["verdict"] == "wrong"
    assert SETTING.tokens not in seen  # it never even ran at the length that is timed


def _like_dout(change: Change, out: Tensor) -> Tensor:
    """A change of shape would stop the backward: what is cut off comes back as zeros."""
    new = change(out)
    return torch.cat([new, torch.zeros_like(out[:, new.shape[1] :])], 1)


def test_wrong_gradients_get_no_backward_time(no_processes: None) -> None:
    found = compared(changed(lambda out: (out + out.detach()) / 2))
    records = by_direction(found)
    assert records[FORWARD]["status"] == "measured"
    assert records[FORWARD]["ms"]["median"] > 0
    assert records[BOTH]["status"] == "wrong"
    assert records[BOTH]["ms"] is None
    assert "d q off by" in records[BOTH]["why"]
    assert found["checks"][0]["verdict"] == "wrong gradients"


def test_an_error_at_the_full_length_only_is_caught(no_processes: None) -> None:
    found = compared(changed(lambda out: out * 1.01, only_at=SETTING.tokens))
    assert found["checks"][0]["verdict"] == FAR
    for record in by_direction(found).values():
        assert record["status"] == "wrong"
        assert "rows at full length" in record["why"] == found["checks"][0]["why"]
        assert record["ms"] is None


def test_what_is_exact_gets_all_figures(no_processes: None) -> None:
    found = compared(changed(lambda out: out))
    assert found["checks"] == [found["checks"][0]]
    assert found["checks"][0]["verdict"] == "exact"
    for way, record in by_direction(found).items():
        assert record["status"] == "measured"
        assert record["why"] == ""
        seconds = record["ms"]["median"] / 1000
        flops, count = least_work(changed(lambda out: out), SETTING, way)
        assert record["flops"] == flops > 0
        assert record["tokens_per_s"] == pytest.approx(128 / seconds)
        assert record["tflops"] == pytest.approx(flops / seconds / 1e12)
        assert record["of_matmul"] == pytest.approx(record["tflops"] / 0.1)
        assert record["gb_per_s"] == pytest.approx(count / seconds / 1e9)
        assert record["of_copy"] == pytest.approx(record["gb_per_s"] / 10)
        assert record["peak_bytes"] == 7


def test_an_error_in_one_does_not_stop_the_others(no_processes: None) -> None:
    def broken(out: Tensor) -> Tensor:
        raise RuntimeError("the kernel says no\nwith details")

    found = compared(changed(broken), *named("head_groups, sdpa"))
    assert found["checks"][0]["verdict"] == FAILED
    assert found["checks"][0]["why"] == "the kernel says no"
    assert (
        by_direction(found)[FORWARD] | {"status": "wrong", "why": "the kernel says no"} == by_direction(found)[FORWARD]
    )
    assert by_direction(found, "head_groups, sdpa")[FORWARD]["status"] == "measured"


def test_a_call_that_fails_while_it_is_timed_is_out_and_the_others_go_on(no_processes: None) -> None:
    calls = []

    def tired(out: Tensor) -> Tensor:
        calls.append(out.shape[1])
        if calls.count(SETTING.tokens) > 2:  # once for the rows, once timed
            raise RuntimeError("the device says no")
        return out

    found = compared(changed(tired), *named("head_groups, sdpa"))
    assert {(x["status"], x["why"]) for x in by_direction(found).values()} == {("wrong", "the device says no")}
    assert {x["ms"] for x in by_direction(found).values()} == {None}
    assert {x["peak_bytes"] for x in by_direction(found).values()} == {None}
    assert by_direction(found, "head_groups, sdpa")[BOTH]["status"] == "measured"


def test_out_of_memory_is_marked_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks(made: Any, *_: Any) -> dict[str, int]:
        if made.func is build:
            raise memory.OutOfMemory("DefaultCPUAllocator: can't allocate memory")
        return dict.fromkeys(DIRECTIONS, 1)

    monkeypatch.setattr(memory, "peaks", peaks)
    found = compared(changed(lambda out: out), *named("head_groups, sdpa"))
    assert {x["status"] for x in by_direction(found).values()} == {"out of memory"}
    assert {x["ms"] for x in by_direction(found).values()} == {None}
    assert by_direction(found, "head_groups, sdpa")[BOTH]["status"] == "measured"
    assert found["checks"][0]["verdict"] == "exact"


def test_what_would_take_too_long_is_skipped_with_a_reason(no_processes: None) -> None:
    found = results()
    comparison = Comparison(found, Quiet(), limit_ms=1e9)
    one = changed(lambda out: out)
    comparison.run("suite", [one], SETTING, DIRECTIONS, seconds=0.0)
    comparison.limit_ms = 1e-6
    longer = replace(SETTING, tokens=256)
    comparison.run("suite", [one], longer, DIRECTIONS, seconds=0.0)
    late = [x for x in found["measurements"] if x["tokens"] == 256]
    assert {x["status"] for x in late} == {"skipped"}
    assert all("is expected to take" in x["why"] for x in late)


def test_an_interrupted_setting_keeps_the_times_it_has(no_processes: None) -> None:
    found = results()
    done: list[str] = []

    class Impatient(Quiet):
        def step(self, text: str) -> None:
            done.append(text)
            if "timing last" in text:
                raise KeyboardInterrupt

    first, last = changed(lambda out: out), replace(changed(lambda out: out), name="last")
    with pytest.raises(KeyboardInterrupt):
        Comparison(found, Impatient(), 1e9).run("suite", [first, last], SETTING, DIRECTIONS, seconds=0.0)
    assert {(x["implementation"], x["status"]) for x in found["measurements"]} == {("changed", "measured")}
    assert len(found["checks"]) == 2


def test_without_a_clock_only_memory_is_measured(no_processes: None) -> None:
    found = compared(changed(lambda out: out), seconds=None)
    for record in by_direction(found).values():
        assert (record["status"], record["ms"], record["peak_bytes"]) == ("measured", None, 7)


def test_wrong_gradients_of_parameters_are_caught(no_processes: None) -> None:
    def with_fault(setting: Setting) -> Subject:
        subject = multihead.ours(MultiheadDilatedAttention, setting)
        weight = subject.parameters["out_proj.weight"]
        return replace(subject, attention=lambda x: subject.attention(x) + weight.sum() - weight.sum().detach())

    found = compared(Implementation("changed", "multihead", "head_groups", with_fault))
    check = found["checks"][0]
    assert check["verdict"] == "wrong gradients"
    assert check["errors"]["d q_proj.weight"] <= check["limits"]["d q_proj.weight"]


def test_one_dtype_has_one_verdict_the_worst(no_processes: None) -> None:
    found = results()
    comparison = Comparison(found, Quiet(), 1e9)
    fine, wrong = changed(lambda out: out), changed(lambda out: out * 2)
    comparison.run("suite", [fine], SETTING, [FORWARD], seconds=0.0)
    comparison.run("suite", [wrong], replace(SETTING, samples=2), [FORWARD], seconds=0.0)
    comparison.run("suite", [fine], replace(SETTING, samples=3), [FORWARD], seconds=0.0)
    comparison.run("suite", [fine], replace(SETTING, causal=True), [FORWARD], seconds=0.0)
    assert [(x["causal"], x["verdict"]) for x in found["checks"]] == [(False, "wrong"), (True, "exact")]


@pytest.mark.parametrize("causal", [False, True])
def test_all_on_one_device_but_two_are_exact(causal: bool, no_processes: None) -> None:
    every = [one for one in everything() if one.ranks == 1 and "compiled" not in one.name]  # compiling takes long
    found = compared(*every, setting=replace(SETTING, causal=causal))
    checked = {x["implementation"]: x["verdict"] for x in found["checks"]}
    expected = {RELEASED: "wrong gradients", "attention over heads": "wrong"}
    assert {name: verdict for name, verdict in checked.items() if verdict != "exact"} == expected
    skipped = {x["implementation"] for x in found["measurements"] if x["status"] == "skipped"}
    only_cuda = {"dense flash", "dense cuDNN", "dense memory-efficient", f"{RELEASED}, cuDNN", "FlexAttention"}
    only_cuda |= {f"{rule}, triton" for rule in RULES}
    assert skipped == only_cuda
    assert set(checked) | only_cuda == {one.name for one in every}


def test_a_compiled_one_is_exact(no_processes: None) -> None:
    found = compared(*named("longnet, sdpa, compiled"))
    assert found["checks"][0]["verdict"] == "exact"


@pytest.mark.parametrize("name", ["RingDilatedAttention", "RingMultiheadDilatedAttention"])
def test_over_ranks_too_a_wrong_one_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, no_processes: None) -> None:
    one = named(f"{name}, 2 ranks")[0]
    right = runners.results_of
    assert compared(one)["checks"][0]["verdict"] == "exact"

    def shifted(one: Implementation, setting: Setting) -> dict[str, Tensor]:
        return {key: x.roll(1) for key, x in right(one, setting).items()}

    monkeypatch.setattr(compare.runners, "results_of", shifted)
    found = compared(one)
    assert found["checks"][0]["verdict"] == "wrong"
    assert by_direction(found, one.name)[BOTH]["ms"] is None


def test_everything_is_compared() -> None:
    names = [one.name for one in everything()]
    assert len(set(names)) == len(names)
    assert names[0] == "dense SDPA"
    one_device = {
        "DilatedAttention", "ImprovedDilatedAttention", "MultiheadDilatedAttention", "RingAttentionV2Simple",
        "ImprovedMultiheadDilatedAttention", "RingDilatedAttention", "RingDilatedAttentionV2Collective",
        "RingDilatedAttentionProduction", "RingMultiheadDilatedAttention", GATHER, "copy and gather, slicing", RELEASED,
        "dense flash", "dense cuDNN", "dense memory-efficient", "FlexAttention", "nn.MultiheadAttention",
    }  # fmt: skip
    assert one_device < set(names)
    for ranks in (2, 4):
        ring = {name for name in one_device if name.startswith("Ring")} | {"RingAdvancedDistributedDilatedAttention"}
        assert {f"{name}, {ranks} ranks" for name in ring} < set(names)
    for rule in ("longnet", "torchscale", "head_groups"):
        for backend in ("eager", "sdpa"):
            assert {f"{rule}, {backend}", f"{rule}, {backend}, compiled"} < set(names)


def test_ours_goes_through_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        implementations, "dilated_attention", lambda *x, **o: seen.append(o) or dilated_attention(*x, **o)
    )
    subject = implementations._ours("longnet", "eager", SETTING)
    subject.attention(*subject.inputs)
    assert seen == [{"backend": "eager", "is_causal": False}]


def test_the_least_work_is_that_of_the_pattern() -> None:
    one = named("head_groups, sdpa")[0]
    pattern = SETTING.pattern("head_groups")
    assert least_work(one, replace(SETTING, samples=3), FORWARD)[0] == 3 * pattern.pairs(128, 4) * 8 * 4
    assert least_work(one, SETTING, BOTH)[0] == pattern.pairs(128, 4) * 8 * 14
    tensor = 128 * 4 * 8 * 4
    assert least_work(one, SETTING, FORWARD)[1] == 4 * tensor + 128 * 4 * 4
    dense = named("dense SDPA")[0]
    assert least_work(dense, SETTING, FORWARD)[0] == 128 * 128 * 4 * 8 * 4
    projecting = named("MultiheadDilatedAttention")[0]
    assert least_work(projecting, SETTING, FORWARD)[0] == pattern.pairs(128, 4) * 8 * 4 + 4 * 2 * 128 * 32 * 32


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("slow_ms", "once"), [(0.0, True), (1e9, False)])
def test_a_slow_call_is_timed_once_when_its_time_is_spent(
    monkeypatch: pytest.MonkeyPatch, slow_ms: float, once: bool
) -> None:
    monkeypatch.setitem(compare.SLOW_MS, "cpu", slow_ms)
    for record in compared(*named("longnet, sdpa"))["measurements"]:
        assert (record["ms"]["repeats"] == 1) is once
