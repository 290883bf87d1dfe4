"""Text for terminals: what is drawn, that it fits, and that nothing needs more than the terminal can do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.show import View, text
from dilated_attention.show.text import NOTHING, RAMP

from .views import Case, cases, long_view

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def visible(drawn: str) -> str:
    return ESCAPE.sub("", drawn)


@settings(max_examples=60)
@given(cases(), st.integers(40, 200), st.booleans(), st.booleans(), st.data())
def test_lines_fit(case: Case, width: int, colour: bool, ascii_only: bool, data: st.DataObject) -> None:
    query = data.draw(st.none() | st.integers(0, case.tokens - 1))
    ranks, cells = data.draw(st.sampled_from([None, 3, 9])), data.draw(st.integers(1, 70))
    drawn = text(case.view(query=query, ranks=ranks, cells=cells), width, colour, ascii_only=ascii_only)
    assert max(map(len, visible(drawn).splitlines())) <= width
    assert ("\x1b" in drawn) == colour
    if ascii_only:
        assert drawn.isascii()


@pytest.mark.parametrize("colour", [False, True])
def test_long_sequences_fit(colour: bool) -> None:
    view = long_view(query=7, ranks=8, kv_heads=4, exchange="allgather")
    drawn = visible(text(view, 80, colour))
    assert max(map(len, drawn.splitlines())) <= 80
    assert "1,000,000,000 tokens" in drawn


def panel(drawn: str, title: str) -> list[str]:
    """The lines of a picture, from its title to the next empty line."""
    lines = drawn.splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(title))
    return lines[first + 1 : lines.index("", first)]


PATTERN = DilatedPattern.longnet([4, 8], [1, 2])


def test_cells_are_drawn_as_they_are_counted() -> None:
    view = View.of(PATTERN, 8, 1, query=5)
    assert panel(text(view, 40), "head 0") == [
        "  ▒▒░░▒▒░░░░· ░░·",
        "  ░░░░░░░░· · · ·",
        "  ▒▒░░▒▒░░░░· ░░·",
        "  ░░░░░░░░· · · ·",
        "  ░░· ░░· ▒▒░░▒▒░░",
        "▸ · · · · ░░░░░░░░",
        "  ░░· ░░· ▒▒░░▒▒░░",
        "  · · · · ░░░░░░░░",
    ]
    assert panel(text(view, 40, ascii_only=True), "head 0")[4:6] == ["  11. 11. 22112211", "> . . . . 11111111"]


def test_colours_are_those_of_the_counts() -> None:
    (row,) = (line for line in panel(text(View.of(PATTERN, 8, 1), 40, True), "head 0")[:1])
    levels = {0: NOTHING, 1: RAMP[0], 2: RAMP[-1]}
    expected = [(levels[count], many) for count, many in ((2, 1), (1, 1), (2, 1), (1, 2), (0, 1), (1, 1), (0, 1))]
    assert row == "  " + "".join(f"\x1b[48;5;{level}m{'  ' * many}" for level, many in expected) + "\x1b[0m"


def test_half_blocks_hold_two_rows_of_cells() -> None:
    view = View.of(DilatedPattern.longnet([1], [1]), 31, 1, query=30)  # a diagonal
    lines = panel(text(view, 40, True), "head 0")
    assert len(lines) == 16
    on, off = RAMP[2], NOTHING
    assert lines[0] == (
        f"  \x1b[38;5;{on};48;5;{off}m▀\x1b[38;5;{off};48;5;{on}m▀\x1b[38;5;{off};48;5;{off}m{'▀' * 29}\x1b[0m"
    )
    assert lines[-1] == f"▸ \x1b[38;5;{off};49m{'▀' * 30}\x1b[38;5;{on};49m▀\x1b[0m"


def test_wide_pictures_are_drawn_with_merged_cells() -> None:
    view = View.of(DilatedPattern.longnet([16], [1]), 64, 1)
    drawn = text(view, 40)
    assert "a cell is 4 × 4 pairs" in " ".join(drawn.split())
    lines = panel(drawn, "head 0")
    assert len(lines) == 16
    assert lines[0] == "  ░░░░░░░░" + "· " * 11 + "·"


def test_pictures_stand_side_by_side_where_there_is_room() -> None:
    view = View.of(PATTERN, 8, 2)
    assert re.search(r"^ +head 0 +head 1$", text(view, 80), re.MULTILINE)
    assert not re.search(r"head 0 +head 1", text(view, 30))


def test_only_some_of_many_pictures_are_drawn() -> None:
    view = View.of(DilatedPattern.longnet([20], [20]), 20, 20)
    drawn = text(view, 100)
    assert "12 more pictures are not shown" in drawn
    assert "more pictures" not in text(View.of(view.pattern, 20, 20, head=19), 80)
    assert panel(text(View.of(view.pattern, 20, 20, head=19), 80), "head 19")[-1].endswith("░░")


def test_equal_facts_are_told_once() -> None:
    drawn = text(View.of(PATTERN, 8, 4, query=1), 100)
    assert "heads 0–3: every row is covered" in drawn
    assert "heads 0, 2: 4 keys: 0, 1, 2, 3" in drawn
    assert "heads 1, 3: 8 keys (4 by (4, 1), 4 by (8, 2)): 0, 1 ×2, 2, 3 ×2, 5, 7" in drawn


def test_layers_are_drawn_as_strips() -> None:
    drawn = text(View.of(PATTERN, 8, 1, query=0), 80)
    assert "after layer 1: 6 tokens, 0 to 6 ▕█████ █ ▏" in drawn
    assert "after layer 2: 8 tokens, 0 to 7 ▕████████▏" in drawn


def test_ranks_are_a_table_and_a_matrix() -> None:
    view = View.of(DilatedPattern.longnet([4, 16], [1, 1]), 16, 1, ranks=4, head_dim=8)
    drawn = text(view, 80)
    assert re.search(r"\(4, 1\) +none of 4: local +0 +0 B", drawn)
    assert re.search(r"\(16, 1\) +1 of 1 +48 +1\.54 kB", drawn)
    assert "    1       ·       ·   384 B       ·" in drawn  # in a ring all goes to the neighbour,
    assert "    1   128 B       ·   128 B   128 B" in drawn  # and comes from everyone
    wide = text(View.of(view.pattern, 16, 1, ranks=16), 80)
    assert re.search(r"rank +sent +received", wide)
    assert "sends to rank" not in wide
    assert re.search(r"^ +0–6 ", text(View.of(view.pattern, 16, 1, ranks=100), 80), re.MULTILINE)
