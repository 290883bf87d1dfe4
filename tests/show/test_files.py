"""The three kinds of files, the chart for notebooks, and the text for terminals."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dilated_attention import DilatedPattern, charts
from dilated_attention.show import View, plot, save, terminal

pytest.importorskip("altair")

from dilated_attention.show.chart import choosable, hues, panels
from dilated_attention.show.view import shades
from tests.page_text import data_of

PATTERN = DilatedPattern.longnet([16, 64], [1, 4])
SMALL = View(PATTERN, 64, 4, query=20, ranks=2)


def rows_of(chart: Any) -> list[list[dict[str, Any]]]:
    """The rectangles that a chart draws, for each of its pictures."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    whole = chart.to_dict()
    for index, panel in enumerate(whole.get("concat", [whole])):
        data = next(one["data"] for one in (whole, panel, *panel["layer"]) if "data" in one)
        (columns,) = json.loads(whole["datasets"][data["name"]])
        for row in zip(*columns.values(), strict=True):
            one = dict(zip(columns, row, strict=True))
            found.setdefault((index, one["picture"]), []).append(one)
    return list(found.values())


@pytest.mark.parametrize(
    "view",
    [
        View(PATTERN, 64, 4, is_causal=True),
        View(PATTERN, 100, 1, window=(10, 90)),
        View(PATTERN, 70, 2),
        View(PATTERN, 5000, 2),
    ],
    ids=["cell by cell", "window", "merged", "overview"],
)
@pytest.mark.parametrize("made", [panels, choosable])
def test_a_chart_holds_every_cell_once(view: View, made: Any) -> None:
    """Whatever was merged: its rectangles cover the cells with pairs, and say of each its share and branch."""
    at = {token: index for index, token in enumerate(view.edges)}
    for rows, picture in zip(rows_of(made(view)), view.pictures(), strict=True):
        drawn = {}
        for row in rows:
            for q in range(at[row["q"]], at[row["q_end"]]):
                for k in range(at[row["k"]], at[row["k_end"]]):
                    assert (q, k) not in drawn
                    drawn[q, k] = row
        assert sorted(drawn) == [(q, k) for q, k in (picture.share > 0).nonzero().tolist()]
        for (q, k), row in drawn.items():
            assert row["share"] == pytest.approx(picture.share[q, k].item(), rel=1e-3)
            assert row["branch"] == picture.branch[q, k]


def test_a_picture(tmp_path: Path) -> None:
    save(SMALL, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    words = re.findall(r">([^<>]+)</text>", drawn)
    assert {"longnet: w=16 r=1, w=64 r=4", "head 0", "head 3", "query", "key", "16", "64"} <= set(words)
    assert not {"any branch", "share of pairs"} & set(words), "single pairs of one colour need no legend"
    save(View(PATTERN, 4096, 4, colour="branch"), tmp_path / "b.svg")
    words = re.findall(r">([^<>]+)</text>", (tmp_path / "b.svg").read_text(encoding="utf-8"))
    assert {"w=16 r=1", "w=64 r=4", "share of pairs", "all", "1/4 or more", "1,024"} <= set(words)
    save(View(DilatedPattern.longnet([16], [8]), 16, 1, window=(1, 3)), tmp_path / "c.svg")
    assert ">query</text>" in (tmp_path / "c.svg").read_text(encoding="utf-8"), "nothing is seen there, and drawn"
    save(SMALL, tmp_path / "c.PNG")
    assert (tmp_path / "c.PNG").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.svg", "b.svg", "c.PNG", "c.svg"], (
        "nothing half-written"
    )


def test_a_page_holds_all_that_it_needs(tmp_path: Path) -> None:
    save(SMALL, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    held = data_of(text)
    assert held["captions"] == {colour: SMALL.caption(colour) for colour in ("share", "branch")}  # type: ignore[arg-type]
    bound = {one["name"]: one["bind"] for one in held["specification"]["params"] if isinstance(one.get("bind"), dict)}
    assert bound["picture"]["labels"] == ["head 0", "head 1", "head 2", "head 3"]
    assert bound["colour"]["options"] == ["share", "branch"]
    assert "<p>In head 0, query 20 sees" in text


@pytest.mark.parametrize("count", [1, 2, 9, 64])
def test_every_branch_has_a_colour_of_its_own(count: int) -> None:
    assert len({*hues(count)}) == count
    view = View(DilatedPattern.longnet([*range(1, count + 1)], [1] * count), 8, 1)
    scale = choosable(view).to_dict()["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"][:-1] == view.branch_names
    assert scale["range"][:-1] == hues(count)


def test_text_in_a_page_ends_no_element() -> None:
    assert charts.as_json(["</script><b>"]) == '["\\u003c/script>\\u003cb>"]'
    with pytest.raises(ValueError, match="JSON"):
        charts.as_json([float("nan")])


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.svg"
    charts.write(file, b"old")
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        charts.write(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match=r"ends in .html, .svg, .png"):
        save(SMALL, tmp_path / "a.pdf")


@pytest.mark.parametrize("name", ["altair", "vl_convert"])
def test_what_to_install_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"a chart needs {name}.*: pip install \S+ from a clone$"):
        save(SMALL, tmp_path / "a.svg")


def test_a_notebook_gets_a_chart() -> None:
    made = PATTERN.plot(is_causal=True)
    assert made.to_dict()["$schema"].startswith("https://vega.github.io/schema/vega-lite")
    assert made.to_dict() == panels(View(PATTERN, 64, 4, is_causal=True)).to_dict()
    divided = DilatedPattern.head_groups([2, 4096], [1, 512])
    assert plot(divided).to_dict() == panels(View(divided, 512, 2)).to_dict(), "512 tokens, a head per branch"
    assert plot(PATTERN, 16, 2, colour="branch").to_dict() == panels(View(PATTERN, 16, 2, colour="branch")).to_dict()


# --- terminals ----------------------------------------------------------------------------------------------------


def printed(view: View, encoding: str = "utf-8", **how: Any) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=stream, **{"width": 80, **how})
    console.print(terminal.text(view, console))
    stream.seek(0)
    return stream.read()


def test_a_terminal_without_colours() -> None:
    view = View(DilatedPattern.longnet([4, 8], [1, 2]), 8, 2, query=5)
    assert printed(view).splitlines() == [
        "longnet: w=4 r=1, w=8 r=2",
        "8 tokens, 2 heads, not causal",
        "Queries go down and keys across. A coloured cell is a key that the query sees.",
        "",
        "head 0",
        "    0       4",
        "0   ██████████· ██·",
        "    ████████· · · ·",
        "    ██████████· ██·",
        "    ████████· · · ·",
        "4   ██· ██· ████████",
        "  ▸ · · · · ████████",
        "    ██· ██· ████████",
        "    · · · · ████████",
        "",
        "head 1",
        "    0       4",
        "0   ████████· · · ·",
        "    ████████· ██· ██",
        "    ████████· · · ·",
        "    ████████· ██· ██",
        "4   · · · · ████████",
        "  ▸ · ██· ██████████",
        "    · · · · ████████",
        "    · ██· ██████████",
        "",
        *view.facts()[:1],
        "In head 1, query 5 sees 4 keys in w=4 r=1 (4 5 6 7), 4 keys in w=8 r=2 (1 3 5 ",
        "7).",
    ]
    assert printed(view, "ascii") == printed(view).translate(terminal.ASCII)
    assert printed(view, "ascii").isascii()


def test_a_terminal_with_colours_shows_two_cells_in_a_character() -> None:
    view = View(DilatedPattern.longnet([3], [1]), 3, 1)
    how = {"force_terminal": True, "color_system": "256"}
    lines = printed(view, **how).splitlines()
    full = "38;5;117;48;5;117m▀"
    assert lines[-3].count(full) == 3
    assert lines[-2].count("\x1b[38;5;117m▀") == 3, "the third row has nothing below it"
    assert printed(view, **how, no_color=True).count("██") == 9


@pytest.mark.parametrize("tokens", [7, 64, 65536, 10**9])
@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("how", [{}, {"force_terminal": True, "color_system": "truecolor"}])
def test_lines_fit_the_terminal(tokens: int, width: int, how: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=width, **how)
    pattern = DilatedPattern.longnet([16, 1024, 2**20], [1, 4, 64])
    view = View(pattern, tokens, 4, cells=terminal.cells_in(console, tokens))
    lines = terminal.text(view, console).plain.splitlines()
    pictured = [line for line in lines if re.fullmatch(r"[\d, ▸█▓▒░:·▀]+", line)]
    assert pictured
    assert max(map(len, pictured)) <= width
    if tokens > 64:
        said = " ".join(lines)
        assert all(name in said for name in shades(view.pictures()[: terminal.MOST_PANELS])), "the shades are explained"
