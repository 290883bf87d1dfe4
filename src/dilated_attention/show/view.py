"""What a picture of a pattern shows and says, as data: `chart` and `terminal` draw it.

Legend: a stretch is the tokens between two edges of the picture; a cell is the queries of one stretch with the keys of
another; runs are the index, width, rate and offset of each branch that a head runs, and so say what it sees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dilated_attention.checks import check_int
from dilated_attention.pattern import DilatedPattern
from dilated_attention.ring.shards import Shards
from dilated_attention.show import counts

Colour = Literal["share", "branch"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
SHADES = 5
MOST_CELLS = 512  # down and across: up to so many tokens each is a cell
MOST_KINDS, MOST_PICTURES = 64, 8  # kinds of heads that are looked at, and different pictures of them
MOST_RANKS = 64  # more borders would hide the picture
COUNTED = 2**16  # tokens that are looked at to say which rows get an output


Runs = tuple[tuple[int, ...], ...]


class Picture(NamedTuple):
    """What some heads look like. Of each cell, queries down and keys across: the largest share of its pairs that one
    branch computes, from 0 to 1, and that branch; the first one, where several compute as much."""

    heads: list[int]
    share: Tensor
    branch: Tensor

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
class View:
    """A picture that was asked for; wrong questions are a ValueError."""

    pattern: DilatedPattern
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
    def edges(self) -> tuple[int, ...]:
        return counts.edges(*self.shown, self.cells, (*self.pattern.segment_lengths, *self.pattern.dilation_rates))

    @cached_property
    def kinds(self) -> dict[Runs, list[int]]:
        """The (query) heads by their runs, as far as they are looked at."""
        kv_heads, alike = self.kv_heads or self.heads, dict[Runs, list[int]]()
        branches = self.pattern.branches_for(kv_heads)
        for head in range(self.heads):
            kv_head = head * kv_heads // self.heads
            runs = ((i, x.length, x.rate, x.offset_of(kv_head)) for i, x in enumerate(branches) if kv_head in x.members)
            alike.setdefault(tuple(runs), []).append(head)
        asked = ((runs, heads) for runs, heads in alike.items() if self.head is None or self.head in heads)
        return dict(itertools.islice(asked, MOST_KINDS))

    @cached_property
    def pictures(self) -> list[Picture]:
        """Heads that look the same are one picture: in large cells some do, though they see other keys."""
        looks: dict[bytes, Picture] = {}
        for runs, heads in self.kinds.items():
            shares = [counts.branch_shares(self.edges, *x[1:], is_causal=self.is_causal) for x in runs]
            share, which = torch.stack(shares).max(0)
            branch = torch.tensor([x[0] for x in runs])[which]
            look = share.numpy().tobytes() + branch.numpy().tobytes()
            if look in looks or len(looks) < MOST_PICTURES:
                looks.setdefault(look, Picture([], share, branch)).heads.extend(heads)
        return [*looks.values()]

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
        return [f"w={width} r={rate}" for width, rate in self.pattern.branches]

    # --- the sentences --------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return f"{self.pattern.rule}: {_listed(self.branch_names, 5)}"

    @property
    def subtitle(self) -> str:
        shared = f" on {_many(self.kv_heads, 'key/value head')}" if self.kv_heads else ""
        drawn = f"; tokens {self.window[0]:,} to {self.window[1] - 1:,} are drawn" if self.window else ""
        causal = "causal" if self.is_causal else "not causal"
        return f"{_many(self.tokens, 'token')}, {_many(self.heads, 'head')}{shared}, {causal}{drawn}"

    def caption(self, colour: Colour) -> str:
        """What the cells and their colours mean."""
        size, said = self.cell_size, "A coloured cell is a key that the query sees."
        if size > 1:
            shade = "Its shade is the largest share of its pairs that one branch computes."
            said = f"A cell is {size:,} × {size:,} tokens. {shade}"
        return said if colour == "share" else f"{said} Its colour is the first branch that computes so much of it."

    def facts(self, most: int = MOST_PICTURES) -> list[str]:
        """Which rows get no output, what the query sees, and what else so many pictures need to be understood."""
        said: dict[str, list[int]] = {}
        for runs, heads in self.kinds.items():
            for sentence in self._facts_of(runs, heads[0]):
                said.setdefault(sentence, []).extend(heads)
        facts = [f"In {_heads_name(heads)}, {sentence}" for sentence, heads in said.items()]
        if len(facts) > MOST_PICTURES:
            facts[MOST_PICTURES:] = ["More could be said about other heads: name one to read it."]
        if self.ranks:
            facts.append(f"Lines are the borders between the shards of {_many(self.ranks, 'rank')}.")
        rest = self.heads - sum(len(x.heads) for x in self.pictures[:most]) if self.head is None else 0
        return [*facts, f"Not drawn: {_many(rest, 'more head')}. Name one to see it."] if rest else facts

    def _facts_of(self, runs: Runs, head: int) -> Iterator[str]:
        token, query, seen = torch.arange(min(self.tokens, COUNTED)), self.query, []
        covered = torch.zeros_like(token)
        for index, width, rate, offset in runs:
            covered |= token % width % rate == offset
            if query is not None and query % width % rate == offset:
                start = query - query % width
                keys = range(start + offset, query + 1 if self.is_causal else min(start + width, self.tokens), rate)
                seen.append(f"{_many(len(keys), 'key')} in {self.branch_names[index]} ({_listed(keys, 8, ' ')})")
        if not covered.all():
            first = "" if len(token) == self.tokens else "the first "
            yield f"{covered.sum():,} of {first}{_many(len(token), 'token')} get an output. The others get 0."
        if query is not None:
            zeros = self.pattern.zero_keys(
                query, head, num_tokens=self.tokens, num_heads=self.heads, num_kv_heads=self.kv_heads,
                is_causal=self.is_causal,
            )  # fmt: skip
            seen += [_many(zeros, "zero key")] if zeros else []
            yield f"query {query:,} sees {', '.join(seen) or 'nothing, because no branch contains it'}."


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
