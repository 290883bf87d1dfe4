"""`bench`: what is kept whatever happens, and the exit code. What is measured is not this file's matter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import suites

Results = dict[str, Any]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, results: Results) -> Callable[[Callable[..., None]], list[dict[str, Any]]]:
    """Instead of a run: ``act(save, results)``. Returns the arguments of the calls."""

    def install(act: Callable[..., None]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run(names: Any, device: Any, dtypes: Any = None, *, save: Any, watch: Any, **more: Any) -> Results:
            calls.append({"suites": names, "device": device, "dtypes": dtypes, **more})
            watch.step("measuring", 0.5)
            act(save, results)
            return results

        monkeypatch.setattr(suites, "run", run)
        return calls

    return install


def complete(save: Any, results: Results) -> None:
    save(results)


def test_a_run(run: Any, fake: Any, results: Results, tmp_path: Path) -> None:
    calls = fake(complete)
    code, out, err = run("bench", "--out", tmp_path / "new", "--device", "cpu")
    assert code == 0, err
    assert "[50%] measuring\n" in err
    assert calls == [
        {"suites": ["quick"], "device": torch.device("cpu"), "dtypes": None, "seconds": None, "commit": None}
    ]
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == results
    assert (tmp_path / "new" / "index.html").is_file()
    assert {file.name for file in (tmp_path / "new" / "plots").iterdir()} >= {"time.svg", "time.png"}
    for said in ("CPU 9000", "1.2 (1.11–1.48)", "Take longnet", "results.json", "index.html"):
        assert said in out


@pytest.mark.usefixtures("no_pictures")
def test_options_reach_the_run(run: Any, fake: Any, tmp_path: Path) -> None:
    calls = fake(complete)
    line = ("--suite", "copies,ring", "--suite", "profile", "--dtype", "bf16,float32", "--seconds", "1.5")
    assert run("bench", "--out", tmp_path, "--device", "cpu", *line, "--commit", "abc").code == 0
    assert calls == [
        {
            "suites": ["copies", "ring", "profile"],
            "device": torch.device("cpu"),
            "dtypes": [torch.bfloat16, torch.float32],
            "seconds": 1.5,
            "commit": "abc",
        }
    ]


@pytest.mark.usefixtures("no_pictures")
def test_json(run: Any, fake: Any, results: Results, tmp_path: Path) -> None:
    fake(complete)
    code, out, err = run("bench", "--out", tmp_path, "--json")
    assert (code, json.loads(out)) == (0, results)
    assert f"written: {tmp_path / 'index.html'}" in err


@pytest.mark.usefixtures("no_pictures")
def test_a_second_run_keeps_the_first_and_says_what_changed(
    run: Any, fake: Any, results: Results, tmp_path: Path
) -> None:
    fake(complete)
    run("bench", "--out", tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    out = run("bench", "--out", tmp_path).out
    assert (tmp_path / "previous.json").read_bytes() == before
    assert "compared with the run before" in out
    assert " same" in out
    assert out.rstrip().endswith("index.html")


def test_the_help_names_every_suite(run: Any) -> None:
    listed = run("bench", "-h").out.partition("Suites:\n")[2].partition("\n\n")[0]
    assert sorted(line.split()[0] for line in listed.splitlines()) == sorted(suites.SUITES)
    assert "the six from copies to optimisations" in listed
    assert (len(suites.ALL), suites.ALL[0], suites.ALL[-1]) == (6, "copies", "optimisations")


@pytest.mark.usefixtures("no_pictures")
def test_a_busy_machine_is_told(run: Any, fake: Any, results: Results, tmp_path: Path) -> None:
    results["machine"] |= {"too_busy": True, "others": 0.46, "load_max": 5.0}
    fake(complete)
    assert "too busy to trust these times: other work took 46% of its cores" in run("bench", "--out", tmp_path).out


def test_with_pytorch_alone_it_still_measures(tmp_path: Path) -> None:
    """Results.json is written, and a report can be made elsewhere."""
    code = (
        "import sys\nfor name in ('rich', 'altair', 'jinja2'): sys.modules[name] = None\n"
        "from dilated_attention.bench import suites\nfrom dilated_attention.cli import main\n"
        "suites.run = lambda names, *_, save, **more: save({'machine': dict(dirty=False, commit='abc', device='CPU', "
        "threads=1, load=0, versions={}), 'answer': ','.join(names), 'checks': [], 'measurements': []})\n"
        "code = main(sys.argv[1:])\nassert code == 0, code\n"
        "for wrong in (['--seconds', 'nan'], ['--out', '/dev/null/x'], ['--suite', 'fast']):\n"
        "    assert main(['bench', *wrong]) == 2\n"
    )
    suites = ("--suite", "copies,ring", "--suite", "decode")
    command = [sys.executable, "-c", code, "bench", *suites, "--out", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "copies,ring,decode" in done.stdout
    assert json.loads((tmp_path / "results.json").read_text())["answer"] == "copies,ring,decode"
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    for line, says in zip(told, ("--seconds must be", "/dev/null", "fast"), strict=True):
        assert says in line


@pytest.mark.usefixtures("no_pictures")
def test_one_of_ours_is_wrong(run: Any, fake: Any, results: Results, tmp_path: Path) -> None:
    results["checks"][0]["verdict"] = "wrong"
    fake(complete)
    ran = run("bench", "--out", tmp_path)
    assert ran.code == 1
    assert "OURS: longnet, sdpa" in ran.out


def interrupted(save: Any, results: Results) -> None:
    save({**deepcopy(results), "measurements": results["measurements"][:2]})
    raise KeyboardInterrupt


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("is_ours_wrong", [False, True])
def test_interrupted(run: Any, fake: Any, results: Results, tmp_path: Path, is_ours_wrong: bool) -> None:
    """What there is was written, says so, and has its report."""
    if is_ours_wrong:
        results["checks"][0]["verdict"] = "wrong"
    fake(interrupted)
    ran = run("bench", "--out", tmp_path)
    assert ran.code == 130
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["complete"] is False
    assert len(written["measurements"]) == 2
    assert "interrupted" in (tmp_path / "index.html").read_text()
    assert "The run was interrupted" in ran.out


def at_once(save: Any, results: Results) -> None:
    raise KeyboardInterrupt


def test_interrupted_at_once(run: Any, fake: Any, tmp_path: Path) -> None:
    fake(at_once)
    ran = run("bench", "--out", tmp_path)
    assert ran.code == 130
    assert "nothing was written" in ran.out
    assert list(tmp_path.iterdir()) == []


def failing(save: Any, results: Results) -> None:
    save({**results, "complete": False})
    raise RuntimeError("a fault of ours")


def test_a_fault_keeps_what_was_measured(run: Any, fake: Any, tmp_path: Path) -> None:
    fake(failing)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run("bench", "--out", tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["complete"] is False
