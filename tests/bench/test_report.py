"""The report says what the results say: nothing more, nothing made up, and nothing that a name could smuggle in."""

from __future__ import annotations

import base64
import csv
import hashlib
import inspect
import io
import json
import math
import os
import re
import runpy
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from dilated_attention.bench import page as page_package
from dilated_attention.bench import plots, series
from dilated_attention.bench.report import COLUMNS, page, table, write_report

made = runpy.run_path(str(Path(__file__).with_name("sample.py")))
SAMPLE: dict[str, Any] = made["sample"]()
HOSTILE = """</script><img src=x onerror="document.title='taken'">'"&<b>$style ${script} %s {0}"""
SECRET = 987654.321  # a time that must not be told
Results = dict[str, Any]


def copy(results: Results = SAMPLE) -> Results:
    found: Results = json.loads(json.dumps(results))
    return found


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and its text outside of style and script."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.raw: dict[str, list[str]] = {"style": [], "script": []}
        self._inside = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in self.raw else self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        (self.raw[self._inside] if self._inside else self.text).append(data)

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


PARSED = Parsed(page(SAMPLE))


# --- files ------------------------------------------------------------------------------------------------------


def test_all_is_written_and_named(tmp_path: Path) -> None:
    said: list[str] = []
    written = write_report(SAMPLE, tmp_path / "new", say=said.append)
    pictures = [f"plots/{name}.{kind}" for name in ("time", "memory", "roofline", "errors") for kind in ("png", "svg")]
    assert [str(file.relative_to(tmp_path / "new")) for file in written] == ["results.csv", *pictures, "index.html"]
    assert sorted(written) == sorted(file for file in (tmp_path / "new").rglob("*") if file.is_file())
    assert said == []
    assert (tmp_path / "new/index.html").read_text(encoding="utf-8") == page(SAMPLE)


def test_nothing_measured_leaves_no_picture_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    for old in ("time.png", "errors.svg"):
        (tmp_path / "plots" / old).touch()
    said: list[str] = []
    written = write_report(made["empty"](), tmp_path, say=said.append)
    assert [file.name for file in written] == ["results.csv", "index.html"]
    assert not list((tmp_path / "plots").iterdir())  # the older pictures were of another run
    assert [line.split(":")[0] for line in said] == [
        f"no plot of {name}" for name in ("time", "memory", "roofline", "errors")
    ]
    assert "Nothing was measured" in Parsed((tmp_path / "index.html").read_text()).words()
    assert (tmp_path / "results.csv").read_text() == ",".join(COLUMNS) + "\n"


@pytest.mark.parametrize("broken", ["replace", "fdopen"])
def test_a_file_is_written_at_once_or_not_at_all(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results.csv").write_text("old")

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, broken, fails)
    with pytest.raises(OSError, match="disk full"):
        write_report(SAMPLE, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.csv"]
    assert (tmp_path / "results.csv").read_text() == "old"


# --- csv --------------------------------------------------------------------------------------------------------


def lines(results: Results) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table(results["measurements"]))))


def test_every_measurement_is_a_line_with_its_figures() -> None:
    found = lines(SAMPLE)
    assert len(found) == len(SAMPLE["measurements"])
    for line, one in zip(found, SAMPLE["measurements"], strict=True):
        for name in ("implementation", "direction", "status", "why", "dtype", "rule", "suite", "kind"):
            assert line[name] == one[name]
        assert int(line["tokens"]) == one["tokens"]
        assert line["causal"] == str(one["causal"]).lower()
        assert line["lengths"] == " ".join(map(str, one["lengths"]))
        for name in ("median", "lower", "upper", "repeats"):
            assert line[f"ms_{name}"] == ("" if one["ms"] is None else str(one["ms"][name]))
        for name in ("tflops", "peak_bytes", "of_copy"):
            assert line[name] == ("" if one[name] is None else str(one[name]))


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "\t=1", "\n-1", "=1\r=2"])
def test_no_text_is_a_formula(text: str) -> None:
    results = copy()
    results["measurements"][0]["implementation"] = text
    assert lines(results)[0]["implementation"] == "'" + text.replace("\r", "\\r")


def test_numbers_and_plain_text_are_left_alone() -> None:
    results = copy()
    results["measurements"][0].update(implementation='a - b, "c"\n= d', tflops=-1.5)
    assert lines(results)[0]["implementation"] == 'a - b, "c"\n= d'
    assert lines(results)[0]["tflops"] == "-1.5"


# --- what is wrong gets no time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["wrong", "out of memory", "skipped"])
def test_what_was_not_measured_has_no_figure_anywhere(status: str) -> None:
    results = copy()
    one = next(m for m in results["measurements"] if m["ms"])
    one["status"] = status
    one["ms"] = {"median": SECRET, "lower": SECRET, "upper": SECRET, "repeats": 9}
    for name in series.FIGURES[1:]:
        one[name] = SECRET
    for told in (page(results), table(results["measurements"]), *svgs(results).values()):
        assert "987654" not in told


# --- series and selections --------------------------------------------------------------------------------------


def measurement(**changes: Any) -> dict[str, Any]:
    return {**SAMPLE["measurements"][0], **changes}


def names(*measurements: dict[str, Any]) -> list[str]:
    return [one["series"] for one in series.prepared(measurements)]


def test_a_series_is_an_implementation() -> None:
    assert names(measurement(tokens=1024), measurement(tokens=2048, lengths=[2048])) == ["dense SDPA"] * 2


def test_rules_and_ranks_tell_series_apart_where_needed() -> None:
    assert names(measurement(), measurement(rule="torchscale")) == ["dense SDPA, longnet", "dense SDPA, torchscale"]
    assert names(measurement(), measurement(ranks=4)) == ["dense SDPA", "dense SDPA, 4 ranks"]
    assert names(measurement(implementation="ring, 4 ranks, kept", ranks=4)) == ["ring, 4 ranks, kept"]


def test_segments_are_picked_where_a_length_has_several() -> None:
    def segments(*measurements: dict[str, Any]) -> list[str]:
        return [one["segments"] for one in series.prepared(measurements)]

    assert segments(measurement(lengths=[4, 8], rates=[1, 2])) == ["w=4,8 r=1,2"]
    two = measurement(lengths=[4], rates=[1]), measurement(lengths=[8], rates=[1])
    assert segments(*two, measurement(lengths=[16], rates=[1], suite="other")) == ["w=4 r=1", "w=8 r=1", "w=16 r=1"]
    grown = measurement(lengths=[4], rates=[1]), measurement(lengths=[8], rates=[1], tokens=1 << 20)
    assert segments(*grown) == ["by length"] * 2  # one line with a pattern for each length


def test_preparing_changes_nothing_of_the_results() -> None:
    results = copy()
    results["measurements"][0]["status"] = "wrong"
    before = copy(results)
    series.prepared(results["measurements"])
    assert results == before


def test_the_first_selection_is_the_one_with_the_most_lengths() -> None:
    many = [measurement(suite="steps", implementation=str(i)) for i in range(9)]
    far = [measurement(suite="lengths", tokens=2**i, dtype="bfloat16") for i in range(4)]
    lost = [measurement(suite="wrong", tokens=2**i, status="wrong") for i in range(8)]
    start = series.start(series.prepared([*lost, *many, *far]))
    assert start == {
        "direction": "forward", "causal": False, "dtype": "bfloat16", "suite": "lengths", "shape": "B=1 H=8 D=64",
        "segments": "w=1024 r=1", "ranks": None,
    }  # fmt: skip
    assert series.start([]) == {}


# --- page -------------------------------------------------------------------------------------------------------


def test_the_plain_parts_need_no_script() -> None:
    words = PARSED.words()
    said = [SAMPLE["answer"], "64816d3f0c5e", "2.13.0+cpu", SAMPLE["machine"]["command"], "load at the start", "0.42"]
    said += [str(one[key]) for one in SAMPLE["claims"] for key in ("claim", "claimed", "ours", "holds", "how")]
    said += [one[key] for one in SAMPLE["recommendations"] for key in ("use_case", "best", "value")]
    said += [one["implementation"] for one in SAMPLE["matrix"]] + ["level with head_groups, auto, DilatedAttention"]
    said += [one["title"] for one in SAMPLE["tables"]] + ["412.7", "6,291,456"]
    assert [text for text in said if text not in words] == []


def test_the_order_of_the_page() -> None:
    places = [attributes.get("id") for tag, attributes in PARSED.elements if tag == "section"]
    wanted = ["answer", "plots", "roofline", "correctness", "claims", "tables", "measurements", "environment"]
    assert places == wanted


def test_changes_and_interruptions_are_said_near_the_top() -> None:
    results = copy()
    for dirty, complete in ((True, True), (False, False), (False, True), (None, True)):
        results["machine"]["dirty"], results["complete"] = dirty, complete
        head, _, rest = Parsed(page(results)).words().partition(SAMPLE["answer"][:30])
        assert ("uncommitted changes" in head) is bool(dirty)
        assert ("interrupted" in head) is not complete
        assert (f"run {'complete' if complete else 'interrupted'}") in rest
    assert "tree had changes not known" in rest


def test_an_interrupted_run_says_where() -> None:
    results = copy() | {"complete": False, "suites": ["copies", "ring"], "planned": ["copies", "ring"]}
    assert "This run was interrupted in the suite ring:" in Parsed(page(results)).words()
    results["planned"] = ["copies", "ring", "scaling", "profile"]
    assert "interrupted in the suite ring, and before scaling, profile:" in Parsed(page(results)).words()
    results["suites"] = []
    assert "interrupted before copies, ring, scaling, profile:" in Parsed(page(results)).words()


def test_wrong_ones_come_first_and_each_error_stands_with_its_limit() -> None:
    results = copy()
    results["checks"] = [
        {**results["checks"][0], "errors": {"out": 1.25e-7, "d q": 3e-6, "d k": 1e-9}, "verdict": "exact",
         "limits": {"out": 5e-6, "d q": 5e-6, "d k": 1e-12}},
        {**results["checks"][0], "errors": {"out": "inf"}, "limits": {"out": 5e-6}, "verdict": "wrong", "why": "Off."},
        {**results["checks"][0], "errors": {}, "limits": {}, "verdict": "failed", "why": "It raised."},
    ]  # fmt: skip
    words = Parsed(page(results)).words()
    words = words[words.index("1 of 3 checks are exact") :]
    assert words.index("✗ wrong") < words.index("✗ failed") < words.index("✓ exact")
    assert "inf over 5.0e-06" in words
    assert "1.2e-07 of 5.0e-06" in words
    assert "d k 1.0e-09 over 1.0e-12 all 3" in words  # farthest beyond its limit, though d q is larger
    assert "Off." in words
    assert "It raised." in words


def test_names_between_backticks_are_code() -> None:
    results = copy()
    results["answer"] = "Use `a<b` and `c`, not `this."
    assert "Use <code>a&lt;b</code> and <code>c</code>, not `this." in page(results)


def test_a_verdict_is_a_colour_and_a_word() -> None:
    content = page(SAMPLE)
    for kind, text in (("good", "✓ exact"), ("bad", "✗ wrong gradients"), ("bad", "✗ no"), ("open", "– not measured")):
        assert f'<span class="verdict {kind}">{text}</span>' in content


def test_the_data_is_json_without_a_less_than_sign() -> None:
    results = copy()
    results["measurements"][0].update(implementation=HOSTILE, tflops=math.inf)
    found = Parsed(page(results))
    data, script = found.raw["script"]
    assert "<" not in data
    embedded = json.loads(data)
    assert embedded["measurements"][0]["implementation"] == HOSTILE
    assert embedded["measurements"][0]["tflops"] is None
    assert len(embedded["measurements"]) == len(results["measurements"])
    assert "ResizeObserver" in script


def hostile(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    kept = key in ("status", "direction", "verdict") or not isinstance(value, str) or value in ("inf", "")
    return value if kept else f"{value} {HOSTILE}"


def test_no_text_becomes_markup() -> None:
    found, usual = Parsed(page(hostile(copy()))), PARSED
    # a span keeps short cells on one line, and these are no longer short
    tags = [[tag for tag, _ in one.elements if tag != "span"] for one in (found, usual)]
    assert tags[0] == tags[1]
    assert found.raw["style"] == usual.raw["style"]
    assert found.raw["script"][1] == usual.raw["script"][1]
    assert HOSTILE in found.words()


def test_nothing_can_be_loaded_and_nothing_else_can_run() -> None:
    policy = next(a["content"] for tag, a in PARSED.elements if tag == "meta" and "http-equiv" in a) or ""
    (style,), (_, script) = PARSED.raw["style"], PARSED.raw["script"]

    def known(content: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    assert dict(part.strip().split(" ", 1) for part in policy.split(";")) == {
        "default-src": "'none'", "script-src": known(script), "style-src": known(style), "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert not re.search(r"url\(|@import|@font-face", style)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import|\w+HTML|eval)\b", script)
    assert set(re.findall(r"https?://[^\"'\s]+", page(SAMPLE))) == {"http://www.w3.org/2000/svg"}
    for tag, attributes in PARSED.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")]
        if "href" in attributes:
            assert str(attributes["href"]).startswith(("#", "data:,", "plots/", "results.csv"))


# --- looks ------------------------------------------------------------------------------------------------------


def themes() -> list[dict[str, str]]:
    style = PARSED.raw["style"][0]
    light, dark = style.split("@media (prefers-color-scheme: dark)", 1)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in (light, dark)]


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([light(one), light(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_ink_and_series_stand_out_from_the_ground(theme: dict[str, str]) -> None:
    for ink in ("ink", "muted", "accent", "good", "bad"):
        assert contrast(theme[ink], theme["ground"]) >= 4.5, ink
        assert contrast(theme[ink], theme["raised"]) >= 4.5, ink
    assert contrast(theme["notice-ink"], theme["notice"]) >= 4.5
    for place in range(len(plots.COLOURS)):
        assert contrast(theme[f"s{place}"], theme["ground"]) >= 3, place


def test_the_pictures_have_the_colours_of_the_page() -> None:
    assert [themes()[0][f"s{place}"] for place in range(len(plots.COLOURS))] == list(plots.COLOURS)
    assert len(plots.MARKERS) == len(plots.COLOURS)


# --- pictures ---------------------------------------------------------------------------------------------------


def svgs(results: Results) -> dict[str, str]:
    return {name: plots.encoded(f, "svg").decode() for name, f in plots.figures(results).items() if f is not None}


SETTINGS = dict(mpl.rcParams)
SVGS = svgs(SAMPLE)


def texts(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", picture)


def test_pictures_are_the_same_each_time_and_change_no_setting() -> None:
    assert svgs(SAMPLE) == SVGS
    assert dict(mpl.rcParams) == SETTINGS
    figure = plots.figures(SAMPLE)["time"]
    assert figure is not None
    png = plots.encoded(figure, "png")
    assert png == plots.encoded(figure, "png")
    assert png.startswith(b"\x89PNG")
    assert "<dc:date>" not in SVGS["time"]
    assert "pyplot" not in inspect.getsource(plots)


def test_the_users_settings_change_no_picture() -> None:
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 30, "legend.labelcolor": "red"}):
        assert svgs(SAMPLE)["roofline"] == SVGS["roofline"]


@pytest.mark.parametrize("name", ["time", "memory", "roofline", "errors"])
def test_no_text_is_smaller_than_9_points(name: str) -> None:
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", SVGS[name])]
    assert sizes
    assert min(sizes) >= 9


@pytest.mark.parametrize("name", ["time", "memory", "roofline"])
def test_the_telling_and_the_recommended_are_drawn(name: str) -> None:
    found = texts(SVGS[name])
    names = series.names_in_order(series.prepared(SAMPLE["measurements"]))
    drawn = [one for one in names if one in found]
    assert len(drawn) == plots.MOST_LINES
    telling = {one for one in names if one in series.TELLING}
    assert len(telling) > 2
    assert telling <= set(drawn)
    assert {one["best"] for one in SAMPLE["recommendations"]} <= set(drawn)
    assert any("8 more on the page" in text for text in found)


def test_both_directions_are_panels_and_a_direction_without_data_is_not() -> None:
    assert {"forward", "forward + backward"} <= set(texts(SVGS["time"]))
    results = copy()
    results["measurements"] = [m for m in results["measurements"] if m["direction"] == "forward"]
    assert "forward + backward" not in texts(svgs(results)["time"])


@pytest.mark.parametrize("name", ["time", "memory", "roofline"])
def test_no_point_lies_outside(name: str) -> None:
    results = copy()
    for m in results["measurements"]:
        if m["ms"] and m["direction"] == "forward_backward":  # a panel far above the other
            m["ms"]["median"] *= 100
            m["peak_bytes"] *= 100
    figure = plots.figures(results)[name]
    assert figure is not None
    for axis in figure.axes:
        (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
        points = [point for line in axis.lines if line.get_marker() != "x" for point in line.get_xydata()]
        assert len(points) > 20
        assert all(left <= x <= right and low <= y <= high for x, y in points)


def test_where_memory_ended_is_marked() -> None:
    assert "out of memory" not in texts(SVGS["time"])  # no line that is drawn ended so
    results = copy()
    results["recommendations"][0]["best"] = name = "longnet, eager"
    figure = plots.figures(results)["time"]
    assert figure is not None
    assert "out of memory" in [label.get_text() for label in figure.legends[0].get_texts()]
    crosses = [line for axis in figure.axes for line in axis.lines if line.get_marker() == "x"]
    here = [m for m in results["measurements"] if m["implementation"] == name and m["status"] == "out of memory"]
    here = [m for m in here if m["dtype"] == "float32" and not m["causal"]]
    first = [min(m["tokens"] for m in here if m["direction"] == direction) for direction in made["DIRECTIONS"]]
    assert [float(x) for cross in crosses for x in cross.get_xdata()] == first


def test_the_roofline_has_the_ceilings_of_its_dtype() -> None:
    assert {"matmul, 0.152 TFLOP/s", "copy, 9.1 GB/s"} <= set(texts(SVGS["roofline"]))
    assert "matmul, 0.221 TFLOP/s" not in texts(SVGS["roofline"])


def test_the_wrong_are_the_first_rows_of_the_errors() -> None:
    rows = [text for text in texts(SVGS["errors"]) if text.endswith(("float32", "bfloat16"))]
    assert len(rows) == plots.MOST_ROWS
    wrong = {f"{name}, {dtype}" for name in (made["WRONG"], made["NO_GRADIENTS"]) for dtype in made["DTYPES"]}
    assert set(rows[:4]) == wrong


def test_wrong_far_out_is_wrong_however_small_its_errors() -> None:
    results = copy()
    odd = {**results["checks"][0], "implementation": "odd", "errors": {"out": 1e-9}, "verdict": "wrong at full length"}
    results["checks"].append({**odd, "limits": {"out": 1e-3}})
    rows = [text for text in texts(svgs(results)["errors"]) if text.endswith(("float32", "bfloat16"))]
    assert "odd, float32" in rows[:5]


def leave_out(results: Results, name: str) -> None:
    for one in results["measurements"]:
        one[name] = None


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda results: leave_out(results, "peak_bytes"), {"memory"}),
        (lambda results: leave_out(results, "tflops"), {"roofline"}),
        (lambda results: results.update(checks=[]), {"errors"}),
        (lambda results: results.update(measurements=[]), {"time", "memory", "roofline"}),
    ],
)
def test_what_was_not_measured_is_not_drawn(change: Callable[[Results], None], missing: set[str]) -> None:
    results = copy()
    change(results)
    assert {name for name, figure in plots.figures(results).items() if figure is None} == missing


def test_any_name_can_be_drawn() -> None:
    results = copy()
    for one in results["measurements"] + results["checks"]:
        one["implementation"] = f"$x^{{ $ {HOSTILE} {one['implementation']}"
    for name, figure in plots.figures(results).items():
        assert figure is not None
        assert b"<img" not in plots.encoded(figure, "svg")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for text in (figure.legends[0], *figure.texts):  # the legend and the title
            assert text.get_window_extent(canvas.get_renderer()).x1 <= figure.bbox.x1, name


def test_the_files_of_the_page_are_all_there() -> None:
    folder = Path(page_package.__file__).parent
    assert {file.name for file in folder.iterdir() if file.is_file()} == {"__init__.py", *page_package.FILES}
