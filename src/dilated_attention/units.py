"""How numbers are written for people: one place for units and digits. Memory is in powers of 1024 everywhere."""

from __future__ import annotations

import math

GIB = 1 << 30
DIGITS = 3  # at most: no measurement here is better than one in a thousand


def number_text(number: float, digits: int = DIGITS) -> str:
    """So many significant digits, thousands separated, and never a power of ten."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    rounded = float(f"{number:.{digits - 1}e}")  # first, because 999.6 has one decimal less than 99.96
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def cell_text(value: object) -> str:
    """A cell of a table, whatever it holds."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number_text(value) if 1e-3 <= abs(value) < 1e15 or not value else f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def bytes_text(count: float) -> str:
    """In B, KiB, MiB and so on: 1 KiB is 1024 B."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{_plain(count)} {unit}"
        count /= 1024
    return f"{_plain(count)} PiB"


def seconds_text(seconds: float) -> str:
    """From microseconds to hours, in the unit that fits."""
    # minutes begin at 100 s, because "1.5 min" is harder to read than "90 s"
    for unit, length, least, digits in (("h", 3600, 6000, 2), ("min", 60, 100, 2), ("s", 1, 0.9995, 3)):
        if abs(seconds) >= least:
            return f"{_plain(seconds / length, digits)} {unit}"
    return f"{_plain(seconds * 1e3)} ms" if abs(seconds) >= 0.9995e-3 else f"{_plain(seconds * 1e6)} µs"


def measured_text(median: float, lower: float, upper: float) -> str:
    """A median with the digits that its quartiles support: 0.0872 between 0.045 and 0.100 is written 0.087."""
    if median == 0 or upper <= lower:
        return number_text(median)
    digits = min(DIGITS, max(2, 1 + math.floor(math.log10(abs(median))) - math.floor(math.log10(upper - lower))))
    while digits < 9 and not lower <= float(number_text(median, digits).replace(",", "")) <= upper:
        digits += 1  # rounded so, it would leave its own quartiles
    return number_text(median, digits)


def _plain(number: float, digits: int = DIGITS) -> str:
    """Without zeros at the end: 2 MiB, not 2.00 MiB."""
    text = number_text(number, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def flops_text(flops: float) -> str:
    """Operations with a prefix: 1.20 TFLOP."""
    power = min(8, int(math.log10(max(1, flops))) // 3)
    return f"{number_text(flops / 1000**power)} {' kMGTPEZY'[power].strip()}FLOP"
