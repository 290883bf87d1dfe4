"""The kernels of `fuse` through Triton's compiler, for GPUs that need not be there. Run by test_triton."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from triton.runtime import driver

from dilated_attention.backends.triton import fuse
from tests.triton_kernels.decode_compiles import Compiled, Driver

assert os.environ.get("TRITON_INTERPRET") != "1"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    found = {"merge": Compiled(fuse.merge_kernel), "put": Compiled(fuse.put_kernel)}
    monkeypatch.setattr(fuse, "merge_kernel", found["merge"])
    monkeypatch.setattr(fuse, "put_kernel", found["put"])
    driver.set_active(Driver(90))
    return found


def launch(
    kernels: dict[str, Compiled], dtype: torch.dtype, part_dtype: torch.dtype, dim: int, rows: int = 200, heads: int = 3
) -> dict[str, Any]:
    """Each of the kernels, compiled for such tensors."""
    out, lse = torch.empty(2, 2 * rows, 2 * heads, dim, dtype=dtype), torch.empty(2, 2 * rows, 2 * heads)
    out, lse = out[:, ::2, ::2], lse[:, ::2, ::2]
    part = torch.empty(2, heads, rows, dim, dtype=part_dtype).transpose(1, 2)
    part_lse = torch.empty(2, heads, rows).transpose(1, 2)
    fuse.merge_(out, lse, part, part_lse)
    fuse.merge_(out, lse, part, part_lse, torch.zeros(2, 1, heads))
    fuse.write_(out, lse, part, part_lse)
    fuse.write_(out, lse, part, part_lse, 0.5)
    fuse.write_(out, lse, part, part_lse, None, (2, 0, 0, 2 * rows))
    fuse.put_([out, out, out], [part, part, part], add=True)
    fuse.put_([out], [part], add=False)
    fuse.put_([out], [part], add=False, gaps=(2, 0, 0, 2 * rows))
    made = [*kernels["merge"].made[-5:], *kernels["put"].made[-3:]]
    names = ("merge", "merge zeros", "write", "write zeros", "write gaps", "add", "put", "put gaps")
    return dict(zip(names, made, strict=True))


HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "part_dtype", "dim"),
    [(90, SINGLE, HALF, 64), (80, SINGLE, HALF, 40), (90, HALF, HALF, 40), (90, SINGLE, SINGLE, 64)],
)
def test_accesses_are_16_bytes_long(
    kernels: dict[str, Compiled], capability: int, dtype: torch.dtype, part_dtype: torch.dtype, dim: int
) -> None:
    driver.set_active(Driver(capability))
    for name, kernel in launch(kernels, dtype, part_dtype, dim).items():
        code = kernel.asm["ptx"]
        loads, stores = re.findall(r"ld\.global\S*", code), re.findall(r"st\.global\S*", code)
        rows_only = {"ld.global.b32", "st.global.b32"}  # an lse a row
        assert set(loads) | set(stores) <= {"ld.global.v4.b32", "st.global.v4.b32"} | rows_only, name
        if name in ("add", "put", "put gaps"):
            assert not (set(loads) | set(stores)) & rows_only


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "part_dtype"),
    [(1, 16, SINGLE, HALF), (33, 5, HALF, HALF), (300, 64, SINGLE, HALF), (300, 64, SINGLE, SINGLE)],
)
def test_nothing_is_stored_before_all_is_loaded(
    kernels: dict[str, Compiled], rows: int, dim: int, dtype: torch.dtype, part_dtype: torch.dtype
) -> None:
    """The compiler lets several threads load what one of them replaces: without a barrier that is a race."""
    made = launch(kernels, dtype, part_dtype, dim, rows)
    for name in ("merge", "merge zeros", "add"):
        steps = re.findall(r"ld\.global|st\.global|bar\.sync", made[name].asm["ptx"])
        for part in " ".join(steps).split("st.global"):  # from store to store; a kernel has up to three bodies
            if "ld.global" in part:
                assert part.rfind("bar.sync") > part.rfind("ld.global"), name


def test_other_sizes_are_the_same_kernel(kernels: dict[str, Compiled]) -> None:
    """A kernel for each dtype and head dim, not for each pattern; few rows are a kernel of their own."""
    for rows, heads in ((200, 3), (64, 1), (1024, 16), (4096, 12)):
        launch(kernels, SINGLE, HALF, 64, rows, heads)
    assert len({kernel.hash for kernel in kernels["merge"].made}) == 5
    assert len({kernel.hash for kernel in kernels["put"].made}) == 3
