"""Tables of tiles against the definition: walked through as the kernels do, row by row, on plain integers.

Legend: own, other: the sizes of the tiles of a program's own rows and of the rows that they meet.
"""

from __future__ import annotations

import functools
import itertools
import random
import weakref
from collections import Counter, namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import Blocks, DilatedPattern, Pattern, Window
from dilated_attention.backends.triton import tiling as tilings
from dilated_attention.backends.triton.dispatch import form_of
from dilated_attention.backends.triton.nesting import MOST_TILES, launches
from dilated_attention.backends.triton.strips import launches as launches_of
from dilated_attention.backends.triton.table import Demand, Section, Table, make_table, table
from dilated_attention.backends.triton.tiling import Nest, Nests, tiling
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from tests.cases import UNIONS
from tests.drawn import few

SEES = ("all", "earlier", "later")
SIZES = ((3, 5), (16, 2), (1, 8), (64, 32))

Numbers = tuple[int, ...]
Tile = namedtuple("Tile", "base step stop run plain edge edge_run")
Run = namedtuple("Run", "base step stop tiles times")
Met = dict[int, Counter[int]]  # for each row how often it meets others

TABLES = {
    "dense": ((40,), (1,)),
    "single": ((1,), (1,)),
    "dilated": ((30,), (3,)),
    "rate_divides_nothing": ((29,), (7,)),
    "rate_over_length": ((4,), (9,)),
    "paper": ((8, 16, 32), (1, 2, 4)),
    "one_rate": ((4, 12, 24), (1, 1, 1)),
    "one_length": ((12, 12), (2, 6)),
    "twice": ((8, 8), (2, 2)),
    "by_three": ((18, 36), (1, 9)),
    "sparse": ((12, 24, 48), (2, 4, 12)),
    "no_row_twice": ((6, 36), (3, 6)),
}


class Plain(NamedTuple):
    """The table of one offset, by the names of its numbers."""

    tiles: tuple[Tile, ...]
    runs: tuple[Run, ...]


def plain_tiling(widths: Numbers, rates: Numbers, offset: int, length: int, own: int, other: int, sees: str) -> Plain:
    found = tiling(widths, rates, (offset,), (length,), own, other, sees)
    return Plain(tuple(Tile(*x) for x in found.tiles.tolist()), tuple(Run(*x) for x in found.runs.tolist()))


def walk(runs: Sequence[Run], first: int, tiles: int, other: int) -> list[tuple[Run, list[int]]]:
    """``tiles`` tiles from the run ``first`` on, run after run: the run of each, and its positions."""
    every = ((run, run.base + tile * other * run.step) for run in runs[first:] for tile in range(run.tiles))
    some = itertools.islice(every, tiles)
    return [(run, [start + row * run.step for row in range(other)]) for run, start in some]


def sees_other(row: int, other: int, sees: str) -> bool:
    return {"all": True, "earlier": other <= row, "later": other >= row}[sees]


def met(found: Plain, own: int, other: int, sees: str) -> Met:
    """What each row meets and how often: whole tiles as they are, others masked as in the kernels."""
    rows = {}
    for tile in found.tiles:
        mine = [row for row in range(tile.base, tile.base + own * tile.step, tile.step) if row < tile.stop]
        plain = walk(found.runs, tile.run, tile.plain, other)
        edge = walk(found.runs, tile.edge_run, tile.edge, other)
        assert (len(plain), len(edge)) == (tile.plain, tile.edge)
        for row in mine:
            assert row not in rows, f"row {row} is in two tiles"
            pairs = [(run.times, position) for run, tile_rows in plain for position in tile_rows]
            assert all(sees_other(row, position, sees) for _, position in pairs), f"row {row} needs a mask"
            pairs += [
                (run.times, position)
                for run, tile_rows in edge
                for position in tile_rows
                if position < run.stop and sees_other(row, position, sees)
            ]
            assert len({position for _, position in pairs}) == len(pairs), f"row {row} meets another one twice"
            rows[row] = Counter({position: count for count, position in pairs})
        for run, tile_rows in plain:
            assert max(tile_rows) < run.stop, "a whole tile needs a mask"
    return rows


@functools.cache  # asked for with each size of tiles
def defined(pattern: DilatedPattern, head: int, heads: int, length: int, sees: str) -> Met:
    """The same for every row, as the pattern says it."""
    seen = {
        row: Counter(pattern.keys(row, head, num_tokens=length, num_heads=heads, is_causal=sees != "all"))
        for row in range(length)
    }
    if sees != "later":
        return seen
    return {key: Counter({row: keys[key] for row, keys in seen.items() if keys[key]}) for key in seen}


def check(widths: Numbers, rates: Numbers, offset: int, length: int, own: int, other: int, sees: str) -> None:
    """One table: it has the rows that some branch covers, and no others.

    That of a single branch has all whole tiles of a program in one run, as kernels do not look at runs then; and its
    tiles and the gaps between their rows are all rows, so that kernels write each once if they also fill the gaps.
    """
    expected = defined(DilatedPattern.longnet(widths, rates), offset, rates[-1], length, sees)
    covered = {row: others for row, others in expected.items() if others}
    found = plain_tiling(widths, rates, offset, length, own, other, sees)
    assert met(found, own, other, sees) == covered
    if len(widths) == 1:
        assert all(not tile.plain or found.runs[tile.run].tiles == tile.plain for tile in found.tiles)
        firsts = sorted(tile.base - offset % rates[0] for tile in found.tiles)
        whole = itertools.chain(*(range(first, min(first + own * rates[0], length)) for first in firsts))
        assert list(whole) == list(range(length))


def lengths(widths: Numbers) -> list[int]:
    """Of a whole period and of tails."""
    near = {1, widths[0] - 1, widths[0], widths[0] + 1, widths[-1] // 2 + 1, widths[-1] - 1, widths[-1]}
    return sorted(length for length in near if 0 < length <= widths[-1])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_the_pattern_says(name: str, sees: str, sizes: tuple[int, int]) -> None:
    widths, rates = TABLES[name]
    for offset, length in itertools.product(range(rates[-1]), lengths(widths)):
        check(widths, rates, offset, length, *sizes, sees)


def drawn(pick: random.Random) -> tuple[Numbers, Numbers]:
    """Nested branches, or one branch of any numbers."""
    count = pick.randint(1, 4)
    if count == 1:
        return (pick.randint(1, 60),), (pick.randint(1, 12),)
    rates = tuple(itertools.accumulate((pick.choice((1, 1, 2, 3, 4)) for _ in range(count)), lambda x, y: x * y))
    first = rates[-1] * pick.randint(1, 4)
    factors = (pick.choice((1, 2, 2, 3)) for _ in range(count - 1))
    return tuple(itertools.accumulate(factors, lambda x, y: x * y, initial=first)), rates


@few(150)
@given(st.integers(0, 2**32 - 1))
def test_any_table(seed: int) -> None:
    """A seed is drawn and the rest follows evenly, so that few numbers are 1."""
    pick = random.Random(seed)
    widths, rates = drawn(pick)
    length, offset = pick.randint(1, min(widths[-1], 150)), pick.randrange(rates[-1])
    check(widths, rates, offset, length, pick.randint(1, 20), pick.randint(1, 20), pick.choice(SEES))


# --- which branches go together ---------------------------------------------------------------------------------


def call_of(pattern: DilatedPattern, heads: Ints, is_causal: bool = False, alone: bool = False) -> Call:
    """``alone``: with dropout."""
    first, held, total = heads
    return Call(
        pattern, is_causal, dropout_p=float(alone), heads=held, kv_heads=held, first_head=first, total_heads=total
    )


EIGHTS, TRIPLE = (8, 16, 32), (1, 2, 4)
PAPER = (2048, 4096, 8192, 16384, 32768)


@pytest.mark.usefixtures("always_nested")
@pytest.mark.parametrize(
    ("rule", "widths", "rates", "heads", "alone", "expected"),
    [  # the launches, each with its tables: their branches, and the offset of each head
        ("longnet", EIGHTS, TRIPLE, (0, 6, 6), False, "012: 0 1 2 3 0 1"),
        # the last two rates do not divide the lengths
        ("longnet", PAPER, (1, 2, 4, 6, 12), (0, 1, 4), False, "012: 0 | 3: 0 | 4: 0"),
        ("longnet", EIGHTS, TRIPLE, (0, 1, 4), True, "0: 0 | 1: 0 | 2: 0"),  # dropout draws for each branch
        # the densest covers most rows, so fewer are left to be filled
        ("longnet", (32, 30, 8), (4, 3, 1), (0, 1, 4), False, "2: 0 | 1: 0 | 0: 0"),
        ("longnet", (32, 8), (4, 1), (0, 2, 4), False, "10: 0 1"),
        ("longnet", (8, 16), (1, 4), (3, 3, 8), False, "01: 3 0 1"),
        # each segment would have a tile for each phase: too long to write down
        ("longnet", (16, 2 * MOST_TILES), (1, 16), (0, 1, 4), False, "0: 0 | 1: 0"),
        # a head's offset differs from branch to branch
        ("torchscale", (8, 16), (1, 2), (0, 4, 4), False, "0: 0 0 0 0 | 1: 0 0 1 1"),
        ("head_groups", EIGHTS, TRIPLE, (0, 7, 7), False, "0: 0 0 0, 1: 1 1, 2: 2 2"),
        ("head_groups", EIGHTS, TRIPLE, (0, 7, 7), True, "0: 0 0 0, 1: 1 1, 2: 2 2"),
        ("head_groups", EIGHTS, TRIPLE, (2, 2, 7), False, "0: 0, 1: 1"),
        ("head_groups", EIGHTS, TRIPLE, (5, 2, 7), False, "2: 2 2"),
    ],
)
def test_what_is_launched_together(
    rule: str, widths: Numbers, rates: Numbers, heads: Numbers, alone: bool, expected: str
) -> None:
    call = call_of(DilatedPattern(rule, widths, rates), heads, alone=alone)
    names = {branch: str(index) for index, branch in enumerate(zip(widths, rates, strict=True))}

    def told(nest: Nest) -> str:
        branches = "".join(names[branch] for branch in zip(nest.widths, nest.rates, strict=True))
        return f"{branches}: {' '.join(map(str, nest.offsets))}"

    assert " | ".join(", ".join(map(told, nests)) for nests in launches(call)) == expected


def pairs_of_tiles(widths: Numbers, rates: Numbers, length: int, is_causal: bool) -> int:
    found = plain_tiling(widths, rates, 0, length, 64, 64, "earlier" if is_causal else "all")
    return sum(tile.plain + tile.edge for tile in found.tiles)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("widths", "rates"),
    [
        ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
        ((2048, 16384), (1, 8)),
        ((128, 256), (1, 2)),
        ((512, 512), (1, 2)),
        ((256, 8192), (1, 64)),
        ((1024, 4096, 8192), (2, 4, 32)),
    ],
)
def test_branches_share_a_table_where_that_is_less_work(widths: Numbers, rates: Numbers, is_causal: bool) -> None:
    """Rows that take part in many branches are few in a segment, and fill their tiles badly where it is short."""
    together = pairs_of_tiles(widths, rates, widths[-1], is_causal)
    apart = sum(pairs_of_tiles((w,), (r,), widths[-1], is_causal) for w, r in zip(widths, rates, strict=True))
    call = call_of(DilatedPattern.longnet(widths, rates), (0, 1, 1), is_causal)
    taken = launches(call)
    done = sum(pairs_of_tiles(c.widths, c.rates, widths[-1], is_causal) for (c,) in taken)
    assert done <= min(together, apart) * 1.05
    assert (form_of(call, alone=False) == "nested") == any(len(nest.widths) > 1 for (nest,) in taken)


# --- tables and what is kept of them ----------------------------------------------------------------------------

CPU = torch.device("cpu")


def demand(nests: Nests, **given: Any) -> Demand:
    like = Demand(nests, 1, (0, 53), group=1, own=4, other=3, sees="all", widest_stride=64, device=CPU)
    return like._replace(**given)


def nested(widths: list[int], rates: list[int], heads: int = 5) -> Nests:
    (nests,) = launches(call_of(DilatedPattern.longnet(widths, rates), (0, heads, heads), True))
    return nests


def same(found: Table, expected: Table) -> None:
    for name, x in vars(found).items():
        y = getattr(expected, name)
        assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y


def test_the_longest_periods_of_packed_sequences_come_first() -> None:
    """So that all processors have work up to the end."""
    found = make_table(demand((Nest(0, (8,), (1,), 0, (0, 0)),), cu_seqlens=(0, 5, 25, 32)))
    padded, count = found.sections[:2].tolist()
    records = found.sections[4 + padded :][: count * len(Section._fields)].reshape(count, -1)
    assert records[:, Section._fields.index("length")].tolist() == [8, 7, 5, 4]


@pytest.mark.usefixtures("always_nested")
@pytest.mark.parametrize("sees", SEES)
def test_long_tables_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch, sees: str) -> None:
    """Which is a CPU here, and not the default device."""
    asked = demand(nested([24, 48], [1, 2]), sees=sees)
    expected = make_table(asked)
    made = []
    make = tilings.tiles_of
    monkeypatch.setattr(tilings, "FEW", 0)
    monkeypatch.setattr(tilings, "tiles_of", lambda mine, *rest: made.append(mine.device) or make(mine, *rest))
    with torch.device("meta"):
        same(make_table(asked), expected)
    assert made == [CPU]  # for the tail: a period's are kept


def pairs_of(found: Table, tokens: int, own: int, other: int) -> set[tuple[int, int]]:
    """All that the kernels meet of head 0, each row where it is; a row that is there is within the sequence."""
    fields = len(Section._fields)
    data = found.sections.tolist() if found.parts else found.sections[4 + int(found.sections[0]) :].tolist()
    count = found.parts or int(found.sections[1])
    tiles, runs = (x[: len(x) // n * n].view(-1, n).tolist() for x, n in ((found.tiles, 7), (found.runs, 5)))
    every, pairs = [Run(*run) for run in runs], set()
    for section in (Section(*data[at : at + fields]) for at in range(0, count * fields, fields)):
        if section.head or section.program == 2**31 - 1:
            continue
        for repeat, tile in itertools.product(
            range(section.periods), tiles[section.tile : section.tile + section.tiles]
        ):
            start, one = section.start + repeat * section.length, Tile(*tile)
            mine = [row for row in range(one.base, one.base + own * one.step, one.step) if row < one.stop]
            for first, number, is_edge in ((one.run, one.plain, False), (one.edge_run, one.edge, True)):
                for run, rows in walk(every, first, number, other):
                    there = [row for row in rows if row < run.stop]
                    assert is_edge or there == rows, "a whole tile needs a mask"
                    assert found.ragged or there == rows, "a tile is read beyond its rows"
                    assert 0 <= start + min(there, default=0) <= start + max(there, default=0) < tokens
                    met = {
                        (row, x) for row in mine for x in there if not is_edge or section.low <= x - row <= section.high
                    }
                    moved = {(start + row, start + x) for row, x in met}
                    assert not moved & pairs, "a pair counts twice"
                    pairs |= moved
    return pairs


@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", UNIONS)
def test_tables_of_any_branches_say_what_the_pattern_says(name: str, is_causal: bool, kernel: str) -> None:
    for tokens, own, other in ((150, 8, 16), (129, 16, 8)):
        call = Call(Pattern(UNIONS[name]), is_causal, kv_heads=2, heads=2, total=tokens)
        if launches_of(call) is None:
            return  # only a mask can tell some pairs apart
        given = demand((), cu_seqlens=(0, tokens), own=own, other=other)
        found = [pairs_of(make_table(given._replace(nests=x)), tokens, own, other) for x in launches_of(call, kernel)]
        keys = [call.pattern.keys(row, 0, num_tokens=tokens, num_heads=2, is_causal=is_causal) for row in range(tokens)]
        expected = {(row, key) if kernel == "forward" else (key, row) for row in range(tokens) for key in keys[row]}
        assert sum(map(len, found)) == len(expected)
        assert set().union(*found) == expected


def sizes_of(pattern: Pattern, tokens: int, kernel: str = "forward") -> list[tuple[int, ...]]:
    """How many sections, tiles and runs the tables of a causal call have."""
    call = Call(pattern, True, kv_heads=2, heads=2, total=tokens)
    found = [make_table(demand(some, cu_seqlens=(0, tokens), own=64, other=32)) for some in launches_of(call, kernel)]
    numbers = len(Section._fields), 7, 5
    return [
        tuple(len(x) // n for x, n in zip((one.sections, one.tiles, one.runs), numbers, strict=True)) for one in found
    ]


@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
def test_the_table_of_a_window_does_not_grow_with_the_sequence(kernel: str) -> None:
    for window in (Window(1023), Window(30, 5), Window(200, rate=4)):
        sizes = [sizes_of(Pattern([window]), tokens, kernel) for tokens in (1 << 14, (1 << 20) + 8 * 1024)]
        assert sizes[0] == sizes[1]
        assert sum(sizes[0][0]) < 250


@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
def test_listed_blocks_are_one_section_and_neighbours_one_run(kernel: str) -> None:
    """However many there are; the second is there for kernels that are compiled for two."""
    listed = Blocks(64, [(row, row - distance) for row in range(100) for distance in (0, 1, 2, 9) if row >= distance])
    ((sections, tiles, runs),) = sizes_of(Pattern([listed]), 100 * 64, kernel)
    assert (sections, tiles) == (2, 100)
    assert runs < 100 * 4  # two runs, of which the diagonal cuts one, and that after the last


@pytest.mark.parametrize("capturing", [False, True])
def test_a_table_that_cannot_be_made_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(torch.cuda, "Stream", refused)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    told = "make the same call before, outside of the graph" if capturing else "^operation not permitted"
    with pytest.raises(RuntimeError, match=told):
        table(demand(nested([24], [1]), device=torch.device("cuda", 99)))  # a device that has no stream yet


def test_launches_that_need_the_same_table_share_it() -> None:
    asked = demand(nested([24], [4]))
    found = table(asked)
    assert table(asked._replace(samples=1)) is found
    gone = weakref.ref(found)
    del found
    assert gone() is None  # nobody needs it any more


@pytest.mark.parametrize(
    ("tokens", "stride", "dtype"),
    [
        (4096, 2**31 // 256 - 1, torch.int32),
        (4096, 2**31 // 256, torch.int64),  # the last row of a tile is 64 * 4 tokens away
        (2**31 - 2048, 64, torch.int32),
        (2**31, 64, torch.int64),
    ],
)
def test_a_table_is_as_wide_as_it_must_be(tokens: int, stride: int, dtype: torch.dtype) -> None:
    asked = demand(nested([2048], [4], heads=2), cu_seqlens=(0, tokens), own=64, other=32, widest_stride=stride)
    found = table(asked)
    assert {x.dtype for x in (found.sections, found.tiles, found.runs)} == {dtype}
