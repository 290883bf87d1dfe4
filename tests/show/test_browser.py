"""The page in a browser: what it shows, what it says, and that it stays by itself."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dilated_attention import DilatedPattern
from dilated_attention.show import View, colours, save
from dilated_attention.show.seen import Kind

from .views import long_view

webdriver = pytest.importorskip("selenium.webdriver", reason="the page is opened with selenium")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
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

SMALL = View.of(DilatedPattern.longnet([4, 8], [1, 2]), 16, 4, query=5, ranks=4, head_dim=8)


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


def resize(browser: Any, width: int, height: int = 900) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture
def shown(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page of a view, `SMALL` unless the test names another; nothing may have gone wrong or left when it ends."""
    resize(browser, 1100)
    prefer(browser, "light")
    save(getattr(request, "param", SMALL), tmp_path / "page.html")
    browser.get("about:blank")
    for log in ("browser", "performance"):  # what came before, such as the browser's own first page
        browser.get_log(log)
    browser.get((tmp_path / "page.html").as_uri())
    yield browser
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert asked <= {(tmp_path / "page.html").as_uri()}


def text(browser: Any, name: str) -> str:
    return str(browser.find_element("id", name).text)


def pixels(browser: Any, name: str = "cells") -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0]).toDataURL()", name))


def until(condition: Callable[[], object]) -> None:
    """Wait for what the browser does in its own time."""
    WebDriverWait(None, 5, 0.05).until(lambda _: condition())


def point(browser: Any, name: str, row: int, column: int, rows: int, columns: int) -> None:
    """Move the pointer to the middle of a cell."""
    canvas = browser.find_element("id", name)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    x = round(canvas.rect["width"] * ((column + 0.5) / columns - 0.5))
    y = round(canvas.rect["height"] * ((row + 0.5) / rows - 0.5))
    ActionChains(browser, duration=0).move_to_element_with_offset(canvas, x, y).perform()


def test_the_slider_changes_the_head(shown: Any) -> None:
    before = pixels(shown)
    assert text(shown, "head-name") == "0 (heads 0, 2 see the same)"
    assert "Query 5 has 4 keys: 4, 5, 6, 7." in text(shown, "head-facts")
    shown.find_element("id", "head").send_keys(Keys.ARROW_RIGHT)
    assert text(shown, "head-name") == "1 (heads 1, 3 see the same)"
    assert "Query 5 has 8 keys (4 by (4, 1), 4 by (8, 2)): 1, 3, 4, 5 ×2, 6, 7 ×2." in text(shown, "head-facts")
    after = pixels(shown)
    assert after != before
    shown.find_element("id", "head").send_keys(Keys.ARROW_RIGHT)
    assert pixels(shown) == before


def test_pointing_at_a_cell_says_what_is_in_it(shown: Any) -> None:
    point(shown, "cells", 2, 6, 16, 16)
    assert text(shown, "cell-text").split("\n") == ["Query 2, key 6", "seen by (8, 2)"]
    point(shown, "cells", 2, 0, 16, 16)
    assert text(shown, "cell-text").split("\n") == ["Query 2, key 0", "seen by (4, 1)", "seen by (8, 2)"]
    point(shown, "cells", 15, 0, 16, 16)
    assert text(shown, "cell-text").split("\n") == ["Query 15, key 0", "No branch shows any of it."]


def test_arrow_keys_move_from_cell_to_cell(shown: Any) -> None:
    canvas = shown.find_element("id", "cells")
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert text(shown, "cell-text").startswith("Query 0, key 0")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.ARROW_UP)
    assert text(shown, "cell-text").startswith("Query 0, key 1")


def drawn_colours(browser: Any, count: int) -> list[list[str]]:
    """The colour in the middle of every cell."""
    script = """
    const canvas = document.getElementById("cells"), width = canvas.width, n = arguments[0], found = [];
    const copy = Object.assign(document.createElement("canvas"), { width, height: width });
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const data = context.getImageData(0, 0, width, width).data;
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
      const at = 4 * (Math.floor((i + .5) * width / n) * width + Math.floor((j + .5) * width / n));
      found.push([...data.slice(at, at + 3)].map((c) => c.toString(16).padStart(2, "0")).join(""));
    }
    return found;
    """
    found = browser.execute_script(script, count)
    return [[f"#{colour}" for colour in found[i * count : (i + 1) * count]] for i in range(count)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_have_the_colours_of_their_counts(shown: Any, scheme: str) -> None:
    prefer(shown, scheme)
    palette = colours.levels(2, scheme)
    expected = [[palette[count] for count in row] for row in SMALL.kinds[0].counts()]
    until(lambda: drawn_colours(shown, 16) == expected)
    shown.find_elements("css selector", "#branches input")[1].click()
    first = [[palette[mask & 1] for mask in row] for row in SMALL.kinds[0].masks()]
    assert drawn_colours(shown, 16) == first


def test_dark_mode_follows_the_system(shown: Any) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    assert shown.execute_script(background) == "rgb(255, 255, 255)"
    before = {name: pixels(shown, name) for name in ("cells", "reach", "matrix")}
    prefer(shown, "dark")
    until(lambda: shown.execute_script(background) == "rgb(17, 22, 28)")
    until(lambda: all(pixels(shown, name) != drawn for name, drawn in before.items()))


COARSE = View.of(SMALL.pattern, 16, 4, cells=4)


@pytest.mark.parametrize("shown", [COARSE], indirect=True)
def test_shares_are_another_colouring(shown: Any) -> None:
    before = pixels(shown)
    assert text(shown, "scale").split() == ["0", "1", "2"]
    point(shown, "cells", 0, 1, 4, 4)
    assert text(shown, "cell-text").split("\n") == ["Queries 0–3, keys 4–7", "(8, 2): 4 of 16 pairs (25 %)"]
    shown.find_element("css selector", "input[value=share]").click()
    assert pixels(shown) != before
    assert text(shown, "scale").split("\n") == ["0", "25 %", "125 %"]


def test_pointing_at_layers_and_ranks(shown: Any) -> None:
    point(shown, "reach", 0, 3, len(SMALL.reach.layers), 16)
    assert text(shown, "reach-text") == "After layer 1: 1 of 1 tokens of 3"
    point(shown, "matrix", 0, 1, 4, 4)
    assert text(shown, "matrix-text") == "rank 0 sends 8 rows of branch (8, 2), 256 B, to rank 1"
    point(shown, "matrix", 0, 3, 4, 4)
    assert text(shown, "matrix-text") == "rank 0 sends nothing to rank 3"
    rows = [row.text for row in shown.find_elements("css selector", "#crossing tbody tr")]
    assert rows == ["(4, 1) none of 4: local 0 0 B", "(8, 2) 2 of 2 32 1.02 kB"]


RING = View.of(DilatedPattern.longnet([16], [1]), 16, 1, ranks=4, head_dim=8)


@pytest.mark.parametrize("shown", [RING], indirect=True)
def test_a_ring_tells_who_sends_and_whose_rows(shown: Any) -> None:
    point(shown, "matrix", 0, 1, 4, 4)
    assert text(shown, "matrix-text") == "rank 0 sends 12 rows of branch (16, 1), 384 B, to rank 1"
    shown.find_element("css selector", "#travel-lists input[value='whose rows']").click()
    assert text(shown, "matrix-text") == "rank 1 needs 4 rows of branch (16, 1), 128 B, of rank 0"


LONG = long_view(tokens=10**12 + 7, query=10**11, ranks=100, kv_heads=4, is_causal=True)


@pytest.mark.parametrize("shown", [LONG], indirect=True)
def test_the_page_counts_as_python_does(shown: Any) -> None:
    script = """
    const kind = data.kinds[arguments[0]], found = [];
    for (let i = 0; i < stretches; i++) for (let j = 0; j < stretches; j++)
      found.push(kind.branches.map((branch) => String(pairs(branch, i, j, BigInt))));
    return [found, [...counted(kind).counts]];
    """
    size = len(LONG.edges) - 1
    kind: Kind = LONG.kinds[1]
    exact, counts = shown.execute_script(script, 1)
    cells = list(itertools.product(range(size), repeat=2))
    assert exact == [[str(pairs) for pairs in kind.pairs(*cell)] for cell in cells]
    assert counts == [count for row in kind.counts() for count in row]
    assert not shown.find_element("id", "matrix").is_displayed()
    assert len(shown.find_elements("css selector", "#sums tbody tr")) == 25


@pytest.mark.parametrize("shown", [SMALL, LONG], indirect=True, ids=["small", "long"])
def test_it_fits_a_phone(shown: Any) -> None:
    resize(shown, 360, 740)
    assert shown.execute_script("return document.documentElement.scrollWidth") <= 360
    assert shown.find_element("id", "cells").rect["width"] >= 300
    point(shown, "cells", 0, 0, 4, 4)
    assert shown.execute_script("return document.documentElement.scrollWidth") <= 360


def test_the_policy_keeps_the_page_by_itself(browser: Any, tmp_path: Path) -> None:
    save(SMALL, tmp_path / "page.html")
    browser.get((tmp_path / "page.html").as_uri())
    script = """
    const done = arguments[0];
    document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective), { once: true });
    fetch("http://127.0.0.1:9/").catch(() => {});
    """
    assert browser.execute_async_script(script) == "connect-src"
    inline = """
    const done = arguments[0];
    document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective), { once: true });
    const added = document.createElement("script");
    added.textContent = "document.title = 'run'";
    document.body.append(added);
    """
    assert browser.execute_async_script(inline) == "script-src-elem"
    assert browser.title != "run"
