"""Feature files as TRIDENT, GigaPath and STAMP write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor


def content(tiles: int, channels: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features, and coordinates of tiles of 256 pixels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tiles, channels, generator=generator), torch.randint(
        0, 100, (tiles, 2), generator=generator
    ) * 256


def save(
    path: Path, arrays: dict[str, Tensor], attributes: dict[str, Any] | None = None, on: str | None = None
) -> Path:
    """``on``: the dataset that has the attributes; None: the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array.numpy()
        (file if on is None else file[on]).attrs.update(attributes or {})
    return path


def trident(path: Path, tiles: Tensor, coords: Tensor, tile_size: int = 256, **more: Any) -> Path:
    attributes = {"patch_size_level0": tile_size, "level0_magnification": 40, "target_magnification": 20, "overlap": 0}
    return save(path, {"features": tiles, "coords": coords}, attributes | more, on="coords")


def gigapath(path: Path, tiles: Tensor, coords: Tensor) -> Path:
    return save(path, {"features": tiles[None], "coords": coords})


def stamp(path: Path, tiles: Tensor, coords: Tensor, **more: Any) -> Path:
    """Tiles of 224 pixels and 256 µm; ``coords`` are µm then."""
    attributes = {"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224, "extractor": "gigapath"}
    return save(path, {"feats": tiles.half(), "coords": coords.double()}, attributes | more)
