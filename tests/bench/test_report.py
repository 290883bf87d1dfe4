"""The report says what the results say: nothing more, nothing made up, and nothing that a name could smuggle in."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dilated_attention.bench import plots
from dilated_attention.bench.page import COLUMNS, csv_text, page, write_report
from dilated_attention.bench.results import load
from dilated_attention.show.charts import _hashes
from tests.bench import sample

SAMPLE: dict[str, Any] = sample.sample()
HOSTILE = """</script><img src=x onerror="document.title='taken'">'"&<b>{{ 7 * 7 }} {% raw %} %s {0}"""
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
        self.raw: dict[str, list[str]] = {"style": [], "script": [], "": []}
        self._inside = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in self.raw else self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        self.raw[self._inside].append(data)

    def words(self) -> str:
        return " ".join(" ".join(self.raw[""]).split())


@functools.cache
def parsed() -> Parsed:
    return Parsed(page(SAMPLE))


def test_all_is_written_and_named(tmp_path: Path) -> None:
    said: list[str] = []
    write_report(SAMPLE, tmp_path / "new", say=said.append)
    names = {str(file.relative_to(tmp_path / "new")) for file in (tmp_path / "new").rglob("*") if file.is_file()}
    pictures = {f"plots/{name}.{kind}" for name in ("time", "memory") for kind in ("svg", "png")}
    assert names == {"results.csv", "index.html"} | pictures
    assert said == [f"written: {tmp_path / 'new' / name}" for name in ("results.csv", "index.html")]
    assert (tmp_path / "new/plots/time.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new/index.html").read_text(encoding="utf-8") == page(SAMPLE)


def test_nothing_measured_leaves_no_picture_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    for old in ("time.png", "memory.svg"):
        (tmp_path / "plots" / old).touch()
    said: list[str] = []
    write_report(sample.empty(), tmp_path, say=said.append)
    assert not list((tmp_path / "plots").iterdir())  # the older pictures were of another run
    assert [line.split(":")[0] for line in said] == ["written", "no plot of time", "no plot of memory", "written"]
    words = Parsed((tmp_path / "index.html").read_text()).words()
    for said_there in ("Nothing was measured", "Nothing was checked", "This run made no tables"):
        assert said_there in words
    assert (tmp_path / "results.csv").read_text() == ",".join(COLUMNS) + "\n"


def test_without_what_draws_there_is_a_csv_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    said: list[str] = []
    write_report(SAMPLE, tmp_path, say=said.append)
    assert [file.name for file in tmp_path.iterdir()] == ["results.csv"]
    assert said[0] == f"written: {tmp_path / 'results.csv'}"
    assert "needs vl_convert, which is not installed: pip install" in said[1]


def lines(results: Results) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(results["measurements"]))))


def test_every_measurement_is_a_line_with_its_figures() -> None:
    for line, one in zip(lines(SAMPLE), SAMPLE["measurements"], strict=True):
        wanted = {name: "" if one[name] is None else str(one[name]) for name in COLUMNS if name in one}
        wanted |= {name: wanted[name].lower() for name in ("causal", "ours")} | {"lengths": "256 1024", "rates": "1 4"}
        times = {f"ms_{name}": str(value) for name, value in (one["ms"] or {}).items()}
        assert line == {**dict.fromkeys(COLUMNS, ""), **wanted, **times}


@pytest.mark.parametrize("text", ["+1", "@SUM(A1)", " =1", "\n-1", "=1\r=2"])
def test_no_text_is_a_formula(text: str) -> None:
    results = copy()
    results["measurements"][0].update(implementation=text, kind='a - b, "c"\n= d', flops=-1.5)
    assert lines(results)[0]["implementation"] == "'" + text.replace("\r", "\\r")
    assert (lines(results)[0]["kind"], lines(results)[0]["flops"]) == ('a - b, "c"\n= d', "-1.5")


@pytest.mark.parametrize("status", ["wrong", "skipped"])
def test_what_was_not_measured_has_no_figure_anywhere(status: str, tmp_path: Path) -> None:
    results = copy()
    ms = {"median": SECRET, "lower": SECRET, "upper": SECRET, "repeats": 9}
    results["measurements"][0].update(peak_bytes=SECRET, status=status, ms=ms)
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    results = load(tmp_path)
    for told in (page(results), csv_text(results["measurements"]), json.dumps(plots.pictures(results))):
        assert "987654" not in told
        assert "987,654" not in told


def test_at_most_eight_lines_are_seen_first_and_the_longest_setting() -> None:
    drawn = plots.points(SAMPLE["measurements"])
    start, *others = plots.settings(drawn)
    assert start == "quick: float32, B=1 H=8 D=64, w=256,1024 r=1,4"
    assert {*others} == {start.replace("float32", "float32, causal"), "steps" + start[5:].replace("B=1", "B=4")}
    first = plots.first(drawn, start)
    assert len(first) == plots.MOST_SHOWN < len({one["series"] for one in drawn})
    assert set(first) >= {name for name in plots.FIRST if name in sample.WHO}
    assert sample.WRONG not in {one["series"] for one in drawn}
    assert plots.settings([]) == []


def test_the_plain_parts_need_no_script() -> None:
    words = parsed().words()
    for text in (
        "It is fast .", "All is right.", "64816d3f0c5e", "2.13.0+cpu", "load at the start 0.42",
        "training dilated_attention(q, k, v, DilatedPattern.head_groups(w, r)) 1.2 ms head_groups, sdpa copy and",
        "gather, slicing, 2.40 times that",
        "Time is linear linear 1.03 yes slope", "DarcStar fork of dilated-attention-pytorch",
        "How do all of them compare?", "reshape 0.0112 no", "einops 1,230 yes", "none – no",
        "0.50 / 1.5 4.00 / 8.00", "out of memory", "2.0 / wrong",
    ):  # fmt: skip
        assert text in words, text
    places = [attributes.get("id") for tag, attributes in parsed().elements if tag == "section"]
    assert places == ["plots", "use", "tables", "correctness", "claims", "environment"]


def test_suggested_patterns_are_one_line_and_named_by_length() -> None:
    found = copy()
    for one in found["measurements"]:
        one |= {"suggested": True, "lengths": [256, one["tokens"]]}
    first, *_ = plots.settings(plots.points(found["measurements"]))
    assert first == "quick: float32, B=1 H=8 D=64, suggested w and r"
    assert "1,024 tokens: w=256,1024 r=1,4. 2,048 tokens: w=256,2048 r=1,4." in Parsed(page(found)).words()


def test_what_spoils_a_run_is_said_above_the_answer() -> None:
    for dirty, complete, too_busy in ((True, True, False), (False, False, True), (None, True, False)):
        results = copy() | {"complete": complete}
        results["machine"] |= {"dirty": dirty, "too_busy": too_busy}
        head, _, rest = Parsed(page(results)).words().partition("It is fast")
        assert ("uncommitted changes" in head) is bool(dirty)
        assert ("This run was interrupted" in head) is not complete
        assert ("too busy to trust" in head) is too_busy
        assert (f"run {'complete' if complete else 'interrupted'}") in rest
    assert "uncommitted changes not known" in rest


def test_wrong_ones_come_first_with_the_error_that_is_farthest_beyond_its_limit() -> None:
    words = parsed().words()
    words = words[words.index("2 are wrong") :]
    assert f"{sample.WRONG} wrong gradient of k: inf with a limit of 5.0e-06, float32 The mask is shifted." in words
    assert "gather-pad-scatter wrong gradients gradient of q: 2.4e-02 with a limit of 5.0e-06" in words
    assert words.index("2 are wrong") < words.index("10 are right") < words.index("exact")


def hostile(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    kept = key in ("status", "direction", "verdict") or not isinstance(value, str) or value in ("inf", "")
    return value if kept else f"{value} {HOSTILE}"


def test_no_text_becomes_markup_and_all_data_is_there() -> None:
    results = hostile(copy())
    results["measurements"][0]["flops"] = math.inf
    found = Parsed(page(results))
    assert [tag for tag, _ in found.elements if tag != "code"] == [tag for tag, _ in parsed().elements if tag != "code"]
    assert found.raw["style"] == parsed().raw["style"]
    data, *scripts = found.raw["script"]
    assert scripts == parsed().raw["script"][1:]
    assert HOSTILE in found.words()
    assert "<" not in data
    told = json.loads(data)["points"]
    assert len(told) == len(plots.points(results["measurements"]))
    assert HOSTILE in told[0]["series"]
    for picture in plots.pictures(results).values():
        assert picture is not None
        assert b"<img" not in plots.svg(picture)


def test_nothing_can_be_loaded_and_nothing_else_can_run() -> None:
    policy = next(a["content"] for tag, a in parsed().elements if tag == "meta" and "http-equiv" in a) or ""
    kept = {name: _hashes(parsed().raw[name][name == "script" :]).strip() for name in ("style", "script")}
    assert {part.split(maxsplit=1)[0]: part.split(maxsplit=1)[1].strip() for part in policy.split(";")} == {
        "default-src": "'none'", "script-src": kept["script"], "style-src": kept["style"], "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert not re.search(r"url\(|@import|@font-face", "".join(parsed().raw["style"]))
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import|\w+HTML|eval)\b", parsed().raw["script"][-1])
    for tag, attributes in parsed().elements:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")]
        if "href" in attributes:
            assert str(attributes["href"]).startswith(("data:,", "plots/", "results.csv"))


def texts(picture: dict[str, Any] | None) -> list[str]:
    assert picture is not None
    return re.findall(r"<text[^>]*>([^<]+)</text>", plots.svg(picture).decode())


def test_the_pictures_show_the_first_lines_in_both_directions() -> None:
    found = plots.pictures(SAMPLE)
    first = plots.first(plots.points(SAMPLE["measurements"]), plots.settings(plots.points(SAMPLE["measurements"]))[0])
    for name, title in (("time", "Time in ms"), ("memory", "Peak memory beyond the inputs")):
        said = texts(found[name])
        assert set(first) <= set(said)
        assert {f"{title}, forward", f"{title}, forward + backward"} <= set(said)
        assert {"1k", "8k"} <= set(said)
    assert b"prefers-color-scheme: dark" in plots.svg(found["time"])  # type: ignore[arg-type]
    untold = [{**one, "peak_bytes": None} for one in SAMPLE["measurements"]]
    found = plots.pictures({**SAMPLE, "measurements": untold})
    assert [name for name, picture in found.items() if picture is None] == ["memory"], "not measured, not drawn"
