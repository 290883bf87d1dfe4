"""Pages in a real browser: the one of benchmarks/screenshots.py, and what a page may not do."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="pages are opened with selenium")

from selenium.webdriver.support.wait import WebDriverWait

screenshots = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/screenshots.py"))
IN_A_BROWSER = [
    pytest.mark.skipif(
        screenshots["program"]() is None or shutil.which("chromedriver") is None,
        reason="needs chromium (or google-chrome) and chromedriver on the PATH",
    ),
]
INJECTED = "const one = document.createElement('script'); one.textContent = 'window.ran = 1'; document.body.append(one)"


@pytest.fixture(scope="module", name="browser")
def started_browser() -> Iterator[Any]:
    with screenshots["browser"]() as found:
        yield found


def wait(browser: Any) -> WebDriverWait[Any]:
    return WebDriverWait(browser, 60)


def open_page(browser: Any, file: Path, width: int, height: int, theme: str, *, mobile: bool) -> None:
    """Until it says that it has drawn itself."""
    screenshots["emulate"](browser, width, height, 1, theme, mobile)
    for log in ("browser", "performance"):  # what came before, such as the browser's own first page
        browser.get_log(log)
    browser.get(file.as_uri())
    wait(browser).until(lambda page: page.execute_script("return window.shown !== undefined"))


def pixel_at(browser: Any, x: float, y: float) -> list[int]:
    """The colour there on the canvas, as red, green, blue and alpha."""
    read = "return [...document.querySelector('canvas').getContext('2d').getImageData(...arguments, 1, 1).data]"
    return browser.execute_script(read, x, y)  # type: ignore[no-any-return]


def keeps_to_itself(browser: Any, file: Path) -> None:
    """The page fits, complains of nothing, has asked for nothing, and lets no other script run."""
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    said = [entry for entry in browser.get_log("browser") if entry["source"] != "rendering"]  # of getImageData above
    assert said == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {file.as_uri()}
    assert browser.execute_script(f"{INJECTED}; return window.ran === undefined"), "the policy lets other scripts run"
