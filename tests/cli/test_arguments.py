"""What users type, as numbers, dtypes, devices and files."""

from __future__ import annotations

import contextlib
import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention.cli import options
from dilated_attention.cli.options import bandwidth, count, counts, index, latency, size, span, speed

Read = Callable[[str], Any]
READ: list[tuple[Read, dict[str, Any]]] = [
    (count, {
        "1": 1, "65536": 65536, "64k": 65536, "64K": 65536, "1M": 2**20, "1.5M": 3 * 2**19, "2G": 2**31, "1T": 2**40,
        "1e9": 10**9, "1B": 10**9, "1,000,000": 10**6, "1E+9": 10**9, "2.5e3": 2500, "1e3k": 1024000, "0.5k": 512,
        "1_000_000": 10**6, "2^30": 2**30, "2**30": 2**30, " 64 k ": 65536,
    }),
    (counts, {"2k,4096, 8k": [2048, 4096, 8192]}),
    (index, {"0": 0, "1k": 1024}),
    (span, {"0:4k": (0, 4096)}),
    (size, {
        "80GB": 80 * 10**9, "80gb": 80 * 10**9, "80G": 80 * 10**9, "24GiB": 24 * 2**30, "24 gib": 24 * 2**30,
        "0.5TB": 5 * 10**11, "100B": 100, "16MiB": 2**24, "1kB": 1000, "1PB": 10**15,
    }),
    # a bit is an eighth of a byte: taking one for the other would be wrong by 8
    (bandwidth, {
        "50GB": 50e9, "50GB/s": 50e9, "50GBps": 50e9, "50G": 50e9, "50 GB/s": 50e9, "400Gbit/s": 50e9, "400Gb/s": 50e9,
        "400Gbps": 50e9, "1GiB/s": 2.0**30, "8Kibit/s": 1024,
    }),
    (latency, {"10us": 1e-5, "10µs": 1e-5, "10μs": 1e-5, "0.2ms": 2e-4, "1e-5s": 1e-5, "1s": 1, "0s": 0}),
    (speed, {"400T": 4e14, "400TFLOPS": 4e14, "4e14": 4e14, "0.4 PFLOP/s": 4e14}),
]  # fmt: skip
REFUSED: list[tuple[Read, str, list[str]]] = [
    (count, "is not a whole number of 1 or more", [
        "", "k", "x", "1,00", "1GB", "0", "-1", "1.5", "0.3k", "1e-3", "nan", "inf", "1e", "1e999", "1e1000000000",
        "1,5", "--", "1 2", "2^-1", "^3", "0^2", "１", "1e5e5", "1__e", "0x10", "9" * 5000 + "q",
    ]),
    (counts, "is not a whole number", ["", "1,,2", "1,", "1;2"]),
    (index, "of 0 or more", ["-1"]),
    (span, "is not", ["a:b", "1:", ":5", "-1:4"]),
    (size, "with its unit, such as 80GB", ["", "GB", "80 Gigs", "-1GB", "0", "0B", "0.1B", "80GB/s", "80", "1e9"]),
    (bandwidth, "is not bytes per second", ["", "50gb", "50 GB per s", "0GB", "-1GB", "1iB", "1PiB/h", "50", "5e10"]),
    (latency, "is not a time with its unit", ["-1us", "10 minutes", "", "10"]),
    (speed, "is not operations per second", ["0", "-1T", "400 TB", ""]),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text", "found"), [(read, *item) for read, some in READ for item in some.items()])
def test_numbers(read: Read, text: str, found: Any) -> None:
    assert read(text) == found


@pytest.mark.parametrize(("read", "message", "text"), [(read, said, one) for read, said, all in REFUSED for one in all])
def test_what_is_no_number(read: Read, message: str, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        read(text)


@given(st.text(max_size=12), st.sampled_from([count, counts, size, bandwidth, latency, speed]))
def test_no_text_does_worse_than_be_refused(text: str, read: Read) -> None:
    with contextlib.suppress(ArgumentTypeError):
        found = read(text)
        assert all(x >= 0 and math.isfinite(x) for x in (found if isinstance(found, list) else [found]))


def test_dtypes_and_devices() -> None:
    assert options.dtype("bf16") is options.dtype("BFloat16") is torch.bfloat16
    assert options.device("cpu") == torch.device("cpu")
    assert options.device("").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for text in ("cuda:x", "cpu:0"):
        with pytest.raises(ValueError, match=r"--device must be one of cpu.*, got"):
            options.device(text)
