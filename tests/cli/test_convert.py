"""`convert`: the same weights, in a file without code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dilated_attention.models import SlideEncoder
from tests.cli.conftest import Refused, Run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "slide_encoder.pth"
    torch.save({"model": SlideEncoder(6, 32, 2, 4, global_pool=False).state_dict()}, file)
    return file


def test_the_weights_are_the_same(run: Run, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "slide_encoder.safetensors"
    ran = run("convert", source, target)
    assert (ran.code, ran.out) == (0, f"written: {target}\n")
    wanted, found = torch.load(source, weights_only=True)["model"], load_file(target)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    SlideEncoder.from_pretrained(target, global_pool=True, num_heads=4)


def test_what_is_refused(refused: Refused, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "new.safetensors"
    assert "there is no file" in refused("convert", tmp_path / "none.pth", target)
    assert "must be a file, and end in .safetensors" in refused("convert", source, tmp_path / "new.pth")
    other = tmp_path / "other.pth"
    torch.save({"model": {"norm.weight": torch.ones(3)}}, other)
    assert "no weights of such a model" in refused("convert", other, target)
    torch.save({"model": {"x": Path("y")}}, other)  # which would run code
    assert "more in it than tensors" in refused("convert", other, target)
    (tmp_path / "config.json").write_text("{}")
    assert "and no weights" in refused("convert", tmp_path, target, "--pattern", tmp_path / "pattern.json")
    assert not target.exists()
    target.write_bytes(b"mine")
    assert "exists already" in refused("convert", source, target)
    assert target.read_bytes() == b"mine"
