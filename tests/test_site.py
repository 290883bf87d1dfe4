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
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import dilated_attention

ROOT = Path(__file__).parents[1]
CONFIG: dict[str, Any] = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
LINK = re.compile(r"""<(\w+)\b[^>]*?\s(?:href|src)=["']?([^"'\s>]+)""")
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


def test_what_pages_load_and_lead_to_is_in_the_site(site: Path) -> None:
    """Nothing is loaded from another host, and no link or picture leads nowhere."""
    for file in set(site.rglob("*.html")) - {site / "404.html"}:  # whose links are from the root of a host
        text = file.read_text(encoding="utf-8")
        for tag, link in LINK.findall(text):
            where = urlsplit(unescape(link))
            if where.scheme or where.netloc:
                assert tag == "a" or where.scheme == "data", f"{file} loads {link}"
            else:
                target = file.parent / unquote(where.path)
                page = target / "index.html" if target.is_dir() else target
                assert page.is_file(), f"{file} leads to {link}"
        assert not [mark for mark in FETCHED_FOR if mark in text.lower()], f"{file} makes the script fetch"
    for file in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", file.read_text(encoding="utf-8"))
        assert not found, f"{file.name} loads {found}"
