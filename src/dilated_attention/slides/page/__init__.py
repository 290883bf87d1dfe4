"""The page of attention maps: one file that loads nothing. page.js draws the tiles on a canvas."""

from __future__ import annotations

import base64
from pathlib import Path

from dilated_attention import charts
from dilated_attention.slides.maps import STEP, Maps, codes

FILES = Path(__file__).parent


def page(maps: Maps) -> str:
    """The whole page as one HTML text."""
    jinja2, safe = charts.library("jinja2"), charts.library("markupsafe").Markup
    script, style = (FILES / "page.js").read_text("utf-8"), (FILES / "page.css").read_text("utf-8")
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
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    text: str = environment.get_template("page.html").render(
        maps=maps,
        tiles=tiles,
        layers=layers,
        heads=heads,
        policy=charts.policy([script], [style]),
        style=safe(style),
        script=safe(script),
        data=safe(charts.as_json(data)),
    )
    return text
