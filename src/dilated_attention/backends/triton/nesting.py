"""Which branches share a table of tiles, and which heads share a launch: those that do the least work.

Pure integers. Legend: heads are key/value heads.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import torch

from dilated_attention.backends.triton.tiling import Nest, Nests, are_nested, rows_of
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.pattern import DilatedPattern

ENOUGH_BYTES = 256 << 20  # of out in float32 between launches: tiles of fewer heads may leave processors idle
MOST_TILES = 1 << 16  # of one period: a longer one would take long to write down
TILE = 64  # rows of the tiles that work is counted in


def launches(call: Call) -> tuple[Nests, ...]:
    """What each launch of a call has to do, in their order: later launches take in what earlier ones found."""
    nests: list[Nest] = []
    for group in groups(call.dilated, call.is_causal, call.drops):  # dropout draws for each branch anew
        placed = call.placed(group[-1])  # a nested branch's offset is that of the last, modulo its rate
        if placed:
            heads, offsets = zip(*placed, strict=True)
            widths, rates = zip(*(call.dilated.branches[i] for i in group), strict=True)
            nests.append(Nest(group[0], widths, rates, heads[0], offsets))
    if call.dilated.head_rule.splits_heads:  # different heads: all at once
        return (tuple(nests),)
    return tuple((nest,) for nest in nests)


def heads_at_once(call: Call) -> int:
    """The fewest key/value heads whose results, in float32 between launches, take ENOUGH_BYTES; or all.

    Few that would be left for the last launches join the others: alone, they would leave processors idle.
    """
    if not isinstance(call.pattern, DilatedPattern) or len(launches(call)) == 1 or call.dtype is torch.float32:
        return call.kv_heads
    fewest = min(call.kv_heads, -(-ENOUGH_BYTES * call.kv_heads // (4 * call.rows * call.head_dim)))
    parts, left = divmod(call.kv_heads, fewest)
    return fewest if 2 * left >= fewest else -(-call.kv_heads // parts)


@functools.lru_cache(maxsize=256)
def groups(pattern: DilatedPattern, is_causal: bool, alone: bool) -> tuple[Ints, ...]:
    """Branches that go into one table each: those that are nested, where the rule allows it and it is less work.

    ``alone``: every branch needs a table of its own.
    """
    found: list[Ints] = []
    for branch in sorted(range(len(pattern.branches)), key=lambda i: pattern.branches[i][::-1]):
        if found and not alone and pattern.head_rule.nests and _joins(pattern, found[-1], branch, is_causal):
            found[-1] += (branch,)
        else:
            found.append((branch,))
    return tuple(found)


def _joins(pattern: DilatedPattern, group: Ints, branch: int, is_causal: bool) -> bool:
    widths, rates = zip(*(pattern.branches[i] for i in (*group, branch)), strict=True)
    if not are_nested(widths, rates) or widths[-1] // widths[0] * rates[-1] > MOST_TILES:
        return False
    apart: float = _work(widths[:-1], rates[:-1], is_causal) * (widths[-1] // widths[-2])
    return _work(widths, rates, is_causal) <= apart + _work(widths[-1:], rates[-1:], is_causal)


def _work(widths: Ints, rates: Ints, is_causal: bool) -> float:
    """How many pairs of tiles a table of nested branches has, nearly: rows of one kind fill their tiles or not."""
    total = 0.0
    kinds = Counter((step, level) for _, step, level in rows_of(rates, 0)).items()
    for ((step, level), number), ((other_step, other_level), others) in itertools.product(kinds, repeat=2):
        shared = widths[: min(level, other_level) + 1]  # the segments in which both take part
        met = _tiles(shared[0], other_step)
        met += sum(_tiles(after - before, other_step) for before, after in itertools.pairwise(shared))
        total += number * _tiles(widths[0], step) * others * ((met + 1) / 2 if is_causal else met)
    return total * (widths[-1] // widths[0])


def _tiles(width: int, step: int) -> int:
    return -(-width // (step * TILE))
