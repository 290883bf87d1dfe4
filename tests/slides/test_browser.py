"""The page of attention maps in a browser: sliders, hover, zoom and click, and nothing is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dilated_attention.models import AttentionMap
from dilated_attention.slides.maps import Maps, Thumbnail
from dilated_attention.slides.maps import page as page_of
from tests import browsing
from tests.browsing import IN_A_BROWSER, keeps_to_itself, open_page, pixel_at, started_browser  # noqa: F401

pytest.importorskip("altair")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

pytestmark = IN_A_BROWSER
SIDE = 10
PLACES = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).flip(-1).double() * 256  # row by row


def example() -> Maps:
    """Weights that tell query, layer and head apart: those of tile 42 in layer 1 and head 2 lie on one tile."""
    torch.manual_seed(0)
    weights = torch.rand(3, 2, 4, SIDE**2)
    weights[1, 1, 2] = 0.0
    weights[1, 1, 2, 17] = 1.0
    weights = 0.75 * weights / weights.sum(-1, keepdim=True)
    share = torch.full((3, 2, 4), 0.125)
    return Maps("slide 1", PLACES, 256.0, ("cls", 42, 88), AttentionMap(weights, share, share))


def pixel(page: Any, tile: int, x: float = 0.5, y: float = 0.5) -> list[int]:
    """Where a tile is on the canvas, from its upper left corner."""
    found = (
        "const {place, view} = window.shown, [left, top] = place(arguments[0]); return [left, top, 256 * view.scale]"
    )
    left, top, side = page.execute_script(found, tile)
    return [round(left + x * side), round(top + y * side)]


def colour(page: Any, tile: int) -> list[int]:
    return pixel_at(page, *pixel(page, tile))


def middle(page: Any, tile: int) -> tuple[float, float]:
    """The tile from the middle of the canvas, from where selenium counts."""
    canvas, (x, y) = page.find_element("id", "map"), pixel(page, tile)
    return x - canvas.size["width"] / 2, y - canvas.size["height"] / 2


def pointed(page: Any, tile: int) -> ActionChains:
    x, y = middle(page, tile)
    return ActionChains(page).move_to_element_with_offset(page.find_element("id", "map"), round(x), round(y))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    file, maps = tmp_path / "page.html", example()
    Image.new("RGB", (50, 50), (0, 200, 0)).save(tmp_path / "thumb.png")
    picture = Thumbnail(tmp_path / "thumb.png", SIDE * 256, SIDE * 256)
    file.write_text(page_of(replace(maps, thumbnail=picture) if width == 390 else maps), "utf-8")
    # high enough to see all of the canvas: selenium counts from the middle of what is seen
    open_page(browser, file, width, 1400, scheme, mobile=False)
    wait = browsing.wait(browser)

    def shown(query: int, layer: int, head: int | None) -> None:
        """The page shows this map, by its weights."""
        where = [query, layer, -1 if head is None else head]
        state = "const {query, layer, head} = window.shown; return [query, layer, head]"
        wait.until(lambda page: page.execute_script(state) == where)
        rows = maps.weights.tiles[maps.queries.index("cls" if query < 0 else query), layer]
        wanted = (rows.mean(0) if head is None else rows[head]).tolist()
        assert browser.execute_script("return [...window.shown.weights]") == pytest.approx(wanted, rel=4e-4)

    def about() -> str:
        return str(browser.find_element("id", "about").text)

    shown(-1, 1, None)
    assert about().startswith("Query: the class token. Of its weight, 75.0 % is on tiles, 12.5 % on the class token")
    pointed(browser, 43).click().perform()  # next to tile 42, whose weights are on the page
    shown(42, 1, None)
    assert about().startswith("Query: tile 42.")
    browser.find_element("name", "head").send_keys("\ue014" * 3)  # right: the mean, 0, 1, 2
    shown(42, 1, 2)
    bright, other = colour(browser, 17), colour(browser, 18)
    assert bright != other
    if width == 390:
        assert other[:3] == [0, 200, 0], "the picture is seen where the weight is 0"
    else:
        assert bright[:3] == [252, 255, 164]
    pointed(browser, 17).perform()
    hover = wait.until(lambda page: page.find_element("css selector", "#hover:not([hidden])"))
    assert hover.text.split("\n") == ["tile 17", "(1,792, 256)", "weight 0.750"]
    browser.find_element("name", "layer").send_keys("\ue012")  # left
    shown(42, 0, 2)
    browser.find_element("name", "cls").click()
    shown(-1, 0, 2)
    before = pixel(browser, 17)
    canvas = browser.find_element("id", "map")
    origin = ScrollOrigin.from_element(canvas, *(round(part) for part in middle(browser, 17)))
    scale = browser.execute_script("return window.shown.view.scale")
    ActionChains(browser).scroll_from_origin(origin, 0, -200).perform()
    wait.until(lambda page: page.execute_script("return window.shown.view.scale") > 1.5 * scale)
    ActionChains(browser).drag_and_drop_by_offset(canvas, 40, 30).perform()
    wait.until(lambda page: pixel(page, 17)[0] > before[0] + 20)
    shown(-1, 0, 2)  # dragging is no click
    browser.find_element("name", "whole").click()
    wait.until(lambda page: pixel(page, 17) == before)
    keeps_to_itself(browser, file)
