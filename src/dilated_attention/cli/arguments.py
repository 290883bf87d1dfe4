"""What users type, as numbers: 64k tokens, 80GB, 10us. Nothing here knows typer, rich or attention.

Tokens, segments and rates count by 1024, as people do who say 64k: k, M, G and T are 1024, 1024², 1024³ and 1024⁴.
B and 1e9 are a thousand million. Bytes follow their units: GB is 1000³, GiB is 1024³. Rates per second count by 1000.
Sizes and times need a unit: nobody means 80 bytes or 10 seconds per hop.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import torch

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
Units = dict[str, int | Fraction]
BINARY: Units = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
TOKENS_BY: Units = {**BINARY, "b": 10**9}
DECIMAL: Units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
SECONDS: Units = {"s": 1, "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
SECONDS |= {"µs": SECONDS["us"], "μs": SECONDS["us"]}  # the sign, and the Greek letter
# forty digits and exponents of two: enough for any number here, and none that takes all memory to write out
NUMBER = re.compile(
    r"\s*([+-]?(?:[0-9][0-9_]{0,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:e[+-]?[0-9]{1,2}(?![0-9]))?)\s*(\S*)\s*", re.I
)
POWER = re.compile(r"\s*([0-9]{1,6})\s*(?:\^|\*\*)\s*([0-9]{1,3})\s*")
GROUPED = re.compile(r"\s*([0-9]{1,3}(?:,[0-9]{3})+)\s*")  # 1,000,000
TOKENS = "a whole number such as 65536, 65,536, 64k (k, M, G, T count by 1024), 2^16, 1e9 or 1B"


class Refused(Exception):  # noqa: N818 - it says what happened
    """What the user asked for cannot be done; the message is one line that says why and what to do."""


@contextmanager
def refusing() -> Iterator[None]:
    """Around the checking of arguments only: a ValueError in here is the user's, elsewhere it is a fault of ours."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error


def count(option: str, text: str, least: int = 1) -> int:
    """Tokens, segment lengths and dilation rates; with ``least=0`` the index of a token or head."""
    text = text.replace(",", "") if GROUPED.fullmatch(text) else text
    power = POWER.fullmatch(text)
    if power:
        number = Fraction(int(power[1]) ** int(power[2]))
    else:
        number = _scaled(option, text, TOKENS_BY, TOKENS)
    if number.denominator != 1 or number < least:
        raise ValueError(f"{option} must be {TOKENS}, and {least} or more, got {text!r}")
    return int(number)


def counts(option: str, text: str) -> list[int]:
    """Several, with commas between them."""
    return [count(option, part) for part in text.split(",")]


def span(option: str, text: str) -> tuple[int, int]:
    """From a token up to another, which is the first outside: 0:4k."""
    start, colon, stop = text.partition(":")
    if not colon:
        raise ValueError(f"{option} must be two numbers of tokens such as 0:4k, got {text!r}")
    return count(option, start, least=0), count(option, stop)


def size(option: str, text: str) -> int:
    """Bytes: 80GB and 80G are 80 thousand million, 24GiB are 24 times 1024³."""
    units: Units = {unit + end: factor for unit, factor in DECIMAL.items() for end in ("", "b") if unit + end}
    units |= {f"{unit}ib": BINARY[unit] for unit in "kmgt"}
    number = _scaled(option, text, units, "a size with its unit, such as 80GB or 24GiB")
    if number < 1:
        raise ValueError(f"{option} must be at least one byte, got {text!r}")
    return int(number)


def bandwidth(option: str, text: str) -> float:
    """Bytes per second: 50GB or 50GB/s; 400Gbit/s, 400Gb/s and 400Gbps count bits. Here b and B differ."""
    what = "bytes per second such as 50GB/s, or bits as 400Gbit/s"
    number, unit = _split(option, text, what)
    found = re.fullmatch(r"([kKMGT]i|[kKMGTP])?(B|b|bit)?(/s|ps)?", unit)
    if not found or not unit:
        raise ValueError(f"{option} must be {what}, got {text!r}")
    prefix = found[1] or ""
    factor = (BINARY if prefix.endswith("i") else DECIMAL)[prefix[:1].lower()]
    return _positive(option, text, number * factor / (8 if found[2] in ("b", "bit") else 1))


def latency(option: str, text: str) -> float:
    """Seconds: 10us, 0.2ms, 1e-5s."""
    number = _scaled(option, "0s" if text == "0" else text, SECONDS, "a time with its unit, such as 10us or 0.2ms")
    if number < 0:
        raise ValueError(f"{option} must not be negative, got {text!r}")
    return float(number)


def speed(option: str, text: str) -> float:
    """Operations per second: 400T, 400TFLOPS, 4e14."""
    names = ("", "flops", "flop", "flop/s", "flops/s")
    units = {unit + name: factor for unit, factor in DECIMAL.items() for name in names}
    return _positive(option, text, _scaled(option, text, units, "operations per second such as 400T or 4e14"))


def dtype(option: str, text: str) -> torch.dtype:
    if text.lower() not in DTYPES:
        raise ValueError(f"{option} must be one of {', '.join(DTYPES)}, got {text!r}")
    return DTYPES[text.lower()]


def device(option: str, text: str) -> torch.device:
    """cpu, or a CUDA device that is there."""
    found = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", text)
    if not found:
        raise ValueError(f"{option} must be cpu, cuda or cuda:0, got {text!r}")
    if text != "cpu":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(found[1] or 0) >= there:
            raise ValueError(f"{option} is {text}, and torch {torch.__version__} sees {there} CUDA devices: use cpu")
    return torch.device(text)


def file(option: str, path: Path, endings: tuple[str, ...]) -> Path:
    """A file that can be written, whose name says what it is."""
    if path.suffix.lower() not in endings:
        raise ValueError(f"{option} must end in {', '.join(endings)}, got {str(path)!r}")
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long
        raise ValueError(
            f"cannot write {str(path)[:60]!r}... ({error.strerror}): name another with {option}"
        ) from error
    if is_folder:
        raise ValueError(f"{option} must be a file, and {path} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: make it, or name another file with {option}")
    writable(path.parent, option)
    return path


def writable(folder: Path, option: str = "--out") -> Path:
    """The folder, made if need be, in which a file can be written: better known before hours of work than after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}): name another with {option}") from error
    return folder


def _positive(option: str, text: str, number: Fraction) -> float:
    if number <= 0:
        raise ValueError(f"{option} must be more than 0, got {text!r}")
    return float(number)


def _scaled(option: str, text: str, units: Units, what: str) -> Fraction:
    """The number times its unit, exactly; in units case does not matter."""
    number, unit = _split(option, text, what)
    if unit.lower() not in units:
        raise ValueError(f"{option} must be {what}, got {text!r}")
    return number * units[unit.lower()]


def _split(option: str, text: str, what: str) -> tuple[Fraction, str]:
    found = NUMBER.fullmatch(text)
    if not found:
        raise ValueError(f"{option} must be {what}, got {text!r}")
    return Fraction(found[1].replace("_", "")), found[2]
