"""The documentation site: built strictly, whole, and with nothing from another host. Needs the extra ``docs``.

The builder's own check covers links and anchors between pages; what it leaves out is read from the pages it made.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import dilated_attention

ROOT = Path(__file__).parents[1]
SERVED = "http://site.test/"
CONFIG: dict[str, Any] = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
# What the theme's script fetches from elsewhere, and the mark on a page that makes it do so.
FETCHED_FOR = ("mermaid", "glightbox", "pyodide", 'data-md-component="source"')


# --- without the builder ----------------------------------------------------------------------------------------


def nav_pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from nav_pages(below if isinstance(below, list) else [below])


def test_every_page_is_in_the_navigation() -> None:
    there = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(nav_pages(CONFIG["nav"])) == sorted(there)


def test_every_public_name_is_on_one_api_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    shown = re.findall(r"^::: dilated_attention\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(dilated_attention.__all__)


# --- with it ----------------------------------------------------------------------------------------------------


@dataclass
class Page(HTMLParser):
    """Where a page leads, what it loads, and what can be linked to in it."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif "href" in values and not (tag == "link" and values.get("rel") in ("next", "prev", "canonical")):
            self.loads.append(values["href"])
        self.loads += [values[name] for name in ("src", "srcset", "poster", "data") if values.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a folder of its own, and without a network as far as proxies go."""
    for name in ("zensical", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "zensical.toml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "src").symlink_to(ROOT / "src")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, **{name.upper(): value for name, value in nowhere.items()}, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert done.returncode == 0, said
    assert "No issues found" in said, said
    assert not re.search(r"griffe|mkdocstrings|warning", said, re.IGNORECASE), said  # a docstring that cannot be read
    return folder / str(CONFIG["site_dir"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """By address."""
    found = {}
    for file in site.rglob("*.html"):
        address = str(file.relative_to(site)).removesuffix("index.html")
        if address != "404.html":  # its links are from the root of a host
            found[urljoin(SERVED, address)] = Page(file.read_text(encoding="utf-8"))
    return found


def test_all_pages_are_there(pages: dict[str, Page]) -> None:
    wanted = {re.sub(r"(index)?\.md$", "/", page).lstrip("/").replace("//", "/") for page in nav_pages(CONFIG["nav"])}
    assert {address.removeprefix(SERVED) for address in pages} == wanted


def test_every_link_and_picture_leads_somewhere(site: Path, pages: dict[str, Page]) -> None:
    wrong = []
    for address, page in pages.items():
        for link in page.links + page.loads:
            target = urljoin(address, link)
            if not target.startswith(SERVED):
                continue
            where, _, anchor = target.partition("#")
            file = site / unquote(urlsplit(where).path).lstrip("/")
            there = (file / "index.html").is_file() if where.endswith("/") else file.is_file()
            if not there or (anchor and where in pages and unquote(anchor) not in pages[where].ids):
                wrong.append(f"{address} -> {link}")
    assert not wrong


def test_public_names_can_be_linked_to(pages: dict[str, Page]) -> None:
    shown = set().union(*(page.ids for address, page in pages.items() if "/api/" in address))
    assert not [name for name in dilated_attention.__all__ if f"dilated_attention.{name}" not in shown]


def test_docstrings_are_rendered(pages: dict[str, Page]) -> None:
    """No markup of another kind is left over."""
    for address, page in pages.items():
        assert not re.search(r":(class|func|meth):", page.text), address
    assert "h*G to (h+1)*G" in pages[f"{SERVED}api/functions/"].text
    assert "sage: dilated-attention encode" in pages[f"{SERVED}command-line/"].text


def test_nothing_comes_from_another_host(site: Path, pages: dict[str, Page]) -> None:
    for address, page in pages.items():
        outside = [load for load in page.loads if not urljoin(address, load).startswith((SERVED, "data:"))]
        assert not outside, f"{address} loads {outside}"
        assert not [mark for mark in FETCHED_FOR if mark in page.text.lower()], f"{address} makes the script fetch"
    for file in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", file.read_text(encoding="utf-8"))
        assert not found, f"{file.name} loads {found}"
