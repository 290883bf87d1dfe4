"""Pictures of the report: python benchmarks/screenshots.py report/index.html FOLDER

Writes report-desktop-light.png and report-phone-dark.png, the top of the page each. Each picture holds the SHA-256 of
the results.json beside the page. Needs selenium (in the extra ``dev``) and a chromium or chrome with its driver on the
PATH; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
# name: width, height, device pixels per pixel of the page, theme
VIEWS = {"report-desktop-light": (1280, 740, 1, "light"), "report-phone-dark": (390, 844, 2, "dark")}
MOST = 300_000  # bytes of a picture in the repository


def program() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile, found on the PATH: selenium's own manager would download one."""
    driver = shutil.which("chromedriver")
    if program() is None or driver is None:
        raise SystemExit(f"needs chromedriver and one of {', '.join(BROWSERS)} on the PATH: install chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # a browser may write after its end
        options = webdriver.ChromeOptions()
        options.binary_location = str(program())
        for flag in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
        try:
            yield chrome
        finally:
            chrome.quit()


def emulate(chrome: webdriver.Chrome, width: int, height: int, scale: int, theme: str, mobile: bool) -> None:
    """Such a screen, with nothing on it."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": theme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    chrome.get("about:blank")  # an address that differs after its # only would not be loaded again


def show(chrome: webdriver.Chrome, address: str, width: int, height: int, scale: int, theme: str) -> None:
    """Open a report as it looks on such a screen, and wait until its plot is drawn."""
    emulate(chrome, width, height, scale, theme, mobile=width < 600)
    chrome.get(address)
    is_drawn = "return document.documentElement.classList.contains('drawn')"
    WebDriverWait(chrome, 60).until(lambda _: chrome.execute_script(is_drawn))


def stamped(png: bytes, results: Path) -> bytes:
    """The picture with a note of what it shows, in few colours so that it is small."""
    note, file = PngInfo(), io.BytesIO()
    note.add_text("results", hashlib.sha256(results.read_bytes()).hexdigest())
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(128).save(file, "PNG", pnginfo=note, optimize=True)
    return file.getvalue()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pictures of the report, for the docs.")
    parser.add_argument("page", type=Path, help="the index.html of a report")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    options = parser.parse_args(arguments)
    results = options.page.with_name("results.json")
    for file in (options.page, results):
        if not file.is_file():
            parser.error(f"no file {file}: make a report first")
    options.folder.mkdir(parents=True, exist_ok=True)
    with browser() as chrome:
        for name, view in VIEWS.items():
            show(chrome, options.page.resolve().as_uri(), *view)
            taken = chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
            png = stamped(base64.b64decode(taken), results)
            if len(png) > MOST:
                raise SystemExit(f"{name} has {len(png):,} bytes, more than {MOST:,}: make the view smaller")
            (options.folder / f"{name}.png").write_bytes(png)
            print(options.folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
