"""The decoding kernel without a GPU: in Triton's interpreter, and through its compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_kernels.runner import run

pytest.importorskip("triton")


def test_interpreted() -> None:
    assert run("decode_cases.py", TRITON_INTERPRET="1") >= 70


def test_compiled(tmp_path: Path) -> None:
    assert run("decode_compiles.py", TRITON_CACHE_DIR=str(tmp_path)) >= 13
