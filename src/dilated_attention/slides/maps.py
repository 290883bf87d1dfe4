"""Attention maps of a slide: the exact weights of some queries over all tiles, drawn as a picture and as a page.

The picture (.png) is of the class token's; on the page (.html), one chooses layer, head and query.

Legend: L tiles; the maps are (Q, layers, heads, L), for Q queries. A query is the class token or a tile.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from dilated_attention.models import AttentionMap, SlideEncoder, explain
from dilated_attention.show import charts
from dilated_attention.slides.files import BadFile, Slide

ENDINGS = (".html", ".png")
LONGEST = 640  # side of the drawing in a .png, in pixels
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
MOST_BYTES = 32 * 2**20  # of weights on a page; a third is added by their encoding as text
PAGE = Path(__file__).parent / "page"  # page.js draws the tiles on a canvas
STEP = 32 / 65534  # between two codes, of the logarithm of a weight: a weight is rounded by 0.03 % at most


@dataclass(frozen=True)
class Thumbnail:
    """A picture of the whole slide, and the size of the slide in the pixels of the coordinates."""

    file: Path
    width: float
    height: float

    def url(self) -> str:
        return f"data:{PICTURES[self.file.suffix]};base64,{base64.b64encode(self.file.read_bytes()).decode()}"


@dataclass(frozen=True)
class Maps:
    """The weights of some queries over all tiles, and where the tiles are."""

    name: str
    coords: Tensor  # (L, 2), in pixels
    tile_size: float
    queries: tuple[explain.Query, ...]
    weights: AttentionMap
    thumbnail: Thumbnail | None = None

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of what is drawn, in pixels of the coordinates: the thumbnail or all tiles."""
        if self.thumbnail is not None:
            return 0.0, 0.0, self.thumbnail.width, self.thumbnail.height
        left, top = self.coords.amin(0).tolist()
        right, bottom = (self.coords.amax(0) + self.tile_size).tolist()
        return left, top, right - left, bottom - top


def spread(model: SlideEncoder, tiles: int, most: int = 16) -> tuple[explain.Query, ...]:
    """Chooses the queries to draw: "cls" and up to ``most`` tiles at even distances along the sequence.

    They are fewer if their maps would take more than 32 MiB in the page.
    """
    layers = model.encoder.layers
    attention = layers[0].self_attn
    seen = attention.pattern.pairs(tiles, attention.num_heads) // tiles  # keys of a query on average, of all heads
    rows = int(MOST_BYTES / (len(layers) * (2 * seen + attention.num_heads * tiles / 8))) - 1
    rows = max(0, min(most, rows, tiles))
    return ("cls", *((2 * index + 1) * tiles // (2 * rows) for index in range(rows)))


@torch.no_grad()
def collect(
    model: SlideEncoder, tiles: Tensor, coords: Tensor, name: str, tile_size: float, thumbnail: Thumbnail | None = None
) -> Maps:
    """The attention weights of the queries that `spread` chooses in all layers and heads, on the CPU.

    ``tiles``: (L, in_chans); ``coords``: (L, 2), in pixels.
    """
    queries = spread(model, len(coords))
    states = model._explained(tiles, coords, tile_size)
    found = [explain.attention_map(model.encoder.layers, states, query, None, None) for query in queries]
    weights = AttentionMap(*(torch.stack(parts).float().cpu() for parts in zip(*found, strict=True)))
    return Maps(name, coords.double().cpu(), tile_size, queries, weights, thumbnail)


def codes(weights: Tensor) -> tuple[bytes, bytes]:
    """Maps (..., L) in few bytes: a bit per weight that is not 0, and two bytes for each such weight, by its logarithm.

    Weights below 1e-14 count as 0. The bits of each map begin with a new byte.
    """
    found = (65535 + weights.double().log() / STEP).round().clamp(0, 65535)  # log(0) is -inf, and so 0
    dense = found.to(torch.int32).numpy().astype("<u2")
    return numpy.packbits(dense > 0, axis=-1).tobytes(), dense[dense > 0].tobytes()


def page(maps: Maps) -> str:
    """The whole page as one HTML text that loads nothing."""
    sizes: Any = dict(zip(("layers", "heads", "tiles"), maps.weights.tiles.shape[1:], strict=True))
    on_cls, zeros = (part.double().flatten(1).round(decimals=6).tolist() for part in maps.weights[1:])
    data = {
        **sizes,
        "queries": [-1 if query == "cls" else query for query in maps.queries],
        "coords": maps.coords.flatten().tolist(),
        "tileSize": maps.tile_size,
        "frame": maps.frame,
        "step": STEP,
        "rows": [[base64.b64encode(part).decode() for part in codes(row)] for row in maps.weights.tiles],
        "zeroShare": zeros,
        "clsShare": on_cls,
        "thumbnail": maps.thumbnail.url() if maps.thumbnail else None,
    }
    return charts.page(PAGE, data, maps=maps, **sizes)


def content(maps: Maps) -> dict[str, bytes]:
    """A page with all maps and a picture of the first, by their endings."""
    return {".html": str(charts.plain(page(maps))).encode(), ".png": charts.drawn(picture(maps), ".png")}


def picture(maps: Maps) -> dict[str, Any]:
    """The map of the first query in the last layer, the mean of all heads, as a Vega-Lite specification."""
    weights, cls, zero = (part[0, -1].mean(0) for part in maps.weights)
    left, top, width, height = maps.frame
    scale = LONGEST / max(width, height)
    size = {"width": round(width * scale), "height": round(height * scale)}
    x, y = maps.coords.T.tolist()

    def axis(name: str, first: float, length: float, **more: Any) -> dict[str, Any]:
        domain = {"domain": [first, first + length], "nice": False, "zero": False, **more}
        return {
            "field": name, "type": "quantitative", "title": f"{name} in pixels", "scale": domain,
            "axis": {"grid": False, "format": ",d", "tickCount": 5},
        }  # fmt: skip

    places = {"x": axis("x", left, width), "y": axis("y", top, height, reverse=True)}
    shade = {"scheme": "inferno", "type": "sqrt", "domain": [0, max(weights.max().item(), 1e-30)]}
    weight = {"field": "weight", "type": "quantitative", "scale": shade, "legend": {"format": ".2~g"}}
    tiles = {
        "data": {"values": [{"x": x, "y": y, "weight": weights.tolist()}]},
        "transform": [
            {"flatten": ["x", "y", "weight"]},
            *({"calculate": f"datum.{axis} + {maps.tile_size}", "as": f"{axis}2"} for axis in "xy"),
        ],
        "mark": {"type": "rect", "clip": True, "opacity": 0.6 if maps.thumbnail else 1.0},
        "encoding": {**places, "x2": {"field": "x2"}, "y2": {"field": "y2"}, "color": weight},
    }
    layers: list[dict[str, Any]] = [tiles]
    if maps.thumbnail is not None:
        layers.insert(0, {
            "data": {"values": [{"x": left, "y": top, "url": maps.thumbnail.url()}]},
            "mark": {"type": "image", "align": "left", "baseline": "top", **size, "aspect": False},
            "encoding": {**places, "url": {"field": "url", "type": "nominal"}},
        })  # fmt: skip
    about = f"layer {maps.weights.tiles.shape[1] - 1}, mean of all heads, query: the class token"
    rest = f"on tiles {1 - zero - cls:.3g}, on the class token {cls:.3g}, on zero keys {zero:.3g}"
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": maps.name, "subtitle": [about, rest], "anchor": "start"},
        **size,
        "view": {"stroke": None, "fill": "#f5f6f8"},
        "layer": layers,
    }


def beside(
    model: SlideEncoder, slide: Slide, tiles: Tensor, coords: Tensor, thumbnails: Path | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Arrays for the .h5 file, weights of the class token and coordinates; and the page and the picture beside it."""
    thumbnail = None if thumbnails is None else thumbnail_of(slide, thumbnails)
    maps = collect(model, tiles.to(model.cls_token.device), coords, slide.name, slide.tile_size, thumbnail)
    names = ("attention", "attention_cls", "attention_zeros")
    arrays = {name: part[0].numpy() for name, part in zip(names, maps.weights, strict=True)}
    return {**arrays, "coords": coords.numpy()}, content(maps)


def thumbnail_of(slide: Slide, folder: Path) -> Thumbnail:
    size: Any = [slide.attributes.get(name) for name in ("level0_width", "level0_height")]
    files = [file for ending in PICTURES if (file := folder / f"{slide.name}{ending}").is_file()]
    if not files:
        raise BadFile(f"there is no picture {slide.name}.png or .jpg in {folder}")
    if not all(isinstance(side, int | float) and 0 < side < math.inf for side in size):
        raise BadFile(
            f"its level0_width and level0_height are {size[0]!r} and {size[1]!r}: it needs the size in pixels"
        )
    return Thumbnail(files[0], *size)
