"""The operation against the float64 oracle: out, lse and all gradients, lse's own included, over a table of cases.

Every combination of length, pattern, rule, causality and backend is there; what else varies (dtype, heads, mask,
samples, head_dim) is dealt to them by a seeded sampler. Tolerances are those of `dilated_attention.testing`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES

SHORT = (1, 2, 5, 17, 63, 64, 65, 97, 127, 129)
LONG = (1000, 1025)
BACKENDS = ("sdpa", "eager")
MASKS = ("none", "random", "right", "sample")
DTYPES = {"f64": torch.float64, "f32": torch.float32}
HEADS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (4, 2), (6, 2), (6, 3), (10, 5))  # query heads, key/value heads

PATTERNS = {
    "dense": ([2000], [1]),  # w > N
    "local": ([16], [1]),
    "paper": ([16, 32, 64], [1, 2, 4]),
    "sparse": ([64], [3]),  # most rows in no branch
    "odd": ([7, 30], [2, 5]),  # nothing divides anything
    "rate_over_length": ([4, 40], [9, 6]),
    "ones": ([1, 2], [1, 3]),
    "twice": ([20, 20], [2, 2]),  # every key counted twice
    "prime": ([13, 101], [1, 7]),
    "gigapath": ([8, 45, 256, 1448, 8192], [1, 2, 4, 8, 16]),  # the released slide encoder's, w / 128
}
LONG_PATTERNS = ("dense", "paper", "odd", "gigapath")


@dataclass(frozen=True)
class Case:
    tokens: int
    pattern: DilatedPattern
    name: str  # of the pattern
    is_causal: bool
    backend: str
    dtype: str
    samples: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str

    @property
    def id(self) -> str:
        causal = "causal-" if self.is_causal else ""
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}over{self.kv_heads}"
        return (
            f"n{self.tokens}-{self.pattern.rule}-{self.name}-{causal}{self.backend}-{self.dtype}-"
            f"b{self.samples}{heads}d{self.head_dim}-mask_{self.mask}"
        )

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return testing.make_qkv(
            self.samples,
            self.tokens,
            self.heads,
            self.head_dim,
            kv_heads=self.kv_heads,
            dtype=DTYPES[self.dtype],
            seed=self.tokens,
        )

    def padding(self) -> Tensor | None:
        return make_mask(self.mask, self.samples, self.tokens)


def make_mask(kind: str, samples: int, tokens: int) -> Tensor | None:
    """(B, N) bool, True = ignored: none, random, right padding, or one whole sample."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(tokens)
    if kind == "random":
        return torch.rand(samples, tokens, generator=generator) < 0.3
    if kind == "right":
        ends = torch.randint(1, tokens + 1, (samples, 1), generator=generator)
        return torch.arange(tokens) >= ends
    return (torch.arange(samples) == samples - 1)[:, None].expand(-1, tokens)


def make_cases(lengths: tuple[int, ...], names: tuple[str, ...], *, long: bool) -> list[Case]:
    cases = []
    for tokens, name, rule, is_causal, backend in itertools.product(lengths, names, RULES, (False, True), BACKENDS):
        draw = random.Random(f"{tokens} {name} {rule} {is_causal} {backend}")
        widths, rates = PATTERNS[name]
        fits = [heads for heads in HEADS if rule != "head_groups" or heads[1] >= len(widths)]
        if long:  # the oracle is quadratic
            fits = [heads for heads in fits if heads[0] <= 5][:3]
        heads, kv_heads = draw.choice(fits)
        pattern = DilatedPattern(rule, tuple(widths), tuple(rates))
        dtype, mask = draw.choice(tuple(DTYPES)), draw.choice(MASKS)
        samples, head_dim = (1, 4) if long else (draw.choice((1, 2, 3)), draw.choice((1, 4, 8)))
        if long and mask == "sample":
            mask = "random"
        cases.append(Case(tokens, pattern, name, is_causal, backend, dtype, samples, heads, kv_heads, head_dim, mask))
    return cases


CASES = make_cases(SHORT, tuple(PATTERNS), long=False) + make_cases(LONG, LONG_PATTERNS, long=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_oracle(case: Case) -> None:
    testing.check(
        case.qkv(),
        case.pattern,
        is_causal=case.is_causal,
        key_padding_mask=case.padding(),
        backend=case.backend,
        seed=1,
    )


def test_the_table_has_every_kind_of_case() -> None:
    assert len(CASES) >= 1000
    assert len({case.id for case in CASES}) == len(CASES)
    kinds = Counter((case.pattern.rule, case.is_causal, case.backend, case.dtype, case.mask) for case in CASES)
    assert len(kinds) == len(RULES) * 2 * len(BACKENDS) * len(DTYPES) * len(MASKS)
    assert min(kinds.values()) >= 3
    shared = Counter((case.pattern.rule, case.backend, case.mask) for case in CASES if case.heads > case.kv_heads)
    assert len(shared) == len(RULES) * len(BACKENDS) * len(MASKS)


# --- what the table leaves out ----------------------------------------------------------------------------------

SMALL = {
    "longnet": DilatedPattern.longnet([8, 16], [1, 3]),
    "torchscale": DilatedPattern.torchscale([8, 16], [1, 3]),
    "head_groups": DilatedPattern.head_groups([8, 16], [1, 3]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 4.0])
def test_any_scale(rule: str, scale: float, backend: str) -> None:
    qkv = testing.make_qkv(2, 21, 4, 8, kv_heads=2, dtype=torch.float64)
    testing.check(qkv, SMALL[rule], scale=scale, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_large_scores(rule: str, backend: str) -> None:
    q, k, v = testing.make_qkv(2, 21, 4, 8, dtype=torch.float64)
    testing.check((q * 10, k * 10, v), SMALL[rule], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lse_gradient", [False, True])
def test_without_and_with_a_gradient_of_lse(rule: str, backend: str, lse_gradient: bool) -> None:
    qkv = testing.make_qkv(2, 21, 4, 8, dtype=torch.float64)
    testing.check(qkv, SMALL[rule], backend=backend, lse_gradient=lse_gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_of_lse_alone(rule: str, backend: str) -> None:
    qkv = testing.make_qkv(2, 21, 4, 8, dtype=torch.float64)
    dlse = torch.randn(2, 21, 4, dtype=torch.float64)

    def lse_only(*x: Tensor) -> Tensor:
        lse = dilated_attention(*x, SMALL[rule], backend=backend, return_lse=True)[1]
        return lse.masked_fill(lse == -torch.inf, 0.0)

    leaves = [x.detach().requires_grad_() for x in qkv]
    grads = torch.autograd.grad(lse_only(*leaves), leaves, dlse)
    expected = testing.oracle(qkv, SMALL[rule], torch.zeros_like(qkv[0]), dlse)
    for got, wanted in zip(grads, (expected.dq, expected.dk, expected.dv), strict=True):
        assert testing.error(got, wanted) < 1e-12
    assert (grads[2] == 0).all()


# --- dropout: the oracle is given the seed that the function draws ----------------------------------------------

DROPOUT_CASES = [
    pytest.param(rule, name, tokens, is_causal, heads, mask, p, id=f"{rule}-{name}-n{tokens}-{is_causal}-{mask}-{p}")
    for (rule, name, is_causal), (tokens, heads, mask, p) in itertools.product(
        itertools.product(RULES, ("local", "paper", "odd", "twice"), (False, True)),
        ((17, (6, 3), "none", 0.1), (65, (3, 3), "random", 0.5), (40, (4, 4), "right", 0.9)),
    )
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "tokens", "is_causal", "heads", "mask", "p"), DROPOUT_CASES)
def test_dropout_against_the_oracle(rule, name, tokens, is_causal, heads, mask, p) -> None:
    widths, rates = PATTERNS[name]
    pattern = DilatedPattern(rule, tuple(widths), tuple(rates))
    qkv = testing.make_qkv(2, tokens, heads[0], 4, kv_heads=heads[1], dtype=torch.float64)
    dout = torch.randn(qkv[0].shape, dtype=torch.float64)
    dlse = torch.randn(qkv[0].shape[:3], dtype=torch.float64)
    options = {"is_causal": is_causal, "key_padding_mask": make_mask(mask, 2, tokens), "dropout_p": p}

    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    expected = testing.oracle(qkv, pattern, dout, dlse, seed=seed, **options)
    torch.manual_seed(3)
    got = testing.run(
        lambda *x: dilated_attention(*x, pattern, enable_gqa=True, return_lse=True, **options), qkv, dout, dlse
    )
    testing.assert_exact(got, expected)
    undropped = testing.oracle(qkv, pattern, dout, dlse, **{**options, "dropout_p": 0.0})
    assert testing.error(got.out, undropped.out) > 0.01, "the case drops nothing, so it shows nothing"


# --- gradients by finite differences: no oracle in between ------------------------------------------------------

GRADCHECK = [
    pytest.param(DilatedPattern.longnet([4, 8], [1, 2]), 2, 2, id="longnet"),
    pytest.param(DilatedPattern.longnet([3, 5], [2, 4]), 3, 3, id="longnet-with-uncovered-rows"),
    pytest.param(DilatedPattern.torchscale([4, 8], [1, 2]), 2, 2, id="torchscale-with-zero-keys"),
    pytest.param(DilatedPattern.head_groups([4, 8], [1, 2]), 2, 2, id="head_groups"),
    pytest.param(DilatedPattern.longnet([4, 8], [1, 2]), 4, 2, id="grouped-query"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "random"])
@pytest.mark.parametrize(("pattern", "heads", "kv_heads"), GRADCHECK)
def test_gradcheck(
    pattern: DilatedPattern, heads: int, kv_heads: int, mask: str, is_causal: bool, backend: str
) -> None:
    tokens = 6
    qkv = testing.make_qkv(1, tokens, heads, 2, kv_heads=kv_heads, dtype=torch.float64)
    padding = make_mask(mask, 1, tokens)

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dilated_attention(
            *x,
            pattern,
            is_causal=is_causal,
            key_padding_mask=padding,
            enable_gqa=True,
            backend=backend,
            return_lse=True,
        )
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # no difference quotient there

    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in qkv])


@pytest.mark.parametrize("rule", RULES)
def test_gradcheck_with_dropout(rule: str) -> None:
    qkv = testing.make_qkv(1, 6, 2, 2, dtype=torch.float64)
    pattern = DilatedPattern(rule, (4, 8), (1, 1))

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return dilated_attention(*x, pattern, dropout_p=0.4, return_lse=True)

    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in qkv])
