"""The kernels where there is no GPU: in Triton's interpreter and through its compiler; and on one if there is."""

from __future__ import annotations

import pytest
import torch

from dilated_attention.backends.triton.cache import CACHE
from tests.triton_kernels.runner import run

pytest.importorskip("triton")

CASES = [f"triton_kernels/{name}_cases.py" for name in ("attention", "decode", "fuse", "loss")]


def test_interpreted() -> None:
    """With those paths of the table that are our kernels."""
    chosen = ("-k", "triton and not cover_their_path")
    assert run(*CASES, "test_cases.py", options=chosen, TRITON_INTERPRET="1") > 160


@pytest.mark.parametrize("mark", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_compiled(mark: str) -> None:
    assert run("triton_kernels/compiles.py", options=("-m", mark)) > 10


def test_new_kernels_are_compiled_at_once_and_no_kernel_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from dilated_attention.backends.triton import launch, whole_call

    compiled = []
    monkeypatch.setattr(launch.Launch, "compile", lambda self: compiled.append(self.kind))
    CACHE.clear()
    for capturing, kinds in ((True, "ab"), (False, "abbc"), (False, "bde")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_so=capturing: is_so)
        launches = [launch.Launch(None, torch.device("cuda"), 1, (), kind, {}) for kind in kinds]
        whole_call._compile(tuple(launches))
    assert sorted(kind[3] for kind in compiled) == list("abcde")
    CACHE.clear()
    assert not CACHE.compiled


@pytest.mark.gpu
@pytest.mark.parametrize("share", ["0/4", "1/4", "2/4", "3/4"])
def test_on_a_gpu(share: str) -> None:
    assert run(*CASES, CHUNK=share) > 20
