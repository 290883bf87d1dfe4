"""The kernels where there is no GPU: in Triton's interpreter and through its compiler; and on one if there is.

A file of cases is cut into shares, so that several processes can work on it.
"""

from __future__ import annotations

import pytest

from tests.triton_kernels.runner import run

pytest.importorskip("triton")

FOLDER = "triton_kernels"


def shares(files: dict[str, tuple[int, int]]) -> pytest.MarkDecorator:
    """Of a file with at least so many cases, so many shares: (file, i/n, fewest cases of that share)."""
    found = [
        pytest.param(file, f"{share}/{count}", cases // count - 7, id=f"{file.rpartition('/')[2][:-3]}-{share}")
        for file, (cases, count) in files.items()
        for share in range(count)
    ]
    return pytest.mark.parametrize(("file", "share", "fewest"), found)


@shares(
    {
        f"{FOLDER}/attention_cases.py": (55, 2),
        f"{FOLDER}/decode_cases.py": (25, 1),
        f"{FOLDER}/fuse_cases.py": (54, 1),
    }
)
def test_interpreted(file: str, share: str, fewest: int) -> None:
    assert run(file, TRITON_INTERPRET="1", CHUNK=share) >= fewest


@shares({"test_cases.py": (75, 4)})
def test_the_table_interpreted(file: str, share: str, fewest: int) -> None:
    """Those paths that are our kernels."""
    assert run(file, "-m", "gpu", "-k", "oracle and triton", TRITON_INTERPRET="1", CHUNK=share) >= fewest


@shares(
    {
        f"{FOLDER}/attention_compiles.py": (15, 1),
        f"{FOLDER}/decode_compiles.py": (7, 1),
        f"{FOLDER}/fuse_compiles.py": (6, 1),
    }
)
def test_compiled(file: str, share: str, fewest: int) -> None:
    assert run(file, "-m", "not slow", CHUNK=share) >= fewest


@pytest.mark.slow
def test_all_sizes_compiled() -> None:
    assert run(f"{FOLDER}/attention_compiles.py", "-m", "slow") >= 18


@pytest.mark.gpu
@shares(
    {
        f"{FOLDER}/attention_cases.py": (60, 2),
        f"{FOLDER}/decode_cases.py": (25, 1),
        f"{FOLDER}/fuse_cases.py": (60, 1),
    }
)
def test_on_a_gpu(file: str, share: str, fewest: int) -> None:
    assert run(file, CHUNK=share) >= fewest
