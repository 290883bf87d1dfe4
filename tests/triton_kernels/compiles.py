"""All kernels through Triton's compiler, for GPUs that need not be there: what the interpreter cannot show.

Run by test_triton in a process of its own, as the driver that stands in for a GPU's is Triton's only one there.
"""

from __future__ import annotations

import collections
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dilated_attention import Dilated, DilatedPattern, Global, Pattern, Prefix, Strided, Window
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.triton import decode, dispatch, fuse, launch
from dilated_attention.backends.triton.dispatch import TileConfig
from dilated_attention.backends.triton.nesting import launches
from dilated_attention.call import ON_DEVICE, Call

assert os.environ.get("TRITON_INTERPRET") != "1"

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
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
        self.made = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.made.append(self.kernel.warmup(*args, grid=grid, **kwargs))


def asked_for(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """By kernel, what Triton tells compiled kernels apart by, for each launch: nothing is compiled.

    For a device of its own, as what was compiled before is not asked for.
    """
    found = collections.defaultdict(list)

    def note(*, fn: Any, key: str, **_: Any) -> bool:
        found[fn.name.rpartition(".")[2]].append(key)
        return True

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    driver.set_active(Driver(89))
    return found


def assert_one_kernel(keys: list[str], launches: int) -> None:
    """So many launches were of the same one."""
    assert (len(keys), len(set(keys))) == (launches, 1)


# --- attention --------------------------------------------------------------------------------------------------------

NESTED = DilatedPattern.longnet([2048, 8192], [1, 4])
SINGLE = DilatedPattern.longnet([2048], [2])
ZEROS = DilatedPattern.torchscale([2048], [2])


def compiled(
    monkeypatch: pytest.MonkeyPatch, capability: int, kernel: str, dim: int, dtype: torch.dtype, config: TileConfig,
    pattern: DilatedPattern = NESTED, *, is_causal: bool = False, masked: bool = False, drops: bool = False,
    again: bool = False, tokens: int = 10_000, samples: int = 1,
) -> Any:  # fmt: skip
    """The kernel that such a call would launch; grouped heads, and a gradient of lse."""
    driver.set_active(Driver(capability))
    function, names = launch.KERNELS[kernel]
    made = Compiled(function)
    monkeypatch.setitem(launch.KERNELS, kernel, (made, names))
    q, k = torch.empty(samples, tokens, 4, dim, dtype=dtype), torch.empty(samples, tokens, 2, dim, dtype=dtype)
    padding = torch.zeros(samples, tokens, dtype=torch.bool) if masked else None
    call = Call(pattern, is_causal, 0.1, 0.1 if drops else 0.0).of(q, k, padding, 0)
    strides = tuple(x.stride() for x in (q, k, k, q)[: 3 if kernel == "forward" else 4])
    prepared = launch.prepare(kernel, call, strides, launches(call)[0], config, dtype, again, kernel == "dq")
    prepared(*(torch.empty(16, dtype=dtype) for dtype in prepared.dtypes))
    monkeypatch.setitem(launch.KERNELS, kernel, (function, names))
    (found,) = made.made
    return found


def check(capability: int, found: Any, *, tensor_cores: bool = True) -> None:
    assert found.asm["cubin"]
    assert found.metadata.shared <= SHARED[capability]
    if tensor_cores:
        assert "mma" in found.asm["ptx"]


@pytest.mark.parametrize("kernel", dispatch.KERNELS)
def test_a_default_with_everything(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """On the newer devices with the least shared memory."""
    options = {"is_causal": kernel != "forward", "masked": True, "drops": True, "again": True}
    check(86, compiled(monkeypatch, 86, kernel, 128, HALF, dispatch.DEFAULTS[kernel, 128], ZEROS, **options))


@pytest.mark.parametrize("kernel", dispatch.KERNELS)
def test_other_lengths_are_the_same_kernel(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """A kernel for each kind of call, not for each length, batch or pattern: slides are of all lengths."""
    asked, tile = asked_for(monkeypatch), dispatch.SMALL[64]
    for tokens, samples, widths in (
        (4001, 1, [1000, 2048]), (4096, 3, [1000, 2048]), (10_000, 2, [1024, 2048]), (12_345, 1, [512, 1024]),
    ):  # fmt: skip
        pattern, given = DilatedPattern.head_groups(widths, [1, 2]), {"tokens": tokens, "samples": samples}
        compiled(monkeypatch, 89, kernel, 64, BRAIN, tile, pattern, is_causal=kernel == "dq", **given)
    assert_one_kernel(asked[f"{kernel}_kernel"], 4)


# --- all of them ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_trial_in_gluon(monkeypatch: pytest.MonkeyPatch, is_causal: bool) -> None:
    """benchmarks/gluon.py, with Hopper's matrix products and copies; Gluon's API changes from version to version."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import gluon

    driver.set_active(Driver(90))
    kernel = Compiled(gluon.attention_kernel)
    monkeypatch.setattr(gluon, "attention_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    x = torch.empty(1, 4096, 2, 128, dtype=BRAIN)
    gluon.sides((x, x, x), 2048, is_causal)["Gluon"]()
    check(90, kernel.made[0])
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.inc.sync.aligned.u32 \t240"):
        assert instruction in kernel.made[0].asm["ptx"]


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


# --- decoding ---------------------------------------------------------------------------------------------------------

PAPER = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
FAR = Pattern([Window(511), Prefix(4), Dilated(8192, 8), Strided(64), Global([9, 70])])
ODD = DilatedPattern.torchscale([1000, 5792, 2**48], [3, 12, 2**40])


@pytest.fixture
def decode_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    found = [Compiled(decode.decode_kernel), Compiled(decode.combine_kernel)]
    monkeypatch.setattr(decode, "decode_kernel", found[0])
    monkeypatch.setattr(decode, "combine_kernel", found[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return found


def launch_decode(
    dtype: torch.dtype, pattern: Pattern, queries: int, dim: int, *, kv_heads: int = 4, group: int = 1,
    is_causal: bool = True, masked: bool = False, on_device: bool = False, samples: int = 1, tokens: int = 65536,
    offset: int = 77,
) -> None:  # fmt: skip
    q = torch.empty(samples, queries, kv_heads * group, dim, dtype=dtype)
    k, v = torch.empty(2, samples, tokens, kv_heads, dim, dtype=dtype).unbind(0)
    mask = torch.zeros(samples, tokens, dtype=torch.bool) if masked else None
    at = torch.zeros(samples, dtype=torch.int64) if on_device else None
    call = Call(pattern, is_causal, 0.1).of(q, k, mask, ON_DEVICE if on_device else offset)
    sizes = decode.configure(call._replace(device=torch.device("cuda")))
    decode.forward(call, Inputs(q, k, v, mask, None, at), sizes)


GROUPED = {"dtype": HALF, "pattern": PAPER, "queries": 5, "dim": 80, "group": 4, "on_device": True}
ZERO_KEYS = {"dtype": BRAIN, "pattern": ODD, "queries": 3, "dim": 64, "is_causal": False, "masked": True}
WIDEST = {"dtype": FULL, "pattern": PAPER, "queries": 64, "dim": 256, "tokens": 4096}
UNION = {"dtype": BRAIN, "pattern": FAR, "queries": 3, "dim": 64, "masked": True}
ONE_LAUNCH = {"dtype": BRAIN, "pattern": ODD, "queries": 1, "dim": 16, "samples": 300, "tokens": 512}


@pytest.mark.parametrize(
    ("capability", "given"), [(75, GROUPED), (80, ZERO_KEYS), (75, WIDEST), (86, WIDEST), (90, UNION), (90, ONE_LAUNCH)]
)
def test_decode_compiles(decode_kernels: list[Compiled], capability: int, given: dict[str, Any]) -> None:
    driver.set_active(Driver(capability))
    launch_decode(**given)
    made = [kernel for one in decode_kernels for kernel in one.made]
    assert len(made) == (1 if given is ONE_LAUNCH else 2)
    for kernel in made:
        check(capability, kernel, tensor_cores=False)


@pytest.mark.usefixtures("decode_kernels")
def test_a_step_further_is_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing cache and other positions compile nothing anew."""
    asked = asked_for(monkeypatch)
    for tokens, offset in ((4097, 77), (4096, 1), (2048, 16), (300, 0), (65536, 2**16 - 1)):
        launch_decode(BRAIN, PAPER, 1, 64, tokens=tokens, offset=offset, masked=True)
    for kernel in ("decode_kernel", "combine_kernel"):
        assert_one_kernel(asked[kernel], 5)


# --- the fused merge --------------------------------------------------------------------------------------------------


@pytest.fixture
def fuse_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    found = {"merge": Compiled(fuse.merge_kernel), "put": Compiled(fuse.put_kernel)}
    monkeypatch.setattr(fuse, "merge_kernel", found["merge"])
    monkeypatch.setattr(fuse, "put_kernel", found["put"])
    driver.set_active(Driver(90))
    return found


def launch_fused(
    fuse_kernels: dict[str, Compiled], dtype: torch.dtype, part_dtype: torch.dtype, dim: int, rows: int = 200,
    heads: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """What is compiled for such tensors, by what it does."""
    out, lse = torch.empty(2, 2 * rows, 2 * heads, dim, dtype=dtype), torch.empty(2, 2 * rows, 2 * heads)
    out, lse = out[:, ::2, ::2], lse[:, ::2, ::2]
    part = torch.empty(2, heads, rows, dim, dtype=part_dtype).transpose(1, 2)
    given = (out, lse, part, torch.empty(2, heads, rows).transpose(1, 2))
    fuse.merge_(*given, first=False)
    fuse.merge_(*given, torch.zeros(2, 1, heads), first=False)
    fuse.merge_(*given, first=True)
    fuse.merge_(*given, 0.5, first=True)
    fuse.put_(out, part, add=True)
    fuse.put_(out, part, add=False)
    names = ("merge", "merge zeros", "write", "write zeros", "add", "put")
    return dict(zip(names, fuse_kernels["merge"].made[-4:] + fuse_kernels["put"].made[-2:], strict=True))


@pytest.mark.parametrize(
    ("capability", "rows", "dim", "dtype"),
    [(90, 300, 64, FULL), (80, 200, 40, FULL), (90, 33, 5, BRAIN), (90, 1, 16, FULL)],  # rows of 5 are not aligned
)
def test_accesses(fuse_kernels: dict[str, Compiled], capability: int, rows: int, dim: int, dtype: torch.dtype) -> None:
    """They are 16 bytes long; and nothing is stored before all is loaded: the compiler lets several threads load what
    one of them replaces, which without a barrier is a race."""
    driver.set_active(Driver(capability))
    for name, kernel in launch_fused(fuse_kernels, dtype, BRAIN, dim, rows).items():
        steps = re.findall(r"ld\.global\S*|st\.global\S*|bar\.sync", kernel.asm["ptx"])
        if rows >= 200:
            row = {"ld.global.b32", "st.global.b32"} if "merge" in name or "write" in name else set()  # its lse
            assert set(steps) - {"bar.sync"} <= {"ld.global.v4.b32", "st.global.v4.b32"} | row, name
        if name in ("merge", "merge zeros", "add"):  # which load what they replace
            for part in " ".join(steps).split("st.global"):  # from store to store
                assert "ld.global" not in part or part.rfind("bar.sync") > part.rfind("ld.global"), name


def test_other_sizes_are_the_same_kernel(fuse_kernels: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for each dtype and head dim, not for each pattern; few rows are a kernel of their own."""
    asked = asked_for(monkeypatch)
    for rows, heads in ((200, 3), (64, 1), (1024, 16), (4096, 12)):
        launch_fused(fuse_kernels, FULL, BRAIN, 64, rows, heads)
    assert {name: (len(keys), len(set(keys))) for name, keys in asked.items()} == {
        "merge_kernel": (4 * 4, 4),
        "put_kernel": (4 * 2, 2),
    }
