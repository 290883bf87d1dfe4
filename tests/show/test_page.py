"""The page as text: whole, safe and exact. `test_browser` opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dilated_attention
from dilated_attention import DilatedPattern
from dilated_attention.show import View, save
from dilated_attention.show.page import as_json, page

from .views import long_view

VIEW = View.of(DilatedPattern.longnet([4, 8], [1, 2]), 16, 4, query=5, ranks=4)


def embedded(made: str) -> dict[str, object]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', made, re.DOTALL)
    found: dict[str, object] = json.loads(data)
    return found


def test_the_policy_allows_what_is_inside_and_nothing_else() -> None:
    made = page(VIEW)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', made)
    (style,) = re.findall(r"<style>(.*?)</style>", made, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", made, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in (style, script)]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_nothing_is_fetched_and_nothing_handled_inline() -> None:
    made = page(VIEW)
    assert not re.search(r"https?://|//[a-z]|@import|url\(", re.sub(r"^\s*//.*$", "", made, flags=re.MULTILINE))
    assert not re.search(r"<[^>]*\s(on\w+|src|href|style)=", made)
    assert "{{" not in made
    assert "innerHTML" not in made


def test_the_data_cannot_end_its_element() -> None:
    text = {"</script><script>": ["<!--", "×", 1]}
    assert "<" not in as_json(text)
    assert json.loads(as_json(text)) == text
    (data,) = re.findall(r'id="data">(.*?)</script>', page(VIEW), re.DOTALL)
    assert data == as_json(json.loads(data))


def test_numbers_that_javascript_would_round_are_strings() -> None:
    def walk(x: object) -> None:
        if isinstance(x, dict):
            x = list(x.values())
        if isinstance(x, list):
            for one in x:
                walk(one)
        assert not isinstance(x, int) or x <= 2**53

    data = embedded(page(View.of(DilatedPattern.longnet([2**44], [1]), 2**48, 2, kv_heads=1, ranks=8)))
    walk(data)
    own = data["kinds"][0]["branches"][0]["own"]  # type: ignore[index]
    assert own[0] == str(2**84)


def test_equal_views_give_equal_pages() -> None:
    assert page(VIEW) == page(View.of(VIEW.pattern, 16, 4, query=5, ranks=4))


@pytest.mark.parametrize("name", ["pattern", "pattern.pdf", "pattern.htm", ".png"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("give it a name that ends in .html, .png or .svg")):
        save(VIEW, tmp_path / name)


def test_saving_a_page(tmp_path: Path) -> None:
    save(VIEW, tmp_path / "Pattern.HTML")
    assert (tmp_path / "Pattern.HTML").read_text(encoding="utf-8") == page(VIEW)


def test_pages_of_long_sequences_stay_small() -> None:
    assert len(page(long_view(query=7, ranks=64))) < 2_000_000


def test_only_pictures_need_matplotlib(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
for name in ("matplotlib", "rich", "typer", "selenium"):
    sys.modules[name] = None
from dilated_attention import DilatedPattern
from dilated_attention.show import View, save, text
view = View.of(DilatedPattern.longnet([4, 8], [1, 2]), 16, 4, query=5, ranks=4)
print(text(view, 80))
save(view, Path("pattern.html"))
try:
    save(view, Path("pattern.png"))
except ModuleNotFoundError as error:
    print(error)
"""
    path = os.pathsep.join(
        filter(None, [str(Path(dilated_attention.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        "pattern.png needs matplotlib, which is not installed: pip install matplotlib, or save a .html" in done.stdout
    )
    assert (tmp_path / "pattern.html").read_text(encoding="utf-8") == page(VIEW)
