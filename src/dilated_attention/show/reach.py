"""Which tokens a query hears of after 1, 2, 3, ... layers: its receptive field.

A residual stream mixes heads, so a layer connects a token with all that some head shows it: in each branch with the
tokens of its segment that have its residue, if some head is at that offset (when causal, only with earlier ones). A
token keeps what it has. Tokens are marked one by one, in the stretch that so many layers can cross at most: exact,
where that stretch is not too long. Where it is, the first layer alone is counted, from its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.show.coverage import Covering

LAYERS = 24  # at most so many are followed
LONGEST_STRETCH = 2**21  # tokens that are marked one by one


@dataclass(frozen=True, slots=True)
class Layer:
    count: int  # tokens reached after it
    first: int
    last: int
    cells: tuple[int, ...]  # how many of them lie in each stretch of the picture


@dataclass(frozen=True, slots=True)
class Reach:
    """``layers``: exact, from the first on. It then grows no more, unless ``is_all`` is False."""

    query: int
    layers: tuple[Layer, ...]
    is_all: bool
    bound: tuple[int, int]  # the first token and the last that any layer after those could reach

    @classmethod
    def of(cls, query: int, tokens: int, branches: Sequence[Covering], is_causal: bool, edges: Sequence[int]) -> Reach:
        connecting = [branch for branch in branches if branch.rate < min(branch.width, tokens)]
        bounds, is_settled = _bounds(query, tokens, connecting, is_causal)
        whole = (0, query + 1 if is_causal else tokens)
        start, stop = bounds[-1] if is_settled else whole
        short = [one for one in bounds if one[1] - one[0] <= LONGEST_STRETCH]
        if short:
            count = LAYERS if is_settled and len(short) == len(bounds) else len(short)
            layers, grows = _layers(query, *short[-1], connecting, is_causal, edges, count)
        else:
            layers, grows = _from_keys(query, tokens, connecting, is_causal, edges), True
        is_all = bool(layers) and (not grows or layers[-1].count == stop - start)
        bound = (layers[-1].first, layers[-1].last) if is_all else (start, stop - 1)
        return cls(query, tuple(layers), is_all, bound)


def _bounds(
    query: int, tokens: int, branches: Sequence[Covering], is_causal: bool
) -> tuple[list[tuple[int, int]], bool]:
    """[start, stop) that 1, 2, ... layers cannot leave, and whether the last holds for all that follow."""
    start, stop = query, query + 1
    found: list[tuple[int, int]] = []
    for _ in range(LAYERS):
        before = min((start - start % branch.width for branch in branches), default=start)
        ends = (min(tokens, stop - 1 - (stop - 1) % branch.width + branch.width) for branch in branches)
        after = stop if is_causal else max(ends, default=stop)
        if found and (before, after) == (start, stop):
            return found, True
        start, stop = before, after
        found.append((start, stop))
    return found, False


def _layers(
    query: int,
    start: int,
    stop: int,
    branches: Sequence[Covering],
    is_causal: bool,
    edges: Sequence[int],
    count: int,
) -> tuple[list[Layer], bool]:
    """At most so many layers, and whether one more might reach more."""
    reached = torch.zeros(stop - start, dtype=torch.bool)
    new = torch.tensor([query])
    reached[new - start] = True
    layers: list[Layer] = []
    for _ in range(count):
        after = reached.clone()
        for branch in branches:
            after[_connected(new, branch, stop, is_causal) - start] = True
        new = (after & ~reached).nonzero()[:, 0] + start
        if layers and not len(new):
            return layers, False
        layers.append(_layer(range(0), after.nonzero()[:, 0] + start, edges))
        reached = after
        if layers[-1].count == stop - start:  # nothing is left
            break
    return layers, True


def _connected(tokens: Tensor, branch: Covering, stop: int, is_causal: bool) -> Tensor:
    """The tokens before ``stop`` that some of these (n,) see in a branch; some may stand there twice."""
    width, rate, offsets = branch
    residue = tokens % width % rate
    if len(offsets) < rate:
        here = torch.isin(residue, torch.tensor(sorted(offsets)))
        tokens, residue = tokens[here], residue[here]
    # tokens with one first token see one another
    first, index = torch.unique(tokens - tokens % width + residue, return_inverse=True)
    if is_causal:
        end = torch.zeros_like(first).scatter_reduce_(0, index, tokens + 1, "amax")
    else:
        end = (first - first % width + width).clamp_(max=stop)
    rows = (end - first + rate - 1) // rate
    seen: Tensor = first.unsqueeze(1) + rate * torch.arange(int(rows.max()) if len(rows) else 0)
    return seen[seen < end.unsqueeze(1)]


def _from_keys(
    query: int, tokens: int, branches: Sequence[Covering], is_causal: bool, edges: Sequence[int]
) -> list[Layer]:
    """The first layer from the query's keys, unless they are too many to be listed."""
    keys = [range(query, query + 1)]
    for width, rate, offsets in branches:
        start = query - query % width
        if (query - start) % rate in offsets:
            stop = query + 1 if is_causal else min(start + width, tokens)
            keys.append(range(start + (query - start) % rate, stop, rate))
    dense = max((some for some in keys if some.step == 1), key=len)  # need not be listed
    listed = [some for some in keys if some[0] not in dense or some[-1] not in dense]
    if sum(map(len, listed)) > LONGEST_STRETCH:
        return []
    others = torch.cat([torch.arange(0), *(torch.arange(x.start, x.stop, x.step) for x in listed)])
    others = torch.unique(others[(others < dense.start) | (others >= dense.stop)])
    return [_layer(dense, others, edges)]


def _layer(dense: range, others: Tensor, edges: Sequence[int]) -> Layer:
    """dense: all of these tokens; others: sorted, and none of them."""
    before = torch.searchsorted(others, torch.tensor(edges))
    inside = [min(max(edge, dense.start), dense.stop) for edge in edges]
    cells = (before + torch.tensor(inside)).diff().tolist()
    ends = [*dense[:1], *dense[-1:], *others[:1].tolist(), *others[-1:].tolist()]
    return Layer(len(dense) + len(others), min(ends), max(ends), tuple(cells))
