"""A case of the operation, whatever runs it: its inputs, its call, and what the oracle says. See table.py for all."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention import (
    Blocks,
    ContextParallel,
    Dense,
    Dilated,
    DilatedPattern,
    Global,
    Pattern,
    Prefix,
    Strided,
    Window,
    dilated_attention,
    plan_cost,
    testing,
)
from dilated_attention.ring.cost import PlanCost
from dilated_attention.testing import Results
from tests.threads import FakeTransport, run_sharded

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LAYOUTS = ("contiguous", "fused", "transposed", "expanded", "odd")
EXCHANGES = ("ring", "allgather", "alltoall")

PATTERNS = {
    "dense": ([2000], [1]),  # longer than the tokens
    "local": ([16], [1]),
    "nested": ([16, 32, 64], [1, 2, 4]),  # segments of one branch fill those of the next
    "backwards": ([48, 24], [2, 1]),
    "sparse": ([64], [3]),  # most rows are in no branch
    "sparse_nested": ([32, 64], [2, 4]),
    "odd": ([7, 30], [2, 5]),  # nothing divides anything
    "rate_over_length": ([4, 40], [9, 6]),
    "ones": ([1, 2], [1, 3]),
    "offset_over_length": ([1, 2], [2, 3]),
    "twice": ([20, 20], [2, 2]),  # every key counts twice
    "prime": ([13, 101], [1, 7]),
    "gigapath": ([8, 45, 256, 1448, 8192], [1, 2, 4, 8, 16]),  # those of the released slide encoder, divided by 128
    "far": ([5, 2**48], [1, 2**40]),  # beyond any tensor
}
UNIONS = {  # of the paths whose rule is how overlaps count
    "window": [Window(5)],
    "one side": [Window(0, 9), Window(40, 2, rate=3)],
    "far": [Window(6), Dilated(16, 2), Dilated(32, 4), Dilated(64, 8)],  # cut away where they overlap
    "far first": [Dilated(24, 3), Window(6), Dilated(20)],  # masked there
    "strided": [Window(3), Strided(5, 2)],
    "segments": [Strided(4, 1, length=20)],
    "prefix": [Prefix(3), Window(4), Dilated(32, 4, 1)],
    "global": [Global([0, 7, 30]), Dilated(16), Global(2)],
    "blocks": [Window(3), Blocks(8, [(0, 0), (1, 0), (2, 1), (2, 2), (1, 5), (4, 4), (5, 9)])],
    "by heads": [Window(4, heads=[0]), Strided(3, heads=[1]), Dilated(10, 2, heads=[0, 1])],
    "dense": [Window(2), Dense(), Prefix(2)],
    "whole": [Dense()],
}
FEW_ROWS = 32  # queries that our decoding kernel takes at any head dim


@dataclass(frozen=True)
class Case:
    """One call. What the axes of a path leave open is at its default."""

    path: str
    number: int
    rule: str
    is_causal: bool
    pattern: str
    tokens: int
    heads: str = "several"  # one, several, many, or grouped: several query heads share one of key and value
    samples: int = 2
    head_dim: int = 4
    dtype: str = "f64"
    mask: str = "none"  # of the keys: none, random, right (padding), sample (all of one), hidden (all that a rank has)
    layout: str = "contiguous"
    dout: str = "plain"  # how the gradient lies in memory
    dlse: bool = True  # whether lse gets a gradient
    scale: float | None = None
    dropout_p: float = 0.0
    backend: str = "auto"
    packing: str = ""  # several sequences in one row: even, mixed, ones, or with empty ones
    rows: str = ""  # of few queries: which
    cuts: str = ""  # of a stream
    ranks: int = 1
    shards: str = "even"
    exchange: str = "ring"
    recompute: bool = True
    copied: bool = False  # shards are tensors of their own, not slices
    unit: int = 1  # widths are so many times longer
    own_pattern: DilatedPattern | None = None  # these three stand in the place of what is drawn, or named, above
    own_heads: tuple[int, int] | None = None
    own_lengths: tuple[int, ...] = ()
    device: str = field(default="cpu", compare=False)

    @property
    def id(self) -> str:
        words = (self.rule, self.pattern, "causal" if self.is_causal else "", f"n{self.tokens}", self.dtype, self.heads)
        masked = f"mask_{self.mask}" if self.mask != "none" else ""
        more = (masked, self.packing, self.rows, self.cuts, f"P{self.ranks}{self.exchange}" if self.ranks > 1 else "")
        return "-".join([f"{self.path}{self.number}", *filter(None, (*words, *more))])

    def draw(self, what: str) -> random.Random:
        return random.Random(f"{self.path} {self.number} {what}")

    def generator(self, what: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.draw(what).randrange(2**40))

    def the_pattern(self) -> Pattern:
        if self.own_pattern is not None:
            return self.own_pattern
        if self.pattern in UNIONS and self.rule in ("once", "sum"):
            return Pattern(UNIONS[self.pattern], counts=self.rule)
        widths, rates = PATTERNS[self.pattern]
        return DilatedPattern(self.rule, tuple(min(self.unit * width, 2**48) for width in widths), tuple(rates))

    def head_counts(self) -> tuple[int, int]:
        """Of query, and of key and value: as many as head_groups needs."""
        if self.own_heads is not None:
            return self.own_heads
        draw, least = self.draw("heads"), len(PATTERNS[self.pattern][0]) if self.rule == "head_groups" else 1
        least = 2 if self.pattern == "by heads" else least
        most = 2 if INTERPRETED else 5  # the interpreter takes milliseconds a tile
        kv_heads = max(least, {"one": 1, "many": 16}.get(self.heads) or draw.randint(2, most))
        return kv_heads * (draw.randint(2, min(3, most)) if self.heads == "grouped" else 1), kv_heads

    def qkv(self) -> tuple[Tensor, ...]:
        """What the mask hides is NaN, where that does not change the layout."""
        heads, kv_heads = self.head_counts()
        q, k, v = testing.make_qkv(
            self.samples, self.tokens, heads, self.head_dim, kv_heads=kv_heads, layout=self.layout,
            dtype=DTYPES[self.dtype], device=self.device, seed=self.draw("inputs").randrange(2**40),
        )  # fmt: skip
        padding = self.padding()
        if padding is not None and self.layout == "contiguous":
            k, v = (x.masked_fill(padding[:, :, None, None], torch.nan) for x in (k, v))
        return q[:, : self.queries()], k, v

    def queries(self) -> int:
        """How many of the rows of `qkv` are queries; which positions they have is said by `query_offset`."""
        if not self.rows:
            return self.tokens
        most = min(self.tokens, FEW_ROWS if self.path.endswith("triton_few") else self.tokens)
        most = most if self.rows == "many" else min(3, most)
        return self.draw("rows").randint(max(1, most // 2), most)

    def query_offset(self) -> int | Tensor | None:
        last, draw = self.tokens - self.queries(), self.draw("offset")
        if self.rows in ("each", "each32"):
            places = [draw.randint(0, last) for _ in range(self.samples)]
            if self.samples > 2:  # neighbours at one position are computed together
                places[1] = places[0]
            return torch.tensor(places, dtype=torch.int32 if self.rows == "each32" else None, device=self.device)
        return {"first": 0, "inside": draw.randint(0, last), "many": draw.randint(0, last)}.get(self.rows)

    def padding(self) -> Tensor | None:
        """(B, N) bool, True = ignored."""
        if self.mask == "none":
            return None
        draws, shape = self.generator("mask"), (self.samples, self.tokens)
        mask = torch.zeros(shape, dtype=torch.bool)
        if self.mask == "random":
            mask = torch.rand(shape, generator=draws) < 0.3
        elif self.mask == "right":
            mask = torch.arange(self.tokens) >= torch.randint(0, self.tokens + 1, (self.samples, 1), generator=draws)
        elif self.mask == "sample":
            mask[-1] = True
        else:
            for rank in self.draw("hidden").sample(range(self.ranks), (self.ranks + 1) // 2):
                mask[:, self.shard(rank)] = True
        return mask.to(self.device)

    def gradients(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of out and lse, for queries like these."""
        draws = torch.Generator(self.device).manual_seed(self.draw("gradients").randrange(2**40))
        dout = strided(self.dout, like.shape, draws, like.dtype)
        dlse = strided(self.dout, like.shape[:3], draws, torch.promote_types(like.dtype, torch.float32))
        return dout, dlse if self.dlse else None

    def borders(self, what: str, count: int) -> list[int]:
        draw = self.draw(what)
        return sorted(draw.randint(0, self.tokens) for _ in range(count))

    def lengths(self) -> tuple[int, ...]:
        """Of the shards."""
        if self.own_lengths:
            return self.own_lengths
        tokens, draw = self.tokens, self.draw("shards")
        borders = sorted(draw.randint(0, tokens) for _ in range(self.ranks - 1))
        if self.shards == "even":
            borders = [tokens * rank // self.ranks for rank in range(1, self.ranks)]
        elif self.shards == "empty":  # for some ranks
            borders = sorted(draw.choice([0, tokens // 3, tokens]) for _ in borders)
        return between([0, *borders, tokens])

    def shard(self, rank: int) -> slice:
        lengths = self.lengths()
        return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))

    def cu_seqlens(self) -> list[int]:
        """Of packed sequences."""
        tokens, borders = self.tokens, self.borders("packing", 4)
        inner = {
            "even": range(tokens // 3 or 1, tokens, tokens // 3 or 1),  # but for the last
            "ones": range(min(tokens, 3), min(tokens, 6)),  # and a long one
            "mixed": borders,
            "empty": [*borders, *borders[-1:] * 2],
        }
        return [0, *inner[self.packing], tokens]

    def chunks(self) -> tuple[int, ...]:
        """Of a stream."""
        if self.cuts == "ones":
            return (1,) * self.tokens
        several = {"whole": 0, "some": 6, "halves": 1, "with empty ones": 3}[self.cuts]
        times = 2 if self.cuts == "with empty ones" else 1
        return between([0, *sorted(self.borders("cuts", several) * times), self.tokens])

    def options(self) -> dict[str, Any]:
        """Of the call; the oracle takes the same."""
        given = {"is_causal": self.is_causal, "scale": self.scale, "dropout_p": self.dropout_p}
        given |= {"query_offset": self.query_offset()} if self.rows else {}
        given |= {"cu_seqlens": self.cu_seqlens()} if self.packing else {}
        return {**given, "key_padding_mask": self.padding()}

    def seed(self) -> Tensor | None:
        """Of dropout; leaves torch's generator so that the next call draws the same."""
        if not self.dropout_p:
            return None
        # of this device alone: torch.manual_seed takes a millisecond to write down who asked, for devices not there
        begin = torch.default_generator.manual_seed if self.device == "cpu" else torch.cuda.manual_seed
        begin(self.number)
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=self.device)
        begin(self.number)
        return seed

    def attention(self, **more: Any) -> Callable[..., Any]:
        """The public function with all of the case but its tensors."""
        fixed = {"enable_gqa": True, "return_lse": True, "backend": self.backend}
        return functools.partial(dilated_attention, pattern=self.the_pattern(), **{**fixed, **self.options(), **more})

    def inputs(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None, Tensor | None]:
        """q, k, v; dout; dlse; padding."""
        qkv = self.qkv()
        return (qkv, *self.gradients(qkv[0]), self.padding())

    def on_one_device(self, attention: Callable[..., Any] | None = None) -> Results:
        given = self.inputs()[:3]
        self.seed()
        return testing.run(attention or self.attention(), *given)

    def on_threads(self) -> tuple[Results, list[FakeTransport]]:
        """The ranks being threads, and what each of them sent."""
        qkv, dout, dlse, _ = self.inputs()
        options = {**self.options(), "exchange": self.exchange, "use_checkpointing": self.recompute}
        del options["scale"]
        lengths, pattern = self.lengths(), self.the_pattern()
        return run_sharded(qkv, lengths, pattern, dout, dlse, seed=self.seed(), backend=self.backend, **options)

    def cost(self, **more: Any) -> PlanCost:
        heads, kv_heads = self.head_counts()
        given = {"batch": self.samples, "has_padding": self.mask != "none", **more}
        given |= {"cu_seqlens": self.cu_seqlens()} if self.packing else {}
        return plan_cost(
            self.the_pattern(), self.tokens, self.ranks, num_heads=heads, num_kv_heads=kv_heads, lengths=self.lengths(),
            head_dim=self.head_dim, dtype=DTYPES[self.dtype], is_causal=self.is_causal, **given,
        )  # fmt: skip

    def over(self, group: Any = None, **more: Any) -> ContextParallel:
        """The ranks; the default group without one."""
        return ContextParallel(group, exchange=self.exchange, use_checkpointing=self.recompute, **more)

    def on_this_rank(self, group: dist.ProcessGroup | None = None, **more: Any) -> Results:
        """Of this rank's shard. Each rank has a generator of its own, so that a seed that is not rank 0's shows."""
        group = dist.group.WORLD if group is None else group
        shard = self.shard(dist.get_rank(group))
        qkv, dout, dlse, padding = self.inputs()
        parts = [x[:, shard].clone(memory_format=torch.contiguous_format) if self.copied else x[:, shard] for x in qkv]
        padding = None if padding is None else padding[:, shard]
        attention = self.attention(key_padding_mask=padding, group=self.over(group, **more))
        torch.manual_seed(self.number + dist.get_rank(group))
        return testing.run(attention, tuple(parts), dout[:, shard], None if dlse is None else dlse[:, shard])

    def expected(self, dtype: torch.dtype | None = torch.float64) -> Results:
        """The oracle's results; dtype=None: those of plain PyTorch in the case's own dtype."""
        given = self.inputs()[:3]
        return testing.oracle(given[0], self.the_pattern(), *given[1:], dtype=dtype, seed=self.seed(), **self.options())

    def check(self, got: Results) -> None:
        dtype = DTYPES[self.dtype]
        assert got.out.dtype is dtype
        assert got.lse is None or got.lse.dtype is torch.promote_types(dtype, torch.float32)
        testing.assert_exact(got, self.expected(), None if dtype in testing.TOLERANCE else self.expected(dtype=None))


# --- helpers of many tests --------------------------------------------------------------------------------------


def between(borders: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise(borders))


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def finite(lse: Tensor) -> Tensor:
    """0 for rows without keys, through which no gradient comes."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


class Recorder(TorchDispatchMode):
    """The operators that run, views left out, each with the tensors that it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.ran.append((func.name(), tensors))
        return result

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]


def strided(kind: str, shape: torch.Size, draws: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A gradient as autograd may hand it over. Made in its dtype, on its device: converting it would lose strides."""
    randn = functools.partial(torch.randn, generator=draws, dtype=dtype, device=draws.device)
    if kind == "expanded":
        return randn(1).expand(shape)
    if kind == "strided":
        return randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    if kind == "cut":  # of a longer sequence: rows are whole, but samples and tokens are no single stride
        return randn(shape[0], shape[1] + 3, *shape[2:])[:, 2:-1]
    if kind == "reversed":
        return randn(*shape[::-1]).permute(*reversed(range(len(shape))))
    return randn(*shape)


def run_in_rank(cases: list[Case]) -> list[Results]:
    """Here, not beside its test: a rank imports this file, and need not make every path's cases."""
    results = [case.on_this_rank(debug=case.number % 5 == 0) for case in cases]
    return [Results(*(x.cpu() for _, x in result.items())) for result in results]
