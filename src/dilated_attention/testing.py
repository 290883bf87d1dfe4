"""Holding any implementation against the oracle: input makers, one way to run, one rule for tolerances.

An error is max|got - expected| / max(1, max|expected|). In float64 it may be 1e-12 and in float32 5e-6, or, if that is
more, what rounding the scores gives: eps · max|lse| · sqrt(head_dim), as a score is a sum of head_dim products and the
largest scores are about as large as lse. In lower precision it may be twice (of gradients three times) the error of
plain PyTorch in the same dtype, which is at least that of rounding once. Legend as in `functional`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention import reference
from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import Pattern

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


class Results(NamedTuple):
    """Holds what one forward and backward pass gives: out, lse (None if it is not returned), and the gradients."""

    out: Tensor
    lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def items(self) -> list[tuple[str, Tensor]]:
        """The (name, tensor) pairs, without lse if it is None."""
        return [(name, value) for name, value in self._asdict().items() if value is not None]


Named = Results | dict[str, Tensor]


def make_qkv(
    samples: int, tokens: int, heads: int, head_dim: int, *, kv_heads: int | None = None, layout: str = "contiguous",
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Makes random query (samples, tokens, heads, head_dim), key and value (samples, tokens, kv_heads, head_dim).

    ``layout`` is their layout in memory. "contiguous"; "fused": slices of one tensor; "transposed": stored as
    (B, H, N, D); "expanded": one sample and one head, repeated with stride 0; "odd": strided and not aligned.

    Examples:
        >>> query, key, value = testing.make_qkv(2, 100, 8, 16, kv_heads=2, layout="fused")
        >>> key.shape
        torch.Size([2, 100, 2, 16])
    """
    generator = torch.Generator(device).manual_seed(seed)
    counts = [heads, *[heads if kv_heads is None else kv_heads] * 2]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    ways: dict[str, Callable[[int], Tensor]] = {
        "contiguous": lambda h: draw(samples, tokens, h, head_dim),
        "transposed": lambda h: draw(samples, h, tokens, head_dim).transpose(1, 2),
        "expanded": lambda h: draw(1, tokens, 1, head_dim).expand(samples, -1, h, -1),
        "odd": lambda h: draw(samples, tokens, h, 2 * head_dim + 1)[..., 1::2],
    }
    if layout not in {"fused", *ways}:
        raise ValueError(f"unknown layout {layout!r}")
    q, k, v = map(ways[layout], counts) if layout in ways else torch.split(ways["contiguous"](sum(counts)), counts, 2)
    return q, k, v


def run(attention: Callable[..., Any], qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None = None) -> Results:
    """Runs ``attention(query, key, value)``, which returns out or (out, lse), and its backward pass.

    ``dout`` and ``dlse`` are the gradients of out (B, N, H, D) and lse (B, N, H). Where lse is -inf, dlse counts as 0.
    """
    leaves = [x.detach().requires_grad_() for x in qkv]
    result = attention(*leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    outputs, grads = [out], [dout.to(out.dtype)]
    if lse is not None and dlse is not None:
        outputs.append(lse)
        grads.append(dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0))
    return Results(out.detach(), None if lse is None else lse.detach(), *torch.autograd.grad(outputs, leaves, grads))


def oracle(
    qkv: tuple[Tensor, ...], pattern: Pattern, dout: Tensor, dlse: Tensor | None = None, *,
    dtype: torch.dtype | None = torch.float64, **options: Any,
) -> Results:  # fmt: skip
    """Computes the reference results in float64; with dtype=None those of plain PyTorch in the inputs' own dtype.

    ``options`` are those of `reference.attention`, such as is_causal; the other arguments are those of `run`.
    """
    qkv = tuple(x if dtype is None else x.to(dtype) for x in qkv)
    return run(lambda q, k, v: reference.attention(q, k, v, pattern, dtype=None, **options), qkv, dout, dlse)


def error(got: Tensor, expected: Tensor) -> float:
    """max|got - expected| / max(1, max|expected|); infinities must agree, and NaN anywhere is infinite."""
    if got.shape != expected.shape or not torch.equal(got.isinf(), expected.isinf()):
        return math.inf
    value = _size((got.double() - expected.double()).masked_fill(expected.isinf(), 0.0)) / max(1.0, _size(expected))
    return math.inf if math.isnan(value) else value


def _size(x: Tensor) -> float:
    """The largest of the numbers that are not infinite, without its sign."""
    return x.double().masked_fill(x.isinf(), 0.0).abs().max().item() if x.numel() else 0.0


def errors(got: Results, expected: Results) -> dict[str, float]:
    """Computes the error of each result, by its name; it is infinite if shapes or infinities differ, or with a NaN."""
    return {name: error(value, getattr(expected, name)) for name, value in got.items()}


def limits(expected: Named, plain: Named | None, dtype: torch.dtype) -> dict[str, float]:
    """The largest error allowed for each result, by the rule at the top; the larger one where ``plain`` is given, too.

    A dict has the results of any other function, such as a module: "out", and gradients, whose names begin with "d".
    """
    assert plain is not None or dtype in TOLERANCE, f"{dtype} needs the results of plain PyTorch to compare with"
    wanted, floor, eps = dict(expected.items()), TOLERANCE.get(dtype, 0.0), torch.finfo(dtype).eps
    scores = _size(wanted["lse"]) if "lse" in wanted and floor else 0.0
    rounded = max(floor, eps * scores * math.sqrt(wanted["out"].shape[-1]))
    allowed = {name: floor if name == "lse" else rounded for name in wanted}  # that of lse is relative to its own size
    for name, value in plain.items() if plain else ():
        once, off = eps / 2 * min(1.0, _size(wanted[name])), error(value, wanted[name])
        allowed[name] = max(allowed[name], (3 if name[0] == "d" else 2) * (max(off, once) if off < math.inf else once))
    return allowed


def assert_exact(got: Results, expected: Results, plain: Results | None = None) -> None:
    """Raises AssertionError, which names every result that is too far from the oracle's, and its error and limit.

    The limits of max|got - expected| / max(1, max|expected|) are 1e-12 in float64 and 5e-6 in float32, and more where
    scores are large. In half precision ``plain`` is needed, the results of plain PyTorch in the same dtype: the limits
    are twice its error, for gradients three times.

    Examples:
        >>> qkv, pattern = testing.make_qkv(1, 16, 4, 8), da.DilatedPattern.longnet([4, 16], [1, 4])
        >>> got = testing.run(da.DilatedAttention(pattern=pattern), qkv, torch.ones_like(qkv[0]))
        >>> expected = testing.oracle(qkv, pattern, torch.ones_like(qkv[0]))
        >>> testing.assert_exact(got, expected)
    """
    allowed, off = limits(expected, plain, got.out.dtype), errors(got, expected)
    wrong = [name for name in off if not off[name] <= allowed[name]]
    assert not wrong, "; ".join(f"{name} is off by {off[name]:.2e}, allowed {allowed[name]:.2e}" for name in wrong)


def check(
    qkv: tuple[Tensor, ...], pattern: Pattern, *, lse_gradient: bool = True, seed: int = 0, **options: Any
) -> None:
    """Compares `dilated_attention` on query, key and value with the oracle, as `assert_exact` does.

    Gradients of out and, with ``lse_gradient``, of lse are random. ``options``: backend, is_causal, scale,
    key_padding_mask, query_offset or cu_seqlens.

    Examples:
        >>> testing.check(testing.make_qkv(1, 100, 4, 8), da.DilatedPattern.longnet([16, 64], [1, 4]), is_causal=True)
    """
    query, given = qkv[0], {"enable_gqa": True, "return_lse": True, **options}
    generator = torch.Generator(query.device).manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, device=query.device)
    dout, dlse = draw(query.shape).to(query.dtype), draw(query.shape[:3]) if lse_gradient else None
    got = run(lambda q, k, v: dilated_attention(q, k, v, pattern, **given), qkv, dout, dlse)
    options.pop("backend", None)
    plain = None if query.dtype in TOLERANCE else oracle(qkv, pattern, dout, dlse, dtype=None, **options)
    assert_exact(got, oracle(qkv, pattern, dout, dlse, **options), plain)
