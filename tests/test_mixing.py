"""mixing_gradient: the exact gradient of the torchscale rule, and the released one, which mixes by constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.ranks import pool
from dilated_attention.testing import make_qkv
from tests.over_ranks import raised, world

LENGTHS, RATES = [8, 16, 64], [1, 2, 4]
DETACHED = DilatedPattern.torchscale(LENGTHS, RATES, mixing_gradient="detached")
EXACT = DilatedPattern.torchscale(LENGTHS, RATES)


def released(q: Any, k: Any, v: Any, constant: bool) -> Any:
    """The released way: each branch by itself, then a mean by exp(lse), computed under no_grad or not."""
    found = [reference.attention(q, k, v, DilatedPattern.torchscale([w], [r])) for w, r in EXACT.branches]
    outs, lses = (torch.stack(parts) for parts in zip(*found, strict=True))
    mixing = lses.softmax(0)
    return ((mixing.detach() if constant else mixing).unsqueeze(-1) * outs).sum(0)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_each_gradient_is_that_of_its_formula(constant: bool, backend: Any) -> None:
    qkv = [x.requires_grad_() for x in make_qkv(2, 45, 4, 8, dtype=torch.float64)]
    dout = torch.randn(2, 45, 4, 8, dtype=torch.float64)
    wanted = released(*qkv, constant)
    out = dilated_attention(*qkv, DETACHED if constant else EXACT, backend=backend)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)
    found, right, wrong = (torch.autograd.grad(x, qkv, dout) for x in (out, wanted, released(*qkv, not constant)))
    torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-12)
    assert all((x - y).abs().max() > 1e-3 for x, y in zip(found[:2], wrong[:2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"cu_seqlens": [0, 7, 45]},
        {"key_padding_mask": torch.arange(45) >= torch.tensor([[30], [45]])},
        {"backend": "eager"},
    ],
)
def test_with_every_option(options: dict[str, Any], dtype: torch.dtype) -> None:
    samples = 1 if "cu_seqlens" in options else 2
    testing.check(make_qkv(samples, 45, 4, 8, kv_heads=2, dtype=dtype), DETACHED, **options)


def test_compiled() -> None:
    qkv = [x.requires_grad_() for x in make_qkv(1, 45, 4, 8, dtype=torch.float64)]
    compiled = torch.compile(lambda q, k, v: dilated_attention(q, k, v, DETACHED), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*qkv).sum(), qkv)
    torch.testing.assert_close(found, torch.autograd.grad(released(*qkv, True).sum(), qkv), atol=1e-12, rtol=1e-12)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="mixing_gradient must be exact or detached"):
        DilatedPattern.torchscale(LENGTHS, RATES, mixing_gradient="stopped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mixing_gradient must be exact, got 'detached'"):
        DilatedPattern("longnet", (8,), (1,), "detached")
    qkv = make_qkv(1, 45, 4, 8)
    with pytest.raises(ValueError, match="without dropout"):
        dilated_attention(*qkv, DETACHED, dropout_p=0.1)
    with pytest.raises(ValueError, match="backend 'triton' cannot run"):
        dilated_attention(*(x.requires_grad_() for x in qkv), DETACHED, backend="triton")
    assert explain(*qkv, DETACHED, backend="eager").backward.startswith("eager")
    assert "mixing_gradient='detached'" in repr(DETACHED)
    assert DETACHED != EXACT
    assert all("works only on one device" in text for text in pool(2).run(over_ranks))


def over_ranks() -> str:
    return raised(dilated_attention, *make_qkv(1, 45, 4, 8), DETACHED, group=world())


def test_few_queries() -> None:
    q, k, v = make_qkv(2, 45, 4, 8, dtype=torch.float64)
    testing.check((q[:, -3:], k, v), DETACHED, backend="sdpa")
