"""What surrounds the library's kernels, where there is no GPU: in Triton's interpreter and through its compiler; and on
one if there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_kernels.runner import run

pytest.importorskip("triton")


@pytest.mark.parametrize(("cases", "fewest"), [("fuse_cases.py", 125)])
def test_interpreted(cases: str, fewest: int) -> None:
    assert run(cases, TRITON_INTERPRET="1") >= fewest


@pytest.mark.parametrize(("cases", "fewest"), [("fuse_compiles.py", 14)])
def test_compiled(cases: str, fewest: int, tmp_path: Path) -> None:
    assert run(cases, TRITON_CACHE_DIR=str(tmp_path)) >= fewest


@pytest.mark.gpu
@pytest.mark.parametrize(("cases", "fewest"), [("fuse_cases.py", 140)])
def test_on_a_gpu(cases: str, fewest: int) -> None:
    assert run(cases) >= fewest
