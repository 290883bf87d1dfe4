"""Attention maps, drawn: a .png of one map, and a page (.html) on which layer, head and query can be chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dilated_attention import charts
from dilated_attention.models import SlideEncoder
from dilated_attention.models.explain import chosen
from dilated_attention.slides.files import BadFile, Slide
from dilated_attention.slides.maps import PICTURES, Maps, Thumbnail, collect
from dilated_attention.slides.page import page

ENDINGS = (".html", ".png")
LONGEST = 640  # side of the drawing in a .png, in pixels


def save(maps: Maps, file: Path, *, query: int = 0, layer: int = -1, head: int | None = None) -> None:
    """Writes a page (.html) with all maps, or a picture (.png) of one map.

    For a picture, ``query`` is an index into ``maps.queries`` (not a tile), ``layer`` counts from 0 or from the end,
    and ``head`` None is the mean of all heads.
    """
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"cannot save {file.name!r}: give it a name that ends in {', '.join(ENDINGS)}")
    if ending == ".html":
        charts.write(file, charts.plain(page(maps)).encode())
    else:
        charts.write(file, charts.drawn(picture(maps, query, layer, head), ending))


def picture(maps: Maps, query: int, layer: int, head: int | None) -> dict[str, Any]:
    """One map as a Vega-Lite specification."""
    for name, index, size in zip(("query", "layer", "head"), (query, layer, head), maps.weights.shape, strict=False):
        chosen(name, index, size)
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


@dataclass(frozen=True)
class Writer:
    """Writes the maps of slides as they are encoded: a .png and a .html beside each result."""

    thumbnails: Path | None = None

    def __call__(self, model: SlideEncoder, slide: Slide, tiles: Tensor, coords: Tensor, out: Path) -> dict[str, Any]:
        """Writes the .png and .html; returns arrays for the .h5 file: weights of the class token, and coordinates."""
        tiles = tiles.to(model.cls_token.device)
        thumbnail = self._thumbnail(slide)
        maps = collect(model, tiles, coords, tile_size=slide.tile_size, name=slide.name, thumbnail=thumbnail)
        for ending in ENDINGS:
            save(maps, out / f"{slide.name}{ending}")
        parts = {
            "attention": maps.weights[0],
            "attention_cls": maps.cls_share[0],
            "attention_zeros": maps.zero_share[0],
        }
        return {name: part.numpy() for name, part in parts.items()} | {"coords": coords.numpy()}

    def _thumbnail(self, slide: Slide) -> Thumbnail | None:
        if self.thumbnails is None:
            return None
        there = [self.thumbnails / f"{slide.name}{ending}" for ending in PICTURES]
        file = next((file for file in there if file.is_file()), None)
        if file is None:
            raise BadFile(f"there is no picture {slide.name}.png or .jpg in {self.thumbnails}")
        try:
            width, height = (float(slide.attributes[name]) for name in ("level0_width", "level0_height"))
            file.open("rb").close()
        except KeyError as error:
            raise BadFile(f"it lacks the attribute {error}, without which a thumbnail cannot be placed") from error
        except (TypeError, ValueError) as error:
            raise BadFile(f"level0_width or level0_height is no number: {error}") from error
        except OSError as error:
            raise BadFile(f"its thumbnail {file} cannot be read: {error.strerror or error}") from error
        if not (0 < width < math.inf and 0 < height < math.inf):
            raise BadFile(f"its slide is {width:g} pixels wide and {height:g} high, so a thumbnail cannot be placed")
        return Thumbnail(file, width, height)
