"""Attention maps, drawn: a .png of the class token's, and a page (.html) to choose layer, head and query on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from dilated_attention import charts
from dilated_attention.models import SlideEncoder
from dilated_attention.slides.files import BadFile, Slide
from dilated_attention.slides.maps import PICTURES, Maps, Thumbnail, collect
from dilated_attention.slides.page import page

ENDINGS = (".html", ".png")
LONGEST = 640  # side of the drawing in a .png, in pixels


def content(maps: Maps) -> dict[str, bytes]:
    """A page with all maps and a picture of the first, by their endings."""
    return {".html": str(charts.plain(page(maps))).encode(), ".png": charts.drawn(picture(maps), ".png")}


def picture(maps: Maps) -> dict[str, Any]:
    """The map of the first query in the last layer, the mean of all heads, as a Vega-Lite specification."""
    weights, zero, cls = (part[0, -1].mean(0) for part in (maps.weights, maps.zero_share, maps.cls_share))
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
    about = f"layer {maps.weights.shape[1] - 1}, mean of all heads, query: the class token"
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
    parts = {
        "attention": maps.weights[0], "attention_cls": maps.cls_share[0], "attention_zeros": maps.zero_share[0],
        "coords": coords,
    }  # fmt: skip
    return {name: x.numpy() for name, x in parts.items()}, content(maps)


def thumbnail_of(slide: Slide, folder: Path) -> Thumbnail:
    width, height = (slide.attributes.get(name) for name in ("level0_width", "level0_height"))
    files = [file for ending in PICTURES if (file := folder / f"{slide.name}{ending}").is_file()]
    if not files:
        raise BadFile(f"there is no picture {slide.name}.png or .jpg in {folder}")
    if not all(isinstance(side, int | float) and 0 < side < math.inf for side in (width, height)):
        raise BadFile(f"its level0_width and level0_height are {width!r} and {height!r}: it needs the size in pixels")
    return Thumbnail(files[0], float(width), float(height))  # type: ignore[arg-type]
