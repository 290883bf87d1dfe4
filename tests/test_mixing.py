"""mixing_gradient: the exact gradient of the torchscale rule, and the released one, which mixes by constants."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, reference, testing
from dilated_attention.ranks import pool
from dilated_attention.testing import make_qkv
from tests.over_ranks import raised, world

LENGTHS, RATES = [8, 16, 64], [1, 2, 4]
DETACHED = DilatedPattern.torchscale(LENGTHS, RATES, mixing_gradient="detached")
EXACT = DilatedPattern.torchscale(LENGTHS, RATES)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_each_gradient_is_that_of_its_formula(constant: bool, compiled: bool) -> None:
    """The released way: each branch by itself, then a mean by exp(lse), computed under no_grad or not."""
    qkv, dout = make_qkv(2, 45, 4, 8, dtype=torch.float64), torch.randn(2, 45, 4, 8, dtype=torch.float64)

    def formula(*qkv: Tensor) -> Tensor:
        branches = [reference.attention(*qkv, EXACT.alone(branch)) for branch in range(len(RATES))]
        outs, lses = (torch.stack(parts) for parts in zip(*branches, strict=True))
        mixing = lses.detach() if constant else lses
        return (mixing.softmax(0).unsqueeze(-1) * outs).sum(0)

    attend = functools.partial(dilated_attention, pattern=DETACHED if constant else EXACT)
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    testing.assert_exact(testing.run(attend, qkv, dout), testing.run(formula, qkv, dout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"is_causal": True}, {"cu_seqlens": [0, 7, 45]}, {"backend": "eager"}, {"query_offset": 42},
        {"key_padding_mask": torch.arange(45) >= torch.tensor([[30], [45]])},
    ],
)  # fmt: skip
def test_with_every_option(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = make_qkv(1 if "cu_seqlens" in options else 2, 45, 4, 8, kv_heads=2, dtype=dtype)
    testing.check((q[:, options.get("query_offset", 0) :], k, v), DETACHED, **options)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="mixing_gradient must be exact or detached"):
        DilatedPattern.torchscale(LENGTHS, RATES, mixing_gradient="stopped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mixing_gradient must be exact, got 'detached'"):
        DilatedPattern("longnet", (8,), (1,), "detached")
    qkv = make_qkv(1, 45, 4, 8)
    with pytest.raises(ValueError, match="backend 'triton' cannot run"):
        dilated_attention(*qkv, DETACHED, backend="triton")
    assert eval(repr(DETACHED)) == DETACHED != EXACT
    assert all("works only on one device" in text for text in pool(2).run(over_ranks))


def over_ranks() -> str:
    return raised(dilated_attention, *make_qkv(1, 45, 4, 8), DETACHED, group=world())
