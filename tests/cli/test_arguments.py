"""What users type, as numbers."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention.cli import arguments
from dilated_attention.cli.arguments import bandwidth, count, counts, latency, size, span, speed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("65536", 65536),
        ("64k", 65536),
        ("64K", 65536),
        ("1M", 2**20),
        ("1.5M", 3 * 2**19),
        ("2G", 2**31),
        ("1T", 2**40),
        ("1e9", 10**9),
        ("1B", 10**9),
        ("1,000,000", 10**6),
        ("1E+9", 10**9),
        ("2.5e3", 2500),
        ("1e3k", 1024000),
        ("1_000_000", 10**6),
        ("2^30", 2**30),
        ("2**30", 2**30),
        (" 64 k ", 65536),
        ("0.5k", 512),
    ],
)
def test_tokens(text: str, number: int) -> None:
    assert count("-n", text) == number


@pytest.mark.parametrize(
    "text",
    ["", "k", "x", "1,00", "1GB", "0", "-1", "1.5", "0.3k", "1e-3", "nan", "inf", "1e", "1e999", "1e1000000000", "1,5",
     "--", "1 2", "2^-1", "^3", "0^2", "１", "1e5e5", "1__e", "0x10", "9" * 5000 + "q"],
)  # fmt: skip
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="-n must be a whole number"):
        count("-n", text)


@given(st.integers(1, 2**48))
def test_every_whole_number_is_itself(number: int) -> None:
    assert count("-n", str(number)) == count("-n", f"{number:_}") == number
    assert count("-n", f"{number}k") == 1024 * number


@given(st.integers(1, 10**6), st.integers(0, 12))
def test_an_exponent_is_decimal(number: int, power: int) -> None:
    assert count("-n", f"{number}e{power}") == number * 10**power


@given(st.text(max_size=12), st.sampled_from([count, counts, size, bandwidth, latency, speed]))
def test_no_text_does_worse_than_be_refused(text: str, parse: Callable[[str, str], object]) -> None:
    with contextlib.suppress(arguments.Refused), arguments.refusing():
        found = parse("-x", text)
        assert all(x >= 0 and math.isfinite(x) for x in (found if isinstance(found, list) else [found]))


def test_several() -> None:
    assert counts("-w", "2k,4096, 8k") == [2048, 4096, 8192]
    for text in ("", "1,,2", "1,", "1;2"):
        with pytest.raises(ValueError, match="-w must be a whole number"):
            counts("-w", text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GB", 80 * 10**9),
        ("80gb", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("0.5TB", 5 * 10**11),
        ("100B", 100),
        ("16MiB", 2**24),
        ("1kB", 1000),
        ("1PB", 10**15),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert size("--memory", text) == number


@pytest.mark.parametrize("text", ["", "GB", "80 Gigs", "-1GB", "0", "0.1B", "80GB/s", "80", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="--memory must be"):
        size("--memory", text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("50GB", 50e9),
        ("50GB/s", 50e9),
        ("50GBps", 50e9),
        ("50G", 50e9),
        ("400Gbit/s", 50e9),
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("1GiB/s", 2.0**30),
        ("8Kibit/s", 1024),
    ],
)
def test_bandwidths(text: str, number: float) -> None:
    """A bit is an eighth of a byte: taking one for the other would be wrong by 8."""
    assert bandwidth("--bandwidth", text) == number


@pytest.mark.parametrize("text", ["", "50gb", "50 GB per s", "0", "-1GB", "1iB", "1PiB/h", "50", "5e10"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match="--bandwidth must be"):
        bandwidth("--bandwidth", text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10us", 1e-5),
        ("10µs", 1e-5),
        ("10μs", 1e-5),
        ("0.2ms", 2e-4),
        ("5ns", 5e-9),
        ("1s", 1),
        ("0", 0),
    ],
)
def test_latencies(text: str, seconds: float) -> None:
    assert latency("--latency", text) == seconds


def test_what_is_no_latency() -> None:
    for text in ("-1us", "10 minutes", ""):
        with pytest.raises(ValueError, match="--latency must"):
            latency("--latency", text)


def test_speeds() -> None:
    assert [speed("-s", text) for text in ("400T", "400TFLOPS", "4e14", "0.4 PFLOP/s")] == [4e14] * 4
    for text in ("0", "-1T", "400 TB", ""):
        with pytest.raises(ValueError, match="-s must be"):
            speed("-s", text)


def test_dtypes() -> None:
    assert arguments.dtype("--dtype", "bf16") is arguments.dtype("--dtype", "BFloat16") is torch.bfloat16
    with pytest.raises(ValueError, match=r"--dtype must be one of float64.*got 'int8'"):
        arguments.dtype("--dtype", "int8")


def test_devices() -> None:
    assert arguments.device("--device", "cpu") == torch.device("cpu")
    for text in ("tpu", "cuda:x", "", "cpu:0"):
        with pytest.raises(ValueError, match="--device must be cpu, cuda or cuda:0, got"):
            arguments.device("--device", text)
    with pytest.raises(ValueError, match=r"cuda:999.* sees [0-9]+ CUDA devices"):
        arguments.device("--device", "cuda:999")


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert arguments.writable(folder) == folder
    assert os.listdir(folder) == []


def test_a_folder_that_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"cannot write into .*file.*name another with --out"):
            arguments.writable(folder)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_that_is_there_and_cannot() -> None:
    with pytest.raises(ValueError, match=r"cannot write into /proc "):
        arguments.writable(Path("/proc"))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    endings = (".svg", ".png")
    assert arguments.file("-o", tmp_path / "new" / "a.SVG", endings).parent.is_dir()
    (tmp_path / "b.svg").mkdir()
    for name, message in (("a.pdf", "-o must end in .svg, .png"), ("b.svg", "is a folder"), ("", "-o must end in")):
        with pytest.raises(ValueError, match=message):
            arguments.file("-o", tmp_path / name, endings)


def test_an_index_may_be_0() -> None:
    assert arguments.count("--query", "0", least=0) == 0
    with pytest.raises(ValueError, match=r"--query must be .* and 0 or more, got '-1'"):
        arguments.count("--query", "-1", least=0)


def test_only_wrong_arguments_are_refused() -> None:
    for wrong in (ValueError("a\nb"), TypeError("c")):
        with pytest.raises(arguments.Refused), arguments.refusing():
            raise wrong
    with pytest.raises(KeyError), arguments.refusing():
        raise KeyError("a fault of ours")


def test_spans() -> None:
    assert span("--window", "0:4k") == (0, 4096)
    for text in ("4k", "a:b", "1:", ":5", "-1:4"):
        with pytest.raises(ValueError, match="--window must be"):
            span("--window", text)
