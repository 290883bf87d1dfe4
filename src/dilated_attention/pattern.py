"""What the user means: which head attends to which tokens. Pure integers; nothing here touches a device.

Legend: N tokens; H query heads; Hk key/value heads, which rules count; the H // Hk query heads of each see the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from dilated_attention.checks import check_int, check_ints, warn

Rule = Literal["longnet", "torchscale", "head_groups"]
RULES: tuple[Rule, ...] = get_args(Rule)
MixingGradient = Literal["exact", "detached"]
MAX_BRANCHES = 64


def rows_at_offset(length: int, dilation: int, offset: int) -> int:
    """How many p in [0, length) have p mod dilation == offset."""
    return max(0, -((offset - length) // dilation))


class HeadRule(NamedTuple):
    """How a rule deals branches to heads: all that the rules differ in."""

    neighbours: Callable[[int, int], int]  # (heads, rate) -> how many heads in a row have the same offset
    # heads are divided among branches, offsets of branch i begin at i mod rate; otherwise every head runs every branch
    splits_heads: bool = False
    adds_zeros: bool = False  # zero keys fill up segments with fewer rows than others, unless the call is causal
    detaches: bool = False  # the weights that mix branches may be constants for gradients, as in the released code
    nests: bool = False  # a head's offset in a branch is its offset in one of a multiple rate, modulo the rate


# To add a rule, add its name to `Rule`, a row here and a constructor to DilatedPattern: no other file looks at names.
_HEAD_RULES: dict[Rule, HeadRule] = {
    "longnet": HeadRule(lambda heads, rate: 1, nests=True),
    "torchscale": HeadRule(lambda heads, rate: -(-heads // rate), adds_zeros=True, detaches=True),
    "head_groups": HeadRule(lambda heads, rate: heads, splits_heads=True),
}


class Branch(NamedTuple):
    """One branch as heads run it: head h does if first <= h < last, at the offset (h // step + shift) % rate."""

    length: int  # of a segment
    rate: int
    first: int
    last: int
    step: int
    shift: int

    @property
    def heads(self) -> range:
        return range(self.first, self.last)

    def offset(self, head: int) -> int:
        return (head // self.step + self.shift) % self.rate


class _Written:
    """A pattern in one string, which compilers check fast. No field: FSDP copies dataclasses by all their fields."""

    __slots__ = ("text",)
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class DilatedPattern(_Written):
    """Says which head attends to which tokens.

    A branch is a segment length w and a dilation rate r. It cuts the sequence into segments of w tokens; the last one
    may be shorter. In each segment a head takes every r-th token, beginning at the head's offset, and these tokens
    attend to one another. The rule says which heads have which branches, at which offsets: :meth:`longnet`,
    :meth:`torchscale` or :meth:`head_groups` makes a pattern. It is frozen and hashable, and holds no tensors.

    Args:
        rule: "longnet", "torchscale" or "head_groups".
        segment_lengths, dilation_rates: one of each per branch, in tokens.
        mixing_gradient: "exact"; or "detached", see :meth:`torchscale`.

    Examples:
        >>> pattern = da.DilatedPattern.longnet([4, 16], [1, 4])
        >>> pattern.keys(query=8, head=0, num_tokens=16, num_heads=4)  # token 8 itself is in both branches
        (0, 4, 8, 8, 9, 10, 11, 12)
        >>> pattern.pairs(num_tokens=16, num_heads=4)
        320
    """

    rule: Rule
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    mixing_gradient: MixingGradient = "exact"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}: use one of {', '.join(RULES)}")
        known = get_args(MixingGradient) if self.head_rule.detaches else ("exact",)
        if self.mixing_gradient not in known:
            raise ValueError(f"mixing_gradient must be {' or '.join(known)}, got {self.mixing_gradient!r}")
        lengths = check_ints("segment_lengths", self.segment_lengths)
        rates = check_ints("dilation_rates", self.dilation_rates)
        if len(lengths) != len(rates):
            raise ValueError(
                f"segment_lengths has {len(lengths)} entries and dilation_rates {len(rates)}: "
                f"give one rate per length, got {list(lengths)} and {list(rates)}"
            )
        if len(lengths) > MAX_BRANCHES:
            raise ValueError(f"a pattern has at most {MAX_BRANCHES} branches, got {len(lengths)}")
        object.__setattr__(self, "segment_lengths", lengths)
        object.__setattr__(self, "dilation_rates", rates)
        # a compiler may hold symbols for the numbers, which have no text: a range needs their values
        texts = [",".join([str(range(number).stop) for number in numbers]) for numbers in (lengths, rates)]
        object.__setattr__(self, "text", " ".join((self.rule, *texts, self.mixing_gradient)))

    def __reduce__(self) -> tuple[Any, ...]:  # by default a pickle has the fields alone, and would lose `text`
        return type(self), (self.rule, self.segment_lengths, self.dilation_rates, self.mixing_gradient)

    @classmethod
    def of(
        cls, rule: Rule, segment_lengths: Iterable[int], dilation_rates: Iterable[int],
        mixing_gradient: MixingGradient = "exact",
    ) -> DilatedPattern:  # fmt: skip
        """Makes the pattern of a rule that is given by name."""
        pattern = cls(rule, segment_lengths, dilation_rates, mixing_gradient)  # type: ignore[arg-type]  # made tuples
        swapped = all(r >= w for w, r in pattern.branches) and max(pattern.dilation_rates) > 1
        if swapped and not torch.compiler.is_compiling():
            warn(
                f"{pattern}: no rate is smaller than its segment length, so a query sees no other token. The two lists "
                "are probably swapped: give the segment lengths first"
            )
        return pattern

    @classmethod
    def longnet(cls, segment_lengths: Iterable[int], dilation_rates: Iterable[int]) -> DilatedPattern:
        """The rule of the LongNet paper: every head has every branch, head h at offset h mod r.

        Examples:
            >>> da.DilatedPattern.longnet([4], [2]).keys(query=1, head=1, num_tokens=4, num_heads=2)
            (1, 3)
        """
        return cls.of("longnet", segment_lengths, dilation_rates)

    @classmethod
    def torchscale(
        cls, segment_lengths: Iterable[int], dilation_rates: Iterable[int], *, mixing_gradient: MixingGradient = "exact"
    ) -> DilatedPattern:
        """The rule of the released LongNet code: every head has every branch, head h of H at offset h // ceil(H / r).

        Zero keys (key and value are 0) fill up segments of which a head takes fewer than ceil(min(w, N) / r) tokens.
        Queries attend to them, except in causal calls.

        ``mixing_gradient="detached"``: the backward pass takes the weights that mix the branches as constants, as the
        released code does. Outputs do not change. It works on one device, without dropout, on the backends sdpa and
        eager; the backward pass computes each branch's output once more.
        """
        return cls.of("torchscale", segment_lengths, dilation_rates, mixing_gradient)

    @classmethod
    def head_groups(cls, segment_lengths: Iterable[int], dilation_rates: Iterable[int]) -> DilatedPattern:
        """The default rule of the modules: each head has one branch, and all heads of branch i have offset i mod r.

        Neighbouring heads share a branch; the first branches get one head more if heads do not divide evenly. Rows
        that a head's branch leaves out are 0. It needs at least one key/value head per branch.

        Examples:
            >>> da.DilatedPattern.head_groups([4, 16], [1, 4]).heads(branch=1, num_heads=4)
            range(2, 4)
        """
        return cls.of("head_groups", segment_lengths, dilation_rates)

    @classmethod
    def suggest(cls, tokens: int, heads: int, *, rule: Rule = "longnet", kv_heads: int | None = None) -> DilatedPattern:
        """Suggests a pattern for a length: up to 2048 tokens, or for head_groups with one head, one dense segment.

        Beyond, a head takes 2048 tokens of every segment, and the longest segment spans the sequence.

        Examples:
            >>> da.DilatedPattern.suggest(tokens=8192, heads=12)
            DilatedPattern.longnet(segment_lengths=[2048, 4096, 8192], dilation_rates=[1, 2, 4])
        """
        from dilated_attention.advice import pattern_for  # the tools stand above this file

        return pattern_for(tokens, heads, rule, kv_heads)

    def plot(self, num_tokens: int | None = None, num_heads: int | None = None, **options: Any) -> Any:
        """Draws which keys each query sees, as an Altair chart for a notebook.

        By default it draws the tokens of the longest segment, 512 at most, and up to four heads, or one per branch
        with head_groups. Options: ``is_causal``; ``kv_heads``; ``head``: draw only heads that see the same as this one;
        ``query``: mark this token; ``window``: draw only the tokens of range(*window); ``ranks``: draw the borders of
        so many shards; ``colour``: the "share" of a cell's pairs that is computed (default), or its main "branch".

        Examples:
            >>> chart = da.DilatedPattern.longnet([4, 16], [1, 4]).plot(is_causal=True, colour="branch")
            >>> chart.save("pattern.png")  # doctest: +SKIP
        """
        from dilated_attention.show import plot

        return plot(self, num_tokens, num_heads, **options)

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The (segment length, dilation rate) pairs."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def __repr__(self) -> str:
        lists = f"segment_lengths={list(self.segment_lengths)}, dilation_rates={list(self.dilation_rates)}"
        mixing = "" if self.is_exact else f", mixing_gradient={self.mixing_gradient!r}"
        return f"DilatedPattern.{self.rule}({lists}{mixing})"

    @property
    def is_exact(self) -> bool:
        """True unless mixing_gradient is "detached": gradients flow through the weights that mix the branches, too."""
        return self.mixing_gradient == "exact"

    def alone(self, branch: int) -> DilatedPattern:
        """The pattern with this branch alone. (Under head_groups, all heads then have it.)"""
        return DilatedPattern(self.rule, (self.segment_lengths[branch],), (self.dilation_rates[branch],))

    @property
    def head_rule(self) -> HeadRule:
        """How the rule assigns branches and offsets to heads. Internal."""
        return _HEAD_RULES[self.rule]

    def branches_for(self, num_heads: int) -> tuple[Branch, ...]:
        """The branches, each with its heads among this many and their offsets. Internal: see `heads` and `offset`."""
        return _branches_for(self, num_heads)

    def heads(self, branch: int, num_heads: int) -> range:
        """The (key/value) heads that have a branch, by its index."""
        return self.branches_for(num_heads)[branch].heads

    def offset(self, branch: int, head: int, num_heads: int) -> int:
        """The offset of a (key/value) head in a branch."""
        return self.branches_for(num_heads)[branch].offset(head)

    def check_heads(self, num_heads: int, num_kv_heads: int | None = None, *, whole: bool = True) -> int:
        """Raise if these head counts do not fit the rule; return the number of query heads per key/value head.

        ``whole=False``: they are those of one process under tensor parallelism, and may be fewer than branches.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"{num_heads} query heads cannot be shared evenly by {kv_heads} key/value heads: "
                "make the first a positive multiple of the second"
            )
        if whole and self.head_rule.splits_heads and kv_heads < len(self.segment_lengths):
            raise ValueError(
                f"{self.rule} needs at least one key/value head per branch, got {len(self.segment_lengths)} branches "
                f"and {kv_heads} key/value heads: use fewer branches, more heads, or rule 'longnet'"
            )
        return num_heads // kv_heads

    def keys(
        self, query: int, head: int, *, num_tokens: int, num_heads: int, num_kv_heads: int | None = None,
        is_causal: bool = False,
    ) -> tuple[int, ...]:  # fmt: skip
        """The tokens that ``query`` sees in (query) head ``head``, sorted. One that m branches show appears m times.

        Zero keys of torchscale are not tokens: :meth:`zero_keys` counts them.
        """
        return tuple(self._row(query, head, num_tokens, num_heads, num_kv_heads, is_causal)[0])

    def zero_keys(
        self, query: int, head: int, *, num_tokens: int, num_heads: int, num_kv_heads: int | None = None,
        is_causal: bool = False,
    ) -> int:  # fmt: skip
        """How many zero keys the query attends to; 0 unless the rule is torchscale."""
        return self._row(query, head, num_tokens, num_heads, num_kv_heads, is_causal)[1]

    def zeros_in_segment(self, branch: int, length: int, offset: int, num_tokens: int) -> int:
        """How many zero keys a segment of ``length`` tokens in a sequence of ``num_tokens`` gets, if not causal."""
        if not self.head_rule.adds_zeros:
            return 0
        rate = self.dilation_rates[branch]
        return -(-min(self.segment_lengths[branch], num_tokens) // rate) - rows_at_offset(length, rate, offset)

    def pairs(
        self, num_tokens: int, num_heads: int, *, num_kv_heads: int | None = None, is_causal: bool = False
    ) -> int:
        """How many (query, key) pairs one sample has, over all heads. Zero keys are not counted, repeated keys are."""
        num_tokens, num_heads = check_int("num_tokens", num_tokens, least=0), check_int("num_heads", num_heads)
        group = self.check_heads(num_heads, num_kv_heads)
        total = 0
        for branch in self.branches_for(num_heads // group):
            count, rest = divmod(num_tokens, branch.length)
            for head, (times, length) in itertools.product(branch.heads, ((count, branch.length), (1, rest))):
                rows = rows_at_offset(length, branch.rate, branch.offset(head))
                total += times * (rows * (rows + 1) // 2 if is_causal else rows * rows)
        return total * group

    def flops(
        self, num_tokens: int, num_heads: int, head_dim: int, *, num_kv_heads: int | None = None,
        is_causal: bool = False, backward: bool = False,
    ) -> int:  # fmt: skip
        """Operations of one sample: 4 * head_dim per pair; with ``backward`` 14, for both passes together."""
        pairs = self.pairs(num_tokens, num_heads, num_kv_heads=num_kv_heads, is_causal=is_causal)
        return pairs * check_int("head_dim", head_dim) * (14 if backward else 4)

    def saved_bytes(
        self, num_tokens: int, num_heads: int, head_dim: int, *, num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> int:  # fmt: skip
        """The bytes that one sample keeps for the backward pass: q, k, v, out and lse, whatever the branches."""
        kv_heads = check_int("num_heads", num_heads) // self.check_heads(num_heads, num_kv_heads)
        lse_bytes = 8 if dtype is torch.float64 else 4
        row_bytes = check_int("head_dim", head_dim) * dtype.itemsize
        per_token = (2 * num_heads + 2 * kv_heads) * row_bytes + num_heads * lse_bytes
        return check_int("num_tokens", num_tokens, least=0) * per_token

    def coverage(self, num_tokens: int, num_heads: int, *, num_kv_heads: int | None = None) -> torch.Tensor:
        """(N, H) bool: True where some branch covers the row; the others get output 0 and lse -inf."""
        group = self.check_heads(num_heads, num_kv_heads)
        position = torch.arange(check_int("num_tokens", num_tokens, least=0))
        covered = torch.zeros(num_tokens, num_heads // group, dtype=torch.bool)
        for branch in self.branches_for(num_heads // group):
            for head in branch.heads:
                covered[:, head] |= position % branch.length % branch.rate == branch.offset(head)
        return covered.repeat_interleave(group, dim=1)

    def _row(
        self, query: int, head: int, num_tokens: int, num_heads: int, num_kv_heads: int | None, is_causal: bool
    ) -> tuple[list[int], int]:
        """The tokens that a row sees, sorted, and how many zero keys."""
        group = self.check_heads(num_heads, num_kv_heads)
        if not 0 <= query < num_tokens or not 0 <= head < num_heads:
            raise ValueError(
                f"there is no row (query {query}, head {head}) among {num_tokens} tokens and {num_heads} heads: count "
                "from 0"
            )
        tokens: list[int] = []
        zeros = 0
        for index, branch in enumerate(self.branches_for(num_heads // group)):
            first, offset = query - query % branch.length, branch.offset(head // group)
            if head // group in branch.heads and (query - first) % branch.rate == offset:
                length = min(branch.length, num_tokens - first)
                tokens += range(first + offset, query + 1 if is_causal else first + length, branch.rate)
                zeros += 0 if is_causal else self.zeros_in_segment(index, length, offset, num_tokens)
        return sorted(tokens), zeros


@functools.lru_cache(maxsize=256)
def _branches_for(pattern: DilatedPattern, num_heads: int) -> tuple[Branch, ...]:
    rule, (each, extra) = pattern.head_rule, divmod(num_heads, len(pattern.segment_lengths))
    branches = []
    for index, (length, rate) in enumerate(pattern.branches):
        first, last, shift = 0, num_heads, 0
        if rule.splits_heads:  # the first branches take one head more where heads do not divide evenly
            first = index * each + min(index, extra)
            last, shift = first + each + (index < extra), index % rate
        step = max(1, rule.neighbours(num_heads, rate))
        branches.append(Branch(length, rate, first, last, step, shift))
    return tuple(branches)
