"""The decoding kernels through Triton's compiler, for GPUs that need not be there: what the interpreter cannot show.

Run by test_triton in a process of its own, as the driver that stands in for a GPU's is Triton's only one there.
"""

from __future__ import annotations

import collections
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dilated_attention import DilatedPattern
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.triton import decode
from dilated_attention.call import ON_DEVICE, Call

assert os.environ.get("TRITON_INTERPRET") != "1"

PAPER = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
ODD = DilatedPattern.torchscale([1000, 5792, 2**48], [3, 12, 2**40])
SHARED = {75: 65_536, 80: 166_912, 86: 101_376, 90: 232_448}  # bytes of shared memory that a program can have


class Driver:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """In the place of a kernel: takes its launches, and only compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.made.append(self.kernel.warmup(*args, grid=grid, **kwargs))


def asked_for(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """By kernel, what Triton tells compiled kernels apart by, for each launch: nothing is compiled.

    For a device of its own, as what was compiled before is not asked for.
    """
    found: dict[str, list[str]] = collections.defaultdict(list)

    def note(*, fn: Any, key: str, **_: Any) -> bool:
        found[fn.name.rpartition(".")[2]].append(key)
        return True

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    driver.set_active(Driver(89))
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    found = [Compiled(decode.decode_kernel), Compiled(decode.combine_kernel)]
    monkeypatch.setattr(decode, "decode_kernel", found[0])
    monkeypatch.setattr(decode, "combine_kernel", found[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return found


def launch(
    dtype: torch.dtype,
    pattern: DilatedPattern,
    queries: int,
    dim: int,
    *,
    kv_heads: int = 4,
    group: int = 1,
    is_causal: bool = True,
    masked: bool = False,
    on_device: bool = False,
    samples: int = 1,
    tokens: int = 65536,
    offset: int = 77,
) -> None:
    q = torch.empty(samples, queries, kv_heads * group, dim, dtype=dtype)
    k, v = torch.empty(2, samples, tokens, kv_heads, dim, dtype=dtype).unbind(0)
    mask = torch.zeros(samples, tokens, dtype=torch.bool) if masked else None
    at = torch.zeros(samples, dtype=torch.int64) if on_device else None
    call = Call(pattern, is_causal, 0.1).of(q, k, mask, ON_DEVICE if on_device else offset)
    sizes = decode.configure(call._replace(device=torch.device("cuda")))
    decode.forward(call, Inputs(q, k, v, mask, None, at), sizes)


CASES: dict[str, dict[str, Any]] = {
    "grouped": {"dtype": torch.float16, "pattern": PAPER, "queries": 5, "dim": 80, "group": 4, "on_device": True},
    "zeros": {"dtype": torch.bfloat16, "pattern": ODD, "queries": 3, "dim": 64, "is_causal": False, "masked": True},
    "widest": {"dtype": torch.float32, "pattern": PAPER, "queries": 64, "dim": 256, "tokens": 4096},
    "wide": {"dtype": torch.float16, "pattern": PAPER, "queries": 64, "dim": 129, "tokens": 4096},
    "one_launch": {"dtype": torch.bfloat16, "pattern": ODD, "queries": 1, "dim": 16, "samples": 300, "tokens": 512},
}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param("grouped", 75, marks=pytest.mark.slow),
        ("zeros", 80),
        ("widest", 75),
        pytest.param("widest", 86, marks=pytest.mark.slow),  # the least shared memory beside that
        pytest.param("wide", 75, marks=pytest.mark.slow),
        ("one_launch", 90),
    ],
)
def test_compiles(kernels: list[Compiled], name: str, capability: int) -> None:
    driver.set_active(Driver(capability))
    launch(**CASES[name])
    made = [kernel for one in kernels for kernel in one.made]
    assert len(made) == (1 if name == "one_launch" else 2)
    for kernel in made:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED[capability]


@pytest.mark.usefixtures("kernels")
def test_a_step_further_is_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing cache and other positions compile nothing anew."""
    asked = asked_for(monkeypatch)
    for tokens, offset in ((4097, 77), (4096, 1), (2048, 16), (300, 0), (65536, 2**16 - 1)):
        launch(torch.bfloat16, PAPER, 1, 64, tokens=tokens, offset=offset, masked=True)
    for keys in (asked["decode_kernel"], asked["combine_kernel"]):
        assert len(keys) == 5
        assert len(set(keys)) == 1
