"""What the user means: which head attends to which tokens. Pure integers; nothing here touches a device.

A branch is a pair (segment length w, dilation rate r). It cuts the tokens into segments of w, and in each of them
head h takes part with the tokens p where (p - segment start) mod r equals the head's offset, as queries and as keys.

Legend: N tokens, H query heads, Hk key/value heads (the heads of every rule; H // Hk query heads follow each).
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import torch

from dilated_attention.notice import warn

Rule = Literal["longnet", "torchscale", "head_groups"]
RULES: tuple[Rule, ...] = get_args(Rule)
MixingGradient = Literal["exact", "detached"]
MAX_BRANCHES = 64
MAX_NUMBER = 2**48  # lengths and rates beyond it would overflow 64-bit strides


def rows_at_offset(length: int, dilation: int, offset: int) -> int:
    """How many p in [0, length) have p mod dilation == offset."""
    return max(0, -((offset - length) // dilation))


class Dealing(NamedTuple):
    """How a rule deals branches to heads: all that the rules differ in."""

    neighbours: Callable[[int, int], int]  # (heads, rate) -> how many heads in a row have the same offset
    is_shifted: bool = False  # branch i adds i mod rate to every offset
    is_divided: bool = False  # heads are divided among branches; otherwise every head runs every branch
    adds_zeros: bool = False  # zero keys fill up the last segment, unless the call is causal
    nests: bool = False  # a head's offset in a branch is its offset in one of a multiple rate, modulo the rate


# To add a rule, add its name to `Rule`, a row here and a constructor to DilatedPattern: no other file looks at names.
_DEALINGS: dict[Rule, Dealing] = {
    "longnet": Dealing(lambda heads, rate: 1, nests=True),
    "torchscale": Dealing(lambda heads, rate: -(-heads // rate), adds_zeros=True),
    "head_groups": Dealing(lambda heads, rate: heads, is_shifted=True, is_divided=True),
}


class Branch(NamedTuple):
    """One branch as heads run it: head h does if first <= h < last, at the offset (h // step) % rate + shift."""

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
        return head // self.step % self.rate + self.shift


@dataclass(frozen=True, slots=True, repr=False)
class DilatedPattern:
    """Says which head attends to which tokens: segment lengths, dilation rates, and the rule that deals them to heads.

    Make one with :meth:`longnet`, :meth:`torchscale` or :meth:`head_groups`; the three differ in the offsets, in
    whether every head runs every branch, and in what happens at the end of a sequence. It is frozen and hashable, and
    holds no tensors.

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
        known = get_args(MixingGradient) if self.rule == "torchscale" else ("exact",)
        if self.mixing_gradient not in known:
            raise ValueError(f"mixing_gradient must be {' or '.join(known)}, got {self.mixing_gradient!r}")
        lengths = _branch_numbers("segment_lengths", self.segment_lengths)
        rates = _branch_numbers("dilation_rates", self.dilation_rates)
        if len(lengths) != len(rates):
            raise ValueError(
                f"segment_lengths has {len(lengths)} entries and dilation_rates {len(rates)}: "
                f"give one rate per length, got {list(lengths)} and {list(rates)}"
            )
        if len(lengths) > MAX_BRANCHES:
            raise ValueError(f"a pattern has at most {MAX_BRANCHES} branches, got {len(lengths)}")
        object.__setattr__(self, "segment_lengths", lengths)
        object.__setattr__(self, "dilation_rates", rates)

    @classmethod
    def of(
        cls,
        rule: Rule,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        mixing_gradient: MixingGradient = "exact",
    ) -> DilatedPattern:
        """The pattern of a rule given by name."""
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
        """The LongNet paper: every head runs every branch, head h at offset h mod r; a shorter last segment."""
        return cls.of("longnet", segment_lengths, dilation_rates)

    @classmethod
    def torchscale(
        cls,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        *,
        mixing_gradient: MixingGradient = "exact",
    ) -> DilatedPattern:
        """The released LongNet code and checkpoints: offset h // ceil(H / r); zero keys fill up the last segment.

        Those zero keys are attended (not when causal, where they come after every query).

        ``mixing_gradient="detached"``: the backward pass takes the weights that mix the branches as constants, as the
        released code does. Outputs are the same. It is for one device and takes no dropout; backends sdpa and eager
        compute it, with each branch's output once more.
        """
        return cls.of("torchscale", segment_lengths, dilation_rates, mixing_gradient)

    @classmethod
    def head_groups(cls, segment_lengths: Iterable[int], dilation_rates: Iterable[int]) -> DilatedPattern:
        """Heads are divided among branches; all heads of branch i share offset i mod r; a shorter last segment."""
        return cls.of("head_groups", segment_lengths, dilation_rates)

    @classmethod
    def suggest(cls, tokens: int, heads: int, *, rule: Rule = "longnet", kv_heads: int | None = None) -> DilatedPattern:
        """Suggests a pattern for a length, as ``dilated-attention suggest`` does.

        Every segment has 2048 rows, and the longest one spans the sequence. `dilated_attention.advice.suggest` also
        gives the reasons, and what the pattern costs.

        Examples:
            >>> da.DilatedPattern.suggest(tokens=8192, heads=12)
            DilatedPattern.longnet(segment_lengths=[2048, 4096, 8192], dilation_rates=[1, 2, 4])
        """
        tools = importlib.import_module("dilated_attention.advice")  # above this file, so found only when asked for
        found: DilatedPattern = tools.pattern_for(tokens, heads, rule, kv_heads)
        return found

    def plot(self, num_tokens: int | None = None, num_heads: int | None = None, **options: Any) -> Any:
        """Draws which keys each query sees, as an Altair chart for a notebook.

        By default it draws the tokens of the longest segment, 512 at most, and up to four heads, or one per branch
        where heads are divided. ``options``: ``is_causal``, ``head``, ``query``, ``window``, ``kv_heads``, ``ranks``,
        and ``colour``, which is ``"share"`` or ``"branch"``.

        Examples:
            >>> chart = da.DilatedPattern.longnet([4, 16], [1, 4]).plot(is_causal=True, colour="branch")
            >>> chart.save("pattern.png")  # doctest: +SKIP
        """
        tools = importlib.import_module("dilated_attention.show")
        return tools.plot(self, num_tokens, num_heads, **options)

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The (segment length, dilation rate) pairs."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def __repr__(self) -> str:
        mixing = "" if self.is_exact else f", mixing_gradient={self.mixing_gradient!r}"
        return (
            f"DilatedPattern.{self.rule}(segment_lengths={list(self.segment_lengths)}, "
            f"dilation_rates={list(self.dilation_rates)}{mixing})"
        )

    @property
    def is_exact(self) -> bool:
        """Whether the gradient is that of the operation, the weights that mix branches included."""
        return self.mixing_gradient == "exact"

    def alone(self, branch: int) -> DilatedPattern:
        """The pattern of one branch, of a rule under which every head runs every branch."""
        return DilatedPattern(self.rule, (self.segment_lengths[branch],), (self.dilation_rates[branch],))

    # --- which head runs what -----------------------------------------------------------------------------------

    @property
    def dealing(self) -> Dealing:
        """The row of the rule."""
        return _DEALINGS[self.rule]

    def dealt(self, num_heads: int) -> tuple[Branch, ...]:
        """The branches as this many (key/value) heads run them."""
        return _dealt(self, num_heads)

    def heads(self, branch: int, num_heads: int) -> range:
        """The (key/value) heads that run a branch."""
        return self.dealt(num_heads)[branch].heads

    def offset(self, branch: int, head: int, num_heads: int) -> int:
        """The offset of a (key/value) head in a branch."""
        return self.dealt(num_heads)[branch].offset(head)

    def check_heads(self, num_heads: int, num_kv_heads: int | None = None, *, whole: bool = True) -> int:
        """Raise if these head counts do not fit the rule; return the number of query heads per key/value head.

        ``whole=False``: these are some of the heads, and need not have one for each branch.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"{num_heads} query heads cannot be shared evenly by {kv_heads} key/value heads: "
                "make the first a positive multiple of the second"
            )
        if whole and self.dealing.is_divided and kv_heads < len(self.segment_lengths):
            raise ValueError(
                f"{self.rule} needs at least one key/value head per branch, got {len(self.segment_lengths)} branches "
                f"and {kv_heads} key/value heads: use fewer branches, more heads, or rule 'longnet'"
            )
        return num_heads // kv_heads

    # --- questions ----------------------------------------------------------------------------------------------

    def keys(
        self,
        query: int,
        head: int,
        *,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        is_causal: bool = False,
    ) -> tuple[int, ...]:
        """The tokens that ``query`` sees in (query) head ``head``, sorted; one seen by m branches stands m times.

        Torchscale's appended zero keys are not tokens: :meth:`zero_keys` counts them.
        """
        seen: list[int] = []
        for branch, first, length, offset in self._branches_of(query, head, num_tokens, num_heads, num_kv_heads):
            last = query + 1 if is_causal else first + length
            seen.extend(range(first + offset, last, self.dilation_rates[branch]))
        return tuple(sorted(seen))

    def zero_keys(
        self,
        query: int,
        head: int,
        *,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        is_causal: bool = False,
    ) -> int:
        """How many appended zero keys the query attends to: torchscale's filling, 0 for the other rules."""
        if is_causal:
            return 0
        return sum(
            self.zeros_in_segment(branch, length, offset, num_tokens)
            for branch, _, length, offset in self._branches_of(query, head, num_tokens, num_heads, num_kv_heads)
        )

    def zeros_in_segment(self, branch: int, length: int, offset: int, num_tokens: int) -> int:
        """Zero keys of a segment with ``length`` real tokens for a head at ``offset``, causality aside."""
        if not self.dealing.adds_zeros:
            return 0
        rate = self.dilation_rates[branch]
        return -(-min(self.segment_lengths[branch], num_tokens) // rate) - rows_at_offset(length, rate, offset)

    def pairs(
        self, num_tokens: int, num_heads: int, *, num_kv_heads: int | None = None, is_causal: bool = False
    ) -> int:
        """The (query, key) pairs of one sample over all heads, repeated keys counted each time."""
        num_tokens = whole_number("num_tokens", num_tokens, least=0)
        group = self.check_heads(num_heads, num_kv_heads)
        total = 0
        for branch in self.dealt(num_heads // group):
            width = min(branch.length, num_tokens)
            segments = [(num_tokens // width, width), (1, num_tokens % width)] if width else []
            for head in branch.heads:
                for count, length in segments:
                    rows = rows_at_offset(length, branch.rate, branch.offset(head))
                    total += count * (rows * (rows + 1) // 2 if is_causal else rows * rows)
        return total * group

    def flops(
        self,
        num_tokens: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        is_causal: bool = False,
        backward: bool = False,
    ) -> int:
        """Multiply-adds of one sample counted as two: 4 D per pair forward, 10 D more for the backward pass."""
        pairs = self.pairs(num_tokens, num_heads, num_kv_heads=num_kv_heads, is_causal=is_causal)
        return pairs * whole_number("head_dim", head_dim) * (14 if backward else 4)

    def saved_bytes(
        self,
        num_tokens: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> int:
        """What one sample keeps for the backward pass: q, k, v, out and lse, whatever the number of branches."""
        kv_heads = num_heads // self.check_heads(num_heads, num_kv_heads)
        lse_bytes = 8 if dtype is torch.float64 else 4
        row_bytes = whole_number("head_dim", head_dim) * dtype.itemsize
        per_token = (2 * num_heads + 2 * kv_heads) * row_bytes + num_heads * lse_bytes
        return whole_number("num_tokens", num_tokens, least=0) * per_token

    def coverage(self, num_tokens: int, num_heads: int, *, num_kv_heads: int | None = None) -> torch.Tensor:
        """(N, H) bool: True where some branch covers the row; the others get output 0 and lse -inf."""
        group = self.check_heads(num_heads, num_kv_heads)
        position = torch.arange(whole_number("num_tokens", num_tokens, least=0))
        covered = torch.zeros(num_tokens, num_heads // group, dtype=torch.bool)
        for branch in self.dealt(num_heads // group):
            for head in branch.heads:
                covered[:, head] |= position % branch.length % branch.rate == branch.offset(head)
        return covered.repeat_interleave(group, dim=1)

    def _branches_of(
        self, query: int, head: int, num_tokens: int, num_heads: int, num_kv_heads: int | None
    ) -> list[tuple[int, int, int, int]]:
        """(branch, first token, length, offset) of each segment in which this row of this head takes part."""
        group = self.check_heads(num_heads, num_kv_heads)
        if not 0 <= query < num_tokens or not 0 <= head < num_heads:
            raise ValueError(
                f"there is no row (query {query}, head {head}) among {num_tokens} tokens and {num_heads} heads: count "
                "from 0"
            )
        found = []
        for index, branch in enumerate(self.dealt(num_heads // group)):
            first, offset = query - query % branch.length, branch.offset(head // group)
            if head // group in branch.heads and (query - first) % branch.rate == offset:
                found.append((index, first, min(branch.length, num_tokens - first), offset))
        return found


@functools.lru_cache(maxsize=256)
def _dealt(pattern: DilatedPattern, num_heads: int) -> tuple[Branch, ...]:
    dealing, count = pattern.dealing, len(pattern.segment_lengths)
    each, extra = divmod(num_heads, count)
    found = []
    for index, (length, rate) in enumerate(pattern.branches):
        first, last = 0, num_heads
        if dealing.is_divided:  # the first branches take one head more where heads do not divide evenly
            first = index * each + min(index, extra)
            last = first + each + (index < extra)
        step = max(1, dealing.neighbours(num_heads, rate))
        found.append(Branch(length, rate, first, last, step, index % rate if dealing.is_shifted else 0))
    return tuple(found)


def whole_number(name: str, value: object, *, least: int = 1) -> int:
    """value as an int of ``least`` or more, or an error that says what it should have been."""
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be {least} or more, got {number}")
    if number > MAX_NUMBER:
        raise ValueError(f"{name} must be at most 2**48, got {number}")
    return number


def _branch_numbers(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be a list of whole numbers, got a tensor: pass its .tolist()")
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of whole numbers, one per branch, got {values!r}")
    if isinstance(values, (Set, Mapping)):
        raise TypeError(f"{name} must be a list of whole numbers in the order of the branches, got {values!r}")
    numbers = tuple(whole_number(f"every entry of {name}", value) for value in values)
    if not numbers:
        raise ValueError(f"{name} is empty: a pattern needs at least one branch")
    return numbers
