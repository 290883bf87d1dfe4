"""Pictures of the report for the README: python benchmarks/screenshots.py report/index.html docs/images

Writes report-desktop-light.png and report-phone-dark.png, the top of the page each. In each picture stands the SHA-256
of the results.json beside the page, by which a test tells that the README shows the results that are committed. Needs
selenium (in the extra ``dev``) and a chromium or chrome with its driver on the PATH; nothing is downloaded.
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
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
MOST = 300_000  # bytes of a picture in the repository


@dataclass(frozen=True)
class View:
    name: str
    width: int
    height: int
    scale: int  # device pixels per pixel of the page
    theme: str


VIEWS = (View("report-desktop-light", 1200, 1000, 1, "light"), View("report-phone-dark", 360, 760, 2, "dark"))


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile, found on the PATH: selenium's own manager would download one."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        raise SystemExit(f"needs chromedriver and one of {', '.join(BROWSERS)} on the PATH: install chromium-driver")
    with tempfile.TemporaryDirectory() as profile:
        options = Options()
        options.binary_location = program
        for flag in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        chrome = webdriver.Chrome(options, Service(driver))
        try:
            yield chrome
        finally:
            chrome.quit()


def picture(chrome: webdriver.Chrome, page: Path, view: View) -> bytes:
    """A PNG of the top of the page, as it looks in that view."""
    media = [{"name": "prefers-color-scheme", "value": view.theme}]
    size = {"width": view.width, "height": view.height, "deviceScaleFactor": view.scale, "mobile": view.width < 600}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chrome.get(page.resolve().as_uri())
    png: str = chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    return base64.b64decode(png)


def stamped(png: bytes, results: Path) -> bytes:
    """The picture with a note of what it shows."""
    note, file = PngInfo(), io.BytesIO()
    note.add_text("results", hashlib.sha256(results.read_bytes()).hexdigest())
    with Image.open(io.BytesIO(png)) as image:
        image.save(file, "PNG", pnginfo=note, optimize=True)
    return file.getvalue()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pictures of the report, for the README.")
    parser.add_argument("page", type=Path, help="the index.html of a report")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    options = parser.parse_args(arguments)
    if not options.page.is_file():
        parser.error(f"no file {options.page}: make a report first")
    if not options.page.with_name("results.json").is_file():
        parser.error(f"no results.json beside {options.page}")
    options.folder.mkdir(parents=True, exist_ok=True)
    with browser() as chrome:
        for view in VIEWS:
            png = stamped(picture(chrome, options.page, view), options.page.with_name("results.json"))
            if len(png) > MOST:
                raise SystemExit(f"{view.name} has {len(png):,} bytes, more than {MOST:,}: make the view smaller")
            (options.folder / f"{view.name}.png").write_bytes(png)
            print(options.folder / f"{view.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
