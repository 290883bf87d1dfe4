"""The kernels where there is no GPU: in Triton's interpreter and through its compiler; and on one if there is.

A file of cases is cut into shares, so that several processes can work on it.
"""

from __future__ import annotations

import pytest

from tests.triton_kernels.runner import run

pytest.importorskip("triton")

INTERPRETED = {"attention_cases.py": (8, 200), "decode_cases.py": (2, 70), "fuse_cases.py": (2, 125)}
COMPILED = {"attention_compiles.py": (3, 11), "decode_compiles.py": (2, 13), "fuse_compiles.py": (2, 14)}


def shares(files: dict[str, tuple[int, int]]) -> pytest.MarkDecorator:
    """(file, i/n, fewest cases of that share)"""
    found = [
        pytest.param(file, f"{share}/{count}", fewest // count - 7, id=f"{file[:-3]}-{share}")
        for file, (count, fewest) in files.items()
        for share in range(count)
    ]
    return pytest.mark.parametrize(("file", "share", "fewest"), found)


@shares(INTERPRETED)
def test_interpreted(file: str, share: str, fewest: int) -> None:
    assert run(file, TRITON_INTERPRET="1", CHUNK=share) >= fewest


@shares(COMPILED)
def test_compiled(file: str, share: str, fewest: int) -> None:
    assert run(file, only="not slow", CHUNK=share) >= fewest


@pytest.mark.slow
def test_all_sizes_compiled() -> None:
    assert run("attention_compiles.py", only="slow") >= 30


@pytest.mark.gpu
@shares({"attention_cases.py": (4, 200), "fuse_cases.py": (1, 140)})
def test_on_a_gpu(file: str, share: str, fewest: int) -> None:
    assert run(file, CHUNK=share) >= fewest
