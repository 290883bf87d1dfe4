"""A run keeps what it has, says how far it is, and every suite can be planned; their tables are made for real."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import machine, session, suites
from dilated_attention.bench.implementations import named
from dilated_attention.bench.pace import Lines, Pace, Quiet
from dilated_attention.bench.run import Timing
from dilated_attention.bench.session import Session, Step
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.suites import (
    ALL,
    SUITES,
    copies,
    decode,
    improved,
    kernels,
    language,
    optimisations,
    packed,
    profile,
    slides,
    stream,
)
from dilated_attention.models.presets import PRESETS

CPU = torch.device("cpu")
SMALL = ((32, 64), (1, 2))


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a test of their own, and take seconds."""
    found = {"matmul_tflops": 1.0, "copy_gb_per_s": 1.0}
    monkeypatch.setattr(
        session, "ceilings", lambda device, dtype: {"dtype": str(dtype).removeprefix("torch."), **found}
    )


class Noting(Quiet):
    def __init__(self) -> None:
        self.begun, self.steps, self.said = 0.0, list[tuple[str, float]](), list[str]()

    def begin(self, seconds: float) -> None:
        self.begun = seconds

    def step(self, text: str, share: float, left: float) -> None:
        self.steps.append((text, share))

    def say(self, text: str) -> None:
        self.said.append(text)


def started(watch: Any = None) -> Session:
    return Session(CPU, (torch.float32, torch.float16), watch=watch, seconds=0.0, commit="abc")


def small_step(one: Session, *names: str) -> Step:
    return one.comparing("suite", named(*names), Setting(128, *SMALL, CPU, heads=4, head_dim=8))


def test_results_are_saved_after_every_step_and_carry_what_a_number_needs(tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = []
    watch = Noting()
    one = started(watch)
    planned = [small_step(one, "head_groups, sdpa", "attention over heads"), small_step(one, "longnet, sdpa")]
    results = one.run({"suite": planned}, lambda found: saved.append(copy.deepcopy(found)))
    assert [len(x["measurements"]) for x in saved] == [4, 6, 6]
    assert [x["complete"] for x in saved] == [False, False, True]
    assert watch.begun == sum(step.seconds for step in planned) > 0
    shares = [share for _, share in watch.steps]
    assert shares == sorted(shares)
    assert shares[-1] < one.pace.done / one.pace.planned + 1e-9 + one.pace.current / one.pace.planned <= 1 + 1e-9
    assert watch.said[:2] == ["head_groups, sdpa: exact", "attention over heads: wrong"]  # as it becomes known
    assert re.fullmatch(r"128 tokens, head_groups, sdpa: forward \S+ ms, forward \+ backward \S+ ms", watch.said[2])
    assert results["machine"]["commit"] == "abc"
    assert {"load_max", "others", "too_busy"} <= results["machine"].keys()
    assert results["ceilings"][0]["dtype"] == "float32"
    assert "2 of 3 implementations" in results["answer"]
    machine.write_json(tmp_path / "results.json", results)
    assert json.loads((tmp_path / "results.json").read_text())["schema"] == 1


def test_an_interrupted_run_keeps_what_it_has() -> None:
    saved: list[dict[str, Any]] = []

    def interrupted(_: Session) -> None:
        raise KeyboardInterrupt

    one = started()
    planned = [small_step(one, "head_groups, sdpa"), Step(interrupted), small_step(one, "longnet, sdpa")]
    with pytest.raises(KeyboardInterrupt):
        one.run({"suite": planned}, lambda found: saved.append(copy.deepcopy(found)))
    assert saved[-1]["complete"] is False
    assert [x["implementation"] for x in saved[-1]["measurements"]] == ["head_groups, sdpa"] * 2
    assert saved[-1]["answer"]


def test_the_time_left_follows_the_plan_and_then_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 0.0, 0.0, 20.0, 60.0, 100.0])
    pace = Pace(Lines(), clock=lambda: next(now))
    pace.begin(100.0)
    for text in ("first", "second", "third", "fourth"):
        pace.step(text, 25.0)
    out, err = capsys.readouterr()
    assert out == ""
    # 25 s done in 20 s, 50 s in 60 s, 75 s in 100 s; the plan counts as 15 s more of each
    assert err.splitlines() == [
        "this takes about 1.7 min", "[0%, 1.7 min left] first", "[25%, 66 s left] second", "[50%, 58 s left] third",
        "[75%, 32 s left] fourth",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("everybody", "ours", "others"), [(10.0, 9.0, 0.05), (19.0, 4.0, 0.75), (1.0, 2.0, 0.0), (None, None, None)]
)
@pytest.mark.parametrize("load", [0.2, 1.8])
def test_a_machine_that_others_use_is_too_busy(
    monkeypatch: pytest.MonkeyPatch, everybody: float, ours: float, others: float | None, load: float
) -> None:
    """Of ten seconds on two cores. Where no system tells, what the load was at first."""
    now, cpu = iter([0.0, 10.0]), iter([(5.0, 1.0), (5.0 + (everybody or 0), 1.0 + (ours or 0))])
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(machine, "_cpu_seconds", lambda: None if everybody is None else next(cpu))
    monkeypatch.setattr(machine, "_load", lambda: load)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    found = machine.Load().note()
    busy = load > 1 if others is None else others > 0.25
    assert found == {"load_max": load, "others": others, "too_busy": busy}


def test_cpu_time_of_this_machine() -> None:
    found = machine._cpu_seconds()
    assert found is None or 0 < found[1] <= found[0]


# --- the suites -------------------------------------------------------------------------------------------------


def test_unknown_suites_are_refused_before_any_work() -> None:
    for names in (["fast"], [], ["quick", "all", "none"]):
        with pytest.raises(ValueError, match="use one or more of quick, copies"):
            suites.run(names, CPU, save=lambda results: None)


def test_all_is_what_compares_implementations() -> None:
    assert set(ALL) == set(SUITES) - {"quick", "all", "kernels", "decode", "stream", "packed", "slides", "language"}
    assert all(SUITES.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [name for name in SUITES if name != "all"])
def test_every_suite_can_be_planned(name: str, device: str) -> None:
    made = started()
    made.device, made.on_cuda = torch.device(device), device == "cuda"  # as it would be with a GPU
    if device == "cuda" and not torch.cuda.is_available():  # what can run there only a GPU says
        made.comparison.planned = lambda one, setting: (1.0, 1.0)  # type: ignore[method-assign]
    planned = suites.steps_of(name, made)
    assert planned
    assert all(step.seconds > 0 for step in planned)


def test_suites_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made short: every table has its rows, all of them right, and ways that compute the same give the same."""
    made = started()
    numbers = iter(range(1, 1000))  # each call takes longer than the one before

    def time(calls: dict[Any, Any], *_: Any, **__: Any) -> dict[Any, Timing]:
        for call in calls.values():
            call()
        return {key: Timing(next(numbers), 0.0, 0.0, 1) for key in calls}

    monkeypatch.setattr(made, "time", time)
    monkeypatch.setattr(slides, "MODELS", ("gigapath_slide_enc12l384d",))
    monkeypatch.setattr(slides, "HEAD_DIMS", (24,))
    monkeypatch.setitem(PRESETS["gigapath_slide_enc12l384d"], "depth", 2)
    monkeypatch.setattr(slides, "TILES", {"cpu": (20,)})
    monkeypatch.setattr(slides, "TRAINED", {"cpu": 20})
    monkeypatch.setattr(language, "LENGTHS", {"cpu": {65: 1.0}})
    monkeypatch.setattr(language, "COMPILED", (65,))
    monkeypatch.setattr(language, "LARGE", {"cpu": {(65, False): 1.0, (65, True): 1.0}})
    monkeypatch.setattr(language, "PROMPTS", {"cpu": (20,)})
    monkeypatch.setattr(language, "GENERATED", {"cpu": 2})
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it takes long
    made.run({name: suites.steps_of(name, made) for name in ("slides", "language")}, lambda found: None)
    tables = {table["title"]: table["rows"] for table in made.results["tables"]}
    assert [len(rows) for rows in tables.values()] == [2, 2, 1, 4, 1, 2]
    assert all(check["verdict"] == "exact" for check in made.results["checks"])
    assert tables["Whole slide encoders, forward"][1][5] < 1e-5


def test_packed_sequences_are_timed_beside_one_with_as_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = started()
    monkeypatch.setattr(packed, "COUNT", 4)
    monkeypatch.setattr(made, "time", lambda calls: {key: Timing(1.0, 1.0, 1.0, 1) for key in calls})
    made.run({"packed": suites.steps_of("packed", made)}, lambda found: None)
    for what in packed.SHAPES:
        (_, _, tokens, *_, first, _), (_, _, alone, *_, none, _) = (row for row in table_of(made) if row[0] == what)
        assert alone < tokens  # it has the longer segments
        assert (first is None, none is None) == (False, True)
    assert all(check["verdict"] == "exact" for check in made.results["checks"])


def test_quick_takes_about_a_minute() -> None:
    made = started()
    made.comparison.seconds = 3.0
    made.results["ceilings"] = [{"dtype": "float32", "matmul_tflops": 0.27, "copy_gb_per_s": 20.0}]  # two idle cores
    assert 30 < sum(step.seconds for step in suites.steps_of("quick", made)) < 90


def table_of(made: Session, title: str = "") -> list[list[Any]]:
    rows: list[list[Any]] = next(x["rows"] for x in made.results["tables"] if title in x["title"])
    return rows


def test_rows_are_taken_out_in_every_way_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "TOKENS", (2048,))
    one = started()
    copies.rows_table(one)
    copied = {row[1]: row[2] for row in table_of(one)}
    assert copied["strided view"] == copied["reshape"] == "no"
    assert copied["index_select"] == copied["slice, then contiguous"] == "yes"
    right = copies.ways_to_take
    monkeypatch.setattr(
        copies, "ways_to_take", lambda *x: {**right(*x), "bad": lambda t: right(*x)["reshape"](t).flip(1)}
    )
    with pytest.raises(RuntimeError, match="bad takes other rows"):
        copies.rows_table(one)


def test_the_two_classes_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improved, "PATTERNS", (SMALL,))
    monkeypatch.setattr(improved, "TOKENS", (128,))
    one = started()
    improved.distances(one)
    assert table_of(one)[0][1:] == [0.0] * 4


def test_the_profile_finds_copies_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PATTERNS", (SMALL,))
    monkeypatch.setattr(profile, "TOKENS", 128)
    names = ("head_groups, sdpa", "copy and gather, index_select", "gather-pad-scatter", "attention over heads")
    monkeypatch.setattr(profile, "SUBJECTS", names)
    one = started()
    profile.kernel_table(one)
    rows = {row[0]: row for row in table_of(one)}
    assert list(rows) == list(names[:3])  # what is wrong has no times
    assert rows["copy and gather, index_select"][3] > rows["head_groups, sdpa"][3]
    assert rows["gather-pad-scatter"][1].startswith("forward, as")


def test_what_is_wrong_gets_no_time_in_the_tables_of_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Noting()
    one = started(watch)
    monkeypatch.setattr(one.comparison, "check", lambda implementation, setting: "the kernel says no")
    for part in (step for step in optimisations.steps(one) if step.run.args[0] is not optimisations.packed):
        part.run(one)  # all but the messages alone: there is no attention in those
    assert one.results["tables"] == []
    assert len(watch.said) == 5
    for table in (kernels.profile_table, kernels.short_calls, kernels.block_table):
        table(one)
    assert [x["rows"] for x in one.results["tables"]] == [[], [], []]


def test_optimisations_on_and_off() -> None:
    one = started()
    optimisations._add(optimisations.packed, one)
    optimisations._add(optimisations.packed, one)
    rows = table_of(one)
    assert [row[0] for row in rows] == [optimisations.PACKED] * 6
    assert all(row[2] > 0 and row[3] > 0 for row in rows)
    assert optimisations.row("x", "y", 10.0, 8.0, "ms")[-1] == pytest.approx(0.2)
    assert optimisations.row("x", "y", None, 8.0, "ms")[-1] is None


def shortened(monkeypatch: pytest.MonkeyPatch, suite: Any) -> Session:
    monkeypatch.setattr(suite, "LENGTHS", (16, 32, 64))
    monkeypatch.setattr(suite, "RATES", (1, 2, 4))
    return started()


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_every_one_token_step_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    one, right = shortened(monkeypatch, decode), decode.dilated_attention
    monkeypatch.setattr(decode, "TOKENS", {"cpu": 256})
    monkeypatch.setattr(decode, "dilated_attention", lambda *x, **options: factor * right(*x, **options))
    decode.table(one)
    rows = table_of(one)
    if factor == 1:
        assert [row[0] for row in rows] == list(range(240, 256))
        assert all(row[2] < 1e-4 and row[3] > 0 for row in rows)
        # at the end of every segment all 16 rows of each branch are seen, by the heads at the last offset
        assert rows[-1][1] == 16 * (12 + 6 + 3)
        assert all(row[1] > 0 for row in table_of(one, "from Python"))
    else:  # the first wrong step ends it, without a time
        assert [row[3] for row in rows] == [None]
        assert len(one.results["tables"]) == 1
    assert one.results["checks"][0]["verdict"] == ("exact" if factor == 1 else "wrong")


@pytest.mark.parametrize("fault", ["", "scaled", "late", "alone"])
def test_a_stream_is_checked_before_and_while_it_is_timed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    one, right = shortened(monkeypatch, stream), stream.stream
    monkeypatch.setattr(stream, "SIZES", {"cpu": (512, 128)})

    def changed(chunks: Any, *pattern: Any, **options: Any) -> Any:
        if fault == "alone":  # each chunk as if it began the sequence: wrong as soon as a chunk ends in a segment
            for chunk in chunks:
                yield from right([chunk], *pattern, **options)
            return
        for index, out in enumerate(right(chunks, *pattern, **options)):
            wrong = fault == "scaled" or (fault == "late" and index == 3)
            yield 1.01 * out if wrong else out

    monkeypatch.setattr(stream, "stream", changed)
    stream.table(one)
    assert {x["verdict"] for x in one.results["checks"]} == {"wrong" if fault else "exact"}
    if fault in ("scaled", "alone"):
        assert one.results["tables"] == []  # the short stream was wrong already
        return
    rows = table_of(one)
    assert [row[2] for row in rows] == ["no", "yes"]
    assert all((row[3] is None) == bool(fault) for row in rows)
    assert all(row[7] == 4 * 32 for row in rows)


def test_short_calls_and_blocks_are_timed_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CASES", {"C": (128, SMALL, 4, 8)})
    monkeypatch.setattr(kernels, "ROWS", 64)
    one = started()
    for step in kernels.steps(one)[:2]:  # the case that is not causal, and its segments
        step.run(one)
    kernels.profile_table(one)
    kernels.short_calls(one)
    assert {x["status"] for x in one.results["measurements"]} == {"measured", "skipped", "wrong"}
    segments = [x for x in one.results["measurements"] if x["lengths"] == [64]]
    assert {(x["samples"], x["tokens"], x["status"]) for x in segments} == {(2, 64, "measured")}
    assert [row[:2] for row in table_of(one, "Short calls")] == [
        ["head_groups, auto", "eager"], ["dense SDPA", "eager"], ["autograd alone", "eager"],
        ["head_groups, auto", "eager, autograd without its thread"],
    ]  # fmt: skip
    assert all(min(row[2:]) > 0 for row in table_of(one, "Short calls"))
    assert {row[1] for row in table_of(one, "The kernels")} == {"head_groups, auto", "longnet, auto"}
    small = one.setting(128, SMALL, heads=4, head_dim=8, causal=True)
    monkeypatch.setattr(one, "setting", lambda *_, **__: small)
    kernels.block_table(one)
    assert [row[:2] for row in table_of(one, "A transformer block")] == [
        ["longnet, auto", "eager"], ["dense SDPA", "eager"], ["none", "eager"]
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_compiled_call_that_differs_stops_the_run(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: factor * function(x))
    x = torch.randn(4, 8)
    if factor == 1:
        assert torch.equal(kernels.compiled(torch.sin, "default", [x])(x), x.sin())
    else:
        with pytest.raises(RuntimeError, match="compiled with mode default, a call is off"):
            kernels.compiled(torch.sin, "default", [x])


@pytest.mark.slow
def test_the_first_call_is_that_of_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FIRST_CALL", kernels.FIRST_CALL.replace("8192, 8, 64", "64, 4, 8"))
    one = started()
    kernels.first_calls(one)
    assert [row[0] for row in table_of(one)] == ["head_groups", "longnet"]
    assert all(row[1] > 0 for row in table_of(one))
