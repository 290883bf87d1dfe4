"""The script that runs the GPU's tests in many processes, tried with jobs that need none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("run_gpu.py")


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_gpu"] = module
    spec.loader.exec_module(module)
    return module


def python(runner: ModuleType, name: str, code: str) -> object:
    return runner.Job(name, (sys.executable, "-c", code), {})


def test_what_failed_or_did_not_end_is_told(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = python(runner, "good", "print('3 passed, 1 skipped in 1 s')")
    assert runner.run_all([good, good], 2, time.monotonic() + 60, tmp_path) == 0
    assert "6 passed, 2 skipped" in capsys.readouterr().out
    wrong = python(runner, "wrong", "print('1 failed, 2 passed'); raise SystemExit(1)")
    endless = python(runner, "endless", "import time; time.sleep(600)")
    assert runner.run_all([good, wrong], 2, time.monotonic() + 60, tmp_path) == 1
    assert "not right: wrong" in capsys.readouterr().out
    assert runner.run_all([endless, good], 1, time.monotonic() + 2, tmp_path) == 1
    told = capsys.readouterr().out
    assert "not right: endless" in told
    assert "good: 0 s, exit None, not run" in told


def test_files_that_are_cut_otherwise_are_there(runner: ModuleType) -> None:
    assert [file for file in runner.CHUNKS if not (SCRIPT.parents[1] / file).exists()] == []


def test_chunks_are_all_tests_once() -> None:
    def names(chunk: str) -> list[str]:
        asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests/test_fuse_gpu.py"]
        found = subprocess.run(
            asked, cwd=SCRIPT.parents[1], env=os.environ | {"CHUNK": chunk}, capture_output=True, text=True, check=True
        )
        return [line for line in found.stdout.splitlines() if "::" in line]

    everything = names("0/1")
    assert len(everything) > 10
    assert names("0/2") + names("1/2") == everything


def test_tests_that_cannot_be_collected_are_no_success(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "ROOT", tmp_path)  # where there are no tests
    with pytest.raises(SystemExit, match="cannot be collected"):
        list(runner.make_jobs())
