"""benchmarks/hybrid.py with small layers, on a CPU: what it compares, and that it goes on where it was cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention import Pattern, Window

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hybrid


def test_a_row_for_each_model_and_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, given = tmp_path / "hybrid.json", ["--shrink", "32", "--seconds", "0", "--out"]
    hybrid.main([*given, str(out), "--lengths", "64", "--models", "gpt-oss"])
    hybrid.main([*given, str(out), "--lengths", "64", "48", "--models", "gpt-oss"])
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["tokens"] for row in rows] == [64, 48]
    assert rows[0]["layers"] == {"full": 1, "window": 1}
    assert capsys.readouterr().err.count("gpt-oss 64 ") == 1, "what is done is not done again"


def test_its_windows_are_checked() -> None:
    _, config = hybrid.config_of("gpt-oss", 32)
    shape = {"heads": config.heads, "head_dim": config.head_dim, "kv_heads": config.kv_heads}
    hybrid.check(hybrid.sdpa, hybrid.FULL, **shape)
    with pytest.raises(AssertionError, match="out is off"):
        hybrid.check(hybrid.ours(Pattern([Window(4)])), config.patterns[0], **shape)


def test_windows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "WINDOWS", hybrid.WINDOWS[:1])
    words = ["--lengths", "--windows", "--shrink", "512", "--seconds", "0", "--out", str(tmp_path / "found.json")]
    for _ in range(2):  # the second time it is done
        hybrid.main(words)
    (row,) = json.loads((tmp_path / "found.json").read_text("utf-8"))["windows"]
    assert (row["tokens"], row["heads"], row["head_dim"], row["window"]) == (256, 16, 128, 2)


@pytest.mark.parametrize("kind", hybrid.CACHES[:2], ids=lambda kind: kind[0])
def test_tokens_per_second(kind: tuple[str, str]) -> None:
    row = hybrid.generated(16, *kind, 256, {"dtype": torch.float32, "device": "cpu"})
    assert row["prompt"] == 16
    assert row["tokens_per_second"] != 0
