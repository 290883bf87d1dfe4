"""The page in a browser: it draws, follows the choices, and loads nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilated_attention import DilatedPattern
from dilated_attention.show import View, save

webdriver = pytest.importorskip("selenium.webdriver", reason="the page is opened with selenium")
pytest.importorskip("altair")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver on the PATH"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


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
    """The colour there, as red, green, blue and alpha."""
    read = "return [...document.querySelector('canvas').getContext('2d').getImageData(...arguments, 1, 1).data]"
    return browser.execute_script(read, *place(browser, key, query))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "page.html"
    view = View(DilatedPattern.longnet([4, 16], [1, 4]), 16, 4, ranks=2)
    save(view, file)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get("about:blank")
    for log in ("browser", "performance"):  # what came before, such as the browser's own first page
        browser.get_log(log)
    browser.get(file.as_uri())
    WebDriverWait(browser, 60).until(lambda page: page.execute_script("return window.shown !== undefined"))

    def caption() -> str:
        return str(browser.find_element("id", "caption").text)

    empty = pixel(browser, 9.5, 0.5)
    assert (max(empty[:3]) < 100) == (scheme == "dark")
    assert caption() == view.caption("share")
    share = pixel(browser, 8.5, 0.5)  # head 0 sees every fourth token
    assert share != empty
    assert share == pixel(browser, 1.5, 1.5), "one colour for all branches"
    browser.find_element("css selector", "input[value=branch]").click()
    WebDriverWait(browser, 60).until(lambda _: caption() == view.caption("branch"))
    assert pixel(browser, 8.5, 0.5) != pixel(browser, 1.5, 1.5), "a colour for each branch"
    browser.find_element("css selector", "select").send_keys("head 1")
    WebDriverWait(browser, 60).until(lambda page: pixel(page, 8.5, 0.5) == empty)
    assert pixel(browser, 9.5, 1.5) != empty
    canvas, (x, y) = browser.find_element("css selector", "canvas"), place(browser, 9.5, 1.5)
    x, y = x - canvas.size["width"] / 2, y - canvas.size["height"] / 2  # selenium counts from the middle
    ActionChains(browser).move_to_element_with_offset(canvas, round(x), round(y)).perform()
    hovered = WebDriverWait(browser, 60).until(lambda page: page.find_element("css selector", ".vg-tooltip.visible"))
    assert " ".join(hovered.text.split()) == "queries 1 keys 9 branch w=16 r=4 share of pairs 100%"
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    said = [entry for entry in browser.get_log("browser") if entry["source"] != "rendering"]  # of getImageData here
    assert said == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert asked == {file.as_uri()}
    injected = (
        "const one = document.createElement('script'); one.textContent = 'window.ran = 1'; document.body.append(one)"
    )
    assert browser.execute_script(f"{injected}; return window.ran === undefined"), "the policy lets other scripts run"
