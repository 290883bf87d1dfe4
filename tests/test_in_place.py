"""out and lse are tensors of their own, no views: whoever calls may change them in place, as the result of SDPA.

Autograd refuses to change a view that was made inside a custom function, and a view would keep its base alive. As with
SDPA the backward pass reads out: after a change it raises, and is never silently wrong.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES
from dilated_attention.ranks import pool

PATTERNS = {"covering": ([64], [1]), "one": ([8], [1]), "merged": ([8, 64], [1, 3])}
BACKENDS = ("sdpa", "eager")
SHAPES = [  # samples, tokens, heads, key heads, queries; of 1 and 0 a transposed tensor is contiguous
    (2, 20, 4, 4, 20), (2, 20, 4, 2, 20), (2, 20, 4, 4, 3), (2, 20, 4, 2, 1),
    (1, 1, 1, 1, 1), (1, 5, 1, 1, 5), (3, 1, 2, 2, 1), (0, 5, 2, 2, 5), (2, 0, 2, 2, 0),
]  # fmt: skip


def check_own(out: Tensor, lse: Tensor) -> None:
    for name, x in (("out", out), ("lse", lse)):
        assert not x._is_view(), f"{name} is a view"
        assert x.is_contiguous(), name
        assert x.untyped_storage().nbytes() == x.numel() * x.itemsize, f"{name} keeps more memory alive than its own"
    assert not out.numel() or out.untyped_storage().data_ptr() != lse.untyped_storage().data_ptr()


def check_in_place(call: Any, leaves: list[Tensor], *, compiled: bool = False) -> None:
    """out and lse change alone and as told; the backward pass notices."""
    out, lse = call(*leaves)
    if not compiled:
        check_own(out, lse)
    expected_out, expected_lse = out.detach() * 2, lse.detach() + 1
    out.mul_(2)
    lse.add_(1)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    if any(x.requires_grad for x in leaves):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def make(samples: int, tokens: int, heads: int, kv_heads: int, queries: int, wants_gradients: bool) -> list[Tensor]:
    q, k, v = testing.make_qkv(samples, tokens, heads, 8, kv_heads=kv_heads)
    return [x.clone().requires_grad_(wants_gradients) for x in (q[:, tokens - queries :], k, v)]


def attention(pattern: DilatedPattern, **options: Any) -> Any:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return dilated_attention(query, key, value, pattern, enable_gqa=True, return_lse=True, **options)

    return call


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wants_gradients", [True, False])
def test_a_result_may_be_changed_in_place(
    rule: str, backend: str, name: str, shape: tuple[int, ...], wants_gradients: bool
) -> None:
    pattern = DilatedPattern(rule, *map(tuple, PATTERNS[name]))
    if rule != "head_groups" or len(pattern.branches) <= shape[3]:
        check_in_place(attention(pattern, backend=backend), make(*shape, wants_gradients))


def test_masked_dropped_and_compiled_results_may_be_changed_in_place() -> None:
    mask = torch.zeros(2, 20, dtype=torch.bool)
    for options in ({"key_padding_mask": mask}, {"dropout_p": 0.5}, {"key_padding_mask": mask, "dropout_p": 0.5}):
        check_in_place(attention(DilatedPattern.longnet([64], [1]), **options), make(2, 20, 4, 4, 20, True))
    torch._dynamo.reset()
    for queries, lists in itertools.product((20, 1), PATTERNS.values()):
        call = torch.compile(attention(DilatedPattern.longnet(*lists)), backend="aot_eager", fullgraph=True)
        check_in_place(call, make(2, 20, 4, 4, queries, True), compiled=True)


def over_ranks(exchange: str, backend: str, kv_heads: int) -> None:
    group = ContextParallel(dist.group.WORLD, exchange=exchange)
    for lists, wants_gradients in itertools.product(PATTERNS.values(), (True, False)):
        call = attention(DilatedPattern.longnet(*lists), group=group, backend=backend)
        check_in_place(call, make(2, 20, 4, kv_heads, 20, wants_gradients))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("exchange", ["ring", "allgather", "alltoall"])
@pytest.mark.parametrize(("backend", "kv_heads"), [("sdpa", 4), ("sdpa", 2), ("eager", 4)])
def test_a_result_over_ranks_may_be_changed_in_place(ranks: int, exchange: str, backend: str, kv_heads: int) -> None:
    pool(ranks).run(over_ranks, exchange, backend, kv_heads)
