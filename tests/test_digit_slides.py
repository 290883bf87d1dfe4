"""The example of digit slides: its slides are what they say, and the encoder learns them."""

from __future__ import annotations

import runpy
import types
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def example() -> types.SimpleNamespace:
    return types.SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "examples/digit_slides.py")))


def test_the_slides_are_of_their_class(example: types.SimpleNamespace, tmp_path: Path) -> None:
    pixels, numbers = example.load(tmp_path / "digits.npz")
    assert torch.equal(example.load(tmp_path / "digits.npz")[0], pixels), "from the file"
    tiles, coords, label, is_nine = example.Slides(pixels.float(), numbers, side=30, seed=0).make(40, 60)
    assert (tiles.shape, label.tolist()) == ((40, 60, 64), [0, 1] * 20)
    shown = numbers[((tiles * 6 + 4.9).round()[..., None, :] == pixels).all(-1).int().argmax(-1)]
    assert torch.equal(shown == 9, is_nine)
    assert (is_nine.sum(1) == example.NINES).all()
    cells = coords // example.PIXELS
    order = cells[..., 1] * 30 + cells[..., 0]
    assert (order.diff(dim=1) > 0).all(), "row by row, and one tile per place"
    nines = cells[is_nine].view(40, example.NINES, 2).float()
    near = (torch.cdist(nines, nines, p=torch.inf) <= example.NEAR).sum((1, 2)) - example.NINES  # each pair twice
    assert (near[label == 0] == 0).all()
    assert (near[label == 1] >= 2 * 3).all()


@pytest.mark.slow
def test_the_encoder_learns_and_a_mean_does_not(example: types.SimpleNamespace, tmp_path: Path) -> None:
    found = example.run("small", tmp_path / "digits.npz")
    assert found["encoder 500"] >= 0.95
    assert found["mean 500"] < 0.75
    assert found["share"] > 0.5, "of its weight, where 1.2 % of the tiles are 9s"
