"""benchmarks/tune.py: its logic here, its kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
import json
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dilated_attention.backends.triton import dispatch
from dilated_attention.backends.triton.dispatch import form_of, is_short, measured_as
from dilated_attention.backends.triton.nesting import launches
from dilated_attention.call import Call
from tests.triton_kernels.runner import run

FOLDER = Path(__file__).parents[2] / "benchmarks"
GPU = torch.device("cuda")


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("tune")


def piece(date: str, tiles: dict[str, Any], library: dict[str, Any]) -> dict[str, Any]:
    about = {"runs": {date: {"commit": date}}}
    for part, found in (("tiles", tiles), ("library_from", library)):
        about[part] = {key: {"ms": 1.0, "run": date} for key in found}
    return {"9.0": {"tiles": tiles, "library_from": library, "measured": about}}


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run("triton_kernels/tune_cases.py", TRITON_INTERPRET="1") == 7


@pytest.mark.parametrize(
    ("library_wins", "expected"),
    [("....", None), ("...x", 1 << 20), ("..xx", 1 << 17), ("xx.x", 1 << 20), ("xxx.", None), ("xxxx", 1 << 13)],
)
def test_the_library_wins_from_a_length_on(tune: ModuleType, library_wins: str, expected: int | None) -> None:
    times = {
        n: {"triton": 2.0, "sdpa": 1.0 if x == "x" else 3.0} for n, x in zip(tune.LENGTHS, library_wins, strict=True)
    }
    assert tune.library_from(times) == expected


@pytest.mark.parametrize("device", dispatch.measured())
def test_the_choice_is_what_follows_from_the_times(tune: ModuleType, device: str) -> None:
    entry = dispatch.measured()[device]
    for key, first in entry["library_from"].items():
        times = {int(rows): both for rows, both in entry["measured"]["library_from"][key]["ms"].items()}
        assert tune.library_from(times) == first, key


def test_merged_files_are_written_into_the_code(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, one = tmp_path / "measured.json", tmp_path / "tune.json", tmp_path / "one.json"
    code.write_text(configs_text := tune.MEASURED.read_text())
    monkeypatch.setattr(tune, "MEASURED", code)
    one.write_text(json.dumps(piece("monday", {"dq 64": [16, 16, 1, 1]}, {})))
    assert tune.main(["--merge", str(one), "--out", str(out)]) == 0
    assert code.read_text() == configs_text
    assert tune.main(["--merge", str(one), "--out", str(out), "--write"]) == 0
    before, after = json.loads(configs_text)["9.0"], json.loads(code.read_text())["9.0"]
    assert after["tiles"] == before["tiles"] | {"dq 64": [16, 16, 1, 1]}
    assert after["library_from"] == before["library_from"]
    assert '      "dq 64": [16, 16, 1, 1],\n' in code.read_text()
    assert '        "dq 64": {"ms": 1.0, "run": "monday"}' in code.read_text()


@pytest.mark.parametrize("scale", [1, 32768])
def test_patterns_are_what_their_keys_say(tune: ModuleType, scale: int) -> None:
    """All but those apart are one launch; short is short and the rest is not."""
    for kind in (tune.Setting(*x) for x in product(tune.SHAPES, (False, True), (*tune.RULES, "dense"), (False, True))):
        for tokens in {kind.shape.tokens, min(kind.shape.tokens, tune.CHECK_TOKENS), *tune.LENGTHS}:
            pattern = kind.pattern(tokens, scale)
            call = Call(pattern, kind.causal, head_dim=kind.size, dtype=torch.bfloat16, kv_heads=kind.shape.heads)
            assert (len(launches(call)) > 1) == kind.form.startswith("apart")
            assert form_of(call, alone=False) == kind.form.removesuffix(" thin")
            if scale == 1 and tokens >= tune.LENGTHS[-2]:  # shorter ones have room for few branches
                assert measured_as(call) == kind.form
        assert is_short(Call(pattern, samples=1, queries=kind.shape.tokens, heads=kind.shape.heads)) == kind.short
