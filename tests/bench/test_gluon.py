"""benchmarks/gluon.py: it says in one line why it cannot run, its check, and on Hopper that its kernel is exact."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, testing

FOLDER = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.syspath_prepend(FOLDER)
    import gluon

    return gluon


def test_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "gluon", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    with pytest.raises(SystemExit, match=r"^nothing is measured: no Gluon .*$"):
        import gluon  # noqa: F401


def test_without_a_hopper_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^nothing is measured: this needs a Hopper GPU.*$"):
        script.main([])


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_wrong_is_seen(script: ModuleType, causal: bool) -> None:
    qkv = testing.make_qkv(1, 5 * 32, 2, 16, dtype=torch.bfloat16)
    pattern = DilatedPattern.longnet([32], [1])
    out, lse = dilated_attention(*qkv, pattern, is_causal=causal, return_lse=True)
    cut = out.unflatten(1, (5, 32))[0]
    for right in ((out, lse), (out, None), (cut, None)):
        assert script.check(right, qkv, 32, causal).right()
    last = out.clone()
    last[0, -1, 1, 3] = torch.nan
    other = dilated_attention(*qkv, pattern, is_causal=not causal)
    for wrong in ((last, lse), (out, lse + 0.1), (other, lse)):
        assert not script.check(wrong, qkv, 32, causal).right()


@pytest.mark.gpu
def test_on_a_gpu(script: ModuleType, tmp_path: Path) -> None:
    """With more tiles than programs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    script.main(["--shape", "40", "256", "8", "--seconds", "0", "--out", str(tmp_path / "gluon.json")])
    sides = json.loads((tmp_path / "gluon.json").read_text("utf-8"))["sides"]
    assert [*sides] == ["Gluon", "triton", "cuDNN"]
    for side in sides.values():
        assert all(side[mask]["ms"] > 0 for mask in ("dense", "causal")), "or it was wrong"
