"""The attention kernels where there is no GPU: in Triton's interpreter and through its compiler; on one if there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_kernels.runner import run

pytest.importorskip("triton")


def test_interpreted() -> None:
    assert run("attention_cases.py", TRITON_INTERPRET="1") >= 200


def test_compiled(tmp_path: Path) -> None:
    assert run("attention_compiles.py", only="not slow", TRITON_CACHE_DIR=str(tmp_path)) >= 11


@pytest.mark.slow
def test_all_sizes_compiled(tmp_path: Path) -> None:
    assert run("attention_compiles.py", only="slow", TRITON_CACHE_DIR=str(tmp_path)) >= 30


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_on_a_gpu(part: int) -> None:
    assert run("attention_cases.py", CHUNK=f"{part}/4") >= 50
