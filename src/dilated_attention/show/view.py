"""What a picture of a pattern shows and says, as data: `chart` and `terminal` draw it.

Legend: a stretch is the tokens between two edges of the picture; a cell is the queries of one stretch with the keys of
another; heads of one kind see the same.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dilated_attention.branches import Branch
from dilated_attention.branches.base import grouped
from dilated_attention.checks import check_int
from dilated_attention.pattern import DilatedPattern, Pattern, zeros_beside
from dilated_attention.ring.shards import Shards
from dilated_attention.show import counts

Colour = Literal["share", "branch"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
SHADES = 5
MOST_CELLS = 512  # down and across: up to so many tokens each is a cell
MOST_KINDS, MOST_PICTURES = 64, 8  # kinds of heads that are looked at, and different pictures of them
MOST_RANKS = 64  # more borders would hide the picture
LONGEST_NAME = 40  # letters
LISTED = 8  # keys of a query
COUNTED = 2**16  # tokens that are looked at to say which rows get an output


class Picture(NamedTuple):
    """What some heads look like. Of each cell, queries down and keys across: the largest share of its pairs that one
    branch shows, from 0 to 1; the first branch that shows any of them, -1 without one; and the shares of all branches
    together, which is how often a pair counts where branches are summed."""

    heads: list[int]
    share: Tensor
    branch: Tensor
    times: Tensor

    @property
    def name(self) -> str:
        return _heads_name(self.heads)

    def levels(self, shades: Mapping[str, float]) -> Tensor:
        """Which of the shades each cell has; an empty one has none, so the number after the last."""
        return sum((self.share < least).long() for least in shades.values()) + (self.share == 0)


def shades(pictures: Sequence[Picture]) -> dict[str, float]:
    """The names of the shades, darkest first, and the least share of each.

    A rate r leaves 1/r² of the pairs, so shades a factor of 4 apart differ for the rates 1, 2, 4 and 8. In cells of
    millions of tokens shares are far smaller: then the factor is larger.
    """
    least = min((x.share[x.share > 0].min().item() for x in pictures if x.share.any()), default=1.0)
    factor = 2 ** max(2, math.ceil(-math.log2(least) / SHADES))
    named = {f"1/{factor**n:,} or more": 1 / factor**n for n in (1, 2, 3)}
    return {"all": 1.0, **named, f"less than 1/{factor**3:,}": 0.0}


@dataclass(frozen=True)
class Plot:
    """A picture that was asked for; wrong questions are a ValueError."""

    pattern: Pattern
    tokens: int
    heads: int
    kv_heads: int | None = None
    is_causal: bool = False
    head: int | None = None  # draw only the kind of this head
    query: int | None = None  # mark this query, and list what it sees
    window: tuple[int, int] | None = None  # draw the tokens [first, last)
    ranks: int | None = None  # draw the borders between the shards of this many ranks
    colour: Colour = "share"
    cells: int = MOST_CELLS

    def __post_init__(self) -> None:
        tokens, heads = check_int("tokens", self.tokens), check_int("heads", self.heads)
        self.pattern.check_heads(heads, self.kv_heads)
        for name, index, among in (("query", self.query, tokens), ("head", self.head, heads)):
            if index is not None and not 0 <= index < among:
                raise ValueError(f"there is no {name} {index}: count from 0 to {among - 1}")
        start, stop = self.shown
        if not 0 <= start < stop <= tokens:
            raise ValueError(f"window is [{start}, {stop}): give a first token and a later end, from 0 to {tokens}")
        if self.ranks is not None and not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"a picture shows the borders of 1 to {MOST_RANKS} ranks, got {self.ranks}")
        if self.colour not in COLOURS:
            raise ValueError(f"unknown colour {self.colour!r}: use one of {', '.join(COLOURS)}")

    @property
    def shown(self) -> tuple[int, int]:
        """The tokens that are drawn: the first, and the first after them."""
        return self.window or (0, self.tokens)

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        return self.pattern.branches_for(self.kv_heads or self.heads)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        # after how many tokens something repeats in a branch: cells should be in step with it
        repeats = [getattr(x, name, None) or 1 for x in self.branches for name in ("length", "size", "rate")]
        return counts.edges(*self.shown, self.cells, repeats)

    @cached_property
    def kinds(self) -> list[list[int]]:
        """The (query) heads that see the same, as far as they are looked at."""
        kv_heads = self.kv_heads or self.heads
        alike = grouped(range(self.heads), lambda head: self.pattern.looks(self._kv_head(head), kv_heads))
        asked = (heads for heads in alike.values() if self.head is None or self.head in heads)
        return [*itertools.islice(asked, MOST_KINDS)]

    def _kv_head(self, head: int) -> int:
        return head * (self.kv_heads or self.heads) // self.heads

    @cached_property
    def pictures(self) -> list[Picture]:
        """Heads that look the same are one picture: in large cells some do, though they see other keys."""
        looks: dict[bytes, Picture] = {}
        for heads in self.kinds:
            picture = self._picture(heads)
            look = b"".join(x.numpy().tobytes() for x in picture[1:])
            if look in looks:
                looks[look].heads.extend(heads)
            elif len(looks) < MOST_PICTURES:
                looks[look] = picture
        return [*looks.values()]

    def _picture(self, heads: list[int]) -> Picture:
        head, cells = self._kv_head(heads[0]), len(self.edges) - 1
        share, times = torch.zeros(2, cells, cells, dtype=torch.float64)
        first = torch.full((cells, cells), -1)
        for index, branch in enumerate(self.branches):
            if head in branch.members:
                alike = next(x for x in branch.members if branch.offset_of(x) == branch.offset_of(head))
                shown = counts.shares(branch, alike, self.tokens, self.is_causal, self.edges)
                first[(first < 0) & (shown > 0)] = index
                share, times = torch.maximum(share, shown), times + shown
        return Picture([*heads], share, first, times)

    @property
    def cell_size(self) -> int:
        """Tokens of a stretch; the first and the last may have fewer."""
        return max(stop - start for start, stop in itertools.pairwise(self.edges))

    @property
    def borders(self) -> list[int]:
        """The first tokens of all ranks but the first, as far as the picture shows them."""
        shown = range(self.shown[0] + 1, self.shown[1])
        return sorted({token for token in Shards.even(self.tokens, self.ranks or 1).starts if token in shown})

    @property
    def branch_names(self) -> list[str]:
        if isinstance(self.pattern, DilatedPattern):
            return [f"w={width} r={rate}" for width, rate in self.pattern.branches]
        names = [
            text if len(text := repr(x)) < LONGEST_NAME else text[:LONGEST_NAME] + "…" for x in self.pattern.listed
        ]
        return names if len({*names}) == len(names) else [f"{i + 1}. {name}" for i, name in enumerate(names)]

    # --- the sentences --------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return f"{getattr(self.pattern, 'rule', self.pattern.counts)}: {_listed(self.branch_names, 5)}"

    @property
    def subtitle(self) -> str:
        shared = f" on {_many(self.kv_heads, 'key/value head')}" if self.kv_heads else ""
        drawn = f"; tokens {self.window[0]:,} to {self.window[1] - 1:,} are drawn" if self.window else ""
        causal = "causal" if self.is_causal else "not causal"
        return f"{_many(self.tokens, 'token')}, {_many(self.heads, 'head')}{shared}, {causal}{drawn}"

    def caption(self, colour: Colour) -> str:
        size, said = self.cell_size, "A coloured cell is a key that the query sees."
        if size > 1:
            shade = "Its shade is the largest share of its pairs that one branch shows."
            said = f"A cell is {size:,} × {size:,} tokens. {shade}"
        return said if colour == "share" else f"{said} Its colour is the first branch that shows any of it."

    def facts(self, most: int = MOST_PICTURES) -> list[str]:
        """Which rows get no output, what the query sees, and what else so many pictures need to be understood."""
        said: dict[str, list[int]] = {}
        for heads in self.kinds:
            for sentence in self._facts_of(heads[0]):
                said.setdefault(sentence, []).extend(heads)
        facts = [f"In {_heads_name(heads)}, {sentence}" for sentence, heads in said.items()]
        if len(facts) > MOST_PICTURES:
            facts[MOST_PICTURES:] = ["More could be said about other heads: name one to read it."]
        diagonal = -1 if self.is_causal else self.cells
        if self.window and all((x.share >= torch.ones_like(x.share).tril(diagonal)).all() for x in self.pictures):
            facts.append("It is solid, as no pair of these tokens is left out: draw more tokens to see less.")
        if self.ranks:
            facts.append(f"Lines are the borders between the shards of {_many(self.ranks, 'rank')}.")
        rest = self.heads - sum(len(x.heads) for x in self.pictures[:most]) if self.head is None else 0
        return [*facts, f"Not drawn: {_many(rest, 'more head')}. Name one to see it."] if rest else facts

    def _facts_of(self, head: int) -> Iterator[str]:
        kv_heads, kv_head, looked = self.kv_heads or self.heads, self._kv_head(head), min(self.tokens, COUNTED)
        covered = self.pattern.covered(kv_head, range(looked), self.tokens, kv_heads, self.is_causal)
        if not covered.all():
            first = "" if looked == self.tokens else "the first "
            yield f"{covered.sum():,} of {first}{_many(looked, 'token')} get an output. The others get 0."
        if self.query is not None:
            seen = ", ".join(self._seen_by(self.query, kv_head))
            yield f"query {self.query:,} sees {seen or 'nothing, because no branch shows it a key'}."

    def _seen_by(self, query: int, head: int) -> Iterator[str]:
        """How many keys each branch shows to a query, and which; then zero keys."""
        zeros = 0
        for name, branch in zip(self.branch_names, self.branches, strict=True):
            if head in branch.members:
                rects = branch.rects(head, range(query, query + 1), self.tokens, self.is_causal)
                keys = [rect.keys for rect in rects if not rect.is_empty]
                count, some = sum(map(len, keys)), [*itertools.islice(heapq.merge(*keys), LISTED)]
                if count > LISTED:
                    some += [max(x[-1] for x in keys)]
                if count:
                    yield f"{_many(count, 'key')} in {name} ({_listed(some, LISTED, ' ')})"
                    zeros += zeros_beside(branch, count, self.tokens) if self.pattern.adds_zeros else 0
        if zeros and not self.is_causal:
            yield _many(zeros, "zero key")


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _listed(things: Sequence[object], most: int, between: str = ", ") -> str:
    """All of them or, where there are more than ``most``, the first ones and the last."""
    listed = things if len(things) <= most else [*things[: most - 2], "…", things[-1]]
    return between.join(f"{x:,}" if isinstance(x, int) else str(x) for x in listed)


def _heads_name(heads: Sequence[int]) -> str:
    """head 3; heads 0, 4, 8; heads 0–7."""
    heads = sorted(heads)
    if len(heads) > 2 and heads[-1] - heads[0] + 1 == len(heads):
        return f"heads {heads[0]}–{heads[-1]}"
    return f"head{'s' if len(heads) > 1 else ''} {_listed(heads, 6)}"
