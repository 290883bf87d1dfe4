"""`doctor`: what it finds, and that it notices what does not work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from dilated_attention import testing
from dilated_attention.pattern import RULES


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU is its machine's matter."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_it_fits_on_a_screen_and_ends_in_a_verdict(run: Any) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    for said in (f"torch {torch.__version__}", "not eager: ", "not triton: ", "    longnet float32 on cpu: exact\n"):
        assert said in out
    assert sorted(re.findall(r"cpu (\w+)(?:, |\n    runs: )", out)) == ["bfloat16", "float16", "float32", "float64"]
    assert out.endswith("all 6 checks passed\n")
    assert out.count("\n") <= 40


def test_json_of_what_pytorch_alone_can_do() -> None:
    code = "import sys\nfor name in ('rich', 'altair', 'jinja2', 'typer'): sys.modules[name] = None\n"
    code += "from dilated_attention.cli import main\nsys.exit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert (found["verdict"].endswith(" checks passed"), set(found["checks"].values())) == (True, {""}), done.stderr
    assert {what.split()[0] for what in found["checks"]} == {*RULES}


def test_a_wrong_gradient_is_noticed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = testing.dilated_attention

    def scaled(query, key, value, pattern, **more):  # type: ignore[no-untyped-def]
        return real(query, key * 1.01 - 0.01 * key.detach(), value, pattern, **more)  # the outputs stay right

    monkeypatch.setattr(testing, "dilated_attention", scaled)
    code, out, _ = run("doctor")
    assert code == 1
    assert "longnet float32 on cpu: failed" in out
    assert out.endswith(" of 6 checks failed\n")


def test_of_what_fails_or_warns_only_the_first_line_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        warnings.warn("a primitive failed\nframe #0: a C++ trace", stacklevel=1)
        raise RuntimeError("no kernel image\nand a long story")

    monkeypatch.setattr(testing, "check", fail)
    out = run("doctor").out
    assert out.count("failed: no kernel image\n") == 6
    assert "warning: a primitive failed\n6 of 6 checks failed\n" in out
    assert "C++" not in out
    assert "story" not in out
