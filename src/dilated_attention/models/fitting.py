"""A pattern for a model that was trained with dense attention: which few heads stay full, and what the others see.

The *mass* of a pattern is how much of dense attention's weight its keys have, see `attention_mass`. Each key/value head
gets one of the unions of `menu`. A union is measured as a whole: its mass is not the sum of its branches' masses.

Legend: n tokens; L layers; Hk key/value heads, whose query heads are averaged; O options; U units, each with a choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention.branches import Branch, Dense, Dilated, Prefix, Strided, Window
from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import Pattern

Option = tuple[Branch, ...]  # what one head sees
FIRST = Prefix(4)  # on which models put attention that they need nowhere else
KEPT = ("mass", "output")


def alone(n: int) -> dict[str, Option]:
    """Branches by themselves, to be looked at."""
    windows = {f"window {w:,}": (Window(w - 1),) for share in (64, 16, 4) if (w := n // share)}
    return {"first 4": (FIRST,), **windows, "dilated by 4": (Dilated(n, 4),), "strided by 16": (Strided(16),)}


def menu(n: int) -> list[Option]:
    """What a head may see: near tokens and the first ones, perhaps with far ones; or all."""
    windows = dict.fromkeys(Window(max(1, n // share) - 1) for share in (128, 64, 32, 16, 8))
    far = [(), *((Strided(r),) for r in (64, 32, 16, 8)), *((Dilated(n, r),) for r in (16, 4))]
    return [*((near, FIRST, *some) for near in windows for some in far), (Dense(),)]


def measured(model: Any, rows: Tensor, options: Sequence[Option]) -> Tensor:
    """What each option keeps in each layer and key/value head, of its mass and of its output, (2, L, O, Hk).

    Of the output: 1 - the mean square of its change / that of the output. There, mass that is lost counts by how much
    the values of unseen keys differ from those seen: a head that takes a mean of all tokens loses mass and little else.
    """
    found: dict[int, list[Tensor]] = {}

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
        def attend(option: Option) -> tuple[Tensor, Tensor]:
            given: Any = {"is_causal": True, "scale": scale, "enable_gqa": True, "return_lse": True}
            out, lse = dilated_attention(q, k, v, Pattern(option), **given)
            return out.double(), lse

        out, lse = attend((Dense(),))  # once, which `attention_mass` would compute for each option
        kept = []
        for some, some_lse in map(attend, options):
            lost = (some - out).square().sum((0, 1, 3)) / out.square().sum((0, 1, 3))
            kept.append(torch.stack([(some_lse - lse).exp().clamp(max=1).mean((0, 1)), 1 - lost]))
        by_head = torch.stack(kept, 1)
        found.setdefault(layer, []).append(by_head.view(*by_head.shape[:2], k.shape[2], -1).mean(3).cpu())

    with torch.no_grad():
        for row in rows:
            model.watch(row.unsqueeze(0), look)
    return torch.stack([torch.stack(found[layer]).mean(0) for layer in sorted(found)], 1)


def choose(cost: Tensor, kept: Tensor, room: float) -> list[int]:
    """For each unit the option that it gets, given what options cost (O,) and what a unit keeps with each (U, O).

    All begin with the cheapest. Then, again and again, the change that keeps most for what it costs more is made,
    anywhere; until none that fits into ``room`` keeps more.
    """
    at = torch.full((len(kept), 1), int(cost.argmin()))
    room -= float(cost.min()) * len(kept)
    while True:
        more = cost - cost[at]
        rate = ((kept - kept.gather(1, at)) / more).masked_fill((more <= 0) | (more > room), 0)
        unit, option = divmod(int(rate.argmax()), len(cost))
        if rate[unit, option] <= 0:
            return at.flatten().tolist()
        room -= float(more[unit, option])
        at[unit] = option


def joined(options: Sequence[Option]) -> Pattern:
    """The pattern of a layer whose key/value heads see these."""
    heads: dict[Branch, list[int]] = {}
    for head, option in enumerate(options):
        for branch in option:
            heads.setdefault(branch, []).append(head)
    every = len(options)
    return Pattern([dataclasses.replace(x, heads=None if len(some) == every else some) for x, some in heads.items()])


def share_of(pattern: Pattern, n: int, kv_heads: int) -> float:
    """Its pairs as a share of dense attention's."""
    return pattern.pairs(n, kv_heads, is_causal=True) / Pattern([Dense()]).pairs(n, kv_heads, is_causal=True)


@dataclass(frozen=True)
class Fit:
    """What was chosen; lists are by layer, and inside by key/value head. Layers that were not dense keep all."""

    patterns: tuple[Pattern, ...]
    share: float  # of dense attention's pairs
    shares: list[list[float]]
    kept: list[list[list[float]]]  # KEPT
    alone: dict[str, list[list[float]]]  # masses of branches by themselves


def fit(model: Any, rows: Tensor, budget: float, by: str = "output") -> Fit:
    """Chooses patterns with at most ``budget`` of dense attention's pairs in such rows of tokens (B, n).

    ``by``: what they are to keep, the "output" of the heads or the "mass". Layers that are not dense stay as they are.
    """
    n, options, single = rows.shape[1], menu(rows.shape[1]), alone(rows.shape[1])
    found = measured(model, rows, [*options, *single.values()])
    heads, patterns = found.shape[3], [*model.patterns]
    shares = torch.tensor([[share_of(x, n, heads)] * heads for x in patterns], dtype=torch.float64)  # (L, Hk)
    kept, dense = torch.ones_like(shares).repeat(2, 1, 1), shares[:, 0] >= 1
    cost = torch.tensor([share_of(Pattern(option), n, 1) for option in options], dtype=torch.float64)
    room = budget * shares.numel() - float(shares[~dense].sum())  # in heads
    if not dense.any():
        raise ValueError(f"no layer sees all of {n} tokens: there is nothing to choose")
    if room < (least := float(cost.min() * shares[dense].numel())):
        enough = min(1, math.ceil(1e4 * (budget + (least - room) / shares.numel())) / 1e4)
        raise ValueError(f"--budget must be at least {enough:.4f} in {n} tokens")
    free = found[:, dense, : len(options)]  # (2, layers, O, Hk)
    picked = torch.tensor(choose(cost, free[KEPT.index(by)].mT.flatten(0, 1), room)).view(-1, heads)
    shares[dense] = cost[picked]
    kept[:, dense] = free.gather(2, picked[None, :, None].expand(2, -1, -1, -1)).squeeze(2)
    for layer, numbers in zip(dense.nonzero().flatten().tolist(), picked.tolist(), strict=True):
        patterns[layer] = joined([options[number] for number in numbers])
    looked_at = dict(zip(single, found[0, :, len(options) :].transpose(0, 1).tolist(), strict=True))
    return Fit(tuple(patterns), float(shares.mean()), shares.tolist(), kept.tolist(), looked_at)
