"""Pages in a real browser, and what a page may not do."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="pages are opened with selenium")

from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def program() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def chrome_browser() -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile, found on the PATH: selenium's own manager would download one."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # a browser may write after its end
        options = webdriver.ChromeOptions()
        options.binary_location = str(program())
        for flag in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        chrome = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            yield chrome
        finally:
            chrome.quit()


def emulate(chrome: webdriver.Chrome, width: int, height: int, theme: str, mobile: bool) -> None:
    """Such a screen, with nothing on it."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": theme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    chrome.get("about:blank")  # an address that differs after its # only would not be loaded again


def show_report(chrome: webdriver.Chrome, address: str, width: int, height: int, theme: str) -> None:
    """Opens a report as it looks on such a screen, and waits until its plot is drawn."""
    emulate(chrome, width, height, theme, mobile=width < 600)
    chrome.get(address)
    is_drawn = "return document.documentElement.classList.contains('drawn')"
    wait(chrome).until(lambda _: chrome.execute_script(is_drawn))


IN_A_BROWSER = [
    pytest.mark.skipif(
        program() is None or shutil.which("chromedriver") is None,
        reason="needs chromium (or google-chrome) and chromedriver on the PATH",
    ),
]
INJECTED = "const one = document.createElement('script'); one.textContent = 'window.ran = 1'; document.body.append(one)"


@pytest.fixture(scope="module", name="browser")
def started_browser() -> Iterator[Any]:
    with chrome_browser() as found:
        yield found


def wait(browser: Any) -> WebDriverWait[Any]:
    return WebDriverWait(browser, 60)


def open_page(browser: Any, file: Path, width: int, height: int, theme: str, *, mobile: bool) -> None:
    """Until it says that it has drawn itself."""
    emulate(browser, width, height, theme, mobile)
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
