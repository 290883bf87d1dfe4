"""benchmarks/tasks.py on made-up packages, on a CPU: what is held out, what is compared, and what is measured."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import dilated_attention as da
from dilated_attention.models import LongNetLM, recall

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import tasks  # noqa: E402
import tasks_data  # noqa: E402
import tasks_shown  # noqa: E402

SHRINK, WINDOWS = 16, (8 << 10, 32 << 10)  # windows of 512 and 2,048 bytes, and in training rows of 128, too
SMALL = ["--shrink", SHRINK, "--seconds", "0.01", "--dim", "16", "--depth", "4", "--heads", "2", "--device", "cpu"]
RUN = ("full-layers-8k-1", "dense-8k-1", "dilated-learned-32k-0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages, one of which is large, one a single file and all partly the same."""
    found, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)

    def write(name: str, lines: int) -> None:
        (found / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (found / "code" / name).write_text("".join(f"def name_{draw.randrange(99)}\n" for _ in range(lines)))

    for package in range(20):
        for file in ("b.py", "inner/a.py", "a.py"):
            write(f"package{package}/{file}", 6000 if package == 3 else 80)
        (found / f"code/package{package}/same.py").write_text("# a licence that all of them have\n" * 9)
    write("single.py", 20)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """All runs, and the baselines; by run, the model that was judged, and the data."""
    found: dict[str, Any] = {}
    judged = tasks.Timed.judged

    def kept(trainer: Any, windows: list[int]) -> Any:
        found[trainer.file.stem] = trainer.plain(), trainer.data
        return judged(trainer, windows)

    with (
        mock.patch.object(tasks.Timed, "judged", kept),
        mock.patch.multiple(tasks, WINDOWS=WINDOWS, LONGEST=32 << 10, SEQUENCES=4),
    ):
        for name in ("baselines", *RUN):
            tasks.main(
                [str(word) for word in ("run", name, "--out", folder / "out", "--code", folder / "code", *SMALL)]
            )
    return found


def result(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / f"{name}.json").read_text())
    return found


def test_nothing_of_a_held_out_package_is_trained_on(folder: Path) -> None:
    data = tasks_data.code([folder / "code"], 4, 2048)
    text, held_out = data.text.numpy().tobytes(), data.facts["held_out"]
    assert 1 < len(held_out) < 5
    assert "package3" not in held_out  # it has more than a tenth of all bytes
    for file in (folder / "code").rglob("*.py"):
        package = file.relative_to(folder / "code").parts[0].removesuffix(".py")
        assert (file.read_bytes() in text) == (package not in held_out or file.name == "same.py"), file
    assert text.count(b"# a licence") == 9  # of twenty copies one is kept
    first, size = next(iter(held_out.items()))
    whole = b"".join((folder / f"code/{first}" / x).read_bytes() for x in ("a.py", "b.py", "inner/a.py"))
    assert data.held_out.numpy().tobytes()[:size] in whole
    assert sum(held_out.values()) == data.held_out.numel() == 2048 * len(data.held_out)


def test_steps_of_training(folder: Path) -> None:
    """Rows of the text with questions in them, the same whenever they are asked for."""
    data = tasks_data.code([folder / "code"], 4, 2048)
    inputs, labels, weights = tasks_data.step(data, 5, 1024, 4096, 1)
    assert inputs.shape == labels.shape == (4, 1024)
    assert (inputs[:, 0] == tasks_data.BEGIN).all()
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    for row in labels.tolist():
        assert 16 <= bytes(row).count(b"@") <= 24, "a fact and a question each, and another fact for chains"
        assert b"def name_" in bytes(row)
    answers = labels[weights == tasks_data.WEIGHT].view(-1, 4).tolist()
    assert len(answers) == 32
    assert all(bytes(answer).isalpha() for answer in answers)
    assert (weights == 1).sum() == 4096 - 128
    assert torch.equal(labels, tasks_data.step(data, 5, 1024, 4096, 1)[1])
    assert not torch.equal(labels, tasks_data.step(data, 6, 1024, 4096, 1)[1])
    with pytest.raises(ValueError, match="bytes to train on, and a row has"):
        tasks_data.step(data, 0, 1 << 20, 1 << 20, 0)


# --- patterns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8 << 10, 32 << 10])
def test_what_is_compared(n: int) -> None:
    layers = {name: tasks.patterns_of(name, n, 8, 8, 1024) for name in tasks.LONG if not name.endswith("-learned")}
    pairs = {name: sum(one.pairs(n, 8, is_causal=True) for one in some) for name, some in layers.items()}
    assert 1 <= pairs["window"] / pairs["full-layers"] < 1.001, "at equal cost"
    assert [one == da.Pattern([da.Dense()]) for one in layers["full-layers"]] == 2 * [False, False, False, True]
    assert layers["dilated"] == 8 * [da.Pattern.suggest(tokens=n, heads=8, is_causal=True)]
    assert layers["longnet"] == 8 * [da.DilatedPattern.suggest(tokens=n, heads=8)]
    # the last query sees each far key in one head
    for name, heads in (("strided", 8), ("full-heads", 1)):
        keys = [layers[name][0].keys(n - 1, head, num_tokens=n, num_heads=8, is_causal=True) for head in range(8)]
        assert sorted(key for some in keys for key in some if key < n - 1024) == [*range(n - 1024)]
        assert sum(min(some) < n - 1024 for some in keys) == heads
        assert all({*range(n - 1024, n)} <= {*some} for some in keys)


def test_learned_runs_name_their_near_branches() -> None:
    given: Any = argparse.Namespace(**tasks.MODEL)
    for name, near in (
        ("dilated-learned-32k-0", [da.Window(1023), da.Prefix(4)]),
        ("strided-learned-32k-0", [da.Window(1023)]),
    ):
        config = tasks.config_of(tasks.RUNS[name], given, 1)
        assert {calls[1] for calls in config.calls} == {da.Pattern(near)}


# --- runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUN)
def test_bits_and_recall_are_those_of_a_direct_computation(folder: Path, expected: dict[str, Any], name: str) -> None:
    """From all logits of the trained model."""
    found, (model, data) = result(folder, name), expected[name]
    assert found["tokens"] == sum(found["tokens_by_length"]) >= 2048 * len(found["tokens_by_length"])
    assert all(found["tokens_by_length"]), "rows of each length"
    assert [*found["held_out"]] == ["512", "2048"]
    for window, told in found["held_out"].items():
        labels = data.held_out.reshape(-1, int(window)).long()
        inputs = F.pad(labels[:, :-1], (1, 0), value=256)
        asked = tasks_data.planted(data.held_out, int(window), len(labels), 1)
        with torch.no_grad():
            bits = F.cross_entropy(
                LongNetLM.forward(model, inputs).movedim(-1, 1), labels, reduction="none"
            ) / math.log(2)
            said = LongNetLM.forward(model, F.pad(asked.tokens.long()[:, :-1], (1, 0), value=256)).argmax(-1)
        assert told["bits"] == pytest.approx(bits.mean().item(), rel=1e-4)
        bins = [range(one["first"], one["last"] + 1) for one in told["by_position"]]
        assert [place for one in bins for place in one] == list(range(int(window)))
        for one, inside in zip(told["by_position"], bins, strict=True):
            assert one["bits"] == pytest.approx(bits[:, inside.start : inside.stop].mean().item(), rel=1e-4)
        places = asked.rows[:, None], asked.places[:, None] + torch.arange(4)
        right = (said[places] == asked.tokens[places]).all(1)
        assert told["recall"] == recall.by_distance(asked, right)
        assert {one["from"] for one in told["recall"]} == {*tasks_data.octaves(int(window))}


def test_models_are_those_that_are_registered() -> None:
    """Without any option, as on a GPU."""
    given = tasks.training_options(tasks.arguments(["run"]), 3, "out")
    assert {name: getattr(given, name) for name in tasks.MODEL} == tasks.MODEL
    assert (given.seed, given.seconds, given.shrink, given.rows) == (3, 100.0, 1, 1)
    assert tasks.training_options(tasks.arguments(["run", "--lr", "0.5"]), 3, "out").lr == 0.5


def test_a_call_goes_on_where_the_last_one_ended(
    folder: Path, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(folder / "out")
    tasks.main(["plan", "--done", out])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert [*lines] == ["baselines", *(run.name for run in tasks.QUEUE)]
    assert {name for name, line in lines.items() if line.endswith("done")} == {"baselines", *RUN}
    tasks.main(["run", "--done", out, "--minutes", "1"])
    assert capsys.readouterr().out == "dense-8k-100 and what follows is left for the next call\n"
    with pytest.raises(SystemExit):
        tasks.main(["run", "dense-9k-0"])


# --- what is shown ----------------------------------------------------------------------------------------------


def made_up(name: str, recalled: float, bits: float) -> dict[str, Any]:
    run, held_out = tasks.RUNS[name], {}
    for window in tasks.WINDOWS:
        cells = [
            {"kind": kind, "from": x, "right": recalled} for kind in recall.KINDS for x in tasks_data.octaves(window)
        ]
        places = [{"first": 16 << i, "last": (32 << i) - 1, "bits": bits} for i in range(3)]
        held_out[str(window)] = {"recall": cells, "bits": bits, "by_position": places}
    return {
        **run._asdict(), "complete": True, "held_out": held_out, "held_out_curve": [[1, 2, bits, recalled]],
        "pairs_of_dense": 0.5, "tokens": 10, "tokens_by_length": [10], "operations_per_token": [2.0],
        "data": {"sha256": "0"}, "machine": {"device": "none", "commit": "0" * 40, "versions": {"torch": "2"}},
    }  # fmt: skip


class Process(threading.Thread):
    """As much of a process as the queue uses."""

    exitcode = 0

    def run(self) -> None:
        try:
            super().run()
        except SystemExit:
            self.exitcode = 1


def test_a_run_is_made_ready_while_the_last_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    told, begun = list[str](), {name: threading.Event() for name in RUN}

    def perform(_: Any, name: str, turn: tasks.Turn) -> None:
        begun[name].set()
        assert turn.comes.wait(9)
        told.append(f"{name} trains")
        turn.ends.set()
        if name == RUN[0]:
            assert begun[RUN[1]].wait(9), "the next run waits until this one is judged"
        told.append(f"{name} is judged")
        if name == RUN[1]:
            raise SystemExit("error: no memory")

    context = argparse.Namespace(Event=threading.Event, Process=Process)
    monkeypatch.setattr(tasks.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(tasks, "perform", perform)
    with pytest.raises(SystemExit, match=f"failed: {RUN[1]}"):
        tasks.main(["run", *RUN])
    assert told == [f"{name} {what}" for name in RUN for what in ("trains", "is judged")], "one at a time"


def registered(**changed: tuple[float, float]) -> list[dict[str, Any]]:
    runs = [run for run in tasks.QUEUE if run.part == "registered"]
    usual = {"full-layers": (0.8, 1.0), "dense": (0.7, 1.0), "window": (0.3, 1.1)}
    return [made_up(run.name, *changed.get(run.name.replace("-", "_"), usual[run.attention])) for run in runs]


def test_the_verdict_is_the_registered_one() -> None:
    assert " holds." in tasks_shown.verdict(registered())
    assert " holds." in tasks_shown.verdict(registered(dense_32k_2=(0.79, 1.0), full_layers_8k_2=(0.0, 1.02)))
    for changed, why in (
        ({"dense_32k_2": (0.81, 1.0)}, "not above the highest of `dense`."),
        ({"full_layers_32k_3": (0.7, 1.0)}, "not above the highest of `dense`."),
        ({"window_32k_1": (0.8, 1.0)}, "not above the highest of `window`."),
        ({"full_layers_8k_2": (0.8, 1.04)}, "But 1.01 times the bits were allowed."),
    ):
        said = tasks_shown.verdict(registered(**changed))
        assert " does not hold." in said
        assert why in said
    other = registered()
    other[3]["data"] = {"sha256": "1"}
    assert "cannot be compared" in tasks_shown.verdict(other)
    explored = made_up("dense-32k-0", 1.0, 0.1)
    assert tasks_shown.verdict(registered()) == tasks_shown.verdict([*registered(), explored])
    assert "1 of 15 registered runs" in tasks_shown.verdict([*registered()[1:], explored])


def test_tables_and_pictures(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no run that came to its end"):
        tasks_shown.show(tmp_path, tmp_path)
    explored = [
        made_up("window-1k-32k-0", 0.25, 1.5),
        made_up("dense-32k-0", 0.9, 0.9),
        made_up("dense-8k-100", 0.99, 9.0),
    ]
    for one in (*registered(), *explored):
        (tmp_path / f"{one['attention']}-{one['window']}-{one['seed']}.json").write_text(json.dumps(one))
    for text, bits in (("0", 2.5), ("1", 1.5)):  # the second is of another text, as those of earlier runs
        baselines = {"run": "baselines", "complete": True, "data": {"sha256": text}, "bits": {"xz -9e": bits}}
        (tmp_path / f"baselines-{text}.json").write_text(json.dumps(baselines))
    (tmp_path / "results.md").write_text((ROOT / "docs/results.md").read_text(encoding="utf-8"), encoding="utf-8")
    for _ in range(2):  # the second time changes nothing
        tasks_shown.show(tmp_path, tmp_path)
        lines = (tmp_path / "results.md").read_text(encoding="utf-8").splitlines()
        rows = [line for line in lines if line.startswith(("| dense, 32k", "| window-1k, 32k", "| dense, 8k"))]
        assert [line.split(" | ")[1:8] for line in rows] == [
            ["3", "50 %", "0M", "0", "0.70", "0.70", "0.70"], ["1", "50 %", "0M", "0", "0.25", "0.25", "0.25"],
            ["3", "50 %", "0M", "0", "0.70", "0.70", "0.70"],
        ]  # fmt: skip
    assert next(line for line in lines if line.startswith("| xz")).split()[-2] == "2.500"
    assert len([*tmp_path.glob("tasks-*.svg")]) == 4
    maps = tasks_shown.recall(tasks_shown.grouped(registered()))["vconcat"]
    assert [one["title"] for one in maps] == [*recall.KINDS]
    for cells in (one["data"]["values"] for one in maps):
        shown = {(one["trained with"], round(one["right"], 6)) for one in cells}
        assert shown == {("full-layers", 0.8), ("dense", 0.7), ("window", 0.3)}
    frontier = tasks_shown.cost(tasks_shown.grouped(registered()))["hconcat"][0]["layer"][0]["data"]["values"]
    assert [(one["name"], one["at"]) for one in frontier] == [
        ("full-layers", "trained at 32k"),
        ("full-layers", "trained at 8k"),
    ]


def test_the_page_shows_what_was_measured() -> None:
    first, last = tasks_shown.MARKS
    shown = (ROOT / "docs/results.md").read_text(encoding="utf-8").partition(first)[2].partition(last)[0]
    told = tasks_shown.section(ROOT / "benchmarks/results/tasks")
    assert shown == told, "run: python benchmarks/tasks.py draw --out benchmarks/results/tasks"
