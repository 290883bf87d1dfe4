"""The page in a browser: it draws, follows the choices, and loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilated_attention import DilatedPattern
from dilated_attention.show.vega import save
from dilated_attention.show.view import Plot
from tests.browsing import (
    IN_A_BROWSER,
    keeps_to_itself,
    open_page,
    pixel_at,
    started_browser,  # noqa: F401
    wait,
)

pytest.importorskip("altair")

from selenium.webdriver.common.action_chains import ActionChains

pytestmark = IN_A_BROWSER


def place(browser: Any, key: float, query: float) -> list[float]:
    """Where a token is on the canvas."""
    return browser.execute_script(  # type: ignore[no-any-return]
        """
        const view = window.shown, [left, top] = view.origin(), padding = view.padding();
        const [key, query] = arguments;
        return [left + padding.left + view.scale("x")(key), top + padding.top + view.scale("y")(query)];
        """,
        key,
        query,
    )


def pixel(browser: Any, key: float, query: float) -> list[int]:
    return pixel_at(browser, *place(browser, key, query))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "page.html"
    view = Plot(DilatedPattern.longnet([4, 16], [1, 4]), 16, 4, ranks=2)
    save(view, file)
    open_page(browser, file, width, 900, scheme, mobile=width < 500)

    def caption() -> str:
        return str(browser.find_element("id", "caption").text)

    empty = pixel(browser, 9.5, 0.5)
    assert (max(empty[:3]) < 100) == (scheme == "dark")
    assert caption() == view.caption("share")
    share = pixel(browser, 8.5, 0.5)  # head 0 sees every fourth token
    assert share != empty
    assert share == pixel(browser, 1.5, 1.5), "one colour for all branches"
    browser.find_element("css selector", "input[value=branch]").click()
    wait(browser).until(lambda _: caption() == view.caption("branch"))
    assert pixel(browser, 8.5, 0.5) != pixel(browser, 1.5, 1.5), "a colour for each branch"
    browser.find_element("css selector", "select").send_keys("head 1")
    wait(browser).until(lambda page: pixel(page, 8.5, 0.5) == empty)
    assert pixel(browser, 9.5, 1.5) != empty
    canvas, (x, y) = browser.find_element("css selector", "canvas"), place(browser, 9.5, 1.5)
    x, y = x - canvas.size["width"] / 2, y - canvas.size["height"] / 2  # selenium counts from the middle
    ActionChains(browser).move_to_element_with_offset(canvas, round(x), round(y)).perform()
    hovered = wait(browser).until(lambda page: page.find_element("css selector", ".vg-tooltip.visible"))
    assert " ".join(hovered.text.split()) == "queries 1 keys 9 branch w=16 r=4 share of pairs 100% counts 1"
    keeps_to_itself(browser, file)
