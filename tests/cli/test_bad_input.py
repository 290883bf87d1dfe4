"""Whatever a user gets wrong is one line and exit code 2: nothing is written, and nothing takes long."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Refused, Run

RESULTS = Path(__file__).parents[2] / "benchmarks/results/cpu/results.json"
SHOW, PLAN, LARGE = "show -n 8k -w 2k,4k -r 1,2", "plan -n 4096 -w 1k -r 1", "-n 1M -w 2k,16k -r 1,8"
LINES = [
    ("nonsense", "no such command: 'nonsense' (see dilated-attention --help)"),
    ("sugest", "did you mean 'suggest'?"),
    ("plan --zzz", "unrecognized arguments: --zzz (see dilated-attention plan --help)"),
    ("plan", "missing -n/--tokens, -w/--segment-lengths, -r/--dilation-rates (see dilated-attention plan --help)"),
    ("plan -n", "-n/--tokens: expected one argument"),
    (f"{PLAN} stray", "stray holds nothing that `suggest --json` wrote (FileNotFoundError"),
    (f"{PLAN} / stray", "unrecognized arguments: stray"),
    ("suggest x", "argument -n/--tokens: 'x' is not a whole number"),
    (f"{PLAN} --dtype int8", "--dtype must be one of"),
    (f"{PLAN} --bandwidth 0GB/s", "--bandwidth: '0GB/s' is not bytes per second"),
    (f"plan {LARGE} --ranks 1e9", "at most 4,096 ranks"),
    (f"{PLAN} --flops-per-second 400", "400T or 4e14, of 1M or more"),
    (f"encode {'x' * 300}.h5 --weights a --pool mean --out embeddings", "File name too long"),
    ("encode nothere --weights a --pool mean", "there is no file or folder nothere"),
    ("encode tests --pool mean", "required: --weights"),
    (f"{PLAN} --rule short", "unknown rule 'short': use one of longnet"),
    (f"{PLAN} --heads 12 --kv-heads 5", "12 query heads cannot be shared evenly by 5"),
    ("plan -n 4k -w 2048,4096 -r 1", "segment_lengths has 2 entries and dilation_rates 1"),
    ("plan -n 4k -w 1k,2k -r 1,2 --rule head_groups --heads 1", "2 branches and 1 key/value heads"),
    ("plan -n 4k -w 2^60 -r 1", "at most 2**48"),
    ("show -n 64 --pattern Windo(3)", "there is no Windo: use Pattern, "),
    ("show -n 64 --pattern __import__('os').system('ls')", "there is no __import__('os').system: use"),
    ("show -n 64 --pattern Window(-3)", "left must be 0 or more, got -3"),
    ("show -n 64 --pattern Window(x)", "'Window(x)' is no pattern"),
    ("show -n 64 --pattern Window(*[3])", "is no pattern"),
    ("show -n 64 --pattern Window(**{})", "is no pattern"),
    ("show -n 64 --pattern Window(3", "is no pattern"),
    ("show -n 64 --pattern=", "is no pattern (branches must be"),
    ("show -n 64 --pattern Pattern([Pattern([Dense()])])", "branches must be a list of"),
    ("show -n 64 --pattern Window(3) -r 4", "--pattern says all branches: leave out -w, -r"),
    ("show --pattern Window(3)", "missing -n/--tokens (see"),
    ("suggest -n 64k --rule windows", "unknown rule 'windows'"),
    (f"{SHOW} --query 8192", "there is no query 8192: count from 0 to 8191"),
    (f"{SHOW} --head 8", "there is no head 8: count from 0 to 7"),
    (f"{SHOW} --window 4k:2k", "give a first token and a later end"),
    (f"{SHOW} --ranks 4", "name one with -o"),
    (f"{SHOW} --ranks 100 -o a.svg", "1 to 64 ranks, got 100"),
    (f"{SHOW} --colour branch", "name one with -o"),
    (f"{SHOW} --colour red -o a.svg", "unknown colour 'red'"),
    (f"{SHOW} -o \x1b[2Jx.gif", "must be a file, and end in .html"),
    (f"{SHOW} -o /dev/null/pattern.svg", "cannot write into /dev/null"),
    ("suggest -n 2^60", "tokens must be at most 2**48"),
    ("suggest -n 1M --heads 1000000", "--heads: '1000000' is not a whole number of 1 to 16,384"),
    ("bench --suite quick,", "unknown suite '': use one or more of"),
    ("bench --device tpu", "--device must be one of cpu"),
    ("bench --seconds 0", "--seconds: '0' is not seconds, more than 0"),
    ("compare one.json", "required: AFTER"),
    ("compare a b --threshold much", "--threshold: invalid float value: 'much'"),
    ("compare \x1b[2Jnothere nothere", "cannot read"),
    (f"compare {RESULTS} {RESULTS} --threshold 0.9", "threshold must be a ratio"),
    (f"report {RESULTS} --out {RESULTS}/below", "name another with --out"),
]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_arguments(refused: Refused, line: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(*line.split(" "))
    assert match in said
    assert not any(ord(letter) < 32 for letter in said[:-1]), "a control character"
    assert not list(tmp_path.iterdir())


def changed(place: str, value: Any) -> str:
    """The committed results with one value replaced, or left out."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    *steps, last = (int(step) if step.isdigit() else step for step in place.split("."))
    inside = functools.reduce(lambda part, step: part[step], steps, found)
    inside[last] = value
    if value is None:
        del inside[last]
    return json.dumps(found)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        ("extra", functools.reduce(lambda x, _: [x], range(50), 0), "nested too deeply"),
        ("schema", None, "it has no schema"),
        ("measurements.0.peak_bytes", 10**400, "is not a finite number below 2^63"),
        ("measurements.0.ms.median", float("nan"), "nan is not a finite number"),
        ("measurements.0.ms.median", 1e15, "the median of measurements[0] is not between its"),
        ("measurements.0.ms.lower", 0, "or they are not above 0"),
        ("machine.versions", ["torch"], "machine.versions must be an object"),
        ("measurements.0.direction", "sideways", "measurements[0].direction must be forward or"),
        ("measurements.0.tokens", None, "measurements[0] has no tokens"),
        ("tables.0", [], "tables[0] must be an object"),
        ("tables.0.rows.0", ["a cell"], "another number of cells"),
        ("schema", "9" * 1000, "it has schema '999"),
        ("checks.0.errors", {"out": "far" * 1000}, "checks[0] has errors that cannot be compared"),
        ("machine.device", None, "machine has no device"),
    ],
)
def test_results_that_are_none(refused: Refused, tmp_path: Path, place: str, value: Any, match: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(changed(place, value), encoding="utf-8")
    said = refused("report", file)
    assert match in said
    assert len(said) < 500
    assert list(tmp_path.iterdir()) == [file]
    assert match in refused("compare", RESULTS, file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"), (b"{", "Expecting property name"), (b"\xff\xfe", "can't decode byte"),
        (b"[]", "it has no schema"), (b'{"schema": 2}', "has schema 2, and this version reads 1"),
        (b'{"schema": 1, "suites": []}', "it has no machine, measurements, checks"),
    ],
)  # fmt: skip
def test_what_is_no_results_file(refused: Refused, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "results.json").write_bytes(content)
    said = refused("report", tmp_path)
    assert "results.json is not a results file" in said
    assert message in said


def test_no_name_reaches_the_terminal_as_it_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(changed("measurements.0.implementation", "\x1b[2J\r=1\ud800"))
    said = run("compare", tmp_path, RESULTS).out
    assert "\x1b" not in said
    assert r"\x1b[2J\r=1\ud800" in said
