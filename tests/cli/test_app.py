"""The command itself: help, version, and one line for whatever is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dilated_attention
from dilated_attention.cli import main

COMMANDS = ("bench", "report", "compare", "show", "suggest", "plan", "doctor")


def process(*arguments: str, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    source = Path(dilated_attention.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    start = ["-m", "dilated_attention"] if code is None else ["-c", code]
    command = [sys.executable, *start, *arguments]
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, encoding="utf-8")


def test_without_a_command_it_helps(run: Any) -> None:
    for arguments in ((), ("-h",), ("--help",)):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert out.startswith("Usage: dilated-attention")
        assert all(re.search(rf"^  {name} .*[^.]\.$", out, re.MULTILINE) for name in COMMANDS), out
        assert "..." not in out.replace("[ARGS]...", ""), "every command is told in a line"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps(run: Any, command: str) -> None:
    code, out, err = run(command, "-h")
    assert (code, err) == (0, "")
    assert out == run(command, "--help").out
    assert f"Usage: dilated-attention {command}" in out
    assert "╭" not in out


def test_how_numbers_count_is_said(run: Any) -> None:
    said = " ".join(run("plan", "-h").out.split())
    assert "64k (k, M, G and T count by 1024)" in said
    assert "80GB (1000³) or 24GiB (1024³)" in said


def test_version(run: Any) -> None:
    assert run("--version") == (0, f"dilated-attention {dilated_attention.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense' (see dilated-attention --help)"),
        (["--nonsense"], "No such option: --nonsense"),
        (["plan", "--zzz"], "No such option: --zzz (see dilated-attention plan --help)"),
        (["plan"], "Missing option '-n' / '--tokens' (see dilated-attention plan --help)"),
        (["plan", "-n"], "'-n' requires an argument"),
        (["plan", "-n", "1", "-w", "1", "-r", "1", "--heads", "few"], "Invalid value for '--heads'"),
        (["plan", "-n", "1", "-w", "1", "-r", "1", "stray"], "Got unexpected extra argument"),
        (["compare", "one.json"], "Missing argument 'AFTER'"),
        (["compare", "a", "b", "--threshold", "much"], "Invalid value for '--threshold'"),
        (["suggest", "--causal=maybe", "-n", "5"], "--causal"),
    ],
)
def test_wrong_usage_is_one_line(refused: Any, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_fault_of_ours_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the checking of arguments turns errors into one line."""

    def broken(*_: object) -> None:
        raise ValueError("deep inside")

    monkeypatch.setattr("dilated_attention.cli.plan.print_table", broken)
    with pytest.raises(ValueError, match="deep inside"):
        main(["plan", "-n", "8", "-w", "4", "-r", "1"])


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_what_it_needs_it_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\nfrom dilated_attention.cli import main\nsys.exit(main(['-h']))"
    )
    done = process(code=code)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f'error: this needs {missing}: pip install ".[bench]" from a clone\n'


def test_what_else_is_missing_is_no_matter_of_installing() -> None:
    code = (
        "import sys; sys.modules['dilated_attention.advice'] = None\n"
        "from dilated_attention.cli import main\nsys.exit(main(['-h']))"
    )
    done = process(code=code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_as_a_module() -> None:
    assert process("--version").stdout == f"dilated-attention {dilated_attention.__version__}\n"
    done = process("suggest", "-n", "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: -n must be a whole number")
    assert done.stderr.count("\n") == 1


def test_where_there_is_no_unicode_nothing_fails() -> None:
    done = process(
        "plan", "-n", "64k", "-w", "64k", "-r", "1", "--ranks", "4", PYTHONIOENCODING="ascii", PYTHONUTF8="0"
    )
    assert done.returncode == 0, done.stderr
    assert "time to send" in done.stdout
    done = process("show", "-n", "64", "-w", "32", "-r", "2", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "?" not in done.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import os, sys, threading\nfrom dilated_attention.cli import main\n"
        "r, w = os.pipe(); os.close(r); os.dup2(w, 1)\nsys.exit(main(['plan', '-n', '64', '-w', '8', '-r', '1']))"
    )
    done = process(code=code)
    assert "Traceback" not in done.stderr
