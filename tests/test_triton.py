"""The kernels where there is no GPU: in Triton's interpreter and through its compiler; and on one if there is."""

from __future__ import annotations

import pytest

from tests.triton_kernels.runner import run

pytest.importorskip("triton")

CASES = [f"triton_kernels/{name}_cases.py" for name in ("attention", "decode", "fuse", "loss")]
COMPILED = "triton_kernels/compiles.py"


def shares(count: int) -> pytest.MarkDecorator:
    """So many shares, that several processes can work on: starting one takes seconds, so they are few."""
    return pytest.mark.parametrize("share", [f"{share}/{count}" for share in range(count)])


@shares(2)
def test_interpreted(share: str) -> None:
    """With those paths of the table that are our kernels."""
    chosen = ("-k", "triton and not cover_their_path")
    assert run(*CASES, "test_cases.py", options=chosen, TRITON_INTERPRET="1", CHUNK=share) >= 204 // 2 - 7


def test_compiled() -> None:
    assert run(COMPILED, options=("-m", "not slow")) >= 17


@pytest.mark.slow
def test_all_sizes_compiled() -> None:
    assert run(COMPILED, options=("-m", "slow")) >= 30


@pytest.mark.gpu
@shares(4)
def test_on_a_gpu(share: str) -> None:
    assert run(*CASES, CHUNK=share) >= 134 // 4 - 7
