"""Whatever goes wrong on one rank before the ranks agree on a call reaches all of them at once, and the group goes on.

The rank itself raises its own error unchanged: an error of our checks, of a projection, or of anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention import ContextParallel, DilatedPattern, RingMultiheadDilatedAttention, dilated_attention
from dilated_attention.nn import RingAdvancedDistributedDilatedAttention
from dilated_attention.ranks import Outcome, pool

VICTIM = 1
TIMEOUT = 40.0  # of the calls, in seconds: nobody may wait for it,
AT_ONCE = 10.0  # also on a busy machine
PATTERN = DilatedPattern.longnet([4, 64], [1, 2])


class Needle(float):
    """A number that cannot be read."""

    def __float__(self) -> float:
        raise KeyError("the needle")


def good_arguments(width: tuple[int, ...]) -> dict[str, Any]:
    return {"query": torch.ones(2, 8, *width, dtype=torch.float64)}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"query": None}, "TypeError: query must be a tensor, got NoneType"),
    "an array": ({"query": torch.ones(2, 8, 16).numpy()}, "TypeError: query must be a tensor, got ndarray"),
    "a list as mask": ({"key_padding_mask": [0]}, "TypeError: key_padding_mask must be a tensor, got list"),
    "another dtype": ({"query": torch.ones(2, 8, 16)}, "RuntimeError: "),
    "no bool": ({"is_causal": 1}, "TypeError: is_causal must be True or False, got 1"),
}
WRONG_IN_A_CALL: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"query": None}, "TypeError: query must be a tensor, got NoneType"),
    "a scale beyond all floats": (
        {"scale": 10**400},
        "ValueError: scale must be a finite number of 0 or more, got one beyond the range of float",
    ),
    "any error": ({"scale": Needle(1.0)}, "KeyError: 'the needle'"),
    "heads that are no pair": ({"heads": 3}, "TypeError: "),
}


def call(**given: Any) -> None:
    query = given.pop("query")
    dilated_attention(query, query, query, PATTERN, group=ContextParallel(timeout=TIMEOUT), **given)


def ring(**given: Any) -> None:
    module = RingMultiheadDilatedAttention(
        16, 4, [4, 64], [1, 2], rule="longnet", dtype=torch.float64, group=ContextParallel(timeout=TIMEOUT)
    )
    module(**given)


def mesh(**given: Any) -> None:
    """The projections of this module are split over the heads axis, so that ranks meet along two axes."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    module = RingAdvancedDistributedDilatedAttention(
        16, 4, [4, 64], [1, 2], axes, rule="longnet", dtype=torch.float64, parallel=ContextParallel(timeout=TIMEOUT)
    )
    module(**given)


def wrong_then_right(function: Callable[..., None], width: tuple[int, ...], wrong: dict[str, Any]) -> str:
    """The error of this rank, noted in time, after which the right call runs over the same group."""
    good = good_arguments(width)
    began = time.monotonic()
    try:
        function(**{**good, **(wrong if dist.get_rank() == VICTIM else {})})
    except Exception as error:
        assert time.monotonic() - began < AT_ONCE, "this rank waited"
        function(**good)
        return f"{type(error).__name__}: {error}"
    return "no error"


def assert_all_told(outcomes: list[Outcome], error: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome
        if rank == VICTIM:
            assert outcome.value.startswith(error), outcome.value
        else:
            assert outcome.value.startswith("ValueError: dilated_attention"), outcome.value
            assert "was called off on all ranks" in outcome.value
            assert error in outcome.value


@pytest.mark.parametrize("name", WRONG_IN_A_CALL)
def test_an_error_in_a_call_reaches_all_ranks(name: str) -> None:
    wrong, error = WRONG_IN_A_CALL[name]
    assert_all_told(pool(3).run(wrong_then_right, call, (4, 8), wrong, check=False), error)


@pytest.mark.parametrize("name", WRONG)
def test_an_error_in_a_module_reaches_all_ranks(name: str) -> None:
    wrong, error = WRONG[name]
    assert_all_told(pool(3).run(wrong_then_right, ring, (16,), wrong, check=False), error)


@pytest.mark.parametrize("name", WRONG)
def test_an_error_in_a_module_on_a_mesh_reaches_all_ranks(name: str) -> None:
    wrong, error = WRONG[name]
    assert_all_told(pool(4).run(wrong_then_right, mesh, (16,), wrong, check=False), error)
