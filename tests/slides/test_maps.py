"""Attention maps: those of the model, drawn as a picture and a page."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dilated_attention.models import AttentionMap, SlideEncoder
from dilated_attention.slides import files, maps
from dilated_attention.slides.files import BadFile
from tests.page_text import data_of
from tests.slides import feature_files

TILES, COORDS = feature_files.content(60, 6)


@pytest.fixture(scope="module")
def model() -> SlideEncoder:
    torch.manual_seed(0)
    return SlideEncoder(6, 32, 2, 4, global_pool=True).eval()


@pytest.fixture(scope="module")
def found(model: SlideEncoder) -> maps.Maps:
    return maps.collect(model, TILES, COORDS, "slide <1>", 256.0)


@pytest.fixture
def thumbnail(tmp_path: Path) -> maps.Thumbnail:
    Image.new("RGB", (40, 20), (0, 200, 0)).save(tmp_path / "thumb.png")
    return maps.Thumbnail(tmp_path / "thumb.png", 51200, 25600)


def test_they_are_those_of_the_model(model: SlideEncoder, found: maps.Maps) -> None:
    assert found.weights.tiles.shape == (17, 2, 4, 60)
    for index, query in enumerate(found.queries):
        wanted = model.attention_map(TILES, COORDS, query, None, None)
        for got, part in zip(found.weights, wanted, strict=True):
            torch.testing.assert_close(got[index], part)
    tiles, cls, zeros = found.weights
    torch.testing.assert_close(tiles.sum(-1) + cls + zeros, torch.ones(17, 2, 4))


def test_a_page_has_as_many_queries_as_fit(model: SlideEncoder) -> None:
    assert maps.spread(model, 5) == ("cls", 0, 1, 2, 3, 4)
    assert maps.spread(model, 1000)[:3] == ("cls", 31, 93)
    with torch.device("meta"):
        released = SlideEncoder(global_pool=True)
    assert len(maps.spread(released, 10_000)) == 17
    assert len(maps.spread(released, 45_680)) == 11
    assert maps.spread(released, 10**6) == ("cls",)


def test_codes_keep_a_weight_within_three_in_ten_thousand() -> None:
    weights = torch.tensor([1.0, 0.5, 1 / 45680, 1e-13, 1e-15, 0.0], dtype=torch.float64)
    bits, code = maps.codes(weights)
    assert bits == b"\xf0", "four of six are not 0"
    found = np.frombuffer(code, "<u2").astype("float64")
    assert np.exp((found - 65535) * maps.STEP) == pytest.approx(weights[:4].numpy(), rel=3e-4)


def test_a_picture(found: maps.Maps, thumbnail: maps.Thumbnail) -> None:
    """The drawn values are the weights, and the pixels show them: a bright tile is where the largest weight is."""
    spec = maps.picture(found)
    (columns,) = spec["layer"][0]["data"]["values"]
    assert columns["weight"] == pytest.approx(found.weights.tiles[0, 1].mean(0).tolist())
    assert spec["title"]["subtitle"][0] == "layer 1, mean of all heads, query: the class token"
    assert f"on the class token {found.weights.cls[0, 1].mean():.3g}, on zero" in spec["title"]["subtitle"][1]
    one = torch.zeros(1, 1, 1, 2)
    one[..., 1] = 1.0
    share = torch.zeros(1, 1, 1)
    small = maps.Maps("two", torch.tensor([[0.0, 0.0], [512.0, 0.0]]), 256.0, ("cls",), AttentionMap(one, share, share))
    plain, over = (
        {colour[:3] for _, colour in Image.open(io.BytesIO(maps.content(drawn)[".png"])).getcolors(10**6) or []}
        for drawn in (small, replace(small, thumbnail=thumbnail))
    )
    assert {(0, 0, 4), (252, 255, 164)} <= plain
    assert (0, 200, 0) in over, "the picture below"


def test_a_page_holds_all_that_it_needs(found: maps.Maps, thumbnail: maps.Thumbnail) -> None:
    text = maps.page(replace(found, thumbnail=thumbnail))
    assert "<title>Attention in slide &lt;1&gt;</title>" in text
    held = data_of(text)
    assert held["queries"] == [-1, *found.queries[1:]]
    rows = [tuple(base64.b64decode(part) for part in row) for row in held["rows"]]
    assert rows == [maps.codes(row) for row in found.weights.tiles]
    assert held["thumbnail"].startswith("data:image/png;base64,")


@pytest.mark.parametrize("width", [None, "wide", 0])
def test_a_thumbnail_needs_the_size_of_the_slide(tmp_path: Path, width: Any) -> None:
    Image.new("RGB", (10, 10)).save(tmp_path / "one.png")
    slide = files.look(feature_files.trident(tmp_path / "one.h5", TILES, COORDS))
    about = replace(slide, attributes={"level0_width": width, "level0_height": 2560})
    with pytest.raises(BadFile, match=f"its level0_width and level0_height are {width!r} and 2560: "):
        maps.thumbnail_of(about, tmp_path)
