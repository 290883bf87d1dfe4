"""What a view says: captions that follow the choice, the keys of a query, rows without output, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from dilated_attention import DilatedPattern
from dilated_attention.show.view import Plot, shades

LONGNET = DilatedPattern.longnet([4, 8], [1, 2])
SOLID = "It is solid, as no pair of these tokens is left out: draw more tokens to see less."


def test_titles_and_captions() -> None:
    view = Plot(LONGNET, 2000, 4, kv_heads=2, is_causal=True, window=(1000, 1100))
    assert view.title == "longnet: w=4 r=1, w=8 r=2"
    assert view.subtitle == "2,000 tokens, 4 heads on 2 key/value heads, causal; tokens 1,000 to 1,099 are drawn"
    many = Plot(DilatedPattern.longnet([2**i for i in range(2, 12)], [1] * 10), 1, 1)
    assert many.title == "longnet: w=4 r=1, w=8 r=1, w=16 r=1, …, w=2048 r=1"
    assert many.subtitle == "1 token, 1 head, not causal"
    large = Plot(LONGNET, 1024, 2)
    assert large.caption("share").startswith("A cell is 8 × 8 tokens. Its shade is the largest share of its pairs")
    assert large.caption("branch").startswith(f"{large.caption('share')} Its colour is the first branch that")


@pytest.mark.parametrize(
    ("view", "facts"),
    [
        (Plot(LONGNET, 8, 2), []),
        (Plot(LONGNET, 8, 4, query=5), [
            "In heads 0, 2, query 5 sees 4 keys in w=4 r=1 (4 5 6 7).",
            "In heads 1, 3, query 5 sees 4 keys in w=4 r=1 (4 5 6 7), 4 keys in w=8 r=2 (1 3 5 7).",
        ]),
        (Plot(DilatedPattern.longnet([1000], [2]), 100, 1, query=98, is_causal=True), [
            "In head 0, 50 of 100 tokens get an output. The others get 0.",
            "In head 0, query 98 sees 50 keys in w=1000 r=2 (0 2 4 6 8 10 … 98).",
        ]),
        # each segment begins anew
        (Plot(DilatedPattern.longnet([5], [2]), 10, 1), ["In head 0, 6 of 10 tokens get an output. The others get 0."]),
        (Plot(DilatedPattern.head_groups([4, 8], [1, 4]), 10**9, 4, query=3), [
            "In heads 0, 1, query 3 sees 4 keys in w=4 r=1 (0 1 2 3).",
            "In heads 2, 3, 16,384 of the first 65,536 tokens get an output. The others get 0.",
            "In heads 2, 3, query 3 sees nothing, because no branch shows it a key.",
        ]),
        (Plot(DilatedPattern.torchscale([8], [1]), 12, 1, query=9, ranks=4), [
            "In head 0, query 9 sees 4 keys in w=8 r=1 (8 9 10 11), 4 zero keys.",
            "Lines are the borders between the shards of 4 ranks.",
        ]),
        (Plot(DilatedPattern.longnet([64], [1]), 128, 1, is_causal=True, window=(0, 60), cells=4), [SOLID]),
        (Plot(DilatedPattern.longnet([64], [1]), 128, 1, window=(30, 60)), [SOLID]),
        (Plot(DilatedPattern.longnet([64], [1]), 128, 1, window=(30, 70)), []),
    ],
)  # fmt: skip
def test_facts(view: Plot, facts: list[str]) -> None:
    assert view.facts() == facts


def test_the_size_of_a_cell_is_that_of_whole_ones() -> None:
    assert Plot(DilatedPattern.longnet([64], [4]), 1024, 4, window=(60, 130), cells=4).cell_size == 32
    assert Plot(LONGNET, 8, 2).cell_size == 1


def test_levels_are_what_they_say() -> None:
    """Shares of 1, 1/4, 1/9, 1/64 and 1/81, and an empty cell. Cells of 2^24 tokens have shades of their own."""
    for rate, level in ((1, 0), (2, 1), (3, 2), (8, 3), (9, 4)):
        (picture,) = Plot(DilatedPattern.longnet([1440], [rate]), 2880, 1, cells=2).pictures
        assert picture.levels(shades([picture])).tolist() == [[level, 5], [5, level]]
    (picture,) = Plot(DilatedPattern.longnet([2**11, 2**26, 2**30], [1, 2**15, 2**18]), 2**30, 1, cells=64).pictures
    found = shades([picture])
    assert [*found][1::3] == ["1/256 or more", "less than 1/16,777,216"]
    assert picture.levels(found)[0].tolist() == [2, *[4] * 63]


def test_many_heads_do_not_fill_the_page() -> None:
    """What is not drawn is counted, and not everything is said."""
    view = Plot(DilatedPattern.longnet([64], [16]), 64, 32)
    assert len(view.pictures) == 8
    assert view.facts()[-1] == "Not drawn: 16 more heads. Name one to see it."
    assert view.facts(1)[-1] == "Not drawn: 30 more heads. Name one to see it."
    facts = Plot(DilatedPattern.longnet([2 * rate for rate in range(2, 40)], [*range(2, 40)]), 64, 64, query=40).facts()
    assert len(facts) == 10
    assert facts[-2] == "More could be said about other heads: name one to read it."


def test_borders_are_where_shards_begin() -> None:
    assert Plot(LONGNET, 10, 2, ranks=4).borders == [3, 6, 8]
    assert Plot(LONGNET, 10, 2, ranks=4, window=(3, 8)).borders == [6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be 1 or more"),
        ({"tokens": 2**49}, "at most 2..48"),
        ({"heads": 3, "kv_heads": 2}, "cannot be shared evenly"),
        ({"head": -1}, "there is no head -1"),
        ({"window": (0, 9)}, "give a first token and a later end, from 0 to 8"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plot(**{"pattern": LONGNET, "tokens": 8, "heads": 2, **options})
