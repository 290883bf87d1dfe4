"""benchmarks/tune.py with everything made small, in Triton's interpreter; run by tests/bench/test_tune.py in a process
of its own."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dilated_attention.backends.triton import launch
from dilated_attention.backends.triton.dispatch import TileConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--device", "cpu", "--scale", "32768", "--seconds", "0", "--commit", "abc"]
GOOD, OTHER, ODD = (32, 32, 4, 2), (64, 32, 4, 2), (48, 32, 4, 2)  # OTHER is the default, ODD no power of two

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf - -inf


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("tune")
    monkeypatch.setattr(module, "CANDIDATES", dict.fromkeys(module.CANDIDATES, (GOOD, ODD)))
    monkeypatch.setattr(module, "DEFAULTS", dict.fromkeys(module.DEFAULTS, TileConfig(*OTHER)))
    monkeypatch.setattr(module, "LENGTHS", (8192, 32768))
    module.expected.cache_clear()
    return module


@pytest.mark.parametrize("words", ["", " causal", " nested", " causal nested"])
def test_all_kernels_are_right_in_every_setting(tune: ModuleType, words: str) -> None:
    setting = tune.Setting(64, "causal" in words, "nested" if "nested" in words else "", short=True)
    for kernel in tune.KERNELS:
        assert setting.key(kernel) == f"{kernel} 64{words} short"
        assert tune.check(setting, tune.Place("cpu", 32768), kernel, TileConfig(*GOOD)) is None


def test_in_pieces_into_one_file(tune: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, kernel, way = tmp_path / "tune.json", "dq 64 causal nested short", "forward 64 causal nested"
    common = [*SMALL, "--jobs", "1", "--head-dims", "64", "--out", str(file)]
    assert tune.main([*common, "--only", "tiles dq causal nested short"]) == 0
    assert "(48, 32, 4, 2) fails: " in capsys.readouterr().out
    assert tune.main([*common, "--only", "library forward causal nested"]) == 0
    found = json.loads(file.read_text())["cpu"]
    assert found["tiles"] in ({kernel: list(GOOD)}, {kernel: list(OTHER)})
    assert list(found["library_from"]) == [way]
    about = found["measured"]
    records = about["tiles"][kernel], about["library_from"][way]
    assert records[0]["ms"] > 0
    assert list(records[1]["ms"]) == [str(12 * tokens) for tokens in (8192, 32768)]  # rows
    assert all(about["runs"][record["run"]]["commit"] == "abc" for record in records)


@pytest.mark.parametrize("wrong", [(OTHER,), (OTHER, GOOD)])
def test_what_is_off_is_never_picked(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: Any
) -> None:
    right = launch.prepare

    def sometimes_wrong(*given: Any) -> Any:
        made = right(*given)

        def start(*tensors: Any) -> None:
            made(*tensors)
            if any(isinstance(x, TileConfig) and x.numbers() in wrong for x in given):
                tensors[6][:, -1] *= 1.01  # the last row of dv

        return start

    monkeypatch.setattr(launch, "prepare", sometimes_wrong)
    file = tmp_path / "tune.json"
    code = tune.main([*SMALL, "--jobs", "1", "--only", "tiles dkdv 64 causal nested short", "--out", str(file)])
    said = capsys.readouterr().out
    assert "dkdv 64 causal nested short (64, 32, 4, 2) off: dv by" in said
    assert code == (len(wrong) == 2)
    if code:
        assert "no candidate is right" in said
        assert not file.exists()
    else:
        assert json.loads(file.read_text())["cpu"]["tiles"] == {"dkdv 64 causal nested short": list(GOOD)}
