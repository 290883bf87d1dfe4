"""Feature files: what they say is understood, and what is wrong with one is said in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from dilated_attention.models import positions
from dilated_attention.slides import files
from dilated_attention.slides.files import BadFile
from tests.slides import feature_files

TILES, COORDS = feature_files.content(7, 6)


@pytest.mark.parametrize(
    ("made", "side"), [(feature_files.trident, 256), (feature_files.gigapath, 256), (feature_files.stamp, 224)]
)
def test_the_three_formats_are_the_same_slide(tmp_path: Path, made: Callable[..., Path], side: int) -> None:
    """STAMP's coordinates are in µm; in tiles, which is what the positions come from, all three agree."""
    slide = files.look(made(tmp_path / "one.h5", TILES, COORDS))
    assert (slide.name, slide.tiles, slide.channels, slide.tile_size) == ("one", 7, 6, side)
    tiles, coords = files.read(slide)
    torch.testing.assert_close(tiles.float(), TILES, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(coords / slide.tile_size, COORDS.double() / 256)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("um", "px"), [(291.0, 300), (63.104, 256), (256.0, 224)])
def test_microns_are_in_the_cells_of_their_pixels(tmp_path: Path, um: float, px: int, dtype: torch.dtype) -> None:
    """Also where a tile's place is rounded to just below the border of its cell."""
    cells = torch.stack([torch.arange(1000), torch.arange(999, -1, -1)], 1)
    attributes = {"unit": "um", "tile_size_um": um, "tile_size_px": px}
    arrays = {"feats": torch.zeros(1000, 6), "coords": (cells.double() * um).to(dtype)}
    slide = files.look(feature_files.save(tmp_path / "um.h5", arrays, attributes))
    places = files.read(slide)[1].unsqueeze(0)
    assert torch.equal(positions.cells(places, slide.tile_size, 1000)[0], cells)


def test_numbers_in_another_order_of_bytes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        file["features"], file["coords"] = TILES.numpy().astype(">f4"), COORDS.numpy().astype(">i8")
    tiles, coords = files.read(files.look(tmp_path / "odd.h5"))
    assert torch.equal(tiles, TILES)
    assert torch.equal(coords, COORDS.double())


def test_the_tile_size_of_files_that_do_not_say(tmp_path: Path) -> None:
    silent = feature_files.gigapath(tmp_path / "silent.h5", TILES, COORDS)
    assert files.look(silent, tile_size=512).tile_size == 512
    says = feature_files.trident(tmp_path / "says.h5", TILES, COORDS, 1024)
    assert files.look(says).tile_size == files.look(says, 1024).tile_size == 1024
    with pytest.raises(BadFile, match="its tiles are 1024 pixels wide, it says, and --tile-size 512: leave"):
        files.look(says, tile_size=512)


@pytest.mark.parametrize(
    ("changes", "attributes", "match"),
    [
        ({"coords": None}, {}, "it has no coords, only: features"),
        ({"features": None}, {}, "it has no features or feats, only: coords"),
        ({"coords": COORDS[:6]}, {}, r"coords must be \(7, 2\), x and y of each tile, got \(6, 2\)"),
        ({"features": TILES[0]}, {}, r"must be \(tiles, channels\) of floats, got \(6,\)"),
        ({"features": TILES.long()}, {}, "of floats, got .* int64"),
        ({"coords": COORDS.half()}, {}, "coords are float16: pixels must be"),
        ({"features": TILES[:0], "coords": COORDS[:0]}, {}, "it has no tiles"),
        ({}, {"unit": "um", "tile_size_um": 256.0}, "in µm: .* needs both tile_size_um and tile_size_px"),
        ({}, {"tile_size_px": -1}, "its tile_size_px is -1, and must be a number above 0"),
        ({}, {"tile_size_px": "small"}, "its tile_size_px is 'small', and must be a number"),
        ({}, {"tile_size": h5py.Empty("f4")}, "and must be a number"),
    ],
)
def test_a_file_that_is_no_slide(tmp_path: Path, changes: Any, attributes: Any, match: str) -> None:
    arrays = {"features": TILES, "coords": COORDS} | changes
    whole = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(BadFile, match=match):
        files.look(feature_files.save(tmp_path / "bad.h5", whole, attributes))


def test_what_is_no_feature_file(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("features")
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file["features"], file["coords"] = h5py.Empty("f4"), COORDS.numpy()
    for name, says in (("none", "there is no such file"), ("text", "as HDF5"), ("empty", "it cannot be read")):
        with pytest.raises(BadFile, match=says):
            files.look(tmp_path / f"{name}.h5")


def test_features_that_are_no_numbers(tmp_path: Path) -> None:
    tiles = TILES.clone()
    tiles[3, 2], tiles[5] = torch.nan, torch.inf
    with pytest.raises(BadFile, match="2 of 7 tiles have NaN or infinite features, the first is 3"):
        files.read(files.look(feature_files.trident(tmp_path / "nan.h5", tiles, COORDS)))


@pytest.mark.parametrize(
    ("made", "channels", "match"),
    [
        (feature_files.trident, 1024, r"1024 features \(looks like UNI, .*\); the weights take 1536 \(looks like Prov"),
        (feature_files.stamp, 768, r"768 features \(the file says gigapath\)"),
        (feature_files.gigapath, 7, r"7 features \(looks like an unknown encoder\)"),
    ],
)
def test_the_features_of_another_encoder(tmp_path: Path, made: Any, channels: int, match: str) -> None:
    slide = files.look(made(tmp_path / "other.h5", *feature_files.content(2, channels)))
    with pytest.raises(BadFile, match=match):
        files.check_width(slide, 1536)


def test_places_beyond_the_slide(tmp_path: Path) -> None:
    coords = torch.tensor([[0, 0], [256, 25600]])
    size = {"level0_width": 30000, "level0_height": 1000}
    slide = files.look(feature_files.trident(tmp_path / "swapped.h5", TILES[:2], coords, **size))
    assert "probably (row, column)" in files.check_places(slide, coords.double(), 1000)
    with pytest.raises(BadFile, match=r"tile 1 .* beyond the grid of 50"):
        files.check_places(slide, coords.double(), 50)


def test_what_only_looks_like_a_result_is_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        file.create_group("features")
    assert files.written(tmp_path / "odd.h5", ["features"]) == ({}, {})
