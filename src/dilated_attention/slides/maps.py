"""Attention maps of a slide, drawn: a .png of one map, and a page on which layer, head and query can be chosen.

Legend: L tiles; the maps are (Q, layers, heads, L), for Q queries. A query is the class token or a tile.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention import charts
from dilated_attention.models import SlideEncoder

Query = int | Literal["cls"]
ENDINGS = (".html", ".png")
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
MOST_BYTES = 24 * 2**20  # of weights on a page; a third is added by their encoding as text
STEP = 32 / 65534  # between two codes, of the logarithm of a weight: a weight is rounded by 0.03 % at most
LONGEST = 640  # side of the drawing in a .png, in pixels


@dataclass(frozen=True)
class Thumbnail:
    """A picture of the whole slide, and the size of the slide in the pixels of the coordinates."""

    file: Path
    width: float
    height: float

    def url(self) -> str:
        kind = PICTURES.get(self.file.suffix.lower())
        if kind is None:
            raise ValueError(f"a thumbnail must end in {', '.join(PICTURES)}, got {self.file.name!r}")
        return f"data:{kind};base64,{base64.b64encode(self.file.read_bytes()).decode()}"


@dataclass(frozen=True)
class Maps:
    """The weights of some queries over all tiles, and where the tiles are."""

    name: str
    coords: Tensor  # (L, 2), in pixels
    tile_size: float
    queries: tuple[Query, ...]
    weights: Tensor  # (Q, layers, heads, L)
    zero_share: Tensor  # (Q, layers, heads): of the zero keys
    cls_share: Tensor  # (Q, layers, heads): of the class token as a key
    thumbnail: Thumbnail | None = None

    def __post_init__(self) -> None:
        wanted = (len(self.queries), *self.weights.shape[1:3], len(self.coords))
        if self.weights.shape != wanted or self.zero_share.shape != wanted[:3] or self.cls_share.shape != wanted[:3]:
            raise ValueError(
                f"weights must be (queries, layers, heads, tiles) {wanted}, got {tuple(self.weights.shape)}"
            )

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of what is drawn, in pixels of the coordinates: the thumbnail or all tiles."""
        if self.thumbnail is not None:
            return 0.0, 0.0, self.thumbnail.width, self.thumbnail.height
        left, top = self.coords.amin(0).tolist()
        right, bottom = (self.coords.amax(0) + self.tile_size).tolist()
        return left, top, right - left, bottom - top


def spread(tiles: int, layers: int, heads: int, most: int = 64) -> tuple[Query, ...]:
    """The class token, and tiles evenly along the sequence: as many as a page of MOST_BYTES takes."""
    rows = min(most, MOST_BYTES // (2 * layers * heads * tiles) - 1, tiles)
    return ("cls", *sorted({(2 * index + 1) * tiles // (2 * rows) for index in range(max(0, rows))}))


def save(maps: Maps, file: Path, *, query: int = 0, layer: int = -1, head: int | None = None) -> None:
    """Write a page (.html), or a picture (.png) of one map: ``head`` None is the mean of all heads."""
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"cannot save {file.name!r}: give it a name that ends in {', '.join(ENDINGS)}")
    if ending == ".html":
        from dilated_attention.slides.page import page

        charts.write(file, page(maps).encode())
    else:
        charts.write(file, charts.drawn(picture(maps, query, layer, head), ending))


def picture(maps: Maps, query: int, layer: int, head: int | None) -> dict[str, Any]:
    """One map as a Vega-Lite specification."""
    rows = maps.weights[query, layer]
    weights = rows.mean(0) if head is None else rows[head]
    left, top, width, height = maps.frame
    scale = LONGEST / max(width, height)
    x, y = maps.coords.T.tolist()
    columns = {"x": x, "y": y, "weight": weights.tolist()}
    axis = {"axis": {"grid": False, "format": ",d", "tickCount": 5}}
    across = {"scale": {"domain": [left, left + width], "nice": False, "zero": False}, **axis}
    down = {"scale": {"domain": [top, top + height], "nice": False, "zero": False, "reverse": True}, **axis}
    shade = {"scheme": "inferno", "type": "sqrt", "domain": [0, max(weights.max().item(), 1e-30)]}
    tiles = {
        "data": {"values": [columns]},
        "transform": [
            {"flatten": ["x", "y", "weight"]},
            {"calculate": f"datum.x + {maps.tile_size}", "as": "x2"},
            {"calculate": f"datum.y + {maps.tile_size}", "as": "y2"},
        ],
        "mark": {"type": "rect", "clip": True, "opacity": 0.6 if maps.thumbnail else 1.0},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": "x in pixels", **across},
            "y": {"field": "y", "type": "quantitative", "title": "y in pixels", **down},
            "x2": {"field": "x2"},
            "y2": {"field": "y2"},
            "color": {"field": "weight", "type": "quantitative", "scale": shade, "legend": {"format": ".2~g"}},
        },
    }
    below = [_background(maps, across, down, scale)] if maps.thumbnail else []
    named = "the class token" if maps.queries[query] == "cls" else f"tile {maps.queries[query]:,}"
    shares = (maps.zero_share[query, layer], maps.cls_share[query, layer])
    zero, cls = ((share.mean() if head is None else share[head]).item() for share in shares)
    number = layer % maps.weights.shape[1]
    about = f"layer {number}, {'mean of all heads' if head is None else f'head {head}'}, query: {named}"
    rest = f"on tiles {1 - zero - cls:.3g}, on the class token {cls:.3g}, on zero keys {zero:.3g}"
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": maps.name, "subtitle": [about, rest], "anchor": "start"},
        "width": round(width * scale),
        "height": round(height * scale),
        "view": {"stroke": None, "fill": "#f5f6f8"},
        "layer": [*below, tiles],
    }


def _background(maps: Maps, across: dict[str, Any], down: dict[str, Any], scale: float) -> dict[str, Any]:
    assert maps.thumbnail is not None
    left, top, width, height = maps.frame
    size = {"width": round(width * scale), "height": round(height * scale), "aspect": False}
    return {
        "data": {"values": [{"x": left, "y": top, "url": maps.thumbnail.url()}]},
        "mark": {"type": "image", "align": "left", "baseline": "top", **size},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", **across},
            "y": {"field": "y", "type": "quantitative", **down},
            "url": {"field": "url", "type": "nominal"},
        },
    }


def codes(weights: Tensor) -> bytes:
    """Two bytes for each weight, by its logarithm; 0 for those below 1e-14."""
    found = (65535 + weights.double().log() / STEP).round().clamp(0, 65535)  # log(0) is -inf, and so 0
    return found.to(torch.int32).numpy().astype("<u2").tobytes()
