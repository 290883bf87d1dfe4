"""The kernels of `fuse` through Triton's compiler, for GPUs that need not be there. Run by test_triton."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from triton.runtime import driver

from dilated_attention.backends.triton import fuse
from tests.triton_kernels.decode_compiles import Compiled, Driver, asked_for

assert os.environ.get("TRITON_INTERPRET") != "1"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    found = {"merge": Compiled(fuse.merge_kernel), "put": Compiled(fuse.put_kernel)}
    monkeypatch.setattr(fuse, "merge_kernel", found["merge"])
    monkeypatch.setattr(fuse, "put_kernel", found["put"])
    driver.set_active(Driver(90))
    return found


NAMES = ("merge", "merge zeros", "add", "write", "write zeros", "put")
REPLACING = NAMES[:3]  # what they load


def launch(
    kernels: dict[str, Compiled],
    dtype: torch.dtype,
    part_dtype: torch.dtype,
    dim: int,
    rows: int = 200,
    heads: int = 3,
    names: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """Some of the kernels, compiled for such tensors."""
    out, lse = torch.empty(2, 2 * rows, 2 * heads, dim, dtype=dtype), torch.empty(2, 2 * rows, 2 * heads)
    out, lse = out[:, ::2, ::2], lse[:, ::2, ::2]
    part = torch.empty(2, heads, rows, dim, dtype=part_dtype).transpose(1, 2)
    part_lse = torch.empty(2, heads, rows).transpose(1, 2)
    given = (out, lse, part, part_lse)
    launches: dict[str, Callable[[], object]] = {
        "merge": lambda: fuse.merge_(*given, first=False),
        "merge zeros": lambda: fuse.merge_(*given, torch.zeros(2, 1, heads), first=False),
        "add": lambda: fuse.put_(out, part, add=True),
        "write": lambda: fuse.merge_(*given, first=True),
        "write zeros": lambda: fuse.merge_(*given, 0.5, first=True),
        "put": lambda: fuse.put_(out, part, add=False),
    }
    found = {}
    for name in names:
        launches[name]()
        found[name] = kernels["put" if name in ("add", "put") else "merge"].made[-1]
    return found


HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("capability", "rows", "dim", "dtype", "part_dtype"),
    [
        (90, 300, 64, SINGLE, HALF),
        (80, 200, 40, SINGLE, HALF),
        pytest.param(90, 300, 64, SINGLE, SINGLE, marks=pytest.mark.slow),
        (90, 33, 5, HALF, HALF),  # whose rows are not aligned
        (90, 1, 16, SINGLE, HALF),
    ],
)
def test_accesses(
    kernels: dict[str, Compiled], capability: int, rows: int, dim: int, dtype: torch.dtype, part_dtype: torch.dtype
) -> None:
    """They are 16 bytes long; and nothing is stored before all is loaded: the compiler lets several threads load what
    one of them replaces, which without a barrier is a race."""
    driver.set_active(Driver(capability))
    is_wide = rows >= 200
    for name, kernel in launch(kernels, dtype, part_dtype, dim, rows, names=NAMES if is_wide else REPLACING).items():
        code = kernel.asm["ptx"]
        steps = re.findall(r"ld\.global\S*|st\.global\S*|bar\.sync", code)
        if is_wide:
            row = {"ld.global.b32", "st.global.b32"} if "merge" in name or "write" in name else set()  # its lse
            assert set(steps) - {"bar.sync"} <= {"ld.global.v4.b32", "st.global.v4.b32"} | row, name
        if name in REPLACING:
            for part in " ".join(steps).split("st.global"):  # from store to store
                assert "ld.global" not in part or part.rfind("bar.sync") > part.rfind("ld.global"), name


def test_other_sizes_are_the_same_kernel(kernels: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for each dtype and head dim, not for each pattern; few rows are a kernel of their own."""
    asked = asked_for(monkeypatch)
    for rows, heads in ((200, 3), (64, 1), (1024, 16), (4096, 12)):
        launch(kernels, SINGLE, HALF, 64, rows, heads)
    assert {name: (len(keys), len(set(keys))) for name, keys in asked.items()} == {
        "merge_kernel": (4 * 4, 4),
        "put_kernel": (4 * 2, 2),
    }
