"""Coordinates: what is refused before any work, and the embedding of a cell."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention.checks import DilatedAttentionWarning
from dilated_attention.models import check_attributes, positions
from tests.models.golden import small

SLIDE = {"level0_width": 60000, "level0_height": 100000}


def test_the_embedding_is_that_of_the_released_table() -> None:
    """Row x·1000 + y + 1 of a table in which the first half is from y: here from Python's own float64."""
    cell, dim = (998, 37), 32
    found = positions.embedded(torch.tensor([cell]), dim, 1000, torch.zeros(1))
    assert found.dtype == torch.float32
    wanted = []
    for place in (cell[1], cell[0]):
        angles = [place / 10000 ** (index / (dim // 4)) for index in range(dim // 4)]
        wanted += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    torch.testing.assert_close(found[0], torch.tensor(wanted), atol=6e-8, rtol=0.0)  # float32 angles are off by 6e-5


def test_cells_are_floors() -> None:
    coords = torch.tensor([[[0, 0], [255999, 511]]])
    assert positions.cells(coords, 256, 1000).tolist() == [[[0, 0], [999, 1]]]
    assert positions.cells(coords, [512], 1000).tolist() == [[[0, 0], [499, 0]]]


@pytest.mark.parametrize("place", [(0.0, torch.nan), (torch.inf, 0.0), (-1.0, 5.0), (256000.0, 5.0), (5.0, 256000.0)])
def test_a_tile_outside_of_the_grid_is_refused_before_any_work(place: tuple[float, float]) -> None:
    model = small()
    model.patch_embed.register_forward_hook(lambda *_: pytest.fail("work was done"))
    coords = torch.tensor([[(0.0, 0.0), place]])
    with pytest.raises(ValueError, match=r"tile 1 of slide 0 is at .*, beyond the grid of 1000 × 1000 cells"):
        model(torch.zeros(1, 2, 6), coords)


@pytest.mark.parametrize("size", [-256, math.nan, [256, 256, 256]])
def test_a_tile_size_is_a_number_or_one_for_each_slide(size: object) -> None:
    with pytest.raises(ValueError, match="tile_size must be"):
        small()(torch.zeros(1, 2, 6), torch.zeros(1, 2, 2), tile_size=size)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        *(
            ({"unit": unit}, "in .*, as the attribute 'unit' says, and must be in pixels")
            for unit in (np.bytes_(b"um"), np.array(["um"]), "Micron")
        ),
        ({"unit": "mm"}, "coords are in mm, .* only pixels and µm are known"),
    ],
)
def test_attributes_that_are_refused(attributes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_attributes(torch.tensor([[10, 20]]), attributes)


@pytest.mark.filterwarnings("error")
def test_attributes_of_a_file() -> None:
    coords = torch.tensor([[10, 20], [90000, 4000]])
    for some in (coords, coords.unsqueeze(0), coords.clamp(max=65000).to(torch.uint16)):  # as HDF5 files may have them
        with pytest.warns(DilatedAttentionWarning, match="probably .row, column."):
            check_attributes(some, SLIDE)
    for attributes in (SLIDE, {}, {"unit": "px"}):
        check_attributes(coords.flip(-1), attributes)


@pytest.mark.parametrize(
    ("tiles", "coords", "mask", "said"),
    [
        ((1, 4, 7), (1, 4, 2), None, "those of another encoder"),
        ((2, 4, 6), (1, 4, 2), None, "coords must be"),
        ((1, 0, 6), (1, 0, 2), None, "no tiles"),
        ((1, 4, 6), (1, 4, 2), torch.ones(1, 4, dtype=torch.bool), "no tiles"),
        ((1, 4, 6), (1, 4, 2), torch.zeros(1, 4), "padding_mask must be bool"),
        ((1, 4, 6), (1, 4, 2), torch.zeros(1, 5, dtype=torch.bool), "padding_mask must be bool"),
    ],
)
def test_shapes_are_checked(tiles: Any, coords: Any, mask: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small()(torch.zeros(tiles), torch.zeros(coords), padding_mask=mask)
