"""out and lse are tensors of their own, no views: whoever calls may change them in place, as the result of SDPA.

Autograd refuses to change a view that was made inside a custom function, and a view would keep its base alive. As with
SDPA the backward pass reads out: after a change it raises, and is never silently wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES
from dilated_attention.ranks import pool
from tests.cases import leaves

PATTERNS = [((64,), (1,)), ((8,), (1,)), ((8, 64), (1, 3))]
SHAPES = [  # samples, tokens, heads, key heads, queries; of 1 and 0 a transposed tensor is contiguous
    (2, 20, 4, 4, 20), (2, 20, 4, 2, 3), (2, 20, 4, 2, 1),
    (1, 1, 1, 1, 1), (1, 5, 1, 1, 5), (3, 1, 2, 2, 1), (0, 5, 2, 2, 5), (2, 0, 2, 2, 0),
]  # fmt: skip


def make(samples: int, tokens: int, heads: int, kv_heads: int, queries: int) -> tuple[Tensor, ...]:
    q, k, v = testing.make_qkv(samples, tokens, heads, 8, kv_heads=kv_heads)
    return q[:, tokens - queries :], k, v


def check_in_place(qkv: tuple[Tensor, ...], pattern: DilatedPattern, **options: Any) -> None:
    """out and lse change alone and as told; the backward pass notices."""
    call = functools.partial(dilated_attention, pattern=pattern, enable_gqa=True, return_lse=True, **options)
    for given in (qkv, leaves(*qkv)):
        results = call(*given)
        for x in results:
            assert not x._is_view()
            assert x.is_contiguous()
            assert x.untyped_storage().nbytes() == x.numel() * x.itemsize, "it keeps more memory alive than its own"
        expected = [x.detach() * 2 for x in results]
        assert all(map(torch.equal, [x.mul_(2) for x in results], expected))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("lists", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_result_may_be_changed_in_place(rule: str, backend: str, lists: Any, shape: tuple[int, ...]) -> None:
    if rule != "head_groups" or len(lists[0]) <= shape[3]:
        check_in_place(make(*shape), DilatedPattern(rule, *lists), backend=backend)


@pytest.mark.parametrize("options", [{"key_padding_mask": torch.zeros(2, 20, dtype=torch.bool)}, {"dropout_p": 0.5}])
def test_masked_and_dropped_results_may_be_changed_in_place(options: dict[str, Any]) -> None:
    check_in_place(make(*SHAPES[0]), DilatedPattern.longnet([64], [1]), **options)


def over_ranks(exchange: str, backend: str, kv_heads: int) -> None:
    group = ContextParallel(dist.group.WORLD, exchange=exchange)
    for lists in PATTERNS:
        check_in_place(make(2, 20, 4, kv_heads, 20), DilatedPattern.longnet(*lists), group=group, backend=backend)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("exchange", ["ring", "allgather", "alltoall"])
@pytest.mark.parametrize(("backend", "kv_heads"), [("sdpa", 2), ("eager", 4)])
def test_a_result_over_ranks_may_be_changed_in_place(ranks: int, exchange: str, backend: str, kv_heads: int) -> None:
    pool(ranks).run(over_ranks, exchange, backend, kv_heads)
