"""What a picture of a pattern shows and says, as data: `chart` and `terminal` draw it.

Legend: a kind is the (query) heads that have the same offset in every branch, and so see the same; a stretch is the
tokens between two edges of the picture; a cell is the queries of one stretch with the keys of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

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
OVERVIEW = 128  # cells of more tokens, down and across
MOST_KINDS, MOST_PICTURES = 64, 8  # kinds of heads that are looked at, and different pictures of them
MOST_RANKS = 64  # more borders would hide the picture
COUNTED = 2**16  # tokens that are looked at to say which rows get an output


class Kind(NamedTuple):
    heads: list[int]
    branches: tuple[tuple[int, ...], ...]  # index, width, rate and offset of those that these heads run


class Picture(NamedTuple):
    """What the same-looking kinds look like. Of each cell, queries down and keys across: the largest share of its pairs
    that one branch computes, from 0 to 1, and that branch; the first one, where several compute as much."""

    heads: list[int]
    share: Tensor
    branch: Tensor

    @property
    def name(self) -> str:
        return _heads_name(self.heads)

    def levels(self, limits: Iterable[float]) -> Tensor:
        """Which of the `shades` each cell has; an empty one has none, so the number after the last."""
        least = torch.tensor([*limits], dtype=torch.float64)
        return (self.share[..., None] < least).sum(-1) + (self.share == 0)


def shades(pictures: Sequence[Picture]) -> dict[str, float]:
    """The names of the shades, darkest first, and the least share of each.

    A rate r leaves 1/r² of the pairs, so shades a factor of 4 apart differ for the rates 1, 2, 4 and 8. In cells of
    millions of tokens shares are far smaller: then the shades are chosen among those that there are.
    """
    shares = torch.cat([picture.share[picture.share > 0] for picture in pictures])
    # the powers of 1/2 that there are, the largest share first; a share that rounding made too small is not one less
    there = sorted({*(-shares.log2() - 1e-6).ceil().int().tolist()})
    if not there or there[-1] <= 2 * SHADES:
        return {"all": 1.0, **{f"1/{4**n} or more": 1 / 4**n for n in (1, 2, 3)}, "less than 1/64": 0.0}
    last = len(there) - 1
    chosen = dict.fromkeys(there[round(index * last / (SHADES - 1))] for index in range(SHADES))
    named = {"all" if power == 0 else f"1/{2**power:,} or more": 0.5**power for power in chosen}
    return {**named, [*named][-1]: 0.0}


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
        start, stop = self.shown
        numbers = (*(w for w in self.pattern.segment_lengths if w < self.tokens), *self.pattern.dilation_rates)
        most = self.cells if stop - start <= self.cells else min(self.cells, OVERVIEW)
        return counts.edges(start, stop, most, numbers)

    @cached_property
    def kinds(self) -> list[Kind]:
        kv_heads = self.kv_heads or self.heads
        branches = self.pattern.branches_for(kv_heads)
        alike: dict[Any, list[int]] = {}
        for head in range(self.heads):
            kv_head = head * kv_heads // self.heads
            runs = ((i, x.length, x.rate, x.offset_of(kv_head)) for i, x in enumerate(branches) if kv_head in x.heads)
            alike.setdefault(tuple(runs), []).append(head)
        return [Kind(heads, runs) for runs, heads in alike.items() if self.head is None or self.head in heads]

    @cached_property
    def pictures(self) -> list[Picture]:
        """The kinds to draw. Those that look the same are one picture: in large cells some do."""
        looks: dict[bytes, Picture] = {}
        for kind in self.kinds[:MOST_KINDS]:
            best, which = torch.zeros(2, len(self.edges) - 1, len(self.edges) - 1, dtype=torch.float64)
            for index, *branch in kind.branches:
                share = counts.branch_shares(self.edges, *branch, is_causal=self.is_causal)
                which[share > best] = index
                best = torch.maximum(best, share)
            look = torch.stack([best, which]).numpy().tobytes()
            if look in looks or len(looks) < MOST_PICTURES:
                looks.setdefault(look, Picture([], best, which.long())).heads.extend(kind.heads)
        return [*looks.values()]

    @property
    def cell_size(self) -> int:
        """Tokens of a stretch; the first and the last may have fewer."""
        return max(stop - start for start, stop in itertools.pairwise(self.edges))

    @property
    def borders(self) -> list[int]:
        """The first tokens of all ranks but the first, as far as the picture shows them."""
        start, stop = self.shown
        return sorted({token for token in Shards.even(self.tokens, self.ranks or 1).starts if start < token < stop})

    @property
    def branch_names(self) -> list[str]:
        return [f"w={width} r={rate}" for width, rate in self.pattern.branches]

    # --- the sentences --------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return f"{self.pattern.rule}: {_listed(self.branch_names, 5)}"

    @property
    def subtitle(self) -> str:
        heads = _many(self.heads, "head")
        if self.kv_heads not in (None, self.heads):
            heads += f" on {_many(self.kv_heads or 1, 'key/value head')}"
        drawn = f"; tokens {self.window[0]:,} to {self.window[1] - 1:,} are drawn" if self.window else ""
        return f"{_many(self.tokens, 'token')}, {heads}, {'causal' if self.is_causal else 'not causal'}{drawn}"

    def caption(self, colour: Colour) -> str:
        """What the cells and their colours mean."""
        size = self.cell_size
        cell, branch = "A coloured cell is a key that the query sees.", "the first branch that contains it"
        if size > 1:
            cell = f"A cell is {size:,} × {size:,} tokens. Its shade is the largest share of its pairs that one branch "
            cell, branch = f"{cell}computes.", "that branch"
        return cell if colour == "share" else f"{cell} Its colour is {branch}."

    def facts(self, most: int = MOST_PICTURES) -> list[str]:
        """Which rows get no output, what the query sees, and what else so many pictures need to be understood."""
        said: dict[str, list[int]] = {}
        for kind in self.kinds[:MOST_KINDS]:
            for sentence in self._facts_of(kind):
                said.setdefault(sentence, []).extend(kind.heads)
        facts = [f"In {_heads_name(heads)}, {sentence}" for sentence, heads in said.items()]
        if len(facts) > MOST_PICTURES:
            facts = [*facts[:MOST_PICTURES], "More could be said about other heads: name one to read it."]
        if self.ranks is not None:
            facts.append(f"Lines are the borders between the shards of {_many(self.ranks, 'rank')}.")
        rest = sum(len(x.heads) for x in self.kinds) - sum(len(x.heads) for x in self.pictures[:most])
        more = f"{_many(rest, 'more head')} {'is' if rest == 1 else 'are'} not drawn: name one to see it."
        return [*facts, more] if rest else facts

    def _facts_of(self, kind: Kind) -> Iterator[str]:
        token = torch.arange(min(self.tokens, COUNTED))
        covered = torch.zeros_like(token, dtype=torch.bool)
        for index, width, rate, offset in kind.branches:
            covered |= token % width % rate == offset
            if self.window and rate == 1 and self.window[0] // width == (self.window[1] - 1) // width:
                yield f"all drawn tokens lie in one segment of {self.branch_names[index]}: draw more to see less."
        if not covered.all():
            tokens = ("" if len(token) == self.tokens else "the first ") + _many(len(token), "token")
            yield f"{int(covered.sum()):,} of {tokens} get an output. The others get 0."
        if self.query is not None:
            yield f"query {self.query:,} sees {self._keys(kind, self.query)}."

    def _keys(self, kind: Kind, query: int) -> str:
        seen = []
        for index, width, rate, offset in kind.branches:
            start = query - query % width
            if query % width % rate == offset:
                keys = range(start + offset, query + 1 if self.is_causal else min(start + width, self.tokens), rate)
                listed = _listed(keys, 8, " ", "{:,}")
                seen.append(f"{_many(len(keys), 'key')} in {self.branch_names[index]} ({listed})")
        zeros = self.pattern.zero_keys(
            query, kind.heads[0], num_tokens=self.tokens, num_heads=self.heads, num_kv_heads=self.kv_heads,
            is_causal=self.is_causal,
        )  # fmt: skip
        seen += [_many(zeros, "zero key")] if zeros else []
        return ", ".join(seen) or "nothing, because no branch contains it"


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _listed(things: Sequence[object], most: int, between: str = ", ", how: str = "{}") -> str:
    """All of them or, where there are more than ``most``, the first ones and the last."""
    parts = [things] if len(things) <= most else [things[: most - 2], ["…"], things[-1:]]
    return between.join(x if x == "…" else how.format(x) for part in parts for x in part)


def _heads_name(heads: Sequence[int]) -> str:
    """head 3; heads 0, 4, 8; heads 0–7."""
    heads = sorted(heads)
    if len(heads) > 2 and heads[-1] - heads[0] + 1 == len(heads):
        return f"heads {heads[0]}–{heads[-1]}"
    return f"head{'s' if len(heads) > 1 else ''} {_listed(heads, 6)}"
