"""A run keeps what it has, says how far it is, and every suite can be planned; their tables are made for real."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch

from dilated_attention.bench import session, steps
from dilated_attention.bench.implementations import named
from dilated_attention.bench.machine import write_json
from dilated_attention.bench.setting import CHECK_TOKENS, Setting
from dilated_attention.bench.steps import Session, Step, compare_step
from dilated_attention.bench.suites import ALL, SUITES, copies, improved, optimisations, profile, steps_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a test of their own, and take seconds."""
    monkeypatch.setattr(
        steps, "ceilings", lambda device, dtype: {"dtype": "float32", "matmul_tflops": 1.0, "copy_gb_per_s": 1.0}
    )


SMALL = ((32, 64), (1, 2))


class Counting:
    def __init__(self) -> None:
        self.total, self.steps, self.said = 0, list[str](), list[str]()

    def begin(self, total: int) -> None:
        self.total = total

    def step(self, text: str) -> None:
        self.steps.append(text)

    def say(self, text: str) -> None:
        self.said.append(text)


def started(watch: Any = None) -> Session:
    return Session(CPU, (torch.float32,), watch=watch, seconds=0.0, commit="abc")


def small_step(*names: str) -> Step:
    setting = Setting(128, *SMALL, CPU, heads=4, head_dim=8)
    return compare_step("suite", named(*names), setting)


def test_results_are_saved_after_every_step_and_carry_what_a_number_needs(tmp_path: Any) -> None:
    saved: list[dict[str, Any]] = []
    watch = Counting()
    planned = [small_step("head_groups, sdpa", "attention over heads"), small_step("longnet, sdpa")]
    results = started(watch).run({"suite": planned}, lambda found: saved.append(copy.deepcopy(found)))
    assert [len(x["measurements"]) for x in saved] == [4, 6, 6]
    assert [x["complete"] for x in saved] == [False, False, True]
    assert watch.total == len(watch.steps) == 6
    assert watch.said[:2] == ["head_groups, sdpa: exact", "attention over heads: wrong"]  # as it becomes known
    assert re.fullmatch(r"\d+ tokens, head_groups, sdpa: forward \S+ ms, forward \+ backward \S+ ms", watch.said[2])
    assert results["machine"]["commit"] == "abc"
    assert results["ceilings"][0]["dtype"] == "float32"
    assert len(results["claims"]) == 12
    assert "2 of 3 implementations" in results["answer"]
    write_json(tmp_path / "results.json", results)
    assert json.loads((tmp_path / "results.json").read_text())["schema"] == 1


def test_an_interrupted_run_keeps_what_it_has() -> None:
    saved: list[dict[str, Any]] = []

    def interrupted(_: Session) -> None:
        raise KeyboardInterrupt

    planned = [small_step("head_groups, sdpa"), Step("then", 1, interrupted), small_step("longnet, sdpa")]
    with pytest.raises(KeyboardInterrupt):
        started().run({"suite": planned}, lambda found: saved.append(copy.deepcopy(found)))
    assert saved[-1]["complete"] is False
    assert [x["implementation"] for x in saved[-1]["measurements"]] == ["head_groups, sdpa"] * 2
    assert saved[-1]["answer"]


def test_a_run_goes_on_where_it_was_interrupted() -> None:
    saved: list[dict[str, Any]] = []
    ran: list[str] = []

    def interrupted(_: Session) -> None:
        raise KeyboardInterrupt

    def keep(results: dict[str, Any]) -> None:
        saved.append(json.loads(json.dumps(results)))

    first, last = small_step("head_groups, sdpa"), small_step("longnet, sdpa")
    with pytest.raises(KeyboardInterrupt):
        started().run({"suite": [first, Step("then", 1, interrupted), last]}, keep)
    before = saved[-1]
    half = {**before["measurements"][0], "step": 1, "implementation": "half measured"}
    before["measurements"].append(half)
    again = Session(CPU, (torch.float32,), seconds=0.0, commit="def", before=before)
    assert again.comparison._pace  # what is known of speed is known again
    results = again.run({"suite": [first, Step("then", 1, lambda _: ran.append("then")), last]}, keep)
    assert results["complete"]
    assert results["steps_done"] == {"suite": 3}
    assert ran == ["then"]
    assert [x["implementation"] for x in results["measurements"]] == ["head_groups, sdpa"] * 2 + ["longnet, sdpa"] * 2
    assert results["machine"]["commit"] == "abc"
    assert [x["commit"] for x in results["machine"]["continued"]] == ["def"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"complete": True}, "complete"),
        ({"schema": 0}, "from the start"),
        ({"machine": {"device": "another", "versions": {}}}, "began with device another"),
        ({"dtypes": ["float16"]}, "began with float16, and now it is float32"),
    ],
)
def test_some_runs_cannot_go_on(change: dict[str, Any], message: str) -> None:
    before = {**started().results, **change}
    with pytest.raises(ValueError, match=message):
        Session(CPU, (torch.float32,), before=before)


def test_a_run_goes_on_with_the_same_suites_only() -> None:
    before = {**started().results, "planned": ALL}
    session.check_continues(before, ["all"], CPU, [torch.float32])
    with pytest.raises(ValueError, match="and now it is quick"):
        session.check_continues(before, ["quick"], CPU, [torch.float32])


def test_unknown_suites_are_refused_before_any_work() -> None:
    for names in (["fast"], [], ["quick", "all", "none"]):
        with pytest.raises(ValueError, match="use one or more of quick, copies"):
            session.run(names, CPU, save=lambda results: None)


def test_all_is_every_suite_but_quick() -> None:
    assert set(ALL) == set(SUITES) - {"quick", "all"}
    assert all(SUITES.values())


@pytest.mark.parametrize("name", [*ALL, "quick"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_suite_can_be_planned(name: str, device: str) -> None:
    planned = steps_of(
        name,
        Session(torch.device(device), (torch.float32, torch.float16), commit="abc") if device == "cpu" else _on_cuda(),
    )
    assert planned
    assert all(step.size > 0 for step in planned)


def _on_cuda() -> Session:
    """As it would be with a GPU; the machine's own description needs none."""
    made = Session(CPU, (torch.float32, torch.float16), commit="abc")
    made.device = torch.device("cuda")
    return made


def test_checks_stay_small_at_any_length() -> None:
    for tokens in (1, 100, 2048, 1 << 20):
        for small in Setting(tokens, (1024, 4096), (1, 4), CPU).checks():
            assert 1 <= small.tokens <= CHECK_TOKENS
            assert min(small.lengths) >= 1


# --- the tables of the suites -----------------------------------------------------------------------------------


def test_rows_are_taken_out_in_every_way_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "TOKENS", (2048,))
    monkeypatch.setattr(copies, "timed", lambda calls, device: session_timings(calls))
    one = started()
    copies.rows_table(one)
    (table,) = one.results["tables"]
    copied = {row[1]: row[2] for row in table["rows"]}
    assert copied["strided view"] == copied["reshape"] == "no"
    assert copied["index_select"] == copied["slice, then contiguous"] == "yes"


def test_a_way_that_takes_other_rows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "TOKENS", (2048,))
    monkeypatch.setattr(copies, "RATE", 4)
    right = copies.ways_to_take
    monkeypatch.setattr(copies, "ways_to_take", lambda *x: {**right(*x), "bad": lambda t: t[:, ::4].flip(1)})
    with pytest.raises(RuntimeError, match="bad takes other rows"):
        copies.rows_table(started())


def session_timings(calls: Any) -> Any:
    from dilated_attention.bench.run import time_calls

    return time_calls(calls, CPU, seconds=0.0, least=1)


def test_the_two_classes_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improved, "PATTERNS", (SMALL,))
    monkeypatch.setattr(improved, "TOKENS", (128,))
    one = started()
    improved.distances(one)
    assert one.results["tables"][0]["rows"][0][1:] == [0.0] * 4


def test_the_profile_finds_copies_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PATTERNS", (SMALL,))
    monkeypatch.setattr(profile, "TOKENS", 128)
    monkeypatch.setattr(
        profile, "SUBJECTS", ("head_groups, sdpa", "copy and gather, index_select", "gather-pad-scatter")
    )
    one = started()
    profile.kernel_table(one)
    rows = {row[0]: row for row in one.results["tables"][0]["rows"]}
    assert rows["copy and gather, index_select"][3] > rows["head_groups, sdpa"][3]
    assert rows["gather-pad-scatter"][1].startswith("forward, as")


def test_the_path_leads_from_the_class_to_the_kernel() -> None:
    module = named("DilatedAttention")[0].build(Setting(64, *SMALL, CPU, heads=4, head_dim=8))
    found = profile.path(lambda: module.attention(*module.inputs))
    assert found[0] == "nn.attention.DilatedAttention.forward"
    assert "functional.attend" in found
    assert found[-1].startswith("backends.")


def test_what_is_wrong_gets_no_time_among_the_optimisations(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Counting()
    one = started(watch)
    monkeypatch.setattr(one.comparison, "check", lambda implementation, setting: "the kernel says no")
    for step in optimisations.steps(one):
        if step.text != "packed":  # messages alone: no attention in it
            step.run(one)
    assert one.results["tables"] == []
    assert len(watch.said) == 5


def test_optimisations_on_and_off() -> None:
    one = started()
    rows = optimisations.packed(one)
    assert [row[0] for row in rows] == [optimisations.PACKED] * 3
    assert all(row[2] > 0 and row[3] > 0 for row in rows)
    assert optimisations.row("x", "y", 10.0, 8.0, "ms")[-1] == pytest.approx(0.2)
    assert optimisations.row("x", "y", None, 8.0, "ms")[-1] is None
