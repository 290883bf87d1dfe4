"""Feature files of slides, as TRIDENT, GigaPath and STAMP write them, and the files with results.

A feature file is HDF5 with `features` or `feats`, (L, C) or (1, L, C), and `coords`, (L, 2). What its coordinates mean
is in attributes, which docs/slides.md lists.

Legend: L tiles of C channels.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.models import positions
from dilated_attention.show import charts
from dilated_attention.streaming.chunks import half_of_memory

FEATURES, COORDS = ("features", "feats"), "coords"
TILE_SIZE = 256  # of files that do not say: GigaPath's
MOST_BYTES = half_of_memory(torch.device("cpu")) or math.inf  # of features, which are read twice
# Public tile encoders by the number of their features. Several share a number, so a width alone only suggests one.
ENCODERS = {
    384: "GigaPath-Flash's tile encoder or another ViT-S",
    512: "CONCH or PLIP",
    768: "CTransPath, Phikon or CONCH v1.5",
    1024: "UNI, Phikon-v2 or another ViT-L",
    1280: "the class token of Virchow",
    1536: "Prov-GigaPath's tile encoder, UNI2-h or H-optimus",
    2048: "a ResNet-50 or RetCCL",
    2560: "Virchow or Virchow2",
}


class BadFile(ValueError):  # noqa: N818 - the name says what is wrong
    """Raised for a file that cannot be encoded; the message says why, and does not name the file."""


@dataclass(frozen=True)
class Slide:
    """What a feature file says of itself; its features are not read yet."""

    path: Path
    tiles: int
    channels: int
    tile_size: float  # the side of a tile in pixels
    pixels: float  # that one unit of the coordinates is: 1 for pixels, another number for µm
    attributes: Mapping[str, Any]
    stamp: tuple[int, int]  # bytes of the file, and when it was written in ns, to notice that it has changed

    @property
    def name(self) -> str:
        return self.path.stem


def h5py() -> Any:
    return charts.library("h5py", "feature files need", "slides")


def stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def look(path: Path, tile_size: float | None = None) -> Slide:
    """The slide in a file. ``tile_size``: in pixels, for files that do not say."""
    with _opened(path) as file:
        features, coords = _datasets(file)
        *more, tiles, channels = features.shape if len(features.shape) > 1 else (0, 0, 0)
        if more not in ([], [1]) or features.dtype.kind != "f":
            raise BadFile(f"{features.name} must be (tiles, channels) of floats, got {features.shape} {features.dtype}")
        if coords.shape not in ((tiles, 2), (1, tiles, 2)):
            raise BadFile(f"coords must be ({tiles}, 2), x and y of each tile, got {coords.shape}")
        if coords.dtype.kind not in "iuf" or coords.dtype == "float16":
            raise BadFile(f"coords are {coords.dtype}: pixels must be integers, float32 or float64")
        if not tiles:
            raise BadFile("it has no tiles")
        if (size := features.nbytes + coords.nbytes) > MOST_BYTES:  # the system would end the whole run
            raise BadFile(f"its features take {size / 2**30:.3g} GiB, which does not fit in memory twice")
        said = _plain({**file.attrs, **features.attrs, **coords.attrs})
        return Slide(path, tiles, channels, *_scale(said, tile_size), said, stamp(path))


def read(slide: Slide) -> tuple[Tensor, Tensor]:
    """The features, (L, C) in the dtype of the file, and the coordinates in pixels, (L, 2) float64."""
    with _opened(slide.path) as file:
        if stamp(slide.path) != slide.stamp:
            raise BadFile("it changed while this command was running")
        features, coords = _datasets(file)
        kind = features.dtype.newbyteorder("=")  # torch has no other
        tiles = torch.from_numpy(features[()].astype(kind, copy=False)).view(-1, slide.channels)
        places = torch.from_numpy(coords[()].astype("float64")).view(-1, 2)
        if slide.pixels != 1:  # µm: a tile on the border of a cell belongs to it, however its place was rounded
            cells = places * (slide.pixels / slide.tile_size)
            near = cells.round()
            places = torch.where((cells - near).abs() < 1e-4, near, cells) * slide.tile_size
        if wrong := (~tiles.isfinite().all(1)).nonzero().flatten().tolist():
            raise BadFile(f"{len(wrong)} of {len(tiles)} tiles have NaN or infinite features, the first is {wrong[0]}")
        return tiles, places


def check_width(slide: Slide, channels: int) -> None:
    """Raise if the features are those of another encoder than the weights take."""
    if slide.channels != channels:
        stated = str(slide.attributes.get("extractor", slide.attributes.get("encoder", "")))  # it may be an array
        theirs, ours = (f"looks like {ENCODERS.get(n, 'an unknown encoder')}" for n in (slide.channels, channels))
        said = f"the file says {stated}" if stated else theirs
        raise BadFile(f"its tiles have {slide.channels} features ({said}); the weights take {channels} ({ours})")


def check_places(slide: Slide, coords: Tensor, slide_ngrids: int) -> str:
    """Raise where tiles are not on the grid of positions; returns a warning, or nothing."""
    try:
        positions.cells(coords.unsqueeze(0), slide.tile_size, slide_ngrids)
        return positions.swapped(coords, slide.attributes)
    except ValueError as error:
        raise BadFile(str(error)) from error


def write(path: Path, arrays: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    """An HDF5 file of arrays: the whole of it or none."""
    content = io.BytesIO()
    with h5py().File(content, "w") as file:
        for name, array in arrays.items():
            small = "gzip" if array.nbytes > 2**20 else None  # maps have many zeros
            file.create_dataset(name, data=array, track_times=False, compression=small)
        file.attrs.update(attributes)
    charts.write(path, content.getvalue())


def written(path: Path, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of these names in a result, and its attributes; none where there is no such file."""
    try:
        with _opened(path) as file:
            arrays = {name: file[name][()] for name in names if name in file}
            return arrays, _plain(file.attrs)
    except BadFile:
        return {}, {}  # not one of ours


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: positions.plain(value) for name, value in attributes.items()}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file. Whatever h5py, numpy or torch say of one that is odd, damaged or too large is what is wrong with it."""
    if not path.is_file():  # a pipe would wait for its other end
        raise BadFile("it is not a file" if path.exists() else "there is no such file")
    try:
        with h5py().File(path, "r") as file:
            yield file
    except BadFile:
        raise
    except (OSError, RuntimeError, TypeError, ValueError, KeyError, AttributeError, MemoryError) as error:
        raise BadFile(f"it cannot be read as HDF5: {(str(error) or type(error).__name__).splitlines()[0]}") from error


def _datasets(file: Any) -> tuple[Any, Any]:
    dataset = h5py().Dataset
    features = next((file[name] for name in FEATURES if isinstance(file.get(name), dataset)), None)
    if features is None or not isinstance(file.get(COORDS), dataset):
        missing = " or ".join(FEATURES) if features is None else COORDS
        raise BadFile(f"it has no {missing}, only: {', '.join(sorted(file)) or 'nothing'}")
    return features, file[COORDS]


def _scale(attributes: Mapping[str, Any], tile_size: float | None) -> tuple[float, float]:
    """The side of a tile in pixels, and the pixels per unit of the coordinates."""
    microns = positions.unit_of(attributes) in positions.MICRONS
    names = ("tile_size_um", "tile_size_px") if microns else ("patch_size_level0", "tile_size_px", "tile_size")
    said = {name: attributes[name] for name in names if attributes.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadFile(f"its {name} is {value!r}, and must be a number above 0")
    if microns and len(said) < 2:
        raise BadFile("its coordinates are in µm: to convert them, it needs both tile_size_um and tile_size_px")
    if not said:
        return tile_size or TILE_SIZE, 1.0
    size = said["tile_size_px"] if microns else next(iter(said.values()))
    if tile_size not in (None, size):
        raise BadFile(f"its tiles are {size:g} pixels wide, it says, and --tile-size {tile_size}: leave the option out")
    return size, size / said["tile_size_um"] if microns else 1.0
