"""Coverage against the pattern's own, row by row, and where that would be too long."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention.show import View, coverage
from dilated_attention.show.coverage import Coverage, Covering

from .views import Case, cases


def check(case: Case, view: View) -> None:
    rows = case.pattern.coverage(case.tokens, case.heads, num_kv_heads=case.kv_heads)
    checked = [(kind.coverage, rows[:, head]) for kind in view.kinds for head in kind.heads]
    for found, expected in (*checked, (view.coverage, rows.any(1))):
        assert found.is_exact
        assert found.least == int(expected.sum())
        missing = (~expected).nonzero()[:, 0].tolist()
        assert list(found.missing) == missing[: coverage.NAMED]


@given(cases(most_tokens=300))
def test_coverage_is_the_patterns(case: Case) -> None:
    check(case, case.view(cells=1))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 11)), max_size=3))
def test_long_sequences_are_counted_by_their_period(branches: list[tuple[int, int, int]]) -> None:
    tokens = 100_003
    position = torch.arange(tokens)
    expected = torch.zeros(tokens, dtype=torch.bool)
    for width, rate, offset in branches:
        expected |= position % width % rate == offset % rate
    some = [Covering(width, rate, frozenset({offset % rate})) for width, rate, offset in branches]
    found = Coverage.of(some, tokens)
    assert (found.least, found.most) == (int(expected.sum()),) * 2
    assert list(found.missing) == (~expected).nonzero()[: coverage.NAMED, 0].tolist()


def test_a_billion_tokens() -> None:
    found = Coverage.of([Covering(2048, 2, frozenset({1})), Covering(10**10, 3, frozenset({2}))], 10**9)
    one, other, both = 10**9 // 2, (10**9 - 2 + 2) // 3, -(-(10**9 - 5) // 6)
    assert found.least == found.most == one + other - both
    assert found.missing == (0, 4, 6, 10, 12, 16)


def test_rare_periods_give_bounds() -> None:
    """Segments that begin anew at odd places: the least common period is beyond what is looked at."""
    branches = [Covering(10007, 2, frozenset({0})), Covering(10009, 3, frozenset({0}))]
    found = Coverage.of(branches, 10**9)
    assert not found.is_exact
    assert found.least == branches[0].rows(10**9)
    assert found.most == sum(branch.rows(10**9) for branch in branches)
    assert found.missing == (1, 5, 7, 11, 13, 17)


@pytest.mark.parametrize("tokens", [10**9, 10**9 + 1])
def test_one_branch_is_counted_at_any_length(tokens: int) -> None:
    found = Coverage.of([Covering(3 * 2**21 + 1, 2, frozenset({1}))], tokens)
    whole, rest = divmod(tokens, 3 * 2**21 + 1)
    assert found.least == found.most == whole * 3 * 2**20 + rest // 2
