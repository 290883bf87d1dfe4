"""The comparison on a GPU: every implementation that says it runs there is exact, and memory is CUDA's own count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention.bench import suites
from dilated_attention.bench.implementations import RELEASED, everything, named
from dilated_attention.bench.session import Session
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.suites import alone
from dilated_attention.bench.suites import compared as comparisons

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def setting(tokens: int = 2048, **more: Any) -> Setting:
    return Setting(tokens, (1024, 2048, 4096), (1, 2, 4), CUDA, **{"dtype": torch.bfloat16, **more})


def compared(which: list[Any], given: Setting) -> dict[str, Any]:
    made = Session(CUDA, (given.dtype,), seconds=0.0)
    made.limit_ms = 1e9
    made.compare("suite", which, given)
    return made.results


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_in_one_process_are_exact(dtype: torch.dtype, causal: bool) -> None:
    every = [one for one in everything() if one.ranks == 1 and "compiled" not in one.name]
    found = compared(every, setting(dtype=dtype, causal=causal))
    wrong = {x["implementation"]: x["verdict"] for x in found["checks"] if x["verdict"] != "exact"}
    released = {RELEASED: "wrong gradients", f"{RELEASED}, cuDNN": "wrong gradients"} if dtype.itemsize == 2 else {}
    assert wrong == {**released, "attention over heads": "wrong"}
    for record in found["measurements"]:
        if record["status"] == "measured":
            assert record["ms"]["median"] > 0
            assert record["peak_bytes"] >= record["tokens"] * 512 * dtype.itemsize
        else:
            assert record["ms"] is None
            assert record["why"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_the_gpu_are_exact(ranks: int) -> None:
    which = [one for one in everything() if one.ranks == ranks]
    found = compared(which, setting())
    assert {x["verdict"] for x in found["checks"]} == {"exact"}
    measured = [x for x in found["measurements"] if x["status"] == "measured"]
    assert len(measured) == 2 * (len(which) - (ranks == 4))  # the mesh class has no gloo to gather CUDA tensors with
    assert all(x["peak_bytes"] > 0 for x in measured)


def test_out_of_memory_is_caught() -> None:
    huge = setting(1 << 28, heads=16)
    found = compared(named("head_groups, sdpa"), huge)
    assert {x["status"] for x in found["measurements"]} == {"out of memory"}
    assert compared(named("head_groups, sdpa"), setting())["measurements"][0]["status"] == "measured"


def test_the_suites_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything made short: each table has figures, and nothing is wrong."""
    monkeypatch.setattr(alone, "CONTEXT", {"cuda": 1 << 16})
    monkeypatch.setattr(alone, "SIZES", {"cuda": (1 << 18, 1 << 16)})
    monkeypatch.setattr(comparisons, "ALSO_SHORT", comparisons.ALSO_SHORT[-2:])
    one = Session(CUDA, (torch.bfloat16,), seconds=0.0, commit="abc")
    one.run({name: suites.PLANS[name](one) for name in ("decode", "stream", "kernels")}, lambda found: None)
    wrong = {x["implementation"] for x in one.results["checks"] if x["verdict"] != "exact"}
    assert wrong == {RELEASED, f"{RELEASED}, cuDNN"}
    assert len(one.results["tables"]) == 3
    assert all(table["rows"] for table in one.results["tables"])
    assert all(row[4] > 0 for row in one.results["tables"][0]["rows"])  # replayed graphs
