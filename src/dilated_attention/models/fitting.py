"""A pattern for a model that was trained with dense attention: which few heads stay full, and what the others see.

The *mass* of a pattern is how much of dense attention's weight its keys have, see `attention_mass`. Its *change* is how
much the loss depends on the keys that it leaves out. Each key/value head gets one of the unions of `menu`. A union is
measured as a whole: its mass is not the sum of its branches' masses.

Legend: n tokens; L layers; H heads; Hk key/value heads, each with the query heads that it serves; O options; U units,
each with a choice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention.branches import Branch, Dense, Dilated, Prefix, Strided, Window
from dilated_attention.branches.base import T
from dilated_attention.pattern import Pattern

Option = tuple[Branch, ...]  # what one head sees
Attend = Callable[[Pattern], tuple[Tensor, Tensor]]  # (1, n, H, D) and (1, n, H), the out and lse of a layer
FIRST = Prefix(4)  # on which models put attention that they need nowhere else
ALL = Pattern([Dense()])
STEPS = 2  # from the narrowest pattern to dense attention


def alone(n: int) -> dict[str, Option]:
    """Branches by themselves, to be looked at."""
    windows = {f"window {w:,}": (Window(w - 1),) for share in (64, 16, 4) if (w := n // share)}
    return {"first 4": (FIRST,), **windows, "dilated by 4": (Dilated(n, 4),), "strided by 16": (Strided(16),)}


def menu(n: int) -> list[Option]:
    """What a head may see: near tokens and the first ones, perhaps with far ones; or all."""
    windows = dict.fromkeys(Window(max(1, n // share) - 1) for share in (128, 64, 32, 16, 8))
    far = [(), *((Strided(r),) for r in (64, 32, 16, 8)), *((Dilated(n, r),) for r in (16, 4))]
    return [*((near, FIRST, *some) for near in windows for some in far), (Dense(),)]


@torch.no_grad()
def masses(model: Any, row: Tensor, options: Sequence[Option]) -> Tensor:
    """The mass of each option in each layer and key/value head, (L, O, Hk)."""
    found: dict[int, Tensor] = {}

    def look(layer: int, heads: int, attend: Attend) -> None:
        _, whole = attend(ALL)  # once, which `attention_mass` would compute for each option
        some = [(attend(Pattern(option))[1] - whole).exp().clamp(max=1).mean((0, 1)) for option in options]
        found[layer] = torch.stack(some).view(len(options), heads, -1).mean(2).double().cpu()

    model.losses(row, look)
    return torch.stack([found[layer] for layer in sorted(found)])


@torch.no_grad()
def changes(model: Any, row: Tensor, way: float, options: Sequence[Option], layers: Sequence[int]) -> Tensor:
    """How much the loss depends on what each option leaves out in some layers, (layers, O, Hk).

    What is left out changes the results of a head at a token. This change times the slope of the loss is squared, and
    summed over tokens. Of what a dense model is sure of, its loss has no slope, whatever it takes to know it: so slopes
    are taken on the ``way`` from the first option, 0, to dense attention, 1, on which all heads go together.
    """
    seen, pairs = list[tuple[int, Attend]](), list[Tensor]()

    def look(layer: int, heads: int, attend: Attend) -> Any:
        if layer not in layers:
            return None
        ends = zip(attend(Pattern(options[0])), attend(ALL), strict=True)
        here = [torch.lerp(few, every, way) for few, every in ends]
        pairs.extend(x if x.requires_grad else x.requires_grad_() for x in here)
        seen.append((heads, attend))
        return here

    with torch.enable_grad():
        loss = model.losses(row, look).sum()
    slopes = iter(torch.autograd.grad(loss, pairs, allow_unused=True, materialize_grads=True))
    found = []
    for (heads, attend), *slope in zip(seen, slopes, slopes, strict=True):
        every = attend(ALL)
        some: Any = [sum(map(along, slope, attend(Pattern(option)), every)) for option in options]
        found.append(torch.stack(some).square().sum((1, 2)).view(len(options), heads, -1).sum(2).cpu())
    return torch.stack(found)


def along(slope: Tensor, some: Tensor, every: Tensor) -> Tensor:
    """The change of the loss at each token and head, (1, n, H)."""
    return (slope.double() * (some.double() - every.double())).view(*slope.shape[:3], -1).sum(3)


def choose(cost: Tensor, lost: Tensor, room: float) -> list[int]:
    """For each unit the option that it gets, given what options cost a unit, and what it loses with them, (U, O).

    All begin with the cheapest. Then, again and again, the change that gains most for what it costs more is made,
    anywhere; until none that fits into ``room`` gains anything.
    """
    at = cost.argmin(1, keepdim=True)
    room -= float(cost.amin(1).sum())
    while True:
        more = cost - cost.gather(1, at)
        rate = ((lost.gather(1, at) - lost) / more).masked_fill((more <= 0) | (more > room), 0)
        unit, option = divmod(int(rate.argmax()), cost.shape[1])
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
    return pattern.pairs(n, kv_heads, is_causal=True) / ALL.pairs(n, kv_heads, is_causal=True)


@dataclass(frozen=True)
class Fit:
    """What was chosen; lists are by layer, and inside by key/value head. Layers that were not dense keep all."""

    patterns: tuple[Pattern, ...]
    share: float  # of dense attention's pairs
    shares: list[list[float]]
    mass: list[list[float]]
    kept: list[list[float]]  # of what the narrowest option loses: of the mass, or of what changes the loss
    alone: dict[str, list[list[float]]]  # masses of branches by themselves


def fit(
    model: Any, rows: Tensor, budget: float, by: str = "loss", tell: Callable[[float], Any] = lambda share: None
) -> Fit:
    """Chooses patterns with at most ``budget`` of dense attention's pairs in such rows of tokens (B, n).

    ``by``: what pairs are spent on: the model's "loss", which takes a backward pass, or the "mass". Layers that are not
    dense stay as they are. ``tell`` is called with the share of the work that is done.
    """
    n, options, single, patterns = rows.shape[1], menu(rows.shape[1]), alone(rows.shape[1]), [*model.patterns]
    heads = masses(model, rows[:1, :2], [(Dense(),)]).shape[2]  # two tokens tell how many there are
    given = [share_of(x, n, heads) for x in patterns]
    layers = [layer for layer, share in enumerate(given) if share >= 1]
    if not layers:
        raise ValueError(f"no layer sees all of {n} tokens: there is nothing to choose")
    alike = [[[option if x == head else () for x in range(heads)] for option in options] for head in range(heads)]
    cost = [[heads * share_of(joined(one), n, heads) for one in some] for some in alike]
    costs = torch.tensor([cost] * len(layers), dtype=torch.float64)  # (layers, Hk, O)
    room = heads * (budget * len(given) - sum(given) + len(layers))
    if room < (least := float(costs.amin(2).sum())):
        enough = min(1, math.ceil(1e4 * (budget + (least - room) / (heads * len(given)))) / 1e4)
        raise ValueError(f"--budget must be at least {enough:.4f} in {n} tokens")
    ways = [(step + 0.5) / STEPS for step in range(STEPS)] if by == "loss" else []
    turns = itertools.count(1)

    def told(found: T) -> T:
        tell(next(turns) / (len(rows) * (1 + len(ways))))
        return found

    each = torch.split(rows, 1)
    mass = torch.stack([told(masses(model, row, [*options, *single.values()])) for row in each]).mean(0)
    free = mass[layers, : len(options)].mT
    lost = [told(changes(model, row, way, options, layers)).mT for row in each for way in ways]
    missed = torch.stack(lost).sum(0) if lost else 1 - free
    picked = torch.tensor(choose(costs.flatten(0, 1), missed.flatten(0, 1), room)).view(-1, heads)
    found = torch.stack((costs, free, 1 - missed / missed[..., :1].clamp(min=1e-300)))
    every = torch.ones(3, len(given), heads, dtype=torch.float64)
    every[0] *= torch.tensor(given).unsqueeze(1)
    every[:, layers] = found.gather(3, picked.expand(3, -1, -1).unsqueeze(3)).squeeze(3)
    for layer, numbers in zip(layers, picked.tolist(), strict=True):
        patterns[layer] = joined([options[number] for number in numbers])
    looked_at = dict(zip(single, mass[:, len(options) :].transpose(0, 1).tolist(), strict=True))
    shares, weights, kept = every.tolist()
    return Fit(tuple(patterns), float(every[0].mean()), shares, weights, kept, looked_at)
