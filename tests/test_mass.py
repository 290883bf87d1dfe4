"""`attention_mass` against dense weights, added up where a query sees."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import Dense, DilatedPattern, Pattern, Strided, Window, attention_mass, testing
from tests.cases import UNIONS

PATTERNS = [
    *map(Pattern, UNIONS.values()),
    Pattern(UNIONS["far first"], counts="sum"),
    DilatedPattern.longnet([4, 20, 20], [1, 3, 3]),
    DilatedPattern.torchscale([8, 16], [3, 5], mixing_gradient="detached"),
    DilatedPattern.head_groups([8, 40], [2, 5]),
]


def drawn(dtype: torch.dtype = torch.float64, n: int = 37) -> tuple[Tensor, Tensor]:
    """Four query heads, of which two share one of the keys; scores are far apart."""
    query, key, _ = testing.make_qkv(2, n, 4, 8, kv_heads=2, dtype=dtype)
    return (3 * query).requires_grad_(), key.requires_grad_()


def by_hand(query: Tensor, key: Tensor, pattern: Pattern, is_causal: bool, scale: float | None = None) -> Tensor:
    (_, n, heads, dim), kv_heads = query.shape, key.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", query, key.repeat_interleave(heads // kv_heads, 2))
    scores = scores.double() * (dim**-0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    seen = torch.zeros(heads, n, n, dtype=torch.double)
    size = {"num_tokens": n, "num_heads": heads, "num_kv_heads": kv_heads, "is_causal": is_causal}
    for head, i in itertools.product(range(heads), range(n)):
        seen[head, i, list(pattern.keys(i, head, **size))] = 1
    return (scores.softmax(-1) * seen).sum(-1).transpose(1, 2)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_it_is_the_weight_of_the_keys_that_are_seen(pattern: Pattern, is_causal: bool) -> None:
    query, key = drawn()
    found = attention_mass(query, key, pattern, is_causal=is_causal, enable_gqa=True)
    wanted = by_hand(query, key, pattern, is_causal)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, found.numel(), dtype=torch.double).view_as(found)
    gradients = [torch.autograd.grad((x * weights).sum(), (query, key)) for x in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_scale_and_float32() -> None:
    query, key = drawn(torch.float32, 300)
    pattern = Pattern([Window(5), Strided(16)])
    found = attention_mass(query, key, pattern, is_causal=True, scale=0.7, enable_gqa=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), by_hand(query, key, pattern, True, 0.7), rtol=1e-5, atol=1e-7)


def test_it_is_one_of_dense_attention_and_never_more() -> None:
    query, key = drawn(torch.float32, 500)
    for pattern in (Pattern([Window(3), Dense()]), Pattern([Window(499)]), DilatedPattern.longnet([500] * 2, [1, 1])):
        mass = attention_mass(query, key, pattern, enable_gqa=True).detach()
        assert float(mass.max()) <= 1
        assert float(mass.min()) > 1 - 1e-5


@pytest.mark.parametrize(
    ("error", "says", "given"),
    [
        (TypeError, "pattern must be a Pattern", {"pattern": "window"}),
        (ValueError, "set enable_gqa=True", {"enable_gqa": False}),
        (ValueError, "is for key/value head 2, and there are 2", {"pattern": Pattern([Window(2, heads=[2])])}),
        (ValueError, "scale must be", {"scale": -1.0}),
    ],
)
def test_what_is_refused(error: type[Exception], says: str, given: dict[str, Any]) -> None:
    query, key = drawn()
    with pytest.raises(error, match=says):
        attention_mass(query, key, **{"pattern": Pattern([Window(2)]), "enable_gqa": True, **given})
