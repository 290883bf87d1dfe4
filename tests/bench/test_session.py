"""A run keeps what it has, says how far it is, and every suite can be planned; their tables are made for real."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.bench import machine, suites
from dilated_attention.bench.implementations import named
from dilated_attention.bench.results import load
from dilated_attention.bench.run import Timing
from dilated_attention.bench.session import Session, Step
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.suites import alone, compared, models
from dilated_attention.models.slide import PRESETS

CPU = torch.device("cpu")
SMALL = ((32, 64), (1, 2))
SHORT = DilatedPattern.longnet([16, 32, 64], [1, 2, 4])


def started(**more: Any) -> Session:
    return Session(CPU, (torch.float32, torch.float16), seconds=0.0, commit="abc", **more)


def small_step(one: Session, *names: str) -> Step:
    return partial(one.compare, "suite", named(*names), Setting(128, *SMALL, CPU, heads=4, head_dim=8))


def run(one: Session, name: str) -> None:
    one.run({name: suites.PLANS[name](one)}, lambda found: None)


def table_of(made: Session, title: str = "") -> list[list[Any]]:
    rows: list[list[Any]] = next(x["rows"] for x in made.results["tables"] if title in x["title"])
    return rows


def test_results_are_saved_after_every_step_and_carry_what_a_number_needs(tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = []
    told: list[tuple[str, float | None]] = []
    one = started(watch=lambda text, share=None: told.append((text, share)))
    planned = [small_step(one, "head_groups, sdpa", "attention over heads"), small_step(one, "longnet, sdpa")]
    results = one.run({"suite": planned}, lambda found: saved.append(copy.deepcopy(found)))
    assert [(len(x["measurements"]), x["complete"]) for x in saved] == [(4, False), (6, False), (6, True)]
    assert [share for _, share in told if share is not None] == [0, 0, 0, 0.5, 0.5]
    said = [text for text, share in told if share is None]
    assert re.fullmatch(r"128 tokens, head_groups, sdpa: forward \S+ ms, forward \+ backward \S+ ms", said[0])
    assert said[1] == "128 tokens, attention over heads: forward wrong, forward + backward wrong"
    assert results["machine"]["commit"] == "abc"
    assert {"others", "too_busy"} <= results["machine"].keys()
    assert "2 of 3 implementations" in results["answer"]
    machine.write_json(tmp_path / "results.json", results)
    assert load(tmp_path)["dtypes"] == ["float32", "float16"]


def test_an_interrupted_run_keeps_what_it_has() -> None:
    saved: list[dict[str, Any]] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    one = started()
    planned = [small_step(one, "head_groups, sdpa"), interrupted, small_step(one, "longnet, sdpa")]
    with pytest.raises(KeyboardInterrupt):
        one.run({"suite": planned}, lambda found: saved.append(copy.deepcopy(found)))
    assert saved[-1]["complete"] is False
    assert [x["implementation"] for x in saved[-1]["measurements"]] == ["head_groups, sdpa"] * 2
    assert saved[-1]["answer"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", suites.PLANS)
def test_every_suite_can_be_planned(name: str, device: str) -> None:
    made = started()
    made.device, made.on_cuda = torch.device(device), device == "cuda"  # as it would be with a GPU
    assert len(suites.PLANS[name](made)) > 1


def test_quick_has_the_patterns_that_are_suggested() -> None:
    for step in suites.PLANS["quick"](started()):
        _, which, setting = step.args  # type: ignore[attr-defined]
        assert {"head_groups, auto", "longnet, auto", "dense SDPA"} < {one.name for one in which}
        assert all(one.name != "attention over heads" for one in which), "its check makes an old claim"
        for rule in ("head_groups", "longnet", "torchscale"):
            assert setting.pattern(rule) == DilatedPattern.suggest(setting.tokens, setting.heads, rule=rule)


def test_suites_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made short: every table has its rows, all of them right, and ways that compute the same give the same."""
    made = started()
    numbers = iter(range(1, 1000))  # each call takes longer than the one before

    def time(calls: dict[Any, Any], *_: Any, **__: Any) -> dict[Any, Timing]:
        for call in calls.values():
            call()
        return {key: Timing(next(numbers), 0.0, 0.0, 1) for key in calls}

    monkeypatch.setattr(made, "time", time)
    monkeypatch.setitem(PRESETS["gigapath_slide_enc12l384d"], "depth", 2)
    short = {
        "ENCODERS": ("gigapath_slide_enc12l384d",), "HEAD_DIMS": (24,), "TILES": {"cpu": (20,)}, "TRAINED": {"cpu": 20},
        "SIZES": {"cpu": {"125M": (models.LONG, (65,)), "0.6B": (models.FAR, (65,))}}, "COMPILED": (65,),
        "PROMPTS": {"cpu": (20,)}, "GENERATED": {"cpu": 2},
    }  # fmt: skip
    for name, value in short.items():
        monkeypatch.setattr(models, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it takes long
    made.run({name: suites.PLANS[name](made) for name in ("slides", "language")}, lambda found: None)
    tables = {table["title"]: table["rows"] for table in made.results["tables"]}
    assert [len(rows) for rows in tables.values()] == [2, 1, 4, 2, 1]
    assert {x["implementation"] for x in made.results["checks"] if x["verdict"] != "exact"} == {models.RELEASED}
    assert 0 < tables["Whole slide encoders, forward"][1][5] < 1e-5


def test_packed_sequences_are_timed_beside_one_with_as_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = started()
    monkeypatch.setattr(alone, "COUNT", 4)
    monkeypatch.setattr(made, "time", lambda calls: {key: Timing(1.0, 1.0, 1.0, 1) for key in calls})
    run(made, "packed")
    rows = table_of(made)
    assert [row[0] for row in rows] == [what for what in alone.SHAPES for _ in range(2)]
    for many, one in zip(rows[::2], rows[1::2], strict=True):
        assert one[2] < many[2]  # it has the longer segments
        assert many[3] == one[3] == 1.0
    assert all(check["verdict"] == "exact" for check in made.results["checks"])


def test_where_the_time_goes_and_only_of_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    one = started()
    setting = one.setting(128, SMALL, heads=4, head_dim=8)
    ((name, passes, operators, copies, ms, copied_ms, most),) = compared.kernels_of(
        one, setting, *named("longnet, sdpa")
    )
    assert (name, passes) == ("longnet, sdpa", "forward + backward")
    assert operators > copies > 0
    assert ms > copied_ms > 0
    assert " ms in " in most
    assert list(compared.kernels_of(one, setting, *named("attention over heads"))) == []
    monkeypatch.setattr(one, "check", Mock(side_effect=RuntimeError("the kernel says no")))
    assert list(compared.kernels_of(one, setting, *named("longnet, sdpa"))) == []


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_every_one_token_step_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    one, right = started(), alone.dilated_attention
    monkeypatch.setattr(alone, "PATTERN", SHORT)
    monkeypatch.setattr(alone, "CONTEXT", {"cpu": 256})
    monkeypatch.setattr(alone, "dilated_attention", lambda *x, **options: factor * right(*x, **options))
    run(one, "decode")
    rows = table_of(one)
    assert one.results["checks"][0]["verdict"] == ("exact" if factor == 1 else "wrong")
    if factor != 1:  # the first wrong step ends it, without a time
        assert [row[3] for row in rows] == [None]
        assert len(one.results["tables"]) == 1
        return
    assert [row[0] for row in rows] == list(range(240, 256))
    assert all(row[2] < 1e-4 and row[3] > 0 for row in rows)
    # at the end of every segment all 16 rows of each branch are seen, by the heads at the last offset
    assert rows[-1][1] == 16 * (12 + 6 + 3)
    assert all(row[1] > 0 for row in table_of(one, "from Python"))


@pytest.mark.parametrize("fault", ["", "scaled", "late", "alone"])
def test_a_stream_is_checked_before_and_while_it_is_timed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    one, right = started(), alone.stream
    monkeypatch.setattr(alone, "PATTERN", SHORT)
    monkeypatch.setattr(alone, "SIZES", {"cpu": (512, 128)})

    def changed(chunks: Any, *pattern: Any, **options: Any) -> Any:
        if fault == "alone":  # each chunk as if it began the sequence: wrong as soon as a chunk ends in a segment
            for chunk in chunks:
                yield from right([chunk], *pattern, **options)
            return
        for index, out in enumerate(right(chunks, *pattern, **options)):
            wrong = fault == "scaled" or (fault == "late" and index == 3)
            yield 1.01 * out if wrong else out

    monkeypatch.setattr(alone, "stream", changed)
    run(one, "stream")
    assert {x["verdict"] for x in one.results["checks"]} == {"wrong" if fault else "exact"}
    if fault in ("scaled", "alone"):
        assert one.results["tables"] == []  # the short stream was wrong already
        return
    rows = table_of(one)
    assert [row[2] for row in rows] == ["no", "yes"]
    assert all((row[3] is None) == bool(fault) for row in rows)
    assert all(row[7] == 4 * 32 for row in rows)


def test_each_case_of_the_kernels_stands_beside_dense_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "CASES", {"C": (128, SMALL, 4, 8)})
    monkeypatch.setattr(compared, "ROWS", 64)
    monkeypatch.setattr(compared, "ALSO_SHORT", ())  # compiling takes long
    one = started()
    for step in compared.kernels(one)[:2]:  # the case that is not causal, and its segments
        step()
    assert {x["status"] for x in one.results["measurements"]} == {"measured", "skipped", "wrong"}
    segments = [x for x in one.results["measurements"] if x["lengths"] == [64]]
    assert {(x["samples"], x["tokens"], x["status"]) for x in segments} == {(2, 64, "measured")}
