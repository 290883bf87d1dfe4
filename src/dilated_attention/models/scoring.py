"""What a language model from disk is worth on somebody's text: bits by position, and recall by distance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.models import recall

SUFFIXES = (".txt", ".md", ".py")
LONGEST = 8  # bytes of a token, nearly always
NEAR = 64  # tokens at the beginning that are counted together


def files(paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files, and all files in the folders whose names end so, in the order of their names."""
    found = []
    for path in paths:
        found += sorted(x for x in path.rglob("*") if x.suffix in suffixes and x.is_file()) if path.is_dir() else [path]
    return found


def read(paths: Sequence[Path]) -> bytes:
    return b"\n".join(file.read_bytes() for file in files(paths))


def pieces(text: bytes, n: int, most: int, width: int) -> list[bytes]:
    """At most so many pieces of a text, from all over it, each ``n`` bytes or more after the one before."""
    return [text[at : at + width] for at in range(0, len(text), max(n, -(-len(text) // most)))]


def rows_of(model: Any, text: bytes, n: int, most: int) -> Tensor:
    """At most so many rows of n tokens, from all over the text; each begins as a text does."""
    rows = [found for piece in pieces(text, n, most, LONGEST * n) if len(found := model.tokens(piece)[:n]) == n]
    if not rows:
        raise ValueError(f"the text does not fill a row of {n:,} tokens: give more --data, or fewer --tokens")
    return torch.tensor(rows)


@torch.no_grad()
def by_position(model: Any, rows: Tensor) -> list[dict[str, Any]]:
    """The mean bits of the tokens from first to last: the first token of a row is not predicted."""
    n, bits = rows.shape[1], torch.cat([model.losses(row).double().cpu() for row in torch.split(rows, 1)]) / math.log(2)
    edges = [1, *(NEAR << i for i in range(((n - 1) // NEAR).bit_length())), n]
    return [
        {"first": a, "last": b - 1, "bits": float(bits[:, a - 1 : b - 1].mean())} for a, b in itertools.pairwise(edges)
    ]


def planted(text: bytes, n: int, most: int, seed: int = 0) -> recall.Planted:
    """Rows of n bytes with facts planted in them, and questions at distances that double."""
    distances = [recall.LEAST << i for i in range(((n - 1) // (2 * recall.LEAST)).bit_length())]
    rows = [piece for piece in pieces(text, n, most, n) if len(piece) == n]
    if not (rows and distances):
        raise ValueError(f"recall needs rows of more than {2 * recall.LEAST} bytes and a text that fills one, got {n}")
    given = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, n)
    return recall.plant(given, distances, questions=max(1, n // 128), seed=seed)


@torch.no_grad()
def recalled(model: Any, asked: recall.Planted, device: Any = None) -> Tensor:
    """Which answers are right, (Q,) bool: each token is the likeliest one after the true ones before it.

    An answer has tokens of its own, whatever a tokenizer would join them with.
    """
    right = torch.zeros(len(asked.rows), dtype=torch.bool)
    for row, letters in enumerate(asked.tokens):
        text, ids, last = bytes(letters.tolist()), model.tokens(b""), 0
        mine, at, sizes = (asked.rows == row).nonzero().flatten(), list[int](), list[int]()
        mine = mine[asked.places[mine].argsort()]
        for place in asked.places[mine].tolist():
            ids += model.tokens(text[last:place], False)
            last = place + recall.WIDTH
            answer = model.tokens(text[place:last], False)
            at += range(len(ids), len(ids) + len(answer))
            ids += answer
            sizes.append(len(answer))
        tokens, places = torch.tensor([ids], device=device), torch.tensor(at, device=device)
        hits = (model.logits(tokens, places - 1).argmax(-1) == tokens[:, places])[0].cpu()
        right[mine] = torch.stack([some.all() for some in torch.split(hits, sizes)])
    return right
