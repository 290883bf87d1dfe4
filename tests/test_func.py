"""torch.func on the public function: gradients, Jacobians and mapped calls are those that single calls give."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap

from dilated_attention import DilatedPattern, MultiheadDilatedAttention, dilated_attention, testing
from dilated_attention.pattern import RULES
from dilated_attention.ranks import pool
from tests.cases import leaves
from tests.over_ranks import raised

PATTERNS = [DilatedPattern(rule, (4, 8), (1, 2)) for rule in RULES]
MASK = torch.rand(3, 11, generator=torch.Generator().manual_seed(0)) < 0.3
CLOSE = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def make(queries: int = 11, *, mapped: tuple[int, ...] = (), samples: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, with mapped dimensions in front."""
    q, k, v = testing.make_qkv(math.prod(mapped) * samples, 11, 4, 4, kv_heads=2, dtype=torch.float64)
    q, k, v = (x.unflatten(0, (*mapped, samples)) for x in (q[:, -queries:], k, v))
    return q, k, v


def attention(pattern: DilatedPattern = PATTERNS[1], **options: Any) -> Any:
    return functools.partial(dilated_attention, pattern=pattern, enable_gqa=True, return_lse=True, **options)


def scalar(attend: Any, *qkv: Tensor) -> Tensor:
    """Of out and of lse, so that both send gradients back."""
    out, lse = attend(*qkv)
    return (out.sin() * torch.arange(out.shape[-1])).sum() + lse.clamp(min=-50.0).cos().sum()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("queries", "mask", "offset"),
    [(11, None, None), (11, MASK, None), (3, MASK, None), (3, None, torch.tensor([4, 1, 8]))],
    ids=["whole", "masked", "few", "at positions"],
)
def test_gradients(
    pattern: DilatedPattern, backend: str, queries: int, mask: Tensor | None, offset: Tensor | None
) -> None:
    """Of all samples; and, with vmap over grad, of each: one call whose samples are the mapped ones."""

    def of_all(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, offset: Tensor | None) -> Tensor:
        options = {"key_padding_mask": mask, "query_offset": offset, "is_causal": queries < 11, "backend": backend}
        return scalar(attention(pattern, **options), q, k, v)

    def of_one(*given: Tensor | None) -> Tensor:
        return of_all(*(None if x is None else x[None] for x in given))

    qkv = make(queries, samples=3)
    wanted = torch.autograd.grad(of_all(*(given := leaves(*qkv)), mask, offset), given)
    CLOSE(grad(of_all, (0, 1, 2))(*qkv, mask, offset), wanted)
    in_dims = tuple(None if x is None else 0 for x in (*qkv, mask, offset))
    CLOSE(vmap(grad(of_one, (0, 1, 2)), in_dims)(*qkv, mask, offset), wanted)


@pytest.mark.parametrize(("backend", "queries"), [("sdpa", 11), ("eager", 11), ("sdpa", 3)])
def test_many_gradients_at_once(backend: str, queries: int) -> None:
    """Jacobians; those of torch.autograd come with is_grads_batched=True."""
    qkv = make(queries)

    def summed(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(backend=backend)(*x)
        return out.sin().sum((0, 3)), lse.sum(0)

    wanted = torch.autograd.functional.jacobian(summed, qkv)
    CLOSE(jacrev(summed, (0, 1, 2))(*qkv), wanted)
    CLOSE(torch.autograd.functional.jacobian(summed, qkv, vectorize=True), wanted)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, None), (None, None, 3)], ids=str)
@pytest.mark.parametrize(("queries", "cu_seqlens"), [(11, None), (3, None), (11, [0, 7, 11])])
def test_mapped_calls(in_dims: tuple[int | None, ...], queries: int, cu_seqlens: list[int] | None) -> None:
    """Whatever is mapped, along any dimension."""
    attend = attention(cu_seqlens=cu_seqlens)
    dims = list(zip(make(queries, mapped=(3,), samples=1 if cu_seqlens else 2), in_dims, strict=True))
    given = [x[0] if dim is None else x.movedim(0, dim) for x, dim in dims]
    one_by_one = [attend(*(x[0 if dim is None else i] for x, dim in dims)) for i in range(3)]
    CLOSE(vmap(attend, in_dims=in_dims)(*given), tuple(map(torch.stack, zip(*one_by_one, strict=True))))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_mapped_dropout(randomness: str) -> None:
    """ "same" drops the same pairs in every mapped call; gradients follow what was dropped."""
    q, k, v = make()
    attend, many = attention(dropout_p=0.5), [torch.stack([x] * 3) for x in (q, k, torch.ones_like(v))]
    torch.manual_seed(0)
    out, _ = vmap(attend, randomness=randomness)(*many)
    assert [torch.equal(out[0], x) for x in out[1:]] == [randomness == "same"] * 2
    torch.manual_seed(0)
    dv = vmap(grad(lambda *qkv: attend(*qkv)[0].sum(), 2), randomness=randomness)(*many)
    CLOSE(dv.sum((1, 2, 3, 4)), out.sum((1, 2, 3, 4)))  # out is linear in v, which is 1


def test_second_and_forward_derivatives_are_refused() -> None:
    attend, (q, k, v) = attention(), make()

    def of_query(q: Tensor) -> Tensor:
        return scalar(attend, q, k, v)

    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad(lambda q: grad(of_query)(q).sum())(q)
    for transform in (hessian(of_query), lambda q: jvp(of_query, (q,), (q,))):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            transform(q)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        attend(q, k, forward_ad.make_dual(v, v))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("transform", [grad, vmap])
def test_compiled_transforms(transform: Any) -> None:
    """They are right, or refused in our words: torch may well run them without compiling."""

    def loss(q: Tensor) -> Tensor:
        return dilated_attention(q, q, q, DilatedPattern.longnet([8], [1])).square().sum()

    given = torch.randn((2,) * (transform is vmap) + (1, 10, 2, 4), dtype=torch.float64)
    for backend, fullgraph in (("eager", False), ("aot_eager", True)):
        torch.compiler.reset()
        try:
            found, said = torch.compile(transform(loss), backend=backend, fullgraph=fullgraph)(given), ""
        except (NotImplementedError, RuntimeError) as error:
            found, said = None, str(error)
        assert found is None or testing.error(found, transform(loss)(given)) < 1e-12
        assert found is not None or "does not go through torch.func inside of torch.compile" in said
    torch.compiler.reset()


def test_a_mask_of_floats_for_each_sample() -> None:
    """As torch's encoder layers pass it on."""
    module = MultiheadDilatedAttention(16, 4, [8], [1], rule="longnet", dtype=torch.float64)
    x, ignored = torch.randn(3, 10, 16, dtype=torch.float64), torch.arange(10).expand(3, -1) > 7

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return module(x[None], key_padding_mask=mask[None])[0].square().sum()

    mask = torch.zeros(3, 10, dtype=torch.float64).masked_fill(ignored, -torch.inf)
    CLOSE(vmap(grad(loss))(x, mask), torch.stack([*map(grad(loss), x, ignored)]))
    with pytest.raises(ValueError, match=r"key_padding_mask must be bool.* of 0 .keep. and -inf .ignore. only"):
        vmap(grad(loss))(x, mask + 0.5)


def transforms_over_ranks() -> list[str]:
    q, pattern = torch.ones(1, 8, 2, 4, requires_grad=True), DilatedPattern.longnet([4, 64], [1, 2])

    def attend(q: Tensor) -> Tensor:
        return dilated_attention(q, q, q, pattern, group=dist.group.WORLD).sum()

    detached = q.detach()
    said = [
        raised(grad(attend), detached),
        raised(vmap(attend), torch.stack([detached, detached])),
        raised(torch.autograd.grad, attend(q), q, torch.ones(3), is_grads_batched=True),
    ]
    torch.autograd.grad(attend(q), q)  # the group goes on
    return said


def test_over_ranks_transforms_are_refused() -> None:
    for said in pool(2).run(transforms_over_ranks):
        assert all("torch.func and is_grads_batched do not go over a group of ranks" in text for text in said)
