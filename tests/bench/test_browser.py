"""The page in a real browser: what is drawn is what was measured, it can be read everywhere, and nothing leaves it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from dilated_attention.bench import plots
from dilated_attention.bench.page import page
from tests.bench import sample
from tests.browsing import IN_A_BROWSER, keeps_to_itself, show_report, started_browser  # noqa: F401

SAMPLE: dict[str, Any] = sample.sample()
POINTS = plots.points(SAMPLE["measurements"])
START = plots.settings(POINTS)[0]
FIRST = plots.first(POINTS, START)
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b>'&"
pytestmark = IN_A_BROWSER
Open = Callable[..., webdriver.Chrome]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of the pages."""
    hostile = json.loads(json.dumps(SAMPLE))
    for one in hostile["measurements"] + hostile["checks"]:
        one |= {name: one[name] + HOSTILE for name in ("implementation", "dtype")}
    hostile["answer"] = hostile["machine"]["device"] = HOSTILE
    folder = tmp_path_factory.mktemp("pages")
    for name, results in {"sample": SAMPLE, "empty": sample.empty(), "hostile": hostile}.items():
        (folder / f"{name}.html").write_text(page(results), encoding="utf-8")
    return {file.stem: file.as_uri() for file in folder.iterdir()}


@pytest.fixture
def show(browser: webdriver.Chrome, pages: dict[str, str]) -> Iterator[Open]:
    """Opens a page as it looks at a width and in a theme. Whatever the browser has to complain about fails the test."""

    def opened(name: str = "sample", width: int = 1280, theme: str = "light", choice: str = "") -> webdriver.Chrome:
        show_report(browser, f"{pages[name]}#{choice}", width, 844, theme)
        return browser

    yield opened
    assert browser.get_log("browser") == []


def texts(chrome: webdriver.Chrome, selector: str) -> list[str]:
    found: list[str] = chrome.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
    )
    return found


def number(chrome: webdriver.Chrome, selector: str) -> int:
    return len(chrome.find_elements(By.CSS_SELECTOR, selector))


def wait(chrome: webdriver.Chrome, what: Callable[[], Any]) -> None:
    """Until it is so: Vega draws a little later than it is told to."""
    WebDriverWait(chrome, 20).until(lambda _: what())


def click(chrome: webdriver.Chrome, path: str) -> None:
    """Each choice makes the buttons anew: until one stays long enough to be clicked."""
    patient = WebDriverWait(chrome, 20, ignored_exceptions=[StaleElementReferenceException])
    patient.until(lambda _: chrome.find_element(By.XPATH, path).click() or True)


def choose(chrome: webdriver.Chrome, value: str) -> None:
    click(chrome, f"//input[@value='{value}']/..")


def lines(chrome: webdriver.Chrome) -> int:
    return number(chrome, "#plot .mark-line path")


def point_at(chrome: webdriver.Chrome, tokens: int) -> None:
    """Move the pointer to where a length is, by the labels of the axis."""
    label = next(t for t in chrome.find_elements(By.CSS_SELECTOR, "#plot text") if t.text == f"{tokens // 1024}k")
    ActionChains(chrome).move_to_element_with_offset(label, 0, -150).perform()
    wait(chrome, lambda: f"{tokens:,} tokens" in texts(chrome, "#crosshair")[0])


def here(direction: str = "forward_backward", **also: Any) -> list[dict[str, Any]]:
    wanted = {"setting": START, "direction": direction, **also}
    found = [one for one in POINTS if all(one[key] == value for key, value in wanted.items())]
    return [one for one in found if one["series"] in FIRST]


def test_the_first_lines_are_drawn_with_their_names_on_the_first_screen(show: Open) -> None:
    chrome = show()
    timed = {one["series"] for one in here() if one["ms"]}
    assert lines(chrome) == number(chrome, "#shown button") == len(timed) < len(FIRST)  # one has wrong gradients
    box = chrome.find_element(By.ID, "plot").rect
    assert box["y"] + box["height"] < 844
    names = {t.text: t.rect for t in chrome.find_elements(By.CSS_SELECTOR, "#plot text")}
    assert timed <= set(names)
    assert all(names[name]["x"] + names[name]["width"] <= 1280 for name in timed)


def test_on_a_phone_lines_have_the_numbers_of_their_names(show: Open) -> None:
    chrome = show(width=390)
    shown = texts(chrome, "#shown button")
    assert [name.split(" ")[0] for name in shown] == [str(number + 1) for number in range(len(shown))]
    ends = {t.text: t.rect for t in chrome.find_elements(By.CSS_SELECTOR, "#plot .mark-text.role-mark text")}
    assert set(ends) == {name.split(" ")[0] for name in shown}
    assert all(one["x"] + one["width"] <= 390 for one in ends.values())


def test_points_lie_where_their_values_say(show: Open) -> None:
    """On a log scale equal ratios are equal distances. The labels of the axis are the measure."""
    chrome = show(choice=f"line={quote('dense SDPA')}")
    ticks = chrome.execute_script(
        "const middle = ({ x, y, width, height }) => [x + width / 2, y + height / 2];"
        "return Object.fromEntries([...document.querySelectorAll('#plot .role-axis-label text')]"
        ".map((label) => [label.textContent, middle(label.getBoundingClientRect())]))"
    )
    boxes = [one.rect for one in chrome.find_elements(By.CSS_SELECTOR, "#plot .mark-symbol path")]
    found = sorted((one["x"] + one["width"] / 2, one["y"] + one["height"] / 2) for one in boxes)
    times = [one["ms"] for one in here(series="dense SDPA")]
    decade = ticks["10"][1] - ticks["100"][1]
    for (x, y), tokens, ms in zip(found, sample.LENGTHS, times, strict=True):
        assert x == pytest.approx(ticks[f"{tokens // 1024}k"][0], abs=2)
        assert y == pytest.approx(ticks["10"][1] - decade * math.log10(ms / 10), abs=2)


def test_the_crosshair_lists_the_lines_at_one_length(show: Open) -> None:
    chrome = show()
    assert not chrome.find_element(By.ID, "crosshair").is_displayed()
    for figure, of in (
        ("time", lambda one, least: one["time"] + one["spread"]),
        ("memory", lambda one, least: one["memory"] or "not measured"),
        ("relative", lambda one, least: f"{one['ms'] / least:#.3g} ×" if one["ms"] else "out of memory"),
    ):
        choose(chrome, figure)
        for tokens in (8192, 2048):
            point_at(chrome, tokens)
            rows, expected = texts(chrome, "#crosshair tr"), here(tokens=tokens)
            least = min(one["ms"] for one in expected if one["ms"])
            assert len(rows) == len(expected)
            for one in expected:
                (row,) = [row for row in rows if row.startswith(one["series"])]
                assert of(one, least) in row
    assert "1 ×" in texts(chrome, "#plot .role-axis-label text")


def test_a_choice_changes_the_plot_and_the_address_which_restores_it(show: Open) -> None:
    chrome = show()
    choose(chrome, "forward")
    click(chrome, "//div[@id='shown']/button[text()='dense SDPA']")
    click(chrome, "//details[@id='others']/summary")
    click(chrome, "//div[@id='more']/button[text()='RingDilatedAttention, 4 ranks']")
    choose(chrome, "memory")
    shown = texts(chrome, "#shown button")
    assert {"dense SDPA", "RingDilatedAttention, 4 ranks"} & {*shown} == {"RingDilatedAttention, 4 ranks"}
    wait(chrome, lambda: lines(chrome) == len(shown))
    address = chrome.current_url
    show()
    show_report(chrome, address, 1280, 844, "light")
    assert (texts(chrome, "#shown button"), lines(chrome)) == (shown, len(shown))
    assert texts(chrome, "#heading") == ["Peak memory beyond the inputs, forward"]
    Select(chrome.find_element(By.NAME, "setting")).select_by_value(START.replace("float32", "float32, causal"))
    wait(chrome, lambda: lines(chrome) == 2)
    chrome.back()
    wait(chrome, lambda: texts(chrome, "#shown button") == shown)


@pytest.mark.parametrize("choice", ["figure=x&direction=y&setting=z&line=none", "setting=%3Cb%3E", "line="])
def test_an_address_that_asks_for_nothing_known_does_no_harm(show: Open, choice: str) -> None:
    chrome = show(choice=choice)
    assert texts(chrome, "#heading") == ["Time in ms, forward + backward"]
    assert chrome.find_element(By.ID, "nothing").is_displayed() == ("line" in choice)


def test_words_filter_the_rows_of_tables(show: Open) -> None:
    chrome = show()
    chrome.find_element(By.ID, "words").send_keys("RING 4")
    seen = [row for row in chrome.find_elements(By.CSS_SELECTOR, "#tables tbody tr") if row.is_displayed()]
    assert len(seen) == 1
    assert seen[0].text.startswith("RingDilatedAttention, 4 ranks")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_plot_has_the_colours_of_the_theme(show: Open, theme: str) -> None:
    chrome = show(theme=theme)
    turned = plots.DARK if theme == "dark" else {}
    found = chrome.execute_script(
        "const seen = (node, key) => getComputedStyle(node)[key].match(/\\d+/g).slice(0, 3).map(Number);"
        "const label = document.querySelector('#plot .role-axis-label text');"
        "return [seen(document.body, 'backgroundColor'), seen(label, 'fill'),"
        "...[...document.querySelectorAll('#plot .mark-line path')].map((line) => seen(line, 'stroke')).sort()]"
    )
    lines = {one["series"]: one["colour"] for one in here() if one["ms"]}
    paper, words, *strokes = (
        [int(turned.get(colour, colour)[i : i + 2], 16) for i in (1, 3, 5)]
        for colour in (plots.PAPER, plots.MUTED, *lines.values())
    )
    assert found[:2] == [paper, words]
    assert sorted(found[2:]) == sorted(strokes)


@pytest.mark.parametrize("name", ["sample", "empty", "hostile"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways(show: Open, name: str, width: int) -> None:
    chrome = show(name, width=width)
    chrome.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert chrome.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
    cut = "return [...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length"
    if width == 1280 and name != "hostile":
        assert chrome.execute_script(cut) == 0


def test_an_empty_page_and_a_page_without_script_say_so(
    show: Open, browser: webdriver.Chrome, pages: dict[str, str]
) -> None:
    show("empty")
    assert browser.find_element(By.ID, "nothing").is_displayed()
    assert number(browser, "#shown button, #setting option") == 0
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(pages["sample"])
        assert "The plot needs JavaScript" in browser.find_element(By.TAG_NAME, "body").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_names_are_only_names(show: Open) -> None:
    chrome = show("hostile")
    assert (chrome.title, texts(chrome, ".answer")) == (f"Dilated attention on {HOSTILE}", [HOSTILE])
    point_at(chrome, 2048)
    assert all(HOSTILE in text for text in texts(chrome, "#shown button") + texts(chrome, "#crosshair tr"))
    assert number(chrome, "img, main b b") == 0


def test_nothing_comes_in_or_goes_out(show: Open, browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    browser.get_log("performance")  # of other pages
    keeps_to_itself(show(), Path(pages["sample"].removeprefix("file://")))
    assert browser.get_log("browser")  # the browser says what it stopped: an empty log in other tests means something
