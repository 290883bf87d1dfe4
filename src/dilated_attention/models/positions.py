"""Where tiles are on a slide: their cells in a square grid, checked before any work, and the embedding of a cell.

The released models add row ``x_cell * slide_ngrids + y_cell + 1`` of a 2-D sin-cos table. Its angles are float64: in
float32 they would be wrong by 6e-5 in a grid of 1000. The table has 10^6 rows and takes 3 GB. Half of its channels
come from y and half from x alone, so here two rows of a table of only ``slide_ngrids`` rows make one of them.

Legend: coords (B, L, 2), x then y of a tile's corner, in pixels of level 0; cells (B, L, 2); position (B, L, C).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention.checks import warn

PIXELS = ("", "px", "pixel", "pixels")
MICRONS = ("um", "µm", "μm", "micron", "microns", "micrometer", "micrometers", "micrometre", "micrometres")
TileSize = float | Sequence[float] | Tensor  # one, or one for each slide


def cells(
    coords: Tensor, tile_size: TileSize, slide_ngrids: int, padding_mask: Tensor | None = None, takes_half: bool = False
) -> Tensor:
    """(B, L, 2) int64 on the host; padding is in cell (0, 0). Raises where a tile has no cell.

    ``takes_half``: coordinates in half precision are warned of, not refused. It rounds them beyond 2048 (float16) or
    256 (bfloat16), and is infinite from 65,520 on.
    """
    if coords.dtype in (torch.float16, torch.bfloat16):
        text = f"coords are {coords.dtype}, which rounds pixels to other cells: pass them as integers or float32"
        if not takes_half:
            raise TypeError(text)
        warn(text)
    sides = _sides(tile_size, len(coords))
    pixels = coords.detach().to("cpu", torch.float64)
    if padding_mask is not None:
        pixels = pixels.masked_fill(padding_mask.cpu().unsqueeze(-1), 0.0)
    found = (pixels / sides.view(-1, 1, 1)).floor()
    wrong = ~((found >= 0) & (found < slide_ngrids)).all(-1)  # true for NaN, too
    if wrong.any():
        slide, tile = wrong.nonzero()[0].tolist()
        x, y = pixels[slide, tile].tolist()
        raise ValueError(
            f"tile {tile} of slide {slide} is at ({x:g}, {y:g}), beyond the grid of {slide_ngrids} × "
            f"{slide_ngrids} cells of {sides[slide]:g} pixels, which begins at 0: check that tile_size is the side of "
            "a tile at level 0, or make a model with a larger slide_ngrids"
        )
    return found.long()


def check_attributes(coords: Tensor, attributes: Mapping[str, Any]) -> None:
    """Checks coordinates (L, 2) against the attributes of their feature file.

    It raises ValueError if the attribute ``unit`` is µm. It warns if x and y seem to be swapped, judged by the slide's
    ``level0_width`` and ``level0_height`` in pixels. Attributes that are missing are not checked.

    Examples:
        >>> models.check_attributes(torch.tensor([[900, 100]]), {"level0_width": 1000, "level0_height": 500})
    """
    unit = unit_of(attributes)
    if unit in MICRONS:
        raise ValueError(
            f"coords are in {unit}, as the attribute 'unit' says, and must be in pixels of level 0: divide them by the "
            "µm per pixel at level 0, and give the tile_size in the same pixels"
        )
    if text := swapped(coords, attributes):
        warn(text)


def swapped(coords: Tensor, attributes: Mapping[str, Any]) -> str:
    """What to say if x and y seem to be swapped; else nothing."""
    width, height = (plain(attributes.get(name)) for name in ("level0_width", "level0_height"))
    if not isinstance(width, int | float) or not isinstance(height, int | float) or not coords.numel():
        return ""
    x, y = coords.double().reshape(-1, 2).amax(0).tolist()  # unsigned integers have no amax
    if (x < width and y < height) or x >= height or y >= width:
        return ""
    return (
        f"coords reach ({x:g}, {y:g}) on a slide {width} pixels wide and {height} high: they are probably (row, "
        "column), and must be (x, y); pass coords.flip(-1)"
    )


def unit_of(attributes: Mapping[str, Any]) -> str:
    """The unit of a file's coordinates, one of PIXELS or MICRONS."""
    unit = str(plain(attributes.get("unit", "px"))).lower()
    if unit not in PIXELS + MICRONS:
        raise ValueError(f"coords are in {unit}, as the attribute 'unit' says: only pixels and µm are known")
    return unit


def plain(value: Any) -> Any:
    """An attribute as Python has it: HDF5 gives arrays of one element, and bytes."""
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _sides(tile_size: TileSize, slides: int) -> Tensor:
    sides = torch.as_tensor(tile_size, dtype=torch.float64, device="cpu").reshape(-1)
    if len(sides) not in (1, slides) or not bool(((sides > 0) & sides.isfinite()).all()):
        wanted = f"a number of pixels above 0, or one for each of {slides} slides"
        raise ValueError(f"tile_size must be {wanted}, got {tile_size!r}")
    return sides.expand(slides)


def embedded(cell: Tensor, embed_dim: int, slide_ngrids: int, like: Tensor) -> Tensor:
    """The position embedding of cells (..., 2), on the device and in the dtype of ``like``."""
    table = _table(embed_dim // 2, slide_ngrids).to(like.dtype).to(like.device)  # some devices have no float64
    cell = cell.to(like.device)
    return torch.cat([table[cell[..., 1]], table[cell[..., 0]]], dim=-1)


@functools.lru_cache(maxsize=8)
def _table(channels: int, rows: int) -> Tensor:
    """(rows, channels) float64: the sines, then the cosines, of rows times falling frequencies."""
    frequency = 10000.0 ** -(torch.arange(channels // 2, dtype=torch.float64) / (channels / 2))
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)
