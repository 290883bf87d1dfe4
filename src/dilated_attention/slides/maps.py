"""Attention maps of a slide: the exact weights of some queries over all tiles, and where the tiles are.

Legend: L tiles; the maps are (Q, layers, heads, L), for Q queries. A query is the class token or a tile.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy
import torch
from torch import Tensor

from dilated_attention.models import SlideEncoder, explain

Query = int | Literal["cls"]
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
MOST_BYTES = 32 * 2**20  # of weights on a page; a third is added by their encoding as text
STEP = 32 / 65534  # between two codes, of the logarithm of a weight: a weight is rounded by 0.03 % at most


@dataclass(frozen=True)
class Thumbnail:
    """A picture of the whole slide, and the size of the slide in the pixels of the coordinates."""

    file: Path
    width: float
    height: float

    def url(self) -> str:
        return f"data:{PICTURES[self.file.suffix]};base64,{base64.b64encode(self.file.read_bytes()).decode()}"


@dataclass(frozen=True)
class Maps:
    """The weights of some queries over all tiles, and where the tiles are."""

    name: str
    coords: Tensor  # (L, 2), in pixels
    tile_size: float
    queries: tuple[Query, ...]
    weights: Tensor  # (Q, layers, heads, L)
    zero_share: Tensor  # (Q, layers, heads): of the zero keys
    cls_share: Tensor  # (Q, layers, heads): of the class token as a key
    thumbnail: Thumbnail | None = None

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of what is drawn, in pixels of the coordinates: the thumbnail or all tiles."""
        if self.thumbnail is not None:
            return 0.0, 0.0, self.thumbnail.width, self.thumbnail.height
        left, top = self.coords.amin(0).tolist()
        right, bottom = (self.coords.amax(0) + self.tile_size).tolist()
        return left, top, right - left, bottom - top


def spread(model: SlideEncoder, tiles: int, most: int = 16) -> tuple[Query, ...]:
    """Chooses the queries to draw: "cls" and up to ``most`` tiles at even distances along the sequence.

    They are fewer if their maps would take more than 32 MiB in the page.
    """
    layers = model.encoder.layers
    attention = layers[0].self_attn
    seen = attention.pattern.pairs(tiles, attention.num_heads) // tiles  # keys of a query on average, of all heads
    rows = int(MOST_BYTES / (len(layers) * (2 * seen + attention.num_heads * tiles / 8))) - 1
    rows = max(0, min(most, rows, tiles))
    return ("cls", *((2 * index + 1) * tiles // (2 * rows) for index in range(rows)))


@torch.no_grad()
def collect(
    model: SlideEncoder, tiles: Tensor, coords: Tensor, name: str, tile_size: float, thumbnail: Thumbnail | None = None
) -> Maps:
    """The attention weights of the queries that `spread` chooses in all layers and heads, on the CPU.

    ``tiles``: (L, in_chans); ``coords``: (L, 2), in pixels.
    """
    queries = spread(model, len(coords))
    states = model._explained(tiles, coords, tile_size)
    found = [explain.attention_map(model.encoder.layers, states, query, None, None) for query in queries]
    parts = [torch.stack([part.float().cpu() for part in parts]) for parts in zip(*found, strict=True)]
    weights, on_cls, on_zeros = parts
    return Maps(name, coords.double().cpu(), tile_size, queries, weights, on_zeros, on_cls, thumbnail)


def codes(weights: Tensor) -> tuple[bytes, bytes]:
    """Maps (..., L) in few bytes: a bit per weight that is not 0, and two bytes for each such weight, by its logarithm.

    Weights below 1e-14 count as 0. The bits of each map begin with a new byte.
    """
    found = (65535 + weights.double().log() / STEP).round().clamp(0, 65535)  # log(0) is -inf, and so 0
    dense = found.to(torch.int32).numpy().astype("<u2")
    return numpy.packbits(dense > 0, axis=-1).tobytes(), dense[dense > 0].tobytes()
