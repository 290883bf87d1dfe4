"""The operation over ranks against the float64 oracle, on real gloo groups: as on one device, whatever the shards.

Every combination of ranks, exchange, rule, causality and kind of shards is there; what else varies is dealt to them by
a seeded sampler. Many cases go to the ranks in one call, and each is a test of its own. Inputs are made from seeds in
the ranks, and every rank has a generator of its own, so that a seed that is not rank 0's shows.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dilated_attention import (
    ContextParallel,
    DilatedPattern,
    dilated_attention,
    explain,
    functional,
    testing,
)
from dilated_attention.distributed.group import GroupTransport
from dilated_attention.pattern import RULES
from dilated_attention.ranks import RanksFailed, pool
from dilated_attention.ring import run
from dilated_attention.ring.shards import Shards
from dilated_attention.testing import Results

EXCHANGES = ("ring", "allgather", "alltoall", "auto")
MANY_RANKS = (2, 3, 4, 8)
KINDS = ("even", "unequal", "few", "empty", "padding")
MASKS = ("none", "none", "none", "random", "right", "sample")
LAYOUTS = ("contiguous", "fused", "transposed", "expanded", "odd")
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
HEADS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (4, 2), (6, 2), (6, 3), (8, 4))  # query heads, key/value heads
TOGETHER = 40  # cases in one call to the ranks

PATTERNS = {
    "dense": ([300], [1]),  # one segment over all ranks
    "paper": ([8, 16, 64], [1, 2, 4]),
    "sparse": ([64], [3]),  # most rows in no branch
    "odd": ([7, 30], [2, 5]),  # nothing divides anything
    "rate_over_length": ([4, 40], [9, 6]),
    "ones": ([1, 2], [1, 3]),
    "twice": ([20, 20], [2, 2]),  # every key counted twice
    "prime": ([13, 101], [1, 7]),
    "gigapath": ([4, 23, 128], [1, 2, 4]),
}
LONG_PATTERN = ([1024, 5792], [4, 16])  # no border of a shard of 1000 tokens is one of a segment


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    pattern: DilatedPattern
    name: str  # of the pattern and the shards
    exchange: str
    is_causal: bool = False
    dtype: str = "f64"
    samples: int = 1
    heads: tuple[int, int] = (2, 2)
    head_dim: int = 4
    mask: str = "none"
    hidden: tuple[int, ...] = ()  # ranks that have only padding
    dropout_p: float = 0.0
    lse_gradient: bool = True
    use_checkpointing: bool = True
    layout: str = "contiguous"
    copied: bool = False  # shards are tensors of their own, not slices
    backend: str = "auto"
    debug: bool = False
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def id(self) -> str:
        heads = f"h{self.heads[0]}" if self.heads[0] == self.heads[1] else f"h{self.heads[0]}over{self.heads[1]}"
        words = [f"P{self.ranks}", self.exchange, self.pattern.rule, self.name]
        words += ["causal"] * self.is_causal
        words += [f"n{self.tokens}", self.dtype, f"b{self.samples}{heads}d{self.head_dim}"]
        words += [f"mask_{self.mask}"] * (self.mask != "none") + [f"drop{self.dropout_p}"] * bool(self.dropout_p)
        words += ["kept"] * (not self.use_checkpointing) + ["no_dlse"] * (not self.lse_gradient)
        return "-".join([*words, self.layout, self.backend])

    def shard(self, rank: int) -> slice:
        starts = Shards.of(self.lengths).starts
        return slice(starts[rank], starts[rank + 1])

    def padding(self) -> Tensor | None:
        """(B, N) bool, True = ignored: random, right padding, or one whole sample; and all that some ranks have."""
        if self.mask == "none" and not self.hidden:
            return None
        draws = torch.Generator().manual_seed(self.seed)
        mask = torch.zeros(self.samples, self.tokens, dtype=torch.bool)
        if self.mask == "random":
            mask = torch.rand(mask.shape, generator=draws) < 0.3
        elif self.mask == "right":
            mask = torch.arange(self.tokens) >= torch.randint(0, self.tokens + 1, (self.samples, 1), generator=draws)
        elif self.mask == "sample":
            mask[-1] = True
        for rank in self.hidden:
            mask[:, self.shard(rank)] = True
        return mask

    def inputs(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None, Tensor | None]:
        """q, k, v; dout; dlse; padding: of the whole sequence. What is under the padding is NaN."""
        heads, kv_heads = self.heads
        q, k, v = testing.make_qkv(
            self.samples, self.tokens, heads, self.head_dim, kv_heads=kv_heads, layout=self.layout,
            dtype=DTYPES[self.dtype], seed=self.seed,
        )  # fmt: skip
        draws = torch.Generator().manual_seed(self.seed + 1)
        dout = torch.randn(q.shape, generator=draws).to(q.dtype)
        dlse = torch.randn(q.shape[:3], generator=draws) if self.lse_gradient else None
        padding = self.padding()
        if padding is not None and self.layout == "contiguous":
            k, v = (x.masked_fill(padding[:, :, None, None], torch.nan) for x in (k, v))
        return (q, k, v), dout, dlse, padding

    def options(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "dropout_p": self.dropout_p}

    def expected(self) -> Results:
        qkv, dout, dlse, padding = self.inputs()
        torch.manual_seed(self.seed)
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64) if self.dropout_p else None
        return testing.oracle(qkv, self.pattern, dout, dlse, key_padding_mask=padding, seed=seed, **self.options())

    def on_one_device(self) -> Results:
        qkv, dout, dlse, padding = self.inputs()
        torch.manual_seed(self.seed)
        return testing.run(self.attention(padding), qkv, dout, dlse)

    def attention(self, padding: Tensor | None, **of_a_group: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        fixed: dict[str, Any] = {
            "enable_gqa": True,
            "return_lse": True,
            "backend": self.backend,
            "key_padding_mask": padding,
        }

        if of_a_group:
            fixed |= {"heads": of_a_group.pop("heads", None), "group": ContextParallel(**of_a_group)}

        def attention(*qkv: Tensor) -> tuple[Tensor, Tensor]:
            return dilated_attention(*qkv, self.pattern, **fixed, **self.options())

        return attention

    def on_this_rank(self, group: dist.ProcessGroup | None = None, **options: Any) -> Results:
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        shard = self.shard(rank)
        qkv, dout, dlse, padding = self.inputs()
        qkv = tuple(x[:, shard].clone(memory_format=torch.contiguous_format) if self.copied else x[:, shard]
                    for x in qkv)  # fmt: skip
        attention = self.attention(
            None if padding is None else padding[:, shard], group=group, exchange=self.exchange,
            use_checkpointing=self.use_checkpointing, debug=self.debug, **options,
        )  # fmt: skip
        torch.manual_seed(self.seed + rank)
        return testing.run(attention, qkv, dout[:, shard], None if dlse is None else dlse[:, shard])


def run_here(cases: Sequence[Case]) -> list[Results]:
    """In a rank: its shard of each case."""
    return [case.on_this_rank() for case in cases]


def solve(cases: Sequence[Case]) -> dict[Case, Results | RanksFailed]:
    """The joined results of cases for equally many ranks; if a call fails, its halves are tried, down to one case."""
    try:
        shards = pool(cases[0].ranks).run(run_here, cases)
    except RanksFailed as error:
        if len(cases) == 1:
            return {cases[0]: error}
        half = len(cases) // 2
        return solve(cases[:half]) | solve(cases[half:])
    return {case: testing.joined(parts) for case, parts in zip(cases, zip(*shards, strict=True), strict=True)}


# --- the table --------------------------------------------------------------------------------------------------


def make_lengths(kind: str, ranks: int, draw: random.Random) -> tuple[int, ...]:
    tokens = draw.randint(1, max(1, ranks - 1)) if kind == "few" else draw.randint(24, 90)
    if kind in ("even", "few"):
        return tuple(b - a for a, b in itertools.pairwise(Shards.even(tokens, ranks).starts))
    borders = sorted(draw.sample(range(1, tokens), ranks - 1))
    lengths = [b - a for a, b in itertools.pairwise([0, *borders, tokens])]
    if kind == "empty":
        for rank in draw.sample(range(ranks), draw.randint(1, ranks - 1) if ranks > 1 else 1):
            lengths[rank] = 0
    return tuple(lengths)


def make_case(ranks: int, exchange: str, rule: str, is_causal: bool, kind: str) -> Case:
    draw = random.Random(f"{ranks} {exchange} {rule} {is_causal} {kind}")
    name = draw.choice(tuple(PATTERNS))
    widths, rates = PATTERNS[name]
    dropout_p = draw.choice((0.0, 0.0, 0.2, 0.6))
    return Case(
        lengths=make_lengths(kind, ranks, draw),
        pattern=DilatedPattern(rule, tuple(widths), tuple(rates)),
        name=f"{name}-{kind}",
        exchange=exchange,
        is_causal=is_causal,
        dtype=draw.choice(("f64", "f64", "f32")),
        samples=draw.choice((1, 2, 3)),
        heads=draw.choice([heads for heads in HEADS if rule != "head_groups" or heads[1] >= len(widths)]),
        head_dim=draw.choice((1, 4, 5)),
        mask=draw.choice(MASKS),
        hidden=tuple(draw.sample(range(ranks), draw.randint(1, max(1, ranks - 1)))) if kind == "padding" else (),
        dropout_p=dropout_p,
        lse_gradient=draw.random() < 0.7,
        use_checkpointing=draw.random() < 0.5,
        layout=draw.choice(LAYOUTS) if draw.random() < 0.6 else "contiguous",
        copied=draw.random() < 0.3,
        backend=draw.choice(("auto", "eager") if dropout_p else ("auto", "sdpa", "eager")),
        debug=draw.random() < 0.2,
        seed=draw.randrange(2**20),
    )


CASES = [
    make_case(*kinds)
    for kinds in [
        *itertools.product(MANY_RANKS, EXCHANGES, RULES, (False, True), KINDS),
        *itertools.product((1,), ("ring", "auto"), RULES, (False, True), KINDS),
    ]
]


@functools.cache
def solved(ranks: int, batch: int) -> dict[Case, Results | RanksFailed]:
    cases = [case for case in CASES if case.ranks == ranks]
    return solve(cases[batch * TOGETHER : (batch + 1) * TOGETHER])


def of_the_table(case: Case) -> Results:
    """Computed with its neighbours in the table."""
    place = [other for other in CASES if other.ranks == case.ranks].index(case)
    found = solved(case.ranks, place // TOGETHER)[case]
    if isinstance(found, RanksFailed):
        raise found
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_oracle(case: Case) -> None:
    testing.assert_exact(of_the_table(case), case.expected())


def test_the_table_has_every_kind_of_case() -> None:
    assert len(CASES) >= 500
    assert len(set(CASES)) == len(CASES)
    many = [case for case in CASES if case.ranks > 1 and case.tokens > case.ranks]
    crossing = Counter((case.exchange, case.name.split("-")[0]) for case in many)
    assert len(crossing) == len(EXCHANGES) * len(PATTERNS)
    for one in (
        lambda case: case.dropout_p,
        lambda case: case.mask,
        lambda case: case.layout,
        lambda case: case.dtype,
        lambda case: case.heads,
        lambda case: case.samples,
        lambda case: case.backend,
        lambda case: (case.pattern.rule, case.mask != "none" or bool(case.hidden), bool(case.dropout_p)),
        lambda case: (case.use_checkpointing, case.lse_gradient, case.is_causal),
        lambda case: (case.heads[0] > case.heads[1], bool(case.hidden), case.is_causal),
    ):
        values = {one(case) for case in CASES}
        kinds = Counter((case.exchange, one(case)) for case in many)
        assert len(kinds) == len(EXCHANGES) * len(values)
        assert min(kinds.values()) >= 2


# --- long segments: the oracle is quadratic, so one device is what they are held against ---

LONG = [
    Case((1000,) * ranks, DilatedPattern(rule, *map(tuple, LONG_PATTERN)), "long", exchange, is_causal, heads=(3, 3))
    for ranks, (at, exchange), rule, is_causal in itertools.product(
        (3, 8), enumerate(EXCHANGES[:3]), RULES, (False, True)
    )
    if ranks == 3 or is_causal == (at + RULES.index(rule)) % 2
]
LONG += [
    replace(case, lengths=lengths, heads=(2, 2), mask="right", dropout_p=0.3, seed=7)
    for case in LONG[:6:2]
    for lengths in ((900, 2000, 1), (5792, 1, 0, 300))
]


@functools.cache
def solved_long(ranks: int) -> dict[Case, Results | RanksFailed]:
    return solve([case for case in LONG if case.ranks == ranks])


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.id)
def test_long_segments_are_as_on_one_device(case: Case) -> None:
    found = solved_long(case.ranks)[case]
    if isinstance(found, RanksFailed):
        raise found
    testing.assert_exact(found, case.on_one_device())


# --- bit for bit ------------------------------------------------------------------------------------------------

FULL = ((8, 16), (1, 2)), ((64, 128), (64, 32, 0, 64))
RAGGED = ((12, 18), (3, 5)), ((36, 72), (36, 0, 72, 41))
APART = [
    Case(
        lengths, DilatedPattern(rule, *branches), "apart", "ring", is_causal, dtype, samples, heads, mask=mask,
        layout="fused", copied=samples > 1, backend=backend, seed=3,
    )
    for (branches, some), (rule, heads), is_causal, (dtype, samples), backend in itertools.product(
        (FULL, RAGGED), (("longnet", (8, 4)), ("torchscale", (8, 8)), ("head_groups", (6, 3))), (False, True),
        (("f32", 1), ("f64", 1), ("f64", 2)), ("sdpa", "eager"),
    )
    for lengths, mask in zip(some, ("none", "right"), strict=True)
]  # fmt: skip


@functools.cache
def solved_apart(ranks: int) -> dict[Case, Results | RanksFailed]:
    return solve([case for case in APART if case.ranks == ranks])


@pytest.mark.parametrize("case", APART, ids=lambda case: case.id)
def test_bit_for_bit_one_device_where_no_segment_crosses_a_border(case: Case) -> None:
    found = solved_apart(case.ranks)[case]
    if isinstance(found, RanksFailed):
        raise found
    for (name, got), (_, wanted) in zip(found.items(), case.on_one_device().items(), strict=True):
        assert torch.equal(got, wanted), f"{name} differs by {testing.error(got, wanted):.1e}"


def size_one_here(cases: Sequence[Case]) -> list[bool]:
    """In a rank: a group of this rank alone gives what no group gives."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = []
    for case in cases:
        results = [case.on_this_rank(alone), case.on_one_device()]
        found.append(all(torch.equal(a, b) for (_, a), (_, b) in zip(*(x.items() for x in results), strict=True)))
    return found


def test_a_group_of_one_is_the_plain_function() -> None:
    cases = [replace(case, seed=5) for case in CASES if case.ranks == 1 and not case.copied]
    assert len(cases) > 20
    assert pool(2).run(size_one_here, cases) == [[True] * len(cases)] * 2


# --- half precision ---------------------------------------------------------------------------------------------

HALF = [
    Case(
        (160 // ranks,) * ranks, DilatedPattern.longnet([32, 100, 200], [1, 2, 3]), "half", exchange, is_causal, dtype,
        samples=1, heads=(4, 2), head_dim=16, seed=1,
    )
    for ranks, exchange, is_causal, dtype in itertools.product(
        (1, 2, 4, 8), EXCHANGES[:3], (False, True), ("bf16", "f16")
    )
]  # fmt: skip


@functools.cache
def solved_half(ranks: int) -> dict[Case, Results | RanksFailed]:
    return solve([case for case in HALF if case.ranks == ranks])


@functools.cache
def expected_of_half(is_causal: bool, dtype: str) -> tuple[Results, Results]:
    """In float64, and by plain PyTorch in the dtype itself."""
    case = next(case for case in HALF if case.is_causal == is_causal and case.dtype == dtype)
    qkv, dout, dlse, _ = case.inputs()
    plain = testing.oracle(qkv, case.pattern, dout, dlse, dtype=None, **case.options())
    return case.expected(), plain


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.id)
def test_the_error_of_half_precision_does_not_grow_with_ranks(case: Case) -> None:
    """One limit for any number of ranks: twice plain PyTorch's own error, three times for gradients."""
    found = solved_half(case.ranks)[case]
    if isinstance(found, RanksFailed):
        raise found
    testing.assert_exact(found, *expected_of_half(case.is_causal, case.dtype))


# --- how it is used ---------------------------------------------------------------------------------------------

BASE = Case(
    (9, 14, 3, 15), DilatedPattern.longnet([8, 24, 64], [1, 2, 3]), "base", "ring", samples=2, heads=(4, 2), seed=11
)
BY_EXCHANGE = pytest.mark.parametrize("exchange", EXCHANGES)


def layers(case: Case, attention: Callable[..., Any], x: Tensor) -> Tensor:
    """Four layers, each with q, k and v from the one before."""
    for scale in (1.0, 0.5, 2.0, 0.7):
        group = case.heads[0] // case.heads[1]
        out, lse = attention(x * scale, x[:, :, ::group].tanh(), x[:, :, group - 1 :: group])
        x = x + out * lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1).tanh()
    return x


def layers_here(case: Case) -> tuple[Tensor, Tensor]:
    (q, _, _), dout, _, _ = case.inputs()
    shard = case.shard(dist.get_rank())
    x = q[:, shard].detach().requires_grad_()
    options = {"group": dist.group.WORLD, "exchange": case.exchange, "use_checkpointing": case.use_checkpointing}
    torch.manual_seed(case.seed)
    y = layers(case, case.attention(None, **options), x)
    return y.detach(), torch.autograd.grad(y, x, dout[:, shard])[0]


@BY_EXCHANGE
@pytest.mark.parametrize("use_checkpointing", [False, True])
def test_several_layers(exchange: str, use_checkpointing: bool) -> None:
    case = replace(BASE, exchange=exchange, use_checkpointing=use_checkpointing, dropout_p=0.2)
    (q, _, _), dout, _, _ = case.inputs()
    x = q.detach().requires_grad_()
    torch.manual_seed(case.seed)
    y = layers(case, case.attention(None), x)
    dx = torch.autograd.grad(y, x, dout)[0]
    got = [torch.cat(parts, 1) for parts in zip(*pool(4).run(layers_here, case), strict=True)]
    assert testing.error(got[0], y.detach()) < 1e-12
    assert testing.error(got[1], dx) < 1e-12


def recomputed_here(case: Case, reentrant: bool) -> Results:
    """The call under torch's activation checkpointing, which makes it again in the backward pass."""
    qkv, dout, dlse, padding = case.inputs()
    rank = dist.get_rank()
    shard = case.shard(rank)
    padding = None if padding is None else padding[:, shard]
    attention = case.attention(padding, group=dist.group.WORLD, exchange=case.exchange)
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    torch.manual_seed(case.seed + rank)
    out, lse = checkpoint(attention, *leaves, use_reentrant=reentrant)
    torch.rand(rank)  # the generator moves on: what is made again must be the same nevertheless
    assert dlse is not None
    dlse = dlse[:, shard].to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    torch.autograd.backward([out, lse], [dout[:, shard], dlse])  # reentrant checkpoints refuse autograd.grad
    grads = [x.grad for x in leaves if x.grad is not None]
    return Results(out.detach(), lse.detach(), *grads)


@BY_EXCHANGE
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(exchange: str, reentrant: bool) -> None:
    case = replace(BASE, exchange=exchange, mask="random", dropout_p=0.3)
    testing.assert_exact(testing.joined(pool(4).run(recomputed_here, case, reentrant)), case.expected())


def without_gradients_here(case: Case) -> tuple[Tensor, Tensor, bool]:
    qkv, _, _, _ = case.inputs()
    parts = [x[:, case.shard(dist.get_rank())].requires_grad_() for x in qkv]
    with torch.no_grad():
        out, lse = case.attention(None, group=dist.group.WORLD, exchange=case.exchange)(*parts)
    return out, lse, out.requires_grad or lse.requires_grad


@BY_EXCHANGE
def test_no_grad(exchange: str) -> None:
    case = replace(BASE, exchange=exchange, use_checkpointing=False)
    outs, lses, graded = zip(*pool(4).run(without_gradients_here, case), strict=True)
    expected = case.expected()
    assert expected.lse is not None
    assert testing.error(torch.cat(outs, 1), expected.out) < 1e-12
    assert testing.error(torch.cat(lses, 1), expected.lse) < 1e-12
    assert not any(graded)


def different_losses_here(case: Case) -> tuple[Tensor, ...]:
    """Each rank's loss uses out, lse, both or neither."""
    qkv, dout, dlse, _ = case.inputs()
    rank = dist.get_rank()
    shard = case.shard(rank)
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    out, lse = case.attention(None, group=dist.group.WORLD, exchange=case.exchange)(*leaves)
    assert dlse is not None
    outputs = {0: [out], 1: [lse], 2: [out, lse], 3: [out]}[rank]
    grads = {0: [dout], 1: [dlse.to(lse.dtype)], 2: [dout, dlse.to(lse.dtype)], 3: [dout * 0]}[rank]
    return torch.autograd.grad(outputs, leaves, [x[:, shard] for x in grads])


@BY_EXCHANGE
def test_ranks_whose_losses_use_different_results(exchange: str) -> None:
    case = replace(BASE, exchange=exchange)
    qkv, dout, dlse, _ = case.inputs()
    assert dlse is not None
    dout, dlse = dout.clone(), dlse.clone()
    dout[:, case.shard(1)] = dout[:, case.shard(3)] = 0
    dlse[:, case.shard(0)] = dlse[:, case.shard(3)] = 0
    expected = testing.oracle(qkv, case.pattern, dout, dlse)
    got = [torch.cat(parts, 1) for parts in zip(*pool(4).run(different_losses_here, case), strict=True)]
    for x, wanted in zip(got, (expected.dq, expected.dk, expected.dv), strict=True):
        assert testing.error(x, wanted) < 1e-12


def backward_twice_here(case: Case) -> list[tuple[Tensor, ...]]:
    qkv, dout, _, _ = case.inputs()
    shard = case.shard(dist.get_rank())
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    options = {"group": dist.group.WORLD, "exchange": case.exchange, "use_checkpointing": case.use_checkpointing}
    torch.manual_seed(case.seed)
    out, _ = case.attention(None, **options)(*leaves)
    return [torch.autograd.grad(out, leaves, dout[:, shard], retain_graph=first) for first in (True, False)]


@BY_EXCHANGE
@pytest.mark.parametrize("use_checkpointing", [False, True])
def test_a_graph_can_be_gone_through_twice(exchange: str, use_checkpointing: bool) -> None:
    case = replace(BASE, exchange=exchange, use_checkpointing=use_checkpointing, dropout_p=0.2)
    for once, again in pool(4).run(backward_twice_here, case):
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def differentiated_twice_here(case: Case) -> str:
    qkv, _, _, _ = case.inputs()
    leaves = [x[:, case.shard(dist.get_rank())].detach().requires_grad_() for x in qkv]
    loss = case.attention(None, group=dist.group.WORLD, exchange=case.exchange)(*leaves)[0].sum()
    (grad,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError) as raised:
        (loss + grad.square().sum()).backward()
    return str(raised.value)


@BY_EXCHANGE
def test_there_is_no_second_derivative(exchange: str) -> None:
    for error in pool(4).run(differentiated_twice_here, replace(BASE, exchange=exchange)):
        assert "cannot be differentiated twice" in error


def compiled_here(case: Case) -> Results:
    def twice(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = case.attention(None, group=dist.group.WORLD, exchange=case.exchange)(*(x * 1.5 for x in qkv))
        return out * 2, lse

    qkv, dout, dlse, _ = case.inputs()
    shard = case.shard(dist.get_rank())
    assert dlse is not None
    return testing.run(
        torch.compile(twice, backend="aot_eager"), tuple(x[:, shard] for x in qkv), dout[:, shard], dlse[:, shard]
    )


def test_compiled_around_the_call() -> None:
    case = replace(BASE, lengths=(17, 24), exchange="ring")
    qkv, dout, dlse, _ = case.inputs()
    single = testing.run(
        lambda *x: (lambda out, lse: (out * 2, lse))(*case.attention(None)(*(y * 1.5 for y in x))), qkv, dout, dlse
    )
    testing.assert_exact(testing.joined(pool(2).run(compiled_here, case)), single)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("samples", "lengths"), [(0, (5, 6, 7)), (2, (0, 0, 0)), (0, (0, 0, 0)), (2, (0, 1, 0))])
def test_nothing_or_next_to_nothing(exchange: str, samples: int, lengths: tuple[int, ...]) -> None:
    case = replace(BASE, exchange=exchange, samples=samples, lengths=lengths, pattern=DilatedPattern.longnet([4], [1]))
    found = solve([case])[case]
    if isinstance(found, RanksFailed):
        raise found
    testing.assert_exact(found, case.on_one_device())


# --- groups among others ----------------------------------------------------------------------------------------


def on_a_mesh_here(case: Case) -> Results:
    """Two groups at once, each with another sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    case = replace(case, seed=case.seed + mesh.get_local_rank("data"))
    group = mesh["sequence"]
    assert group.get_group().rank() == mesh.get_local_rank("sequence")
    shard = case.shard(mesh.get_local_rank("sequence"))
    qkv, dout, dlse, _ = case.inputs()
    assert dlse is not None
    attention = case.attention(None, group=group, exchange=case.exchange)
    return testing.run(attention, tuple(x[:, shard] for x in qkv), dout[:, shard], dlse[:, shard])


@BY_EXCHANGE
def test_two_groups_at_once_on_a_mesh(exchange: str) -> None:
    case = replace(BASE, lengths=(17, 24), exchange=exchange)
    results = pool(4).run(on_a_mesh_here, case)
    for data in range(2):
        expected = replace(case, seed=case.seed + data).expected()
        testing.assert_exact(testing.joined(results[2 * data : 2 * data + 2]), expected)


def in_a_subgroup_here(case: Case, ranks: list[int], options: dict[str, Any]) -> tuple[int, Results] | None:
    group = dist.new_group(ranks, **options)
    if dist.get_rank() not in ranks:
        return None
    return dist.get_group_rank(group, dist.get_rank()), case.on_this_rank(group)


UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


@BY_EXCHANGE
@pytest.mark.parametrize("options", [{}, UNSORTED], ids=str)
@pytest.mark.parametrize("ranks", [[3, 1], [2, 0, 3]], ids=str)
def test_ranks_of_a_group_are_not_those_of_the_world(ranks: list[int], options: dict[str, Any], exchange: str) -> None:
    case = replace(BASE, lengths=(17, 24, 5)[: len(ranks)], exchange=exchange, mask="right", dropout_p=0.2)
    found = pool(4).run(in_a_subgroup_here, case, ranks, options)
    assert [rank for rank, one in enumerate(found) if one is not None] == sorted(ranks)
    in_order = sorted((one for one in found if one is not None), key=lambda one: one[0])
    testing.assert_exact(testing.joined([one for _, one in in_order]), case.expected())


def split_heads_here(case: Case) -> Results:
    """Heads over one dimension of a mesh, tokens over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    mine, shard = mesh.get_local_rank("heads"), case.shard(mesh.get_local_rank("sequence"))
    qkv, dout, dlse, _ = case.inputs()
    assert dlse is not None

    def part(x: Tensor) -> Tensor:
        return x[:, shard].chunk(2, 2)[mine]

    torch.manual_seed(case.seed)
    total = case.heads[1]
    options = {"group": mesh["sequence"], "exchange": case.exchange, "heads": (mine * total // 2, total)}
    return testing.run(case.attention(None, **options), tuple(part(x) for x in qkv), part(dout), part(dlse))


@BY_EXCHANGE
@pytest.mark.parametrize("rule", RULES)
def test_heads_split_too(rule: str, exchange: str) -> None:
    pattern = DilatedPattern(rule, (6, 24, 64), (1, 2, 3))
    case = replace(BASE, pattern=pattern, lengths=(17, 24), exchange=exchange, heads=(8, 4), dropout_p=0.3)
    results = pool(4).run(split_heads_here, case)
    halves = [testing.joined(results[:2]), testing.joined(results[2:])]
    whole = [torch.cat(pair, 2) for pair in zip(*([x for _, x in half.items()] for half in halves), strict=True)]
    testing.assert_exact(Results(*whole), case.expected())


# --- what is sent -----------------------------------------------------------------------------------------------

COLLECTIVES = [
    name
    for name, function in vars(dist).items()
    if type(function) is FunctionType and "async_op" in inspect.signature(function).parameters
]


def calls_here(case: Case) -> tuple[Counter[str], set[int]]:
    """What one forward and backward call of torch.distributed in this rank, and to whom more than 100 bytes go."""
    calls: Counter[str] = Counter()
    peers: set[int] = set()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            if name == "batch_isend_irecv":
                peers.update(x.peer for x in args[0] if x.op is dist.isend and x.tensor.numel() > 100)
            return function(*args, **options)

        return wrapped

    with ExitStack() as stack:
        for name in [*COLLECTIVES, "batch_isend_irecv"]:
            stack.enter_context(mock.patch.object(dist, name, counted(name)))
        case.on_this_rank()
    return calls, peers


@pytest.mark.parametrize("use_checkpointing", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES[:3])
def test_a_ring_is_point_to_point_between_neighbours(exchange: str, use_checkpointing: bool) -> None:
    """On gloo the others are so too, between any two ranks: a collective could not tell whose message is missing."""
    assert {"all_reduce", "all_gather", "all_to_all_single", "broadcast"} <= set(COLLECTIVES)
    case = replace(BASE, pattern=DilatedPattern.torchscale([64], [1]), exchange=exchange, mask="right", heads=(8, 4))
    for rank, (calls, peers) in enumerate(pool(4).run(calls_here, replace(case, use_checkpointing=use_checkpointing))):
        assert set(calls) == {"batch_isend_irecv"}
        assert peers == ({(rank + 1) % 4} if exchange == "ring" else {0, 1, 2, 3} - {rank})


def stats_here(case: Case) -> list[tuple[int, int, int, int]]:
    """Hops, bytes received, bytes sent and bytes still held, after the forward and after the backward pass."""
    link = run.Link(dist.group.WORLD, case.exchange, case.use_checkpointing)
    qkv, dout, _, padding = case.inputs()
    shard = case.shard(dist.get_rank())
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    found = []

    def note() -> None:
        stats = link.stats
        found.append((stats.hops, stats.bytes_received, stats.bytes_sent, stats.buffer_bytes))

    out, _ = functional.attend(
        *leaves, case.pattern, case.is_causal, None, 0.0, padding, True, case.backend, None, link
    )
    note()
    out.backward(dout[:, shard])
    note()
    return found


@pytest.mark.parametrize("rate", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("use_checkpointing", [False, True])
@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_bytes_and_hops_of_keys_and_values(exchange: str, use_checkpointing: bool, is_causal: bool, rate: int) -> None:
    P, c, (H, Hk), D, e = 4, 16, (4, 2), 8, 4
    case = replace(
        BASE, lengths=(c,) * P, pattern=DilatedPattern.longnet([P * c], [rate]), exchange=exchange, dtype="f32",
        samples=1, is_causal=is_causal, use_checkpointing=use_checkpointing, head_dim=D, heads=(H, Hk),
    )  # fmt: skip
    block = 2 * Hk * D * e * c // rate  # a shard's rows in float32, and as large the sums of their gradients
    for rank, (forward, both) in enumerate(pool(P).run(stats_here, case)):
        arriving = rank if is_causal else P - 1  # blocks that this rank uses
        wanted = P - 1 - rank if is_causal else P - 1  # ranks that use its block
        steps = arriving if exchange == "ring" else min(1, arriving)
        # on a line a rank takes part as long as it gets something or has something to pass on
        if exchange == "ring":
            passing = min(1, wanted) * (rank + 1) if is_causal else P - 1
            steps = max(steps, passing)
        elif is_causal:
            steps = 1
        sent = wanted if exchange == "allgather" else (arriving + 1) * min(1, wanted) if is_causal else P - 1
        assert forward[:3] == (steps, arriving * block, sent * block)
        again = 1 if use_checkpointing else 0
        if exchange == "allgather":
            assert both[1:3] == ((arriving * (1 + again) + wanted) * block, (wanted * (1 + again) + arriving) * block)
        elif not is_causal:
            assert both[:3] == ((2 + again) * (P - 1), (2 + again) * (P - 1) * block, (2 + again) * (P - 1) * block)
        assert not use_checkpointing or (forward[3], both[3]) == (0, 0)


def test_bytes_and_hops_of_whole_segments() -> None:
    P, c, H, Hk, D, e, rate = 4, 16, 8, 4, 8, 4, 2
    case = replace(
        BASE, lengths=(c,) * P, pattern=DilatedPattern.longnet([P * c], [rate]), exchange="alltoall", dtype="f32",
        samples=1, heads=(H, Hk), head_dim=D,
    )  # fmt: skip
    rows = c // rate * (P - 1) // P  # of one shard's rows of a head, the share computed elsewhere
    forward_bytes = rows * ((2 * H + 2 * Hk) * D + H) * e  # there and back, and lse
    inputs, results = (H + 2 * Hk) * D * e, (H + 2 * Hk) * D * e
    backward_bytes = rows * (H * (2 * D + 1) * e + inputs + results)  # lse, dout, out; q, k, v again; gradients back
    for forward, both in pool(P).run(stats_here, case):
        assert forward == (2, forward_bytes, forward_bytes, 0)
        assert both == (4, forward_bytes + backward_bytes, forward_bytes + backward_bytes, 0)


def test_nothing_is_sent_where_no_segment_crosses_a_border() -> None:
    case = replace(BASE, lengths=(24, 48, 0, 24), pattern=DilatedPattern.longnet([8, 24], [1, 2]))
    for exchange in EXCHANGES[:3]:
        for found in pool(4).run(stats_here, replace(case, exchange=exchange)):
            assert found == [(0, 0, 0, 0)] * 2


# --- verify="first" ---------------------------------------------------------------------------------------------


def unverified_here(case: Case, calls: int) -> tuple[list[list[str]], list[Results], str]:
    """What each call says to all ranks, its results, and the error of a call with another length."""
    group = dist.new_group()
    said: list[str] = []
    post_all = GroupTransport.post_all

    def noted(self: GroupTransport, name: str, message: Tensor) -> Any:
        said.append(name)
        return post_all(self, name, message)

    words, results = [], []
    with mock.patch.object(GroupTransport, "post_all", noted), mock.patch.object(run, "FIRST_CALLS", 8):
        for _ in range(calls):
            results.append(case.on_this_rank(group, verify="first"))
            words.append(said.copy())
            said.clear()
        longer = replace(case, lengths=tuple(length + 1 for length in case.lengths))
        try:
            longer.on_this_rank(group, verify="first")
        except ValueError as error:
            return words, results, str(error)
    return words, results, "nothing raised"


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@BY_EXCHANGE
def test_after_the_first_calls_nothing_is_agreed_on(exchange: str, dropout_p: float) -> None:
    case = replace(BASE, exchange=exchange, dropout_p=dropout_p)
    found = pool(4).run(unverified_here, case, 6)
    agreements = ["the agreement on dilated_attention", "the agreement on the backward of dilated_attention"]
    for rank, (words, _, error) in enumerate(found):
        assert words == [agreements] * 4 + [["the seed"] if dropout_p else []] * 2
        assert f"rank {rank} has {case.lengths[rank] + 1} tokens" in error
        assert "verify='always'" in error
    for call in range(6):
        testing.assert_exact(testing.joined([results[call] for _, results, _ in found]), case.expected())


def explained(options: dict[str, Any]) -> list[Any]:
    group = dist.group.WORLD
    x = testing.make_qkv(1, 32, 4, 8)[0]
    told = explain(x, x, x, DilatedPattern.longnet([8, 64], [1, 2]), group=group, **options)
    return [told.backend, told.kernel, told.backward, told.why_not["triton"]]


@pytest.mark.parametrize("P", [1, 2])
def test_explain_over_ranks(P: int) -> None:
    for backend, kernel, backward, why in pool(P).run(explained, {}):
        assert (backend, kernel, backward) == ("sdpa", "flash on CPU", "sdpa, kernel: flash on CPU")
        assert ("it takes whole calls on one device, not the blocks that ranks exchange" in why) == (P > 1)
    with pytest.raises(RanksFailed, match="query_offset is for one device"):
        pool(P).run(explained, {"query_offset": 0})
