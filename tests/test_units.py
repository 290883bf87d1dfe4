"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dilated_attention.units import bytes_text, cell_text, measured_text, number_text, seconds_text


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (number_text, {0: "0", 0.001234: "0.00123", 1.005: "1.00", 9.996: "10.0", 99.96: "100", 1234567: "1,230,000",
                       -2.5: "-2.50"}),
        (bytes_text, {0: "0 B", 1000: "1,000 B", 1024: "1 KiB", 1536: "1.5 KiB", 80 << 30: "80 GiB", 3 << 50: "3 PiB"}),
        (seconds_text, {0: "0 µs", 8.7e-5: "87 µs", 0.99999e-3: "1 ms", 0.2: "200 ms", 1: "1 s", 99: "99 s",
                        150: "2.5 min", 5000: "83 min", 7200: "2 h"}),
        (cell_text, {None: "–", "": "–", True: "yes", 1234: "1,234", 0.12345: "0.123", 1e9: "1,000,000,000",
                     2e-7: "2.0e-07", 0.0: "0", "a": "a", float("nan"): "nan"}),
        (lambda quartiles: measured_text(*quartiles), {
            (0.0872, 0.045, 0.100): "0.087", (6.894, 6.890, 6.897): "6.89", (213.4, 205, 221): "210",
            (5, 5, 5): "5.00", (1280, 1040, 1590): "1,300", (143, 143, 171): "143", (0.0996, 0.0991, 0.0999): "0.0996",
        }),
    ],
    ids=["number", "bytes", "seconds", "cell", "median"],
)  # fmt: skip
def test_numbers_as_text(write: Callable[[object], str], texts: dict[object, str]) -> None:
    assert {number: write(number) for number in texts} == texts
