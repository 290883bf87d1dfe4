"""Digit slides: a task that needs the places of tiles. The slide encoder learns it from scratch; a mean cannot.

    python examples/digit_slides.py                # small, on a CPU; also writes digits.npz
    python examples/digit_slides.py --form large   # 2,000 to 10,000 tiles per slide, on a GPU

A tile is a handwritten digit of 8 × 8 pixels, and a slide is a grid with tiles on some places, six of them 9s. In class
1 these lie in pairs, at most five tiles apart in x and y; in class 0 no two are so near. Test slides have other digits.
"""

import argparse
import math
import time
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention.models import SlideEncoder

NEAR, NINES, FEWEST = 5, 6, 12  # tiles apart; 9s of a slide; tiles of the first training slides
WIDTH, PIXELS = 64, 256  # of the model; the side of a tile in the units of coordinates
# the side of the grid, tiles of test slides, steps, tiles of a step
FORMS = {"small": (48, (500,), 1200, 2048), "large": (100, (2000, 5000, 10000), 6000, 80000)}


def load(file: Path) -> list[Tensor]:
    """Pixels (1797, 64), and which digit they show: from the file, which is written first if it is not there."""
    if not file.exists():
        from sklearn.datasets import load_digits

        numpy.savez_compressed(file, *load_digits(return_X_y=True))
    with numpy.load(file) as found:
        return [torch.from_numpy(part) for part in found.values()]


class Slides:
    """Makes slides of some of the digits; classes 0 and 1 in turn."""

    def __init__(self, pixels: Tensor, numbers: Tensor, side: int, seed: int) -> None:
        self.nines, self.others, self.side = pixels[numbers == 9], pixels[numbers != 9], side
        self.drawn = {"generator": torch.Generator(pixels.device).manual_seed(seed), "device": pixels.device}

    def make(self, count: int, tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tiles (count, tiles, 64), coordinates, classes, and which tiles are 9s."""
        label = torch.arange(count, device=self.nines.device) % 2
        order = torch.rand(count, self.side**2, **self.drawn).scatter_(1, self._nines(label == 1), -1.0)
        place = order.topk(tiles, dim=1, largest=False).indices.sort(1).values  # the 9s and others, row by row
        is_nine = order.gather(1, place) < 0
        pixels = self.others[torch.randint(len(self.others), (count, tiles), **self.drawn)]
        pixels[is_nine] = self.nines[torch.randint(len(self.nines), (count * NINES,), **self.drawn)]
        return (pixels - 4.9) / 6, torch.stack([place % self.side, place // self.side], -1) * PIXELS, label, is_nine

    def _nines(self, paired: Tensor) -> Tensor:
        """Where the 9s are, drawn again until every slide is of its class."""
        found, todo = torch.zeros(len(paired), NINES, 2, dtype=torch.long, device=paired.device), paired | True
        same = 999 * torch.eye(NINES, dtype=torch.long, device=paired.device)
        while todo.any():
            place = torch.randint(self.side, found.shape, **self.drawn)
            beside = place[:, ::2] + torch.randint(-NEAR, NEAR + 1, place[:, ::2].shape, **self.drawn)
            place[:, 1::2] = torch.where(paired[:, None, None], beside, place[:, 1::2])
            apart = ((place[:, :, None] - place[:, None]).abs().amax(-1) + same).flatten(1).amin(1)
            inside = ((place >= 0) & (place < self.side)).flatten(1).all(1)
            good = todo & inside & (apart > 0) & ((apart <= NEAR) == paired)
            found[good], todo = place[good], todo & ~good
        return found[..., 1] * self.side + found[..., 0]


class Classifier(nn.Module):
    """An MLP on each tile; then the slide encoder and the log-sum-exp of tiles' scores, or a score of the mean."""

    def __init__(self, side: int | None) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.score, self.encoder = nn.Linear(WIDTH, 1), None
        if side is not None:
            size = {"max_wsi_size": PIXELS * 2 ** math.ceil(math.log2(side)), "dropout": 0.0, "drop_path_rate": 0.0}
            self.encoder = SlideEncoder(WIDTH, WIDTH, 2, 4, **size, global_pool=True)

    def scores(self, tiles: Tensor, coords: Tensor) -> Tensor:
        return self.score(self.encoder(self.mlp(tiles), coords, per_tile=True)[0])[..., 0]

    def forward(self, tiles: Tensor, coords: Tensor) -> Tensor:
        if self.encoder is None:
            return self.score(self.mlp(tiles).mean(1))[:, 0]
        return self.scores(tiles, coords).logsumexp(1) - math.log(FEWEST)


def train(model: Classifier, slides: Slides, most: int, steps: int, batch: int) -> None:
    """On slides of few tiles at first, among which the 9s are soon found; then on slides of all sizes."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for step in range(steps):
        done = step / steps
        size = min(1, max(0, done - 0.35) / 0.45) * min(1, 2 * float(torch.rand(())))  # 0: FEWEST tiles, 1: most
        tiles = round(FEWEST * (most / FEWEST) ** size)
        pixels, coords, label, _ = slides.make(min(1024, max(4, batch // tiles // 2 * 2)), tiles)
        loss = F.binary_cross_entropy_with_logits(model(pixels + torch.randn_like(pixels) / 2, coords), label.float())
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 100, 2 - 2 * done)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def auc(model: Classifier, slides: Slides, tiles: int) -> float:
    """The chance that a slide of class 1 has a higher score than one of class 0."""
    scores = torch.cat([model(*slides.make(10, tiles)[:2]) for _ in range(40)]).view(-1, 2).T
    return (scores[1][:, None] > scores[0]).float().mean().item()


@torch.no_grad()
def share_on_nines(model: Classifier, slides: Slides, tiles: int) -> Tensor:
    """Where the tile with the highest score looks in slides of class 1: the weight on 9s, by layer and head."""
    total = 0.0
    for _ in range(20):
        pixels, coords, _, is_nine = (part[1:] for part in slides.make(2, tiles))
        query = int(model.scores(pixels, coords).argmax())
        weights = model.encoder.attention_map(model.mlp(pixels), coords, query, layer=None).tiles
        total += weights[..., is_nine[0]].sum(-1) / 20
    return total


def run(form: str, digits: Path) -> dict[str, float]:
    side, sizes, steps, batch = FORMS[form]
    device, (pixels, numbers), found = "cuda" if torch.cuda.is_available() else "cpu", load(digits), {}
    torch.manual_seed(0)
    order, pixels, numbers = torch.randperm(len(pixels)), pixels.float().to(device), numbers.to(device)
    for name in ("encoder", "mean"):
        model, start = Classifier(side if name == "encoder" else None).to(device), time.monotonic()
        train(model, Slides(pixels[order[360:]], numbers[order[360:]], side, seed=1), sizes[-1], steps, batch)
        took, test = time.monotonic() - start, Slides(pixels[order[:360]], numbers[order[:360]], side, seed=2)
        for tiles in sizes:
            found[f"{name} {tiles}"] = auc(model.eval(), test, tiles)
            print(f"{name}, trained in {took:.0f} s: AUC {found[f'{name} {tiles}']:.3f} at {tiles:,} tiles", flush=True)
        if model.encoder:
            found["share"] = (share := share_on_nines(model, test, sizes[-1])).max().item()
            print("weight on the 9s by layer and head:", [[round(one, 3) for one in head] for head in share.tolist()])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the slide encoder on digit slides, and a mean of tiles.")
    parser.add_argument("--form", choices=FORMS, default="small", help="small: 500 tiles, on a CPU; large: on a GPU")
    parser.add_argument("--digits", type=Path, default="digits.npz", help="written with scikit-learn if it is missing")
    run(**vars(parser.parse_args()))
