"""Digit slides: a task that needs the places of tiles. The slide encoder learns it from scratch; a mean cannot.

    python examples/digit_slides.py                     # small, on a CPU
    python examples/digit_slides.py --form large        # 2,000 to 10,000 tiles per slide, on a GPU
    python examples/digit_slides.py --save-digits digits.npz   # for a machine without scikit-learn: --digits digits.npz

A tile is a handwritten digit of 8 × 8 pixels (scikit-learn's), and a slide is a grid with tiles on some of its places.
Each slide has the same few 9s. In a slide of class 1, they lie in pairs, at most five tiles apart in x and in y. In a
slide of class 0, no two 9s are so near. Test slides are made of digits that no training slide has.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention.models import SlideEncoder

NEAR, NINES, FEWEST = 5, 6, 12  # tiles apart; 9s per slide; tiles of the smallest training slide
TILE = 256  # pixels of a tile, in coordinates


@dataclass(frozen=True)
class Form:
    side: int  # of the grid
    tiles: tuple[int, int]  # of test slides, from and to
    steps: int
    batch: int  # tiles per step
    width: int = 64
    depth: int = 2
    heads: int = 4
    rate: float = 3e-3  # learning rate


FORMS = {
    "small": Form(side=48, tiles=(400, 600), steps=1500, batch=3072),
    "large": Form(side=100, tiles=(2000, 10000), steps=4000, batch=80000),
}


def digits(file: Path | None) -> tuple[Tensor, Tensor]:
    """Pixels (1797, 64) with mean 0 and standard deviation 1, and what they show."""
    if file is None:
        from sklearn.datasets import load_digits

        pixels, numbers = load_digits(return_X_y=True)
    else:
        with numpy.load(file) as found:
            pixels, numbers = found["pixels"], found["numbers"]
    pixels = torch.from_numpy(pixels).float()
    return (pixels - pixels.mean()) / pixels.std(), torch.from_numpy(numbers)


class Slides:
    """Makes slides from some of the digits."""

    def __init__(self, pixels: Tensor, numbers: Tensor, side: int, seed: int) -> None:
        self.nines, self.others, self.side = pixels[numbers == 9], pixels[numbers != 9], side
        self.generator = torch.Generator(pixels.device).manual_seed(seed)

    def make(self, count: int, tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tiles, coordinates, classes (0 and 1 in turn), and which tiles are 9s."""
        device, draw = self.nines.device, {"generator": self.generator, "device": self.nines.device}
        at = self._nines(count)
        order = torch.rand(count, self.side**2, **draw).scatter_(1, at, -1.0)  # the 9s always stay
        place = order.topk(tiles, dim=1, largest=False).indices.sort(1).values  # row by row
        is_nine = torch.zeros(count, self.side**2, dtype=torch.bool, device=device).scatter_(1, at, True).gather(1, place)
        pixels = self.others[torch.randint(len(self.others), (count, tiles), **draw)]
        pixels[is_nine] = self.nines[torch.randint(len(self.nines), (count * NINES,), **draw)]
        coords = torch.stack([place % self.side, place // self.side], dim=-1) * TILE
        return pixels, coords, torch.arange(count, device=device) % 2, is_nine

    def _nines(self, count: int) -> Tensor:
        """Places (count, NINES), drawn again until each slide is of its class."""
        device, draw = self.nines.device, {"generator": self.generator, "device": self.nines.device}
        wanted = torch.arange(count, device=device) % 2 == 1
        found, todo = torch.zeros(count, NINES, 2, dtype=torch.long, device=device), torch.ones_like(wanted)
        while todo.any():
            place = torch.randint(self.side, (count, NINES, 2), **draw)
            beside = place[:, ::2] + torch.randint(-NEAR, NEAR + 1, (count, NINES // 2, 2), **draw)
            place[:, 1::2] = torch.where(wanted[:, None, None], beside, place[:, 1::2])
            apart = (place[:, :, None] - place[:, None]).abs().amax(-1) + 999 * torch.eye(NINES, device=device).long()
            inside = ((place >= 0) & (place < self.side)).flatten(1).all(1) & (apart.flatten(1).amin(1) > 0)
            good = todo & inside & ((apart <= NEAR).flatten(1).any(1) == wanted)
            found[good], todo = place[good], todo & ~good
        return found[..., 1] * self.side + found[..., 0]


class Encoded(nn.Module):
    """The slide encoder, a score for each tile, and the log-sum-exp of the scores."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        across = max(32, 2 ** math.ceil(math.log2(form.side)))
        self.encoder = SlideEncoder(
            64, form.width, form.depth, form.heads, tile_size=TILE, max_wsi_size=across * TILE,
            dropout=0.0, drop_path_rate=0.0, global_pool=True,
        )  # fmt: skip
        self.score = nn.Linear(form.width, 1)
        nn.init.constant_(self.score.bias, -math.log(FEWEST))

    def scores(self, tiles: Tensor, coords: Tensor) -> Tensor:
        return self.score(self.encoder(tiles, coords, per_tile=True)[0])[..., 0]

    def forward(self, tiles: Tensor, coords: Tensor) -> Tensor:
        return self.scores(tiles, coords).logsumexp(1)


class Averaged(nn.Module):
    """The baseline: an MLP on each tile and its place, and the mean of its outputs."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.side = form.side * TILE
        sizes = (66, 4 * form.width, 4 * form.width)
        self.mlp = nn.Sequential(*(part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.GELU())))
        self.score = nn.Linear(sizes[-1], 1)

    def forward(self, tiles: Tensor, coords: Tensor) -> Tensor:
        return self.score(self.mlp(torch.cat([tiles, coords / self.side], dim=-1)).mean(1))[:, 0]
