"""The three kinds of files, the chart for notebooks, and the text for terminals."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dilated_attention import Dilated, DilatedPattern, Global, Pattern, Window
from dilated_attention.show import charts, terminal

pytest.importorskip("altair")

from dilated_attention.show.vega import choosable, hues, panels, plot, save
from dilated_attention.show.view import Plot
from tests.page_text import data_of

PATTERN = DilatedPattern.longnet([16, 64], [1, 4])
UNION = Pattern([Global(1), Window(6, heads=[0, 1]), Dilated(1000, 8)])
SMALL = Plot(PATTERN, 64, 4, query=20, ranks=2)


def rows_of(panel: Any) -> list[list[dict[str, Any]]]:
    """The rectangles of a panel, for each of its pictures."""
    found: dict[int, list[dict[str, Any]]] = {}
    (columns,) = json.loads(panel["layer"][0]["data"]["values"])
    for row in zip(*columns.values(), strict=True):
        found.setdefault(row[0], []).append(dict(zip(columns, row, strict=True)))
    return [*found.values()]


@pytest.mark.parametrize(
    "view",
    [
        Plot(PATTERN, 64, 4, is_causal=True),
        Plot(PATTERN, 100, 1, window=(10, 90)),
        Plot(PATTERN, 70, 2),
        Plot(PATTERN, 5000, 2),
        Plot(UNION, 500, 4),
        Plot(UNION, 5000, 4, is_causal=True),
    ],
    ids=["cell by cell", "window", "merged", "overview", "union", "union in large cells"],
)
def test_a_chart_holds_every_cell_once(view: Plot) -> None:
    """Whatever was merged: its rectangles cover the cells with pairs, and say of each its share and branch."""
    at = {token: index for index, token in enumerate(view.edges)}
    side_by_side = [rows for panel in panels(view)["concat"] for rows in rows_of(panel)]
    for rows, picture in zip(side_by_side + rows_of(choosable(view)), view.pictures * 2, strict=True):
        drawn = {}
        for row in rows:
            for q in range(at[row["q"]], at[row["q_end"]]):
                for k in range(at[row["k"]], at[row["k_end"]]):
                    assert (q, k) not in drawn
                    drawn[q, k] = row
        assert sorted(drawn) == [(q, k) for q, k in (picture.share > 0).nonzero().tolist()]
        summed = view.pattern.counts == "sum"
        for (q, k), row in drawn.items():
            assert row["share"] == pytest.approx(picture.share[q, k].item(), rel=1e-3)
            assert row["branch"] == picture.branch[q, k]
            assert row.get("count") == (pytest.approx(picture.times[q, k].item(), rel=1e-3) if summed else None)


def test_a_picture(tmp_path: Path) -> None:
    def words(view: Plot) -> set[str]:
        save(view, tmp_path / "a.svg")
        return {*re.findall(r">([^<>]+)</text>", (tmp_path / "a.svg").read_text(encoding="utf-8"))}

    assert {"longnet: w=16 r=1, w=64 r=4", "head 0", "head 3", "query", "key", "16", "64"} <= words(SMALL)
    assert not {"any branch", "share of pairs"} & words(SMALL), "single pairs of one colour need no legend"
    coloured = words(Plot(PATTERN, 4096, 4, colour="branch"))
    assert {"w=16 r=1", "w=64 r=4", "share of pairs", "all", "1/4 or more", "1,024"} <= coloured
    assert "query" in words(Plot(DilatedPattern.longnet([16], [8]), 16, 1, window=(1, 3))), "nothing is seen there"
    save(SMALL, tmp_path / "b.PNG")
    assert (tmp_path / "b.PNG").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"a.svg", "b.PNG"}, "nothing half-written"


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
        PATTERN.plot() if name == "altair" else save(SMALL, tmp_path / "a.svg")


def test_a_notebook_gets_a_chart() -> None:
    divided = DilatedPattern.head_groups([2, 4096], [1, 512])
    for made, view in (
        (PATTERN.plot(is_causal=True), Plot(PATTERN, 64, 4, is_causal=True)),
        (plot(divided), Plot(divided, 512, 4)),
        (plot(PATTERN, 16, 2, colour="branch"), Plot(PATTERN, 16, 2, colour="branch")),
        (UNION.plot(is_causal=True), Plot(UNION, 256, 4, is_causal=True)),
        (Pattern([Window(3, heads=[5])]).plot(), Plot(Pattern([Window(3, heads=[5])]), 256, 6)),
    ):
        assert made.to_dict()["title"] == panels(view)["title"]


def test_the_pictures_of_the_documentation_are_current() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name, draw in runpy.run_path(str(docs / "pictures.py"))["PICTURES"].items():
        assert (docs / name).read_bytes() == draw(), f"run docs/pictures.py for {name}"


# --- terminals ----------------------------------------------------------------------------------------------------


def printed(view: Plot, encoding: str = "utf-8", **how: Any) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=stream, **{"width": 80, **how})
    console.print(terminal.text(view, console))
    stream.seek(0)
    return stream.read()


def test_a_terminal_without_colours() -> None:
    view = Plot(DilatedPattern.longnet([4, 8], [1, 2]), 8, 2, query=5)
    assert printed(view).startswith(
        "longnet: w=4 r=1, w=8 r=2\n8 tokens, 2 heads, not causal\n"
        "Queries go down and keys across. A coloured cell is a key that the query sees.\n\n"
        """head 0
    0       4
0   ██████████· ██·
    ████████· · · ·
    ██████████· ██·
    ████████· · · ·
4   ██· ██· ████████
  ▸ · · · · ████████
    ██· ██· ████████
    · · · · ████████

head 1
"""
    )
    assert printed(view, width=200).endswith("\n".join(["", *view.facts(), ""]))
    assert printed(view, "ascii") == printed(view).translate(terminal.ASCII)
    assert printed(view, "ascii").isascii()


def test_a_terminal_with_colours() -> None:
    view = Plot(DilatedPattern.longnet([3], [1]), 3, 1)
    how = {"force_terminal": True, "color_system": "256"}
    assert printed(view, **how).count("\x1b[38;5;117m██") == 9
    assert printed(view, **how, no_color=True).count("██") == 9


@pytest.mark.parametrize("tokens", [7, 64, 65536, 10**9])
@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("how", [{}, {"force_terminal": True, "color_system": "truecolor"}])
def test_lines_fit_the_terminal(tokens: int, width: int, how: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=width, **how)
    pattern = DilatedPattern.longnet([16, 1024, 2**20], [1, 4, 64])
    view = Plot(pattern, tokens, 4, cells=terminal.cells_in(console, tokens))
    text = terminal.text(view, console).plain
    pictured = re.findall(r"^[\d, ▸█▓▒░:·▀]+$", text, re.MULTILINE)
    assert 0 < max(map(len, pictured)) <= width
    assert ("all " in text) == (view.cell_size > 1), "the shades are explained"
