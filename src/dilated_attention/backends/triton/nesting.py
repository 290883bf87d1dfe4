"""Which branches share a table of tiles, and which heads share a launch: those that do the least work.

Pure integers. Legend: heads are key/value heads.
"""

from __future__ import annotations

import functools
import itertools

import torch

from dilated_attention.backends.triton import configs
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.configs import TileConfig
from dilated_attention.backends.triton.tiling import Nest, Nests, are_nested
from dilated_attention.call import Call, Heads
from dilated_attention.pattern import DilatedPattern

ENOUGH_BYTES = 256 << 20  # of out in float32 between launches: tiles of fewer heads may leave processors idle
MOST_TILES = 1 << 16  # of one period: a longer one would take long to write down
TILE = 64  # rows of the tiles that work is counted in
FEW_KEYS = 2560  # that a query meets on average: with 1,792 torch's kernels were faster, with 3,968 ours
# Large tiles of fewer would leave processors idle: an H200 has 132, which take two or three each. Packed sequences of
# 255,000 rows each were slower with small ones (benchmarks/results/packed-small-tiles, beside packed).
FEW_ROWS = 200_000


@functools.lru_cache(maxsize=256)
def launches(pattern: DilatedPattern, heads: Heads, is_causal: bool, alone: bool) -> tuple[Nests, ...]:
    """The launches that do the least; later ones take in what earlier ones found.

    ``alone``: every branch needs a table of its own (dropout draws for each branch anew).
    """
    nests = []
    for group in _groups(pattern, is_causal, alone):
        placed = heads.of_branch(pattern, group[-1])  # a nested branch's offset is that of the last, modulo its rate
        if placed:
            widths, rates = (tuple(numbers) for numbers in zip(*(pattern.branches[i] for i in group), strict=True))
            nests.append(Nest(group[0], widths, rates, placed[0][0], tuple(offset for _, offset in placed)))
    if pattern.head_rule.splits_heads:  # different heads: all at once
        return (tuple(nests),)
    return tuple((nest,) for nest in nests)


def steps(call: Call) -> tuple[Nests, ...]:
    """What each launch of a call has to do, in their order."""
    return launches(call.pattern, call.held, call.is_causal, call.drops)


def heads_at_once(call: Call) -> int:
    """The fewest key/value heads whose results, in float32 between launches, take ENOUGH_BYTES; or all.

    Few that would be left for the last launches join the others: alone, they would leave processors idle.
    """
    if len(steps(call)) == 1 or call.dtype is torch.float32:
        return call.kv_heads
    fewest = min(call.kv_heads, -(-ENOUGH_BYTES * call.kv_heads // (4 * call.rows * call.head_dim)))
    parts, left = divmod(call.kv_heads, fewest)
    return fewest if 2 * left >= fewest else -(-call.kv_heads // parts)


def _groups(pattern: DilatedPattern, is_causal: bool, alone: bool) -> list[list[int]]:
    """Branches that go into one table each: those that are nested, where the rule allows it and it is less work."""
    order = sorted(range(len(pattern.branches)), key=lambda i: (pattern.dilation_rates[i], pattern.segment_lengths[i]))
    groups: list[list[int]] = []
    for branch in order:
        if groups and not alone and pattern.head_rule.nests and _joins(pattern, groups[-1], branch, is_causal):
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


def _joins(pattern: DilatedPattern, group: list[int], branch: int, is_causal: bool) -> bool:
    widths, rates = (tuple(numbers) for numbers in zip(*(pattern.branches[i] for i in [*group, branch]), strict=True))
    if not are_nested(widths, rates) or widths[-1] // widths[0] * rates[-1] > MOST_TILES:
        return False
    apart = _work(widths[:-1], rates[:-1], is_causal) * (widths[-1] // widths[-2])
    apart += _work(widths[-1:], rates[-1:], is_causal)
    return bool(_work(widths, rates, is_causal) <= apart)


def _work(widths: tuple[int, ...], rates: tuple[int, ...], is_causal: bool) -> float:
    """How many pairs of tiles a table of nested branches has, nearly: rows of one kind fill their tiles or not."""
    kinds = [(level, after, after // rate - 1) for level, (rate, after) in enumerate(itertools.pairwise(rates))]
    kinds.append((len(rates) - 1, rates[-1], 1))  # level, step and number, as of `tiling.rows_of`
    seen = 0.5 if is_causal else 1.0
    total = 0.0
    for level, step, number in kinds:
        met = 0.0
        for other_level, other_step, other_number in kinds:
            inside = _tiles(widths[0], other_step)
            met += other_number * ((inside + 1) / 2 if is_causal else inside)
            for branch in range(1, min(level, other_level) + 1):
                met += other_number * seen * _tiles(widths[branch] - widths[branch - 1], other_step)
        total += number * _tiles(widths[0], step) * met
    return total * (widths[-1] // widths[0])


def _tiles(width: int, step: int) -> int:
    return -(-width // (step * TILE))


@functools.lru_cache(maxsize=256)
def form_of(pattern: DilatedPattern, is_causal: bool, alone: bool = False) -> str:
    """The name under which measured.json has such a call; ``alone`` as of `launches`.

    "dense": each segment is one dense problem; "nested": some pairs are computed once for several branches; "apart":
    several launches, each of which takes in what the others found; "": anything else, in one launch.
    """
    if pattern.dilation_rates == (1,):
        return "dense"
    groups = _groups(pattern, is_causal, alone)
    if any(len(group) > 1 for group in groups):
        return "nested"
    return "apart" if len(groups) > 1 and not pattern.head_rule.splits_heads else ""


def measured_as(call: Call) -> str:
    """The form of a call; "apart thin" where each of several launches has little to do for a row."""
    form = form_of(call.pattern, call.is_causal, call.drops)
    is_thin = form == "apart" and sum(width / rate**2 for width, rate in call.pattern.branches) < FEW_KEYS
    return f"{form} thin" if is_thin else form


def rows_of_a_sequence(call: Call) -> int:
    """Query rows of all samples and heads; where sequences are packed, those of one of them on average."""
    return call.rows // max(1, len(call.sequences) - 1)


def is_short(call: Call) -> bool:
    """Whether a call, or each of its packed sequences, has so few rows that smaller tiles are faster."""
    return rows_of_a_sequence(call) < FEW_ROWS


def config(kernel: str, call: Call, nests: Nests) -> TileConfig:
    """The tile of a kernel for one launch of a call."""
    form = "nested" if len(nests[0].widths) > 1 else form_of(call.pattern, call.is_causal, alone=True)
    return configs.config(kernel, call.device, call.dtype, call.head_dim, call.is_causal, form, is_short(call))


CACHE.clears(launches.cache_clear, form_of.cache_clear)
