"""Whatever a user gets wrong is one line and exit code 2: nothing is written, and nothing takes long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilated_attention.cli import main
from tests.cli.conftest import Refused

RESULTS = Path(__file__).parents[2] / "benchmarks/results/cpu/results.json"
PATTERN = ["-w", "2k,16k", "-r", "1,8"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["plan", "-n", "1M", *PATTERN, "--ranks", "1e9"], "at most 131,072 ranks"),
        (["show", "-n", "1M", *PATTERN, "--ranks", "1e9", "-o", "a.svg"], "1 to 64 ranks"),
        (["suggest", "-n", "1M", "--ranks", "1e6"], "at most 131,072 ranks"),
        (["suggest", "-n", "1M", "--heads", "1000000"], "--heads"),
        (["plan", "-n", "1M", *PATTERN, "--memory", "80"], "a size of a byte or more with its unit"),
        (["plan", "-n", "1M", *PATTERN, "--latency", "10"], "a time with its unit"),
        (["plan", "-n", "1M", *PATTERN, "--bandwidth", "50"], "50GB/s"),
        (["show", "-n", "64", *PATTERN, "-o", "x" * 300 + ".png"], "name another with -o"),
        (["show", "-n", "64", *PATTERN, "-o", "\x1b[2Jx.gif"], r"must end in .html"),
        (["compare", "\x1b[2Jnothere", "nothere"], "cannot read"),
    ],
)
def test_arguments(refused: Refused, arguments: list[str], match: str) -> None:
    said = refused(*arguments)
    assert match in said
    assert not any(ord(letter) < 32 for letter in said[:-1]), "a control character"


@pytest.mark.parametrize("tokens", ["1,000,000", "1B", "1b", "64k", "1_000_000"])
def test_numbers_as_people_write_them(capsys: pytest.CaptureFixture[str], tokens: str) -> None:
    assert main(["suggest", "-n", tokens]) == 0
    assert "pattern = DilatedPattern" in capsys.readouterr().out


def changed(place: list[Any], value: Any) -> str:
    """The committed results with one value replaced, or left out."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    inside = found
    for step in place[:-1]:
        inside = inside[step]
    if value is None:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("{}", "it has no schema"),
        (changed(["measurements", 0, "direction"], "sideways"), "measurements[0].direction must be forward or"),
        (changed(["measurements", 0, "tokens"], None), "measurements[0] has no tokens"),
        (
            changed(["measurements", 0, "ms", "median"], float("nan")),
            "ms.median must be a finite number of more than 0",
        ),
        (changed(["measurements", 0, "ms", "median"], 0), "ms.median must be a finite number of more than 0"),
        (changed(["tables", 0], []), "tables[0] must be an object"),
        (changed(["tables", 0, "rows", 0], ["a cell"]), "another number of cells"),
        (changed(["checks", 0, "errors"], {"out": "far"}), "must be a number"),
        (changed(["machine", "device"], None), "machine has no device"),
    ],
)
def test_results_that_are_none(refused: Refused, tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text, encoding="utf-8")
    assert match in refused("report", file)
    assert list(tmp_path.iterdir()) == [file]
    if "measurements" in match or "median" in match or "schema" in match:
        assert match in refused("compare", file, RESULTS)


def test_no_name_reaches_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(changed(["measurements", 0, "implementation"], "\x1b[2J\r=1"))
    main(["compare", str(tmp_path), str(RESULTS)])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"\x1b[2J\r=1" in said
