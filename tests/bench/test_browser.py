"""The page in a real browser: what is drawn is what was measured, it can be read everywhere, and nothing leaves it."""

from __future__ import annotations

import hashlib
import json
import math
import runpy
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dilated_attention.bench import series
from dilated_attention.bench.report import page

pytest.importorskip("selenium", reason="needs selenium: pip install -c constraints.txt selenium")

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

HERE = Path(__file__).parent
made = runpy.run_path(str(HERE / "sample.py"))
SAMPLE: dict[str, Any] = made["sample"]()
MEASUREMENTS = series.prepared(SAMPLE["measurements"])
START = series.start(MEASUREMENTS)
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b>'&"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1200,1000",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        PROGRAM is None or DRIVER is None, reason="needs chromium (or google-chrome) and chromedriver on the PATH"
    ),
    pytest.mark.xdist_group("browser"),
]
Open = Callable[..., webdriver.Chrome]


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One browser for all tests, with an empty profile. Selenium's manager would download one: it gets paths."""
    options = Options()
    options.binary_location = str(PROGRAM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of the pages."""
    hostile = json.loads(json.dumps(SAMPLE))
    for part in ("measurements", "checks", "matrix"):
        for one in hostile[part]:
            one["implementation"] += HOSTILE
    for one in hostile["measurements"]:
        one["dtype"] += HOSTILE
        one["why"] += HOSTILE
    hostile["answer"] = hostile["machine"]["device"] = HOSTILE
    folder = tmp_path_factory.mktemp("pages")
    shown = {"sample": SAMPLE, "empty": made["empty"](), "hostile": hostile, "many": crowded()}
    for name, results in shown.items():
        (folder / f"{name}.html").write_text(page(results), encoding="utf-8")
    return {file.stem: file.as_uri() for file in folder.iterdir()}


def crowded() -> dict[str, Any]:
    """More lines than an eye can follow: three that tell most, and twenty others, which have a suite of their own."""
    first = next(m for m in SAMPLE["measurements"] if m["ms"] and m["ranks"] == 1)
    names = ["dense SDPA", "head_groups, auto", "longnet, auto", *(f"other {i}" for i in range(20))]
    points = [
        {**first, "implementation": name, "rule": "longnet", "suite": suite, "tokens": tokens}
        for suite, some, lengths in (("scaling", names, (1024, 2048, 4096)), ("own", names[3:6], (1024, 2048)))
        for name in some
        for tokens in lengths
    ]
    return {**json.loads(json.dumps(SAMPLE)), "measurements": points}


@pytest.fixture
def show(chrome: webdriver.Chrome, pages: dict[str, str]) -> Iterator[Open]:
    """Opens a page as it looks at a width and in a theme. Whatever the browser has to complain about fails the test."""

    def opened(name: str = "sample", width: int = 1200, theme: str = "light") -> webdriver.Chrome:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = [{"name": "prefers-color-scheme", "value": theme}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        chrome.get(pages[name])
        return chrome

    yield opened
    assert chrome.get_log("browser") == []


def matching(**changes: Any) -> list[dict[str, Any]]:
    picked = {**START, **changes}
    return [m for m in MEASUREMENTS if all(value is None or m[key] == value for key, value in picked.items())]


def one(chrome: webdriver.Chrome, selector: str) -> WebElement:
    return chrome.find_element(By.CSS_SELECTOR, selector)


def number(chrome: webdriver.Chrome, selector: str) -> int:
    return len(chrome.find_elements(By.CSS_SELECTOR, selector))


def choose(chrome: webdriver.Chrome, facet: str, value: Any) -> None:
    wanted = json.dumps(value, separators=(",", ":"))
    chrome.find_element(By.XPATH, f"//input[@name='{facet}' and @value='{wanted}']/..").click()


def point(chrome: webdriver.Chrome, figure: str, name: str, tokens: int) -> WebElement:
    return one(chrome, f'#{figure} [data-series="{name}"] .point[data-x="{tokens}"]')


def tip(chrome: webdriver.Chrome, figure: str = "time") -> str:
    return one(chrome, f"#{figure} .tip").text


def duration(ms: float) -> str:
    value, unit = (ms / 1000, "s") if ms >= 1000 else (ms, "ms") if ms >= 1 else (ms * 1000, "µs")
    return f"{digits(value)} {unit}"


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def check_drawn(chrome: webdriver.Chrome, here: list[dict[str, Any]]) -> None:
    """The points, lines, bars and ends of all three plots, counted against the data."""
    measured = [m for m in here if m["ms"]]
    lost = {m["series"] for m in here if m["status"] == "out of memory"}
    curves = {m["series"] for m in measured} | lost
    for figure, points in (
        ("time", measured),
        ("memory", [m for m in measured if m["peak_bytes"]]),
        ("rate", [m for m in measured if m["tflops"]]),
    ):
        found = {name: number(chrome, f"#{figure} .point.{name}") for name in ("few", "many", "end")}
        few = sum(m["ms"]["repeats"] < 3 for m in points)
        assert found == {"few": few, "many": len(points) - few, "end": 0 if figure == "rate" else len(lost)}, figure
    assert number(chrome, "#time .curve") == len(curves)
    assert number(chrome, "#legend button:not(.all)") == len(curves)
    assert number(chrome, "#time .bar") == sum(m["ms"]["repeats"] >= 3 for m in measured)
    assert number(chrome, "#rate .path") == 0


# --- plots ------------------------------------------------------------------------------------------------------


def test_all_that_was_measured_is_drawn(show: Open) -> None:
    chrome = show()
    here = matching()
    check_drawn(chrome, here)
    assert len({m["series"] for m in here if m["ms"]}) > 12
    assert number(chrome, "#time .lost") == 1  # the line on to where memory ended
    assert number(chrome, "#rate .roof") == 2
    assert not one(chrome, "#no-ceiling").is_displayed()
    assert "152 GFLOP/s" in one(chrome, "#rate svg").text
    shapes = chrome.execute_script(
        "return [...document.querySelectorAll('#legend .curve')]"
        ".map((curve) => curve.classList[1] + curve.lastChild.getAttribute('d'))"
    )
    assert len(set(shapes)) == len(shapes)  # no two series look the same


def test_points_lie_where_their_values_say(show: Open) -> None:
    """On a log scale equal ratios are equal distances, in both directions of the picture."""
    chrome = show()
    places = chrome.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('#time [data-series=\"dense SDPA\"] .point')]"
        ".map(p => [p.dataset.x, p.getAttribute('transform').match(/[\\d.]+/g).map(Number)]))"
    )
    times = {m["tokens"]: m["ms"]["median"] for m in matching() if m["series"] == "dense SDPA"}
    (x0, y0), (x1, y1), (x2, y2) = (places[str(tokens)] for tokens in (1024, 4096, 16384))
    assert x1 - x0 == pytest.approx(x2 - x1)
    ratio = math.log(times[4096] / times[1024]) / math.log(times[16384] / times[4096])
    assert (y0 - y1) / (y1 - y2) == pytest.approx(ratio)
    assert y0 > y1 > y2
    ticks = chrome.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('#time text')]"
        ".map((t) => [t.textContent, [Number(t.getAttribute('x')), Number(t.getAttribute('y'))]]))"
    )
    assert ticks["4k"][0] == pytest.approx(x1)
    decade = ticks["100 ms"][1] - ticks["1 s"][1]
    above = math.log10(times[4096] / 100) * decade  # from the line of 100 ms; text stands 4 pixels below its line
    assert y1 == pytest.approx(ticks["100 ms"][1] - 4 - above)


def test_toggles_change_what_is_drawn(show: Open) -> None:
    chrome = show()
    for facet, value in (("dtype", "bfloat16"), ("causal", True), ("direction", "forward_backward"), ("ranks", 4)):
        choose(chrome, facet, value)
        check_drawn(chrome, matching(**{facet: value}))
        assert number(chrome, "#facets input:checked") == 7
        choose(chrome, facet, START[facet])
    check_drawn(chrome, matching())
    choose(chrome, "dtype", "bfloat16")
    assert "221 GFLOP/s" in one(chrome, "#rate svg").text


def test_only_options_of_the_data_are_there(show: Open) -> None:
    chrome = show()
    names = chrome.execute_script("return [...document.querySelectorAll('#facets legend')].map(l => l.textContent)")
    assert names == ["direction", "causal", "dtype", "suite", "segments", "ranks", "times"]  # one shape: no choice
    labels = chrome.execute_script("return [...document.querySelectorAll('#facets label')].map(l => l.textContent)")
    segments = labels[8:-6]
    assert len(segments) == 2
    assert [*labels[:8], *labels[-6:]] == [
        "forward", "forward + backward", "no", "yes", "float32", "bfloat16", "full", "steps", "all", "1", "2", "4",
        "absolute", "relative",
    ]  # fmt: skip


def test_a_selection_without_data_says_so_and_leads_back(show: Open) -> None:
    chrome = show()
    choose(chrome, "suite", "steps")
    check_drawn(chrome, matching(suite="steps"))
    assert "No memory was measured" in one(chrome, "#memory").text
    choose(chrome, "causal", True)
    assert number(chrome, ".plot svg") == 0
    assert number(chrome, "#legend button") == 0
    assert "Nothing was measured for forward, causal, float32, suite steps" in one(chrome, "#selection").text
    one(chrome, "#selection button").click()
    assert number(chrome, "#time .point") > 0
    assert (
        "Shown: forward, causal, float32, suite full, B=1 H=8 D=64, by length, all ranks;"
        in one(chrome, "#selection").text
    )
    assert chrome.execute_script("return document.querySelector('[name=suite]:checked').value") == '"full"'


def test_what_has_no_time_is_listed_with_its_reason(show: Open) -> None:
    chrome = show()
    one(chrome, "#without summary").click()
    found = one(chrome, "#without ul").text
    assert "index by mask: wrong. out is off by 3.1e-01: it gets no time. (1k, 2k, 4k, 8k, 16k, 32k tokens)" in found
    assert "longnet, eager: out of memory." in found


def test_the_legend_hides_and_shows_a_series(show: Open) -> None:
    chrome = show()
    button = "//div[@id='legend']/button[text()='dense SDPA']"
    before = number(chrome, ".curve[data-series]")
    chrome.find_element(By.XPATH, button).click()
    assert number(chrome, '[data-series="dense SDPA"]') == 0
    assert number(chrome, ".curve[data-series]") == before - 3
    pressed = chrome.find_element(By.XPATH, button)
    assert pressed.get_attribute("aria-pressed") == "false"
    assert chrome.switch_to.active_element == pressed  # for those who press it with a key
    pressed.send_keys(Keys.ENTER)
    assert number(chrome, '.curve[data-series="dense SDPA"]') == 3
    one(chrome, "#legend .all").click()
    assert number(chrome, ".curve[data-series]") == 0
    assert "Every series is hidden" in one(chrome, "#time").text
    one(chrome, "#legend .all").click()
    assert number(chrome, ".curve[data-series]") == before


def test_relative_times_start_at_the_fastest(show: Open) -> None:
    chrome = show()
    choose(chrome, "times", True)
    check_drawn(chrome, matching())
    at = {m["series"]: m["ms"]["median"] for m in matching() if m["ms"] and m["tokens"] == 4096}
    ActionChains(chrome).move_to_element(point(chrome, "time", "dense SDPA", 4096)).perform()
    assert f"{at['dense SDPA'] / min(at.values()):.3g} × the fastest shown" in tip(chrome)


# --- reading values ---------------------------------------------------------------------------------------------


def expected(name: str, tokens: int) -> dict[str, Any]:
    return next(m for m in matching() if m["series"] == name and m["tokens"] == tokens)


@pytest.mark.parametrize(("name", "tokens"), [("dense SDPA", 2048), ("gather-pad-scatter", 32768)])
def test_hovering_shows_the_value(show: Open, name: str, tokens: int) -> None:
    chrome = show()
    assert tip(chrome) == ""
    ActionChains(chrome).move_to_element(point(chrome, "time", name, tokens)).perform()
    m = expected(name, tokens)
    lines = tip(chrome).split("\n")
    assert lines[0] == name
    assert lines[1].startswith(duration(m["ms"]["median"]) + " (")
    assert lines[2] == f"{tokens:,} tokens, forward, not causal, float32"
    assert lines[3] == f"{digits(m['peak_bytes'] / 2**20)} MiB beyond the inputs"
    assert f"{m['tokens_per_s']:,.0f} tokens/s" in lines
    if m["ms"]["repeats"] == 1:
        assert lines[1].endswith("(once)")
    else:
        low, high = duration(m["ms"]["lower"]), duration(m["ms"]["upper"])
        assert lines[1].endswith(f"({low} – {high}, {m['ms']['repeats']} repeats)")
    ActionChains(chrome).move_to_element(one(chrome, "#time figcaption")).perform()
    assert tip(chrome) == ""


def test_hovering_tells_where_memory_ended_and_the_rate(show: Open) -> None:
    chrome = show()
    ActionChains(chrome).move_to_element(one(chrome, "#memory .point.end")).perform()
    assert tip(chrome, "memory").startswith("longnet, eager\nout of memory\n32,768 tokens")
    m = expected("dense SDPA", 32768)
    spot = f'#rate [data-series="dense SDPA"] .point[data-x^="{m["flops"] / m["bytes"]:.0f}"]'
    ActionChains(chrome).move_to_element(one(chrome, spot)).perform()
    assert f"{m['tflops'] * 1000:.1f} GFLOP/s, {100 * m['of_matmul']:.1f} % of matmul" in tip(chrome, "rate")


def test_arrow_keys_go_along_a_series_and_across(show: Open) -> None:
    chrome = show()
    assert number(chrome, "#time [tabindex='0']") == 1  # one stop on the way through the page
    one(chrome, "#time [tabindex='0']").send_keys(Keys.ARROW_RIGHT)
    assert tip(chrome).startswith("dense SDPA\n")
    assert "2,048 tokens" in tip(chrome)
    assert "2,048 tokens" in str(chrome.switch_to.active_element.get_attribute("aria-label"))
    chrome.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert tip(chrome).startswith("longnet, auto\n")
    assert "2,048 tokens" in tip(chrome)
    chrome.switch_to.active_element.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.ARROW_UP)
    assert tip(chrome).startswith("gather-pad-scatter\n")  # round from the first to the last
    assert number(chrome, "#time [tabindex='0']") == 1
    chrome.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert tip(chrome) == ""


def test_a_tap_shows_the_value_until_the_next(show: Open) -> None:
    chrome = show(width=360)
    chrome.execute_script("document.getElementById('memory').scrollIntoView()")

    def tap(element: WebElement) -> None:
        """A little beside it, as fingers do: a marker that is hit gets the focus, and that shows its value anyway."""
        finger = ActionBuilder(chrome, mouse=PointerInput("touch", "finger"))
        finger.pointer_action.move_to(element, 12, -4).pointer_down().pointer_up()
        finger.perform()

    tap(point(chrome, "memory", "longnet, eager", 2048))
    assert tip(chrome, "memory").startswith("longnet, eager\n")
    tap(point(chrome, "memory", "gather-pad-scatter", 4096))
    assert tip(chrome, "memory").startswith("gather-pad-scatter\n")
    box = chrome.execute_script(
        "const { left, right } = document.querySelector('#memory .tip').getBoundingClientRect(); return [left, right]"
    )
    assert 0 <= box[0] < box[1] <= 360
    tap(one(chrome, "#memory figcaption"))
    assert tip(chrome, "memory") == ""


# --- the table --------------------------------------------------------------------------------------------------


def column(chrome: webdriver.Chrome, title: str) -> list[str]:
    found: list[str] = chrome.execute_script(
        "const heads = [...document.querySelectorAll('#all th')].map(h => h.textContent);"
        "const place = heads.indexOf(arguments[0]);"
        "return [...document.querySelectorAll('#all tbody tr')].map((row) => row.cells[place].textContent)",
        title,
    )
    return found


def sort_by(chrome: webdriver.Chrome, title: str) -> None:
    head = chrome.find_element(By.XPATH, f"//table[@id='all']//button[text()='{title}']")
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", head)
    head.click()


def test_the_table_has_all_and_no_time_of_what_is_wrong(show: Open) -> None:
    chrome = show()
    assert column(chrome, "implementation") == [m["implementation"] for m in MEASUREMENTS]
    assert column(chrome, "time") == [duration(m["ms"]["median"]) if m["ms"] else "" for m in MEASUREMENTS]
    assert column(chrome, "status") == [m["status"] for m in MEASUREMENTS]
    said = zip(column(chrome, "quartiles, or why none"), MEASUREMENTS, strict=True)
    reasons = [text for text, m in said if not m["ms"]]
    assert reasons == [m["why"] for m in MEASUREMENTS if not m["ms"]]
    assert one(chrome, "#count").text == f"{len(MEASUREMENTS)} of {len(MEASUREMENTS)}"


def test_sorting(show: Open) -> None:
    chrome = show()
    times = sorted(m["ms"]["median"] for m in MEASUREMENTS if m["ms"])
    blanks = [""] * (len(MEASUREMENTS) - len(times))
    sort_by(chrome, "time")
    assert column(chrome, "time") == [duration(ms) for ms in times] + blanks
    sort_by(chrome, "time")
    assert column(chrome, "time") == [duration(ms) for ms in times[::-1]] + blanks  # what has no time stays last
    assert one(chrome, "#all [aria-sort]").get_attribute("aria-sort") == "descending"
    sort_by(chrome, "tokens")
    assert column(chrome, "tokens") == [f"{m:,}" for m in sorted(m["tokens"] for m in MEASUREMENTS)]
    sort_by(chrome, "implementation")
    found = column(chrome, "implementation")
    assert found == sorted(found, key=str.lower)
    assert number(chrome, "#all [aria-sort]") == 1


def test_filtering(show: Open) -> None:
    chrome = show()
    one(chrome, "#words").send_keys("DENSE  bfloat16 8192", Keys.ENTER)
    wanted = [m for m in MEASUREMENTS if "dense" in m["series"] and m["dtype"] == "bfloat16" and m["tokens"] == 8192]
    assert column(chrome, "tokens") == ["8,192"] * len(wanted)
    assert one(chrome, "#count").text == f"{len(wanted)} of {len(MEASUREMENTS)}"
    one(chrome, "#words").clear()
    status = Select(one(chrome, "#status"))
    assert [option.text for option in status.options] == ["all", "measured", "out of memory", "skipped", "wrong"]
    status.select_by_visible_text("wrong")
    assert set(column(chrome, "status")) == {"wrong"}
    assert set(column(chrome, "time")) == {""}
    assert len(column(chrome, "time")) == sum(m["status"] == "wrong" for m in MEASUREMENTS)
    one(chrome, "#words").send_keys("nothing like it")
    assert column(chrome, "time") == []


# --- everywhere readable ----------------------------------------------------------------------------------------

# [contrast, font size, text] of every element with text of its own that can be seen
TEXTS = """
const light = (c) => c.map((p) => p / 255).map((p) => (p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4))
  .reduce((sum, p, i) => sum + p * [0.2126, 0.7152, 0.0722][i], 0);
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const found = parts(getComputedStyle(node).backgroundColor);
    if (found.length === 3) return found;
  }
};
return [...document.body.querySelectorAll("*")]
  .filter((node) => !["SCRIPT", "NOSCRIPT", "STYLE"].includes(node.tagName) && node.checkVisibility())
  .filter((node) => !node.closest("#all tr:nth-child(n + 20)")) // the rest of a long table is the same
  .filter((node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
  .map((node) => {
    const style = getComputedStyle(node);
    const ink = parts(node instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [low, high] = [light(ink), light(ground(node))].sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), parseFloat(style.fontSize), node.textContent.slice(0, 40)];
  });
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_all_text_can_be_read(show: Open, theme: str, width: int) -> None:
    chrome = show(width=width, theme=theme)
    found = chrome.execute_script(TEXTS)
    assert len(found) > 500
    assert min(found)[0] >= 4.5, min(found)
    smallest = min(found, key=lambda text: text[1])
    assert smallest[1] >= 12, smallest
    ground = chrome.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(ground) < 40 if theme == "dark" else min(ground) > 240


@pytest.mark.parametrize("name", ["sample", "empty", "hostile"])
@pytest.mark.parametrize("width", [360, 800])
def test_the_page_never_scrolls_sideways(show: Open, name: str, width: int) -> None:
    chrome = show(name, width=width)
    sizes = chrome.execute_script(
        "return [innerWidth, document.documentElement.scrollWidth, document.body.scrollWidth]"
    )
    assert sizes[0] == width  # a phone would show more than that where something sticks out
    assert max(sizes) == width
    boxes = chrome.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter((node) => node.checkVisibility())"
        ".map((node) => node.getBoundingClientRect()).map(({ left, right }) => [left, right])",
        "h1, header p, nav, .answer, h2, .scroll, .plot svg, .facets *, .legend *",
    )
    assert all(left >= 0 and right <= width for left, right in boxes)
    head = chrome.execute_script(
        "return [...document.querySelector('header').children].map((node) => node.getBoundingClientRect())"
        ".map(({ top, bottom }) => [top, bottom])"
    )
    assert all(above[1] <= below[0] for above, below in pairwise(head))  # nothing lies over the headline


def test_the_plots_follow_the_width(show: Open) -> None:
    chrome = show()
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    )
    # drawn anew in the frame after the next: the second of two callbacks comes later
    chrome.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))")
    assert one(chrome, "#time svg").get_dom_attribute("viewBox") == "0 0 468 356"
    check_drawn(chrome, matching())


def test_without_script_the_plain_parts_are_there(show: Open, chrome: webdriver.Chrome) -> None:
    chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show()
        shown = one(chrome, "body").text
        for text in (SAMPLE["answer"], "Which one to use", "A ring halves memory", "results.csv", "2.13.0+cpu"):
            assert text in shown
        assert "Time against length" not in shown
    finally:
        chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_an_empty_page_says_so(show: Open) -> None:
    chrome = show("empty")
    for place in ("#time", "#memory", "#rate", "#selection", "#count", "#answer"):
        assert "Nothing was measured" in one(chrome, place).text, place
    assert number(chrome, ".plot svg, #legend button, #facets input, #all tbody tr") == 0
    assert not one(chrome, ".hint").is_displayed()


# --- nothing comes in or goes out -------------------------------------------------------------------------------


def test_names_are_only_names(show: Open) -> None:
    chrome = show("hostile")
    assert chrome.title == f"Dilated attention on {HOSTILE}"
    assert number(chrome, "img, main b b") == 0
    assert number(chrome, "script") == 2
    assert one(chrome, ".answer").text == HOSTILE
    assert number(chrome, "#time .point") > 50
    assert one(chrome, "#no-ceiling").is_displayed()  # nobody measured the ceilings of such a dtype
    assert number(chrome, "#rate .roof") == 0
    assert HOSTILE in one(chrome, "#legend button").text
    assert HOSTILE in one(chrome, "#facets").text
    assert all(HOSTILE in text for text in column(chrome, "implementation"))
    spot = one(chrome, "#time .point")
    ActionChains(chrome).move_to_element(spot).perform()
    assert tip(chrome).startswith(f"dense SDPA{HOSTILE}\n")
    one(chrome, "#without summary").click()
    assert HOSTILE in one(chrome, "#without ul").text
    assert number(chrome, "img, main b b") == 0


def test_nothing_is_asked_for_but_the_page_itself(show: Open, pages: dict[str, str]) -> None:
    chrome = show()
    chrome.get_log("performance")
    show()
    choose(chrome, "dtype", "bfloat16")
    one(chrome, "#legend button").click()
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [pages["sample"]]
    assert not [m for m in messages if m["method"] == "Network.webSocketCreated"]


def test_the_policy_holds(show: Open) -> None:
    """What a hostile text would try if it got in: a script, a style, a picture from elsewhere, a request."""
    chrome = show()
    stopped = chrome.execute_async_script("""
      const done = arguments[0], found = [];
      document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
      const add = (tag, values) => document.body.append(Object.assign(document.createElement(tag), values));
      add("script", { textContent: "window.taken = true" });
      add("style", { textContent: "body { display: none }" });
      add("img", { src: "https://example.invalid/a.png" });
      document.body.setAttribute("style", "display: none");
      fetch("https://example.invalid/").catch(() => setTimeout(() => done([found.sort(), window.taken === true]), 100));
    """)
    assert stopped == [["connect-src", "img-src", "script-src-elem", "style-src-attr", "style-src-elem"], False]
    assert len(chrome.get_log("browser")) >= 5  # and the browser says so: an empty log in other tests means something


def test_screenshots(pages: dict[str, str], tmp_path: Path) -> None:
    script = runpy.run_path(str(HERE.parents[1] / "benchmarks/screenshots.py"))
    shown = Path(pages["sample"].removeprefix("file://"))
    shown.with_name("results.json").write_text("the results")
    assert script["main"]([str(shown), str(tmp_path)]) == 0
    sizes = {}
    for file in tmp_path.iterdir():
        with Image.open(file) as image:
            assert image.text["results"] == hashlib.sha256(b"the results").hexdigest()  # type: ignore[attr-defined]
        content = file.read_bytes()
        assert len(content) < 300_000
        sizes[file.name] = tuple(int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert sizes == {"report-desktop-light.png": (1200, 1000), "report-phone-dark.png": (720, 1520)}


# --- many series ------------------------------------------------------------------------------------------------


def test_of_many_lines_the_telling_ones_are_seen_first_and_never_none(show: Open) -> None:
    chrome = show("many")
    assert number(chrome, "#time .curve") == 3
    assert number(chrome, "#legend button:not(.all)") == 23
    one(chrome, "#legend .all").click()
    assert number(chrome, "#time .curve") == 23
    one(chrome, "#legend .all").click()
    assert number(chrome, "#time .curve") == 0
    chrome = show("many")
    choose(chrome, "suite", "own")
    assert number(chrome, "#time .curve") == 3  # all three were hidden in the suite before
