"""Pictures: what is drawn, and that the same view gives the same bytes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.show import View, colours, save

from .views import long_view

mpl = pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402
from matplotlib.patches import PathPatch  # noqa: E402

from dilated_attention.show import picture  # noqa: E402

PATTERN = DilatedPattern.longnet([4, 8], [1, 2])
VIEW = View.of(PATTERN, 16, 4, query=5, ranks=4)


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=6))
def test_rectangles_cover_every_cell_once(levels: list[list[int]]) -> None:
    found = [[-1] * 4 for _ in levels]
    for level, (x, y, width, height) in picture.rectangles(levels):
        for row, column in itertools.product(range(y, y + height), range(x, x + width)):
            assert found[row][column] == -1
            found[row][column] = level
    assert found == levels


def test_rectangles_are_few() -> None:
    view = View.of(DilatedPattern.longnet([2048, 4096], [1, 2]), 8192, 8)
    assert len(list(picture.rectangles(view.pictures()[0][1]))) == 10


def colour_at(axis: Axes, row: int, column: int) -> str:
    """What is drawn in the middle of a cell, without the lines over it."""
    found = to_hex(axis.get_facecolor())
    for patch in axis.patches:
        if (
            isinstance(patch, PathPatch)
            and patch.get_fill()
            and patch.get_path().contains_point((column + 0.5, row + 0.5))
        ):
            found = to_hex(patch.get_facecolor())
    return found


def drawn(view: View) -> dict[str, Axes]:
    with mpl.rc_context(picture.SETTINGS):
        return {axis.get_title(): axis for part in picture.picture(view).subfigs for axis in part.axes}


def test_cells_have_the_colours_of_their_counts() -> None:
    axes, palette = drawn(VIEW), colours.levels(2)
    for kind in VIEW.kinds:
        for head, row, column in itertools.product(kind.heads, range(16), range(16)):
            assert colour_at(axes[f"head {head}"], row, column) == palette[kind.counts()[row][column]]


@pytest.mark.parametrize(
    ("view", "titles"),
    [
        (VIEW, ["head 0", "head 1", "head 2", "head 3"]),
        (View.of(PATTERN, 16, 4, head=2), ["head 2"]),
        (View.of(PATTERN, 16, 14), ["heads 0, 2, … 12 (7 of them)", "heads 1, 3, … 13 (7 of them)"]),
        (View.of(PATTERN, 16, 4, cells=4), ["heads 0–3"]),
        (View.of(DilatedPattern.longnet([20], [20]), 20, 20), [f"head {head}" for head in range(12)]),
    ],
)
def test_there_is_a_panel_for_each_head_or_each_picture(view: View, titles: list[str]) -> None:
    assert [title for title in drawn(view) if title.startswith("head")] == titles


def test_the_query_is_framed() -> None:
    frames = [
        patch for patch in drawn(VIEW)["head 0"].patches if to_hex(patch.get_edgecolor()) == colours.QUERY["light"]
    ]
    assert [patch.get_path().get_extents().bounds for patch in frames] == [(0, 5, 16, 1)]


def test_ranks_are_a_matrix_and_when_many_a_line_each() -> None:
    sent = drawn(VIEW)["who sends (down) to whom (across)"]
    nothing, most = colours.levels(picture.STEPS)[0], colours.levels(picture.STEPS)[-1]
    found = [[colour_at(sent, row, column) for column in range(4)] for row in range(4)]
    pair = [nothing, most, nothing, nothing]  # of each two ranks that share a segment of 8 tokens
    assert found == [pair, [most, nothing, nothing, nothing], [nothing] * 3 + [most], [nothing, nothing, most, nothing]]
    many = drawn(View.of(PATTERN, 1000, 4, ranks=100))
    (lines,) = (axis for axis in many.values() if axis.get_xlabel() == "rank")
    assert [len(line.get_xdata()) for line in lines.lines] == [100, 100]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_same_view_gives_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    settings = dict(mpl.rcParams)
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        save(View.of(PATTERN, 16, 4, query=5, ranks=4), file)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert b"dc:date" not in first
    assert b"Matplotlib" not in first
    assert dict(mpl.rcParams) == settings


def test_a_long_sequence_is_a_small_sharp_file(tmp_path: Path) -> None:
    save(long_view(query=7, ranks=8), tmp_path / "long.svg")
    drawn = (tmp_path / "long.svg").read_text(encoding="utf-8")
    assert len(drawn) < 200_000
    assert "<image" not in drawn
    assert "1,000,000,000 tokens" in re.sub(r"<[^>]*>", "", drawn)
