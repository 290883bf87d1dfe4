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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention.branches import Branch, Dense, Dilated, Prefix, Strided, Window
from dilated_attention.branches.base import T
from dilated_attention.pattern import Pattern

Option = tuple[Branch, ...]  # what one head sees
Pair = tuple[Tensor, Tensor]  # (1, n, H, D) and (1, n, H), the out and lse of a layer
Attend = Callable[[Pattern], Pair]
FIRST = Prefix(4)  # on which models put attention that they need nowhere else
ALL = Pattern([Dense()])
STEPS = 2  # from the narrowest pattern to dense attention
BY = ("loss", "mass")
TINY = 1e-300


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
def masses(model: Any, rows: Iterable[Tensor], options: Sequence[Option]) -> Tensor:
    """The mass of each option in each layer and key/value head, (L, O, Hk)."""
    found: dict[int, list[Tensor]] = {}

    def look(layer: int, heads: int, attend: Attend) -> None:
        _, whole = attend(ALL)  # once, which `attention_mass` would compute for each option
        some = [(attend(Pattern(option))[1] - whole).exp().clamp(max=1).mean((0, 1)) for option in options]
        found.setdefault(layer, []).append(torch.stack(some).view(len(options), heads, -1).mean(2).cpu())

    for row in rows:
        model.losses(row.unsqueeze(0), look)
    return torch.stack([torch.stack(found[layer]).double().mean(0) for layer in sorted(found)])


@torch.no_grad()
def changes(
    model: Any, ways: Iterable[tuple[Tensor, float]], options: Sequence[Option], layers: Sequence[int]
) -> Tensor:
    """How much the loss depends on what each option leaves out in some layers, (layers, O, Hk).

    What is left out changes the results of a head at a token. This change times the slope of the loss is squared, and
    summed over tokens. Of what a dense model is sure of, its loss has no slope, whatever it takes to know it: so slopes
    are taken on the way from the first option to dense attention, on which all heads go together. ``ways``: rows, and
    how far on it.
    """
    found: list[Any] = [0] * len(layers)
    for row, way in ways:
        for index, (heads, attend, given) in enumerate(slopes(model, row, Pattern(options[0]), way, layers)):
            whole = attend(ALL)
            some: Any = [sum(map(change, given, attend(Pattern(option)), whole)) for option in options]
            found[index] += torch.stack(some).square().sum((1, 2)).view(len(options), heads, -1).sum(2).cpu()
    return torch.stack(found)


def slopes(model: Any, row: Tensor, narrow: Pattern, way: float, layers: Sequence[int]) -> list[tuple[Any, ...]]:
    """Of each layer: its heads, what it can do, and the slopes of the loss for its out and lse; so far on the way."""
    seen, pairs = list[tuple[int, Attend]](), list[Tensor]()

    def look(layer: int, heads: int, attend: Attend) -> Any:
        if layer not in layers:
            return None
        here = [torch.lerp(few, every, way) for few, every in zip(attend(narrow), attend(ALL), strict=True)]
        here = [x if x.requires_grad else x.requires_grad_() for x in here]
        seen.append((heads, attend))
        pairs.extend(here)
        return here

    with torch.enable_grad():
        grads = torch.autograd.grad(model.losses(row.unsqueeze(0), look).sum(), pairs, allow_unused=True)
    return [(*one, grads[2 * index : 2 * index + 2]) for index, one in enumerate(seen)]


def change(slope: Tensor | None, some: Tensor, whole: Tensor) -> Tensor | float:
    """Of the loss, at each token and head, (1, n, H). ``slope`` None: it does not depend on these."""
    return (
        0.0 if slope is None else (slope.double() * (some.double() - whole.double())).view(*slope.shape[:3], -1).sum(3)
    )


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
    return pattern.pairs(n, kv_heads, is_causal=True) / Pattern([Dense()]).pairs(n, kv_heads, is_causal=True)


@torch.no_grad()
def kv_heads_of(model: Any, rows: Tensor) -> int:
    found: list[int] = []
    model.losses(rows[:1, :2], lambda layer, heads, attend: found.append(heads))
    return found[0]


def cost_of(options: Sequence[Option], head: int, n: int, kv_heads: int) -> list[float]:
    """The pairs that a head would have, as a share of its pairs in dense attention."""
    alone = ([option if other == head else () for other in range(kv_heads)] for option in options)
    return [kv_heads * share_of(joined(one), n, kv_heads) for one in alone]


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
    heads = kv_heads_of(model, rows)
    given = [share_of(x, n, heads) for x in patterns]
    layers = [layer for layer, share in enumerate(given) if share >= 1]
    if not layers:
        raise ValueError(f"no layer sees all of {n} tokens: there is nothing to choose")
    cost = torch.tensor([cost_of(options, head, n, heads) for head in range(heads)], dtype=torch.float64)
    room = heads * (budget * len(given) - sum(given) + len(layers))
    if room < (least := float(cost.amin(1).sum() * len(layers))):
        enough = min(1, math.ceil(1e4 * (budget + (least - room) / (heads * len(given)))) / 1e4)
        raise ValueError(f"--budget must be at least {enough:.4f} in {n} tokens")
    ways = [(row, (step + 0.5) / STEPS) for row in rows for step in range(STEPS)] if by == "loss" else []
    turns = itertools.count(1)

    def told(items: Iterable[T]) -> Iterator[T]:
        for item in items:
            yield item
            tell(next(turns) / (len(rows) + len(ways)))

    mass = masses(model, told(rows), [*options, *single.values()])
    free = mass[layers, : len(options)].mT  # (layers, Hk, O)
    lost = changes(model, told(ways), options, layers).mT if ways else 1 - free
    costs = cost.expand_as(lost)
    picked = torch.tensor(choose(costs.flatten(0, 1), lost.flatten(0, 1), room)).view(-1, heads)
    found = torch.stack((costs, free, 1 - lost / lost[..., :1].clamp(min=TINY)))
    every = torch.ones(3, len(given), heads, dtype=torch.float64)
    every[0] *= torch.tensor(given).unsqueeze(1)
    every[:, layers] = found.gather(3, picked.expand(3, -1, -1).unsqueeze(3)).squeeze(3)
    for layer, numbers in zip(layers, picked.tolist(), strict=True):
        patterns[layer] = joined([options[number] for number in numbers])
    looked_at = dict(zip(single, mass[:, len(options) :].transpose(0, 1).tolist(), strict=True))
    shares, weights, kept = every.tolist()
    return Fit(tuple(patterns), float(every[0].mean()), shares, weights, kept, looked_at)
