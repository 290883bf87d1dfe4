"""What a language model from disk is worth: bits by position, and recall by distance, on rows of somebody's text.

Legend: rows (B, n) of tokens; losses (B, n - 1); a question of recall is answered by WIDTH bytes, a few tokens.
"""

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
NEAR = 64  # tokens, or bytes, at the beginning that are counted together


def read(paths: Sequence[Path]) -> bytes:
    """The text of files, and of all files in folders whose names end in SUFFIXES."""
    texts = []
    for path in paths:
        inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        texts += [file.read_bytes() for file in (inside if path.is_dir() else [path])]
    return b"\n".join(texts)


def rows_of(model: Any, text: bytes, n: int, most: int) -> Tensor:
    """At most so many rows of n tokens, from all over the text; each begins as a text does."""
    begin, room = model.tokens(b""), LONGEST * n
    inside, is_long = n - len(begin), len(text) > most * room
    rows: list[list[int]] = []
    for start in range(0, len(text), len(text) // most) if is_long else [0]:
        found = model.tokens(text[start : start + room] if is_long else text, False)
        stops = range(inside, len(found) + 1, inside)
        rows += [[*begin, *found[stop - inside : stop]] for stop in (stops[:1] if is_long else stops)]
    if not rows:
        raise ValueError(f"the text does not fill a row of {n:,} tokens: give more --data, or fewer --tokens")
    return torch.tensor(rows[:: -(-len(rows) // most)])


def by_position(model: Any, rows: Tensor, device: Any = None) -> list[dict[str, Any]]:
    """The mean bits of the tokens first to last, which double; the first token is not predicted."""
    with torch.no_grad():
        bits = torch.cat([model.losses(row.to(device)).double().cpu() for row in rows.split(1)]) / math.log(2)
    edges = [1, *itertools.takewhile(lambda x: x < rows.shape[1], (NEAR << i for i in range(40))), rows.shape[1]]
    bins = itertools.pairwise(dict.fromkeys(edges))
    return [{"first": a, "last": b - 1, "bits": bits[:, a - 1 : b - 1].mean().item()} for a, b in bins]


def planted(text: bytes, n: int, most: int, seed: int = 0) -> recall.Planted:
    """Rows of n bytes with questions about facts planted in them, at distances that double."""
    distances = [*itertools.takewhile(lambda x: x < n // 2, (recall.LEAST << i for i in range(40)))]
    count = min(most, len(text) // n)
    if not count or not distances:
        raise ValueError(
            f"recall needs rows of more than {2 * recall.LEAST} tokens, and as many bytes of text, got {n}"
        )
    rows = [text[at : at + n] for at in range(0, len(text) - n + 1, len(text) // count)][:count]
    given = torch.stack([torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in rows])
    return recall.plant(given, distances, questions=max(1, n // 128), seed=seed)


@torch.no_grad()
def recalled(model: Any, asked: recall.Planted, device: Any = None) -> Tensor:
    """Which answers are right, (Q,) bool: each token is the likeliest one after the true ones before it.

    An answer has tokens of its own, whatever a tokenizer would join them with.
    """
    right = torch.zeros(len(asked.rows), dtype=torch.bool)
    for row, letters in enumerate(asked.tokens):
        text, ids, last = bytes(letters.tolist()), model.tokens(b""), 0
        spans = {}
        for question in sorted((asked.rows == row).nonzero().flatten().tolist(), key=asked.places.__getitem__):
            place = int(asked.places[question])
            ids += model.tokens(text[last:place], False)
            last = place + recall.WIDTH
            answer = model.tokens(text[place:last], False)
            spans[question] = range(len(ids), len(ids) + len(answer))
            ids += answer
        tokens = torch.tensor([ids], device=device)
        places = torch.tensor([at for span in spans.values() for at in span], device=device)
        hits = (model.logits(tokens, places - 1).argmax(-1) == tokens[:, places])[0].cpu()
        for question, some in zip(spans, hits.split([*map(len, spans.values())]), strict=True):
            right[question] = some.all()
    return right
