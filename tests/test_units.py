"""Numbers as people read them."""

from __future__ import annotations

import pytest

from dilated_attention.units import bytes_text, cell_text, count_text, measured_text, number_text, seconds_text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.001234, "0.00123"), (1.005, "1.00"), (9.996, "10.0"), (99.96, "100"), (1234567, "1,230,000"),
     (-2.5, "-2.50")],
)  # fmt: skip
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert number_text(number) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1000, "1,000 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (80 << 30, "80 GiB"), (3 << 50, "3 PiB")],
)
def test_memory_counts_by_1024(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (8.7e-5, "87 µs"), (0.99999e-3, "1 ms"), (0.2, "200 ms"), (1, "1 s"), (99, "99 s"), (150, "2.5 min"),
     (5000, "83 min"), (7200, "2 h")],
)  # fmt: skip
def test_seconds_choose_their_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("median", "lower", "upper", "text"),
    [(0.0872, 0.045, 0.100, "0.087"), (6.894, 6.890, 6.897, "6.89"), (213.4, 205, 221, "210"), (5, 5, 5, "5.00"),
     (1280, 1040, 1590, "1,300"), (143, 143, 171, "143"), (0.0996, 0.0991, 0.0999, "0.0996")],
)  # fmt: skip
def test_a_median_has_the_digits_that_its_quartiles_support(
    median: float, lower: float, upper: float, text: str
) -> None:
    assert measured_text(median, lower, upper) == text


def test_counts_are_exact() -> None:
    assert count_text(1 << 20) == "1,048,576"


def test_a_cell_of_a_table_may_hold_anything() -> None:
    cells = (None, "", True, 1234, 0.12345, 1e9, 2e-7, 0.0, "a", float("nan"))
    texts = ["–", "–", "yes", "1,234", "0.123", "1,000,000,000", "2.0e-07", "0", "a", "nan"]
    assert [cell_text(x) for x in cells] == texts
