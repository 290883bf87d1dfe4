"""The command itself: help, version, completion, and one line for whatever is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dilated_attention
from dilated_attention.cli import main
from dilated_attention.cli.app import parsers

COMMANDS = (
    "bench", "report", "compare", "show", "suggest", "plan", "doctor", "encode", "sample", "fit", "evaluate", "convert",
    "completion",
)  # fmt: skip
NO_UNICODE = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
SCRIPT = "import sys; from dilated_attention.cli import main; sys.exit(main())"  # what pip installs as the command


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python *arguments``, which finds this package."""
    source = Path(dilated_attention.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, timeout=120, encoding="utf-8",
    )  # fmt: skip


def test_without_a_command_it_helps(run: Any) -> None:
    assert [*parsers()] == [*COMMANDS]
    for arguments in ((), ("-h",), ("--help",)):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert out.startswith("usage: dilated-attention")
        assert all(re.search(rf"^  {name} .*[^.]\.$", out, re.MULTILINE) for name in COMMANDS), out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example(run: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(command, "-h")
    assert (code, err) == (0, "")
    assert f"usage: dilated-attention {command}" in out
    assert re.search(rf"\nExample: .*dilated-attention {command}", out)
    assert "\x1b" not in out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    coloured = run(command, "-h").out
    assert "\x1b[36m--help\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == out
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(command, "-h").out == out


def test_help_comes_without_torch_and_without_what_is_not_installed(tmp_path: Path) -> None:
    script = tmp_path / "dilated-attention"
    script.write_text(
        "import sys\nfor name in ('rich', 'altair'): sys.modules[name] = None\n"
        "from dilated_attention.cli import main\nfor command in sys.argv[1:]:\n"
        "    assert main([command, '--help']) == 0\n    assert 'torch' not in sys.modules, command"
    )
    done = process(str(script), *COMMANDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: dilated-attention ") == len(COMMANDS)
    done = process("-m", "dilated_attention", PYTHONPROFILEIMPORTTIME="1")  # tells its imports on stderr
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_shell_completes_commands_and_options(run: Any) -> None:
    words = "COMP_WORDS=(dilated-attention plan --la); COMP_CWORD=2; _dilated_attention; echo ${COMPREPLY[@]}"
    more = words.replace("plan --la", "comp").replace("CWORD=2", "CWORD=1")
    script = f"{run('completion').out}\n{words}\n{more}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["--latency", "compare", "completion"], done.stderr


def test_in_the_command_the_names_come_when_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys, dilated_attention as da\nassert 'torch' not in sys.modules\n"
        "print(*(getattr(da, name).__name__ for name in da.__all__), dir(da) == sorted(da.__all__), hasattr(da, 'x'))"
    )
    script = tmp_path / "dilated-attention"
    script.write_text(code)
    done = process(str(script))
    assert done.stdout.split() == [*dilated_attention.__all__, "True", "False"], done.stderr


def test_version(run: Any) -> None:
    assert run("--version") == (0, f"dilated-attention {dilated_attention.__version__}\n", "")


def test_a_fault_of_ours_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the checking of arguments turns errors into one line."""
    monkeypatch.setattr("dilated_attention.cli.output.print_table", mock.Mock(side_effect=ValueError("deep inside")))
    with pytest.raises(ValueError, match="deep inside"):
        main(["plan", "-n", "8", "-w", "4", "-r", "1"])


@pytest.mark.parametrize(
    ("missing", "code", "message"),
    [
        ("rich", 2, 'error: this needs rich: pip install ".[bench]" from a clone\n'),
        ("dilated_attention.units", 1, "Traceback"),  # nothing that could be installed
    ],
)
def test_without_what_it_needs_it_says_what_to_install(missing: str, code: int, message: str, tmp_path: Path) -> None:
    script = tmp_path / "dilated-attention"
    script.write_text(f"import sys; sys.modules[{missing!r}] = None; {SCRIPT}")
    done = process(str(script), "suggest", "64k")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message)


def test_where_there_is_no_unicode_nothing_fails() -> None:
    code = "from dilated_attention.cli import main\nfor line in LINES: assert main(line.split()) == 0; print('***')"
    lines = ("plan -n 64k -w 64k -r 1 --ranks 4", "show -n 64 -w 32 -r 2")
    done = process("-c", code.replace("LINES", repr(lines)), **NO_UNICODE)
    assert done.returncode == 0, done.stderr
    planned, shown, _ = done.stdout.split("***")
    assert "time to send" in planned
    assert "tokens" in shown
    assert "?" not in shown


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1)"
    done = process("-c", f"{code}; import sys; sys.argv[1:] = ['plan', '-n', '64', '-w', '8', '-r', '1']; {SCRIPT}")
    assert "Traceback" not in done.stderr
