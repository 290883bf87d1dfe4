"""benchmarks/stream.py, tried on a CPU with everything made shorter."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/stream.py"
ON_CPU = ["--device", "cpu", "--scale", "2048", "--tokens", "2621440", "--chunk", "1048576", "--commit", "abc"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts src there
    spec = importlib.util.spec_from_file_location("stream_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stream_script", module)
    spec.loader.exec_module(module)
    return module


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "stream.json").read_text())
    return found


def test_all_figures(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*ON_CPU, "--out", str(tmp_path)]) == 0
    found = written(tmp_path)
    assert found["machine"]["commit"] == "abc"
    assert (found["tokens"], found["chunk"]) == (1280, 512)
    assert [record["causal"] for record in found["streams"]] == [False, True]
    for record in found["streams"]:
        assert record["rows"] | {"worst": 0} == {"rows": 64, "worst": 0, "limit": 1e-4, "right": True}
        assert 0 < record["seconds"] < record["with_drawing_and_checks"]
        assert record["tokens_per_second"] == pytest.approx(1280 / record["seconds"])
        assert record["peak_bytes"] is None
    said = capsys.readouterr()
    assert "64 rows right" in said.out
    assert "causal: 3/3 chunks" in said.err
    assert "met" not in said.out  # there are targets for the whole thing alone


def test_chunks_that_no_segment_divides(script: ModuleType, tmp_path: Path) -> None:
    """Then the keys of a row may lie in two chunks."""
    assert script.main([*ON_CPU, "--chunk", "240000", "--out", str(tmp_path)]) == 0
    assert written(tmp_path)["chunk"] == 117


def test_wrong_rows_are_told(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = script.stream
    monkeypatch.setattr(script, "stream", lambda *x, **options: (out * 1.001 for out in right(*x, **options)))
    assert script.main([*ON_CPU, "--out", str(tmp_path)]) == 1
    assert not any(record["rows"]["right"] for record in written(tmp_path)["streams"])


def test_a_chunk_in_the_wrong_place_is_noticed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk by itself, as if it began the sequence: wrong as soon as a chunk ends in a segment."""

    def each_alone(chunks: Any, *pattern: Any, **options: Any) -> Any:
        for chunk in chunks:
            yield from script.da_stream([chunk], *pattern, **options)

    monkeypatch.setattr(script, "da_stream", script.stream, raising=False)
    monkeypatch.setattr(script, "stream", each_alone)
    assert script.main([*ON_CPU, "--chunk", "240000", "--out", str(tmp_path)]) == 1


def test_chunks_are_the_same_whenever_they_are_drawn(script: ModuleType) -> None:
    source = script.Source(100, 30, torch.device("cpu"), torch.float32, 7)
    assert source.count == 4
    assert [source.draw(index)[0].shape[1] for index in range(4)] == [30, 30, 30, 10]
    for one, again in zip(source.draw(2), source.draw(2), strict=True):
        assert torch.equal(one, again)
    drawn = [x for index in range(3) for x in source.draw(index)]
    assert len({x.sum().item() for x in drawn}) == 9


def test_what_was_measured_stays_when_a_run_dies(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = script.measure

    def dies_when_causal(source: Any, pattern: Any, is_causal: bool, backend: str) -> Any:
        if is_causal:
            raise RuntimeError("the device is gone")
        return measure(source, pattern, is_causal, backend)

    monkeypatch.setattr(script, "measure", dies_when_causal)
    with pytest.raises(RuntimeError, match="gone"):
        script.main([*ON_CPU, "--out", str(tmp_path)])
    assert [record["causal"] for record in written(tmp_path)["streams"]] == [False]


def test_a_billion_tokens_is_what_it_does_by_default(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(source: Any, pattern: Any, is_causal: bool, backend: str) -> Any:
        asked.append((source.tokens, source.chunk, pattern.branches, is_causal))
        record = {"causal": is_causal, "seconds": 30.0, "peak_bytes": 17 << 30, "tokens_per_second": 1.0}
        return record | {"tflops": 1.0, "kernel": "", "rows": {"rows": 64, "worst": 0.0, "limit": 1.0, "right": True}}

    monkeypatch.setattr(script, "measure", note)
    monkeypatch.setattr(script.machine, "write_json", lambda *_: None)
    said: list[str] = []
    monkeypatch.setattr(script, "print", lambda *x, **_: said.append(" ".join(map(str, x))), raising=False)
    assert script.main(["--device", "cpu"]) == 0
    branches = tuple(zip((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16), strict=True))
    assert asked == [(2**30, 2**20, branches, False), (2**30, 2**20, branches, True)]
    verdicts = [line.rsplit(", ")[-1] for line in said if "at most" in line]
    assert verdicts == ["met", "missed", "missed", "missed"]  # 30 s, 17 GiB; causal 30 s, 17 GiB


def test_a_bar_on_a_terminal(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with script.progress("causal", 2) as advance:
        advance("1.0 s")
        advance("2.0 s")
    assert "causal: 2.0 s" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "100%" in sys.stderr.getvalue()  # type: ignore[attr-defined]
