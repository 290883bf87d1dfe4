"""The page of attention maps: one file that loads nothing. page.js draws the tiles on a canvas."""

from __future__ import annotations

import base64
from pathlib import Path

from dilated_attention import charts
from dilated_attention.slides.maps import STEP, Maps, codes


def page(maps: Maps) -> str:
    """The whole page as one HTML text."""
    _, layers, heads, tiles = maps.weights.shape
    data = {
        "tiles": tiles,
        "layers": layers,
        "heads": heads,
        "queries": [-1 if query == "cls" else query for query in maps.queries],
        "coords": maps.coords.flatten().tolist(),
        "tileSize": maps.tile_size,
        "frame": maps.frame,
        "step": STEP,
        "rows": [[base64.b64encode(part).decode() for part in codes(row)] for row in maps.weights],
        "zeroShare": [[round(share, 6) for share in row.flatten().tolist()] for row in maps.zero_share],
        "clsShare": [[round(share, 6) for share in row.flatten().tolist()] for row in maps.cls_share],
        "thumbnail": maps.thumbnail.url() if maps.thumbnail else None,
    }
    return charts.page(Path(__file__).parent, data, maps=maps, tiles=tiles, layers=layers, heads=heads)
