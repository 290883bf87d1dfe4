"""The sentences: right numbers, right words for one and for many, and nothing claimed that was not counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.show import View, words
from dilated_attention.show.coverage import Coverage

from .views import Case, cases, long_view


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        ([3], "head 3"),
        ([0, 1], "heads 0, 1"),
        ([2, 3, 4], "heads 2–4"),
        ([0, 4, 8], "heads 0, 4, 8"),
        (list(range(0, 64, 2)), "heads 0, 2, 4, 6, … 62 (32 of them)"),
    ],
)
def test_names_of_heads(heads: list[int], name: str) -> None:
    assert words.heads_name(heads) == name


@pytest.mark.parametrize(
    ("covered", "sentence"),
    [
        (Coverage(8, 8, 8, ()), "every row is covered"),
        (Coverage(8, 7, 7, (3,)), "7 of 8 rows (87.5 %) are covered; row 3 gets output 0"),
        (Coverage(8, 6, 6, (3, 5)), "6 of 8 rows (75 %) are covered; rows 3, 5 get output 0"),
        (Coverage(9999, 9, 9, (0, 2)), "9 of 9,999 rows (0.09 %) are covered; rows 0, 2, … get output 0"),
        (Coverage(10**9, 10**9 - 1, 10**9 - 1, (0,)),
         "999,999,999 of 1,000,000,000 rows (more than 99.99 %) are covered; row 0 gets output 0"),
        (Coverage(100, 40, 60, (1, 3)),
         "between 40 and 60 of 100 rows are covered (the pattern repeats too rarely to be counted exactly); "
         "rows 1, 3, … get output 0"),
        (Coverage(10**9, 0, 0, (0, 1)), "0 of 1,000,000,000 rows (0 %) are covered; rows 0, 1, … get output 0"),
    ],
)  # fmt: skip
def test_coverage_in_words(covered: Coverage, sentence: str) -> None:
    assert words.coverage(covered) == sentence


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_shares_are_never_rounded_to_all_or_nothing(part: int, whole: int) -> None:
    part = min(part, whole)
    assert (words.percent(part, whole) == "100 %") == (part == whole)
    assert (words.percent(part, whole) == "0 %") == (part == 0)


@given(cases(most_tokens=150), st.data())
def test_listed_keys_are_the_patterns(case: Case, data: st.DataObject) -> None:
    query = data.draw(st.integers(0, case.tokens - 1))
    view = case.view(query=query)
    for kind in view.kinds:
        keys, sentence = case.keys(query, kind.heads[0]), words.keys(view, kind)
        if not keys:
            assert sentence == "no keys: no branch covers this row, its output is 0"
            continue
        count, listed = sentence.split(": ", 1)
        assert int(count.split()[0]) == len(keys)
        listed, _, zeros = listed.partition(", and ")
        assert zeros == ("" if not kind.zero_keys else words.many(kind.zero_keys, "zero key"))
        named: list[int] = []
        for one in listed.replace(", … ", ", ").split(", "):
            value, _, times = one.partition(" ×")
            named += [int(value)] * int(times or 1)
        if "…" in listed:
            distinct = sorted(set(keys))
            ends = (*distinct[:8], *distinct[-3:])
            assert len(distinct) > 11
            assert named == sorted(key for key in keys if key in ends)
        else:
            assert tuple(named) == keys


def test_long_lists_of_keys_are_cut_in_the_middle() -> None:
    view = View.of(DilatedPattern.longnet([64, 16], [1, 5]), 64, 1, query=0)
    assert words.keys(view, view.kinds[0]) == (
        "68 keys (64 by (64, 1), 4 by (16, 5)): 0 ×2, 1, 2, 3, 4, 5 ×2, 6, 7, … 61, 62, 63"
    )


def test_zero_keys_are_told() -> None:
    view = View.of(DilatedPattern.torchscale([4, 6], [1, 4]), 21, 4, query=20)
    assert [words.zeros(view, kind) for kind in view.kinds] == [
        "a row also attends to zero keys: in (4, 1) 3 in the last segment of 1 token, in (6, 4) 1 in the last segment "
        "of 3 tokens",
        "a row also attends to zero keys: in (4, 1) 3 in the last segment of 1 token, in (6, 4) 1 in the last segment "
        "of 3 tokens",
        "a row also attends to zero keys: in (4, 1) 3 in the last segment of 1 token, in (6, 4) 1 in a whole segment "
        "and 1 in the last segment of 3 tokens",
        "a row also attends to zero keys: in (4, 1) 3 in the last segment of 1 token, in (6, 4) 1 in a whole segment",
    ]
    assert words.keys(view, view.kinds[2]).endswith(", and 4 zero keys")
    causal = View.of(view.pattern, 21, 4, is_causal=True)
    assert [words.zeros(causal, kind) for kind in causal.kinds] == [""] * 4


def test_offsets_in_words() -> None:
    view = View.of(DilatedPattern.longnet([4, 8, 8], [1, 2, 4]), 8, 4)
    assert words.offsets(view, view.kinds[0]) == "offset 0 in every branch"
    assert words.offsets(view, view.kinds[3]) == "offset 0 in (4, 1); 1 in (8, 2); 3 in (8, 4)"
    groups = View.of(DilatedPattern.head_groups([4, 8], [1, 2]), 8, 4)
    assert words.offsets(groups, groups.kinds[1]) == "offset 1 in (8, 2)"


def test_titles() -> None:
    view = View.of(DilatedPattern.longnet([4], [2]), 8, 4, kv_heads=1, is_causal=True, window=(2, 6))
    assert words.title(view) == "longnet: branch (w, r) = (4, 2)"
    assert words.subtitle(view) == "8 tokens, 4 heads on 1 key/value head, causal; drawn: tokens 2 to 5"
    assert words.legend(view).startswith("queries down, keys across; a cell is one pair")
    assert "a cell is 2 × 2 pairs" in words.legend(view, merged=2)
    assert "(2048, 1), (4096, 2), … (1073741824, 524288)" in words.title(long_view())


@pytest.mark.parametrize(
    ("view", "end"),
    [
        (View.of(DilatedPattern.longnet([8], [1]), 8, 1), "that is every token"),
        (View.of(DilatedPattern.longnet([8], [1]), 8, 1, is_causal=True, query=3), "that is every token it may see"),
        (View.of(DilatedPattern.longnet([4], [1]), 8, 1), "more layers reach nothing more"),
        (View.of(DilatedPattern.longnet([1000, 1001], [1, 1]), 10**9, 1),
         "it still grows; 24 layers are followed at most"),
        (long_view(), "later layers are not counted: they may reach tokens 0 to 999,999,999, and 2,097,152 tokens are "
         "followed at most"),
        (View.of(DilatedPattern.longnet([10**9], [2]), 10**9, 1),
         "the layers are not counted: they may reach tokens 0 to 999,999,999, and 2,097,152 tokens are followed at "
         "most"),
    ],
)  # fmt: skip
def test_how_a_field_ends(view: View, end: str) -> None:
    assert words.reach_end(view) == end


def test_layers_in_words() -> None:
    view = View.of(DilatedPattern.longnet([4, 8], [2, 4]), 8, 1, query=1)
    assert words.reach_layers(view.reach) == ["after layer 1: 1 token, 1 to 1"]


def test_ranks_in_words() -> None:
    pattern = DilatedPattern.longnet([16, 64, 64], [1, 4, 64])
    view = View.of(pattern, 64, 1, ranks=4, head_dim=8)
    travel = view.travel
    assert travel is not None
    assert words.travel_title(travel) == "what travels between 4 ranks by ring, forward (head dim 8, bfloat16)"
    assert words.travel_branches(view, travel) == [
        ("(16, 1)", "none of 4: local", "0", "0 B"),
        ("(64, 4)", "1 of 1", "48", "1.54 kB"),  # 12 rows to each of 4 ranks, of 2 x 8 numbers of 2 bytes
        ("(64, 64)", "1 of 1", "0", "0 B"),  # a single row, on the first rank
    ]
    assert words.travel_total(travel) == (
        "1.54 kB in all; rank 0 sends most, 384 B, and rank 0 receives most, 384 B; the backward pass adds 4.61 kB"
    )
    assert "its K and V" in words.travel_rows(travel)
    assert "neighbour" in words.travel_note(travel)
    assert len(words.travel_facts(travel)) == 3


def test_nothing_travels_where_every_segment_is_local() -> None:
    view = View.of(DilatedPattern.longnet([16], [1]), 64, 1, ranks=4, exchange="alltoall")
    assert view.travel is not None
    assert words.travel_total(view.travel) == "nothing travels"
    assert "q, k and v there" in words.travel_rows(view.travel)
    assert words.travel_note(view.travel) == ""
    assert words.travel_facts(view.travel) == ["nothing travels"]


def test_many_ranks_are_said_to_be_summed() -> None:
    view = View.of(DilatedPattern.longnet([256], [1]), 256, 1, ranks=100)
    assert view.travel is not None
    assert words.travel_branches(view, view.travel) == [("(256, 1)", "1 of 1", "", "")]
    assert words.travel_note(view.travel) == ("with more than 64 ranks, sums by rank are shown, not who sends to whom")
