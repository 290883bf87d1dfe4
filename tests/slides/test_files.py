"""Feature files: what they say is understood, and what is wrong with one is said in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_the_tile_size_of_files_that_do_not_say(tmp_path: Path) -> None:
    silent = feature_files.gigapath(tmp_path / "silent.h5", TILES, COORDS)
    assert files.look(silent, tile_size=512).tile_size == 512
    says = feature_files.trident(tmp_path / "says.h5", TILES, COORDS, 1024)
    assert files.look(says).tile_size == files.look(says, 1024).tile_size == 1024
    with pytest.raises(BadFile, match="its tiles are 1024 pixels wide, and not 512: leave --tile-size out"):
        files.look(says, tile_size=512)


def test_a_file_that_changed_is_another_slide(tmp_path: Path) -> None:
    path = feature_files.trident(tmp_path / "one.h5", TILES, COORDS)
    slide = files.look(path)
    feature_files.trident(path, TILES[:5], COORDS[:5])
    assert files.look(path).stamp != slide.stamp
    with pytest.raises(BadFile, match="it changed"):
        files.read(slide)


@pytest.mark.parametrize(
    ("arrays", "attributes", "match"),
    [
        ({"features": TILES}, {}, "it has no coords, only: features"),
        ({"coords": COORDS}, {}, "it has no features or feats, only: coords"),
        ({}, {}, "only: nothing"),
        ({"features": TILES, "coords": COORDS[:6]}, {}, r"coords must be \(7, 2\), x and y of each tile, got \(6, 2\)"),
        ({"features": TILES[0], "coords": COORDS}, {}, r"must be \(tiles, channels\) of floats, got \(6,\)"),
        ({"features": TILES.long(), "coords": COORDS}, {}, "of floats, got .* int64"),
        ({"features": TILES, "coords": COORDS.half()}, {}, "coords are float16: pixels must be"),
        ({"features": TILES[:0], "coords": COORDS[:0]}, {}, "it has no tiles"),
        (
            {"feats": TILES, "coords": COORDS},
            {"unit": "um", "tile_size_um": 256.0},
            "in µm: .* needs both tile_size_um and tile_size_px",
        ),
        ({"feats": TILES, "coords": COORDS}, {"tile_size_px": -1}, "must be positive"),
    ],
)
def test_a_file_that_is_no_slide(tmp_path: Path, arrays: Any, attributes: Any, match: str) -> None:
    with pytest.raises(BadFile, match=match):
        files.look(feature_files.save(tmp_path / "bad.h5", arrays, attributes))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="there is no such file"):
        files.look(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("features")
    with pytest.raises(BadFile, match="cannot be read as HDF5"):
        files.look(tmp_path / "text.h5")


def test_features_that_are_no_numbers(tmp_path: Path) -> None:
    tiles = TILES.clone()
    tiles[3, 2], tiles[5] = torch.nan, torch.inf
    with pytest.raises(BadFile, match="2 of 7 tiles have NaN or infinite features, the first is 3"):
        files.read(files.look(feature_files.trident(tmp_path / "nan.h5", tiles, COORDS)))


@pytest.mark.parametrize(
    ("made", "channels", "match"),
    [
        (
            feature_files.trident,
            1024,
            r"have 1024 features \(looks like UNI, .*\); the weights take 1536 \(looks like Prov",
        ),
        (feature_files.stamp, 768, r"have 768 features \(the file says gigapath\)"),
        (feature_files.gigapath, 7, r"have 7 features \(from an unknown encoder\)"),
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
    (warning,) = files.check_places(slide, coords.double(), 1000)
    assert "probably (row, column)" in warning
    with pytest.raises(BadFile, match=r"tile 1 .* beyond the grid of 50"):
        files.check_places(slide, coords.double(), 50)


def test_a_result_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.h5"
    files.write(path, {"features": TILES.numpy()}, {"key": "a"})
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.write(path, {"features": COORDS.numpy()}, {"key": "b"})
    found = files.written(path, ["features", "none"])
    assert found is not None
    assert found[1] == {"key": "a"}
    assert list(found[0]) == ["features"]
    assert list(tmp_path.iterdir()) == [path]
