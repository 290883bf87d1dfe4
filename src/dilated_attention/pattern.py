"""What the user means: which head attends to which tokens. Pure integers; nothing here touches a device.

Legend: N tokens; H query heads; Hk key/value heads, which rules count; the H // Hk query heads of each see the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from dilated_attention.branches import KINDS, Branch, Dilated
from dilated_attention.checks import Ints, check_ints, warn
from dilated_attention.shown import Counts, Shown, resolved

Rule = Literal["longnet", "torchscale", "head_groups"]
RULES: tuple[Rule, ...] = get_args(Rule)
MixingGradient = Literal["exact", "detached"]
MAX_BRANCHES = 64


class HeadRule(NamedTuple):
    """How a rule deals branches to heads: all that the rules differ in."""

    # (heads, rate) -> how many heads in a row have the same offset, unless heads are divided
    neighbours: Callable[[int, int], int] = lambda heads, rate: 1
    # heads are divided among branches, offsets of branch i begin at i mod rate; otherwise every head runs every branch
    splits_heads: bool = False
    adds_zeros: bool = False  # zero keys fill up segments with fewer rows than others, unless the call is causal
    detaches: bool = False  # the weights that mix branches may be constants for gradients, as in the released code
    nests: bool = False  # a head's offset in a branch is its offset in one of a multiple rate, modulo the rate


# To add a rule, add its name to `Rule`, a row here and a constructor to DilatedPattern: no other file looks at names.
_HEAD_RULES: dict[Rule, HeadRule] = {
    "longnet": HeadRule(nests=True),
    "torchscale": HeadRule(lambda heads, rate: -(-heads // rate), adds_zeros=True, detaches=True),
    "head_groups": HeadRule(splits_heads=True),
}


class Pattern(Shown):
    """Says which head attends to which tokens, as a union of branches.

    It is frozen and hashable, and holds no tensors.

    Args:
        branches: see :class:`Dilated`, :class:`Window`, :class:`Strided`, :class:`Prefix`, :class:`Global`,
            :class:`Blocks` and :class:`Dense`.
        counts: "once": a key counts once, however many branches show it. "sum": a key that m branches show counts m
            times, as in LongNet.

    Examples:
        >>> pattern = da.Pattern([da.Window(2), da.Strided(8)])
        >>> pattern.keys(query=20, head=0, num_tokens=32, num_heads=1, is_causal=True)
        (0, 8, 16, 18, 19, 20)
    """

    __slots__ = ("text",)

    text: str  # `to_dict` as JSON: one string, which compilers check fast

    def __init__(self, branches: Iterable[Branch], *, counts: Counts = "once") -> None:
        listed = tuple(branches) if isinstance(branches, Iterable) else (branches,)
        if not listed or not all(isinstance(branch, Branch) for branch in listed):
            raise TypeError(f"branches must be a list of Window(...), Dilated(...) and the like, got {branches!r}")
        if counts not in get_args(Counts):
            raise ValueError(f"counts must be 'once' or 'sum', got {counts!r}")
        self._keep(len(listed), listed=listed, counts=counts)
        self._keep(len(listed), text=json.dumps(self.to_dict(), separators=(",", ":")))

    def _keep(self, number: int, **fields: object) -> None:
        """Set these fields of a new pattern with so many branches."""
        if number > MAX_BRANCHES:
            raise ValueError(f"a pattern has at most {MAX_BRANCHES} branches, got {number}")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a pattern does not change: make another one, with another {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pattern.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        counts = "" if self.counts == "once" else f", counts={self.counts!r}"
        return f"Pattern([{', '.join(map(repr, self.listed))}]{counts})"

    def to_dict(self) -> dict[str, Any]:
        """The pattern as numbers and strings, for JSON; :meth:`from_dict` reads it."""
        return {"branches": [branch.to_dict() for branch in self.listed], "counts": self.counts}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Pattern:
        """The pattern that :meth:`to_dict` wrote.

        Examples:
            >>> da.Pattern.from_dict({"branches": [{"kind": "window", "left": 7}], "counts": "once"})
            Pattern([Window(left=7)])
        """
        rest: dict[str, Any] = {**given} if isinstance(given, Mapping) else {}
        if "rule" in rest:  # not by `of`, which would warn again of what the caller was told
            return DilatedPattern(**rest)
        listed, branches = rest.pop("branches", None), list[Branch]()
        if not isinstance(listed, list | tuple):
            raise TypeError(f"a pattern's dict has a 'rule' or a list of 'branches', got {given!r}")
        for some in listed:
            fields = {**some} if isinstance(some, Mapping) else {}
            kind = fields.pop("kind", some)
            if kind not in [*KINDS]:
                raise ValueError(f"unknown kind of branch {kind!r}: use one of {', '.join(KINDS)}")
            branches.append(KINDS[kind](**fields))
        return Pattern(branches, **rest)

    @property
    def branches(self) -> tuple[Any, ...]:
        """The branches, as they were listed."""
        return self.listed

    @property
    def needs_masks(self) -> bool:
        """Some blocks have pairs that do not count, besides the later keys of a causal call."""
        return len(self.listed) > 1 or any(branch.needs_masks for branch in self.listed)

    @property
    def is_exact(self) -> bool:
        """True unless mixing_gradient is "detached": gradients flow through the weights that mix the branches, too."""
        return True

    @property
    def adds_zeros(self) -> bool:
        """Whether zero keys fill up segments with fewer rows than others. Internal."""
        return False

    @classmethod
    def suggest(cls, tokens: int, heads: int, *, is_causal: bool = False, kv_heads: int | None = None) -> Pattern:
        """Suggests near tokens, far ones, and some that all see; up to 2048 tokens, dense attention.

        A language model (``is_causal``) gets a window of 1024 tokens and the first four; an encoder 512 tokens on
        either side, and a class token at the start. Far branches are those of :meth:`DilatedPattern.suggest`.

        Examples:
            >>> da.Pattern.suggest(tokens=8192, heads=12, is_causal=True)
            Pattern([Window(left=1023), Prefix(count=4), Dilated(length=4096, rate=2), Dilated(length=8192, rate=4)])
        """
        from dilated_attention.advice import union_for  # the tools stand above this file

        return union_for(tokens, heads, kv_heads, is_causal)

    def plot(self, num_tokens: int | None = None, num_heads: int | None = None, **options: Any) -> Any:
        """Draws which keys each query sees, as an Altair chart for a notebook.

        By default the tokens of the longest segment, 512 at most, or 256 of a union; and four heads, or more where
        branches need them. Options: ``is_causal``; ``kv_heads``; ``head``: only heads that see the same as this one;
        ``query``: mark this token; ``window``: only the tokens of range(*window); ``ranks``: the borders of so many
        shards; ``colour``: the largest "share" of a cell's pairs that one branch shows (default), or the first
        "branch" that shows any.

        Examples:
            >>> chart = da.DilatedPattern.longnet([4, 16], [1, 4]).plot(is_causal=True, colour="branch")
            >>> chart.save("pattern.png")  # doctest: +SKIP
        """
        from dilated_attention.show.vega import plot

        return plot(self, num_tokens, num_heads, **options)


@dataclass(frozen=True, slots=True, repr=False)
class DilatedPattern(Pattern):
    """Says which head attends to which tokens.

    A branch is a segment length w and a dilation rate r. It cuts the sequence into segments of w tokens; the last one
    may be shorter. In each, a head takes every r-th token, beginning at the head's offset, and these attend to one
    another. The rule says which heads have which branches, at which offsets: :meth:`longnet`, :meth:`torchscale` or
    :meth:`head_groups` makes a pattern. It is frozen and hashable, and holds no tensors.

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
    segment_lengths: Ints
    dilation_rates: Ints
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
        # a compiler may hold symbols for the numbers, which have no text: a range needs their values
        texts = [",".join([str(range(number).stop) for number in numbers]) for numbers in (lengths, rates)]
        text = '{{"rule":"{}","segment_lengths":[{}],"dilation_rates":[{}],"mixing_gradient":"{}"}}'
        text = text.format(self.rule, *texts, self.mixing_gradient)
        self._keep(len(rates), segment_lengths=lengths, dilation_rates=rates, text=text, counts="sum", listed=())

    def to_dict(self) -> dict[str, Any]:
        lists = {"segment_lengths": list(self.segment_lengths), "dilation_rates": list(self.dilation_rates)}
        return {"rule": self.rule, **lists, **({} if self.is_exact else {"mixing_gradient": self.mixing_gradient})}

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

        ``mixing_gradient="detached"``: gradients take the weights that mix the branches as constants, as the released
        code does. It works on one device, without dropout, on the backends sdpa and eager; the backward pass computes
        each branch's output once more.
        """
        return cls.of("torchscale", segment_lengths, dilation_rates, mixing_gradient)

    @classmethod
    def head_groups(cls, segment_lengths: Iterable[int], dilation_rates: Iterable[int]) -> DilatedPattern:
        """The default rule of the modules: each head has one branch, and all heads of branch i have offset i mod r.

        Neighbouring heads share a branch, the first branches by one head more if heads do not divide evenly: there
        must be a key/value head for each. Rows that a head's branch leaves out are 0.

        Examples:
            >>> da.DilatedPattern.head_groups([4, 16], [1, 4]).heads(branch=1, num_heads=4)
            range(2, 4)
        """
        return cls.of("head_groups", segment_lengths, dilation_rates)

    @classmethod
    def suggest(  # type: ignore[override]  # of a rule, whether causal or not
        cls, tokens: int, heads: int, *, rule: Rule = "longnet", kv_heads: int | None = None
    ) -> DilatedPattern:
        """Suggests a pattern for a length: up to 2048 tokens, or for head_groups with one head, one dense segment.

        Beyond, a head takes 2048 tokens of every segment, and the longest segment spans the sequence.

        Examples:
            >>> da.DilatedPattern.suggest(tokens=8192, heads=12)
            DilatedPattern.longnet(segment_lengths=[2048, 4096, 8192], dilation_rates=[1, 2, 4])
        """
        from dilated_attention.advice import pattern_for

        return pattern_for(tokens, heads, kv_heads, rule)

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
        return self.mixing_gradient == "exact"

    def alone(self, branch: int) -> DilatedPattern:
        """The pattern with this branch alone. (Under head_groups, all heads then have it.)"""
        return DilatedPattern(self.rule, (self.segment_lengths[branch],), (self.dilation_rates[branch],))

    @property
    def head_rule(self) -> HeadRule:
        """How the rule assigns branches and offsets to heads. Internal."""
        return _HEAD_RULES[self.rule]

    @property
    def adds_zeros(self) -> bool:
        return self.head_rule.adds_zeros

    def branches_for(self, num_heads: int) -> tuple[Dilated, ...]:
        return resolved(self, num_heads)  # type: ignore[return-value]

    def _resolved(self, num_heads: int) -> Iterator[Dilated]:
        rule, (each, extra) = self.head_rule, divmod(num_heads, len(self.segment_lengths))
        for index, (length, rate) in enumerate(self.branches):
            heads = range(num_heads)
            if rule.splits_heads:  # the first branches take one head more where heads do not divide evenly
                first = index * each + min(index, extra)
                heads = range(first, first + each + (index < extra))
            offset: Any = index if rule.splits_heads else "head"
            neighbours = max(1, rule.neighbours(num_heads, rate))
            yield Dilated(length, rate, offset, heads=tuple(heads), neighbours=neighbours)

    def heads(self, branch: int, num_heads: int) -> range:
        """The (key/value) heads that have a branch, by its index."""
        heads = self.branches_for(num_heads)[branch].members
        return range(heads[0], heads[-1] + 1) if heads else range(0)

    def offset(self, branch: int, head: int, num_heads: int) -> int:
        """The offset of a (key/value) head in a branch."""
        return self.branches_for(num_heads)[branch].offset_of(head)

    def _check_kv_heads(self, kv_heads: int) -> None:
        if self.head_rule.splits_heads and kv_heads < len(self.segment_lengths):
            raise ValueError(
                f"{self.rule} needs at least one key/value head per branch, got {len(self.segment_lengths)} branches "
                f"and {kv_heads} key/value heads: use fewer branches, more heads, or rule 'longnet'"
            )

    def zero_keys(
        self, query: int, head: int, *, num_tokens: int, num_heads: int, num_kv_heads: int | None = None,
        is_causal: bool = False,
    ) -> int:  # fmt: skip
        """How many zero keys the query attends to; 0 unless the rule is torchscale.

        Examples:
            >>> da.DilatedPattern.torchscale([4], [3]).zero_keys(query=1, head=1, num_tokens=6, num_heads=3)
            1
        """
        rows = self._row(query, head, num_tokens, num_heads, num_kv_heads, is_causal)
        if is_causal or not self.adds_zeros:
            return 0
        branches = self.branches_for(num_heads // self.check_heads(num_heads, num_kv_heads))
        seen = [(branch, len(row)) for branch, row in zip(branches, rows, strict=True) if row]
        return sum(zeros_beside(branch, count, num_tokens) for branch, count in seen)


def zeros_beside(branch: Branch, rows: int, num_tokens: int) -> int:
    """How many zero keys fill up a segment with so many rows, in a sequence of ``num_tokens``, if not causal."""
    assert isinstance(branch, Dilated)
    return -(-min(branch.length, num_tokens) // branch.rate) - rows
