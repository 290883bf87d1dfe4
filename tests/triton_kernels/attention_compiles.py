"""The attention kernels through Triton's compiler, for GPUs that need not be there: what the interpreter cannot show.

Run by test_triton in a process of its own, as the driver that stands in for a GPU's is Triton's only one there.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from triton.runtime import driver

from dilated_attention import DilatedPattern
from dilated_attention.backends.triton import dispatch, launch
from dilated_attention.backends.triton.dispatch import TileConfig
from dilated_attention.backends.triton.nesting import launches
from dilated_attention.call import Call
from tests.triton_kernels.decode_compiles import Compiled, Driver, asked_for

assert os.environ.get("TRITON_INTERPRET") != "1"

NESTED = DilatedPattern.longnet([2048, 8192], [1, 4])
SINGLE = DilatedPattern.longnet([2048], [2])
ZEROS = DilatedPattern.torchscale([2048], [2])
SHARED = {75: 65_536, 80: 166_912, 86: 101_376, 90: 232_448}  # bytes of shared memory that a program can have
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    kernel: str,
    dim: int,
    dtype: torch.dtype,
    config: TileConfig,
    pattern: DilatedPattern = NESTED,
    *,
    is_causal: bool = False,
    masked: bool = False,
    drops: bool = False,
    again: bool = False,
    tokens: int = 10_000,
    samples: int = 1,
) -> Any:
    """The kernel that such a call would launch; grouped heads, and a gradient of lse."""
    driver.set_active(Driver(capability))
    function, names = launch.KERNELS[kernel]
    made = Compiled(function)
    monkeypatch.setitem(launch.KERNELS, kernel, (made, names))
    q, k = torch.empty(samples, tokens, 4, dim, dtype=dtype), torch.empty(samples, tokens, 2, dim, dtype=dtype)
    padding = torch.zeros(samples, tokens, dtype=torch.bool) if masked else None
    call = Call(pattern, is_causal, 0.1, 0.1 if drops else 0.0).of(q, k, padding, 0)
    strides = tuple(x.stride() for x in (q, k, k, q)[: 3 if kernel == "forward" else 4])
    (nests, *_), fills = launches(call), pattern.dilation_rates[0] > 1
    prepared = launch.prepare(kernel, call, strides, nests, config, dtype, again, fills, kernel == "dq")
    prepared(*(torch.empty(16, dtype=dtype) for dtype in prepared.dtypes))
    monkeypatch.setitem(launch.KERNELS, kernel, (function, names))
    (found,) = made.made
    return found


def check(capability: int, found: Any, *, tensor_cores: bool = True) -> None:
    assert found.asm["cubin"]
    assert found.metadata.shared <= SHARED[capability]
    if tensor_cores:
        assert "mma" in found.asm["ptx"]


MEASURED = [(key, TileConfig(*tile)) for key, tile in dispatch.measured()["9.0"]["tiles"].items()]


def size(item: tuple[str, TileConfig]) -> int:
    """Of the tiles that a program holds at once."""
    key, tile = item
    return (tile.rows + tile.keys) * tile.stages * int(key.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", dispatch.KERNELS)
def test_the_largest_measured(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """A GPU runs them all, in test_triton_gpu."""
    key, tile = max((item for item in MEASURED if item[0].startswith(f"{kernel} ")), key=size)
    _, dim, *kind = key.split()
    pattern = NESTED if "nested" in kind else SINGLE
    check(90, compiled(monkeypatch, 90, kernel, int(dim), BRAIN, tile, pattern, is_causal="causal" in kind))


@pytest.mark.parametrize("kernel", dispatch.KERNELS)
def test_a_default_with_everything(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """On the newer devices with the least shared memory."""
    options: dict[str, Any] = {"is_causal": kernel != "forward", "masked": True, "drops": True, "again": True}
    check(86, compiled(monkeypatch, 86, kernel, 128, HALF, dispatch.DEFAULTS[kernel, 128], ZEROS, **options))


def test_the_oldest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    check(75, compiled(monkeypatch, 75, "forward", 64, HALF, dispatch.SMALL[64], SINGLE), tensor_cores=False)


def test_registers_can_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled(monkeypatch, 90, "dkdv", 64, BRAIN, TileConfig(32, 64, 4, 3, 128))
    assert ".maxnreg 128" in found.asm["ptx"]


@pytest.mark.parametrize("kernel", dispatch.KERNELS)
def test_other_lengths_are_the_same_kernel(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """A kernel for each kind of call, not for each length, batch or pattern: slides are of all lengths."""
    asked = asked_for(monkeypatch)
    for tokens, samples, widths in (
        (4001, 1, [1000, 2048]),
        (4096, 3, [1000, 2048]),
        (10_000, 2, [1024, 2048]),
        (12_345, 1, [512, 1024]),
    ):
        pattern = DilatedPattern.head_groups(widths, [1, 2])
        given: dict[str, Any] = {"tokens": tokens, "samples": samples, "is_causal": kernel == "dq"}
        compiled(monkeypatch, 89, kernel, 64, BRAIN, dispatch.SMALL[64], pattern, **given)
    keys = asked[f"{kernel}_kernel"]
    assert len(keys) == 4
    assert len(set(keys)) == 1


def test_own_tiles_that_are_not_full_need_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_for(monkeypatch)
    tile = TileConfig(128, 64, 4, 3)  # 192 rows are a tile and a half of queries, and three whole ones of keys
    patterns = [DilatedPattern.longnet([width], [1]) for width in (192, 256)]
    for pattern in patterns:
        compiled(monkeypatch, 89, "forward", 64, BRAIN, tile, pattern, tokens=768)
    assert len(asked["forward_kernel"]) == 2
    assert len(set(asked["forward_kernel"])) == 1


# --- all of them ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kernel", dispatch.KERNELS)
@pytest.mark.parametrize("dim", dispatch.SMALL)
@pytest.mark.parametrize("capability", [75, 86])
def test_defaults(monkeypatch: pytest.MonkeyPatch, capability: int, dim: int, kernel: str) -> None:
    tile = dispatch.DEFAULTS[kernel, dim] if capability >= 80 else dispatch.SMALL[dim]
    everything = {"masked": True, "drops": True, "again": True}
    for options in ({"pattern": NESTED, "is_causal": True}, {"pattern": SINGLE, **everything}):
        found = compiled(monkeypatch, capability, kernel, dim, HALF, tile, **options)
        check(capability, found, tensor_cores=capability >= 80)
    exact = compiled(
        monkeypatch, capability, kernel, dim, FULL, dispatch.WITHOUT_TENSOR_CORES[dim], SINGLE, masked=True
    )
    if (capability, dim) != (75, 256):  # too large by a KiB, and refused
        check(capability, exact, tensor_cores=False)
