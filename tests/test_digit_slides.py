"""The example of digit slides: its slides are what they say, and the encoder learns them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).parents[1] / "examples/digit_slides.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("digit_slides", FILE)
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_it_is_short() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_slides_are_of_their_class(example: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "digits.npz"
    pixels, numbers = example.load(file)
    assert all(torch.equal(*pair) for pair in zip(example.load(file), (pixels, numbers), strict=True)), "from the file"
    tiles, coords, label, is_nine = example.Slides(pixels.float(), numbers, side=30, seed=0).make(40, 60)
    assert tiles.shape == (40, 60, 64)
    assert label.tolist() == [0, 1] * 20
    known = {tuple(row): number for row, number in zip(pixels.tolist(), numbers.tolist(), strict=True)}
    for slide in range(40):
        shown = [known[tuple(row)] for row in (tiles[slide] * 6 + 4.9).round().tolist()]
        assert [number == 9 for number in shown] == is_nine[slide].tolist()
        assert sum(is_nine[slide]) == example.NINES
        cells = (coords[slide] // example.PIXELS).tolist()
        assert len(set(map(tuple, cells))) == 60, "one tile per place"
        assert cells == sorted(cells, key=lambda cell: (cell[1], cell[0])), "row by row"
        nines = [cell for cell, one in zip(cells, is_nine[slide], strict=True) if one]
        near = [max(abs(a - c), abs(b - d)) <= 5 for i, (a, b) in enumerate(nines) for c, d in nines[:i]]
        assert sum(near) >= 3 if label[slide] else not any(near)


@pytest.mark.slow
def test_the_encoder_learns_and_a_mean_does_not(example: ModuleType, tmp_path: Path) -> None:
    found = example.run("small", tmp_path / "digits.npz")
    assert found["encoder 500"] >= 0.95
    assert found["mean 500"] < 0.75
    assert found["share"] > 0.5, "of its weight, where 1.2 % of the tiles are 9s"
