"""The data of benchmarks/tasks.py: Python files of installed packages, with facts planted in them, and questions.

Legend: text (T,) and sequences (S, n), uint8; inputs and labels (B, n), int64, where labels[i] is what comes after
inputs[0 .. i], and inputs[0] is a token that only begins: every byte is predicted once.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.models import recall

BEGIN = 256  # the token before the first byte
SHARE = 0.1  # of all bytes, at most, are in packages that are held out
MOST = 8  # sequences of one package
APART = 128  # bytes of text for each question
WEIGHT = 8.0  # in the loss of a byte of an answer: there are few


class Data(NamedTuple):
    text: Tensor  # to train on
    held_out: Tensor  # (S, n)
    facts: dict[str, Any]


def installed() -> list[Path]:
    """The folders where this interpreter finds its packages."""
    return [Path(x) for x in sys.path if Path(x).name in ("site-packages", "dist-packages") and Path(x).is_dir()]


def packages(folders: Iterable[Path]) -> dict[str, bytes]:
    """By name, the Python files of each package in the order of their paths. A file that was there before is dropped.

    A package is a folder or a file right in one of ``folders``.
    """
    found: dict[str, list[bytes]] = {}
    known: set[bytes] = set()
    for folder in folders:
        files = (x.relative_to(folder) for x in folder.rglob("*.py") if x.is_file())
        for file in sorted(files, key=lambda x: x.parts):
            text = (folder / file).read_bytes()
            digest = hashlib.sha256(text).digest()
            if text and b"\0" not in text and digest not in known:
                known.add(digest)
                found.setdefault(file.parts[0].removesuffix(".py"), []).append(text)
    return {name: b"".join(texts) for name, texts in sorted(found.items())}


def split(found: dict[str, bytes], count: int, length: int) -> tuple[dict[str, bytes], list[str]]:
    """The parts that are held out, ``count`` sequences of ``length`` bytes at most, and the packages to train on.

    Packages are taken in the order of the hashes of their names, whole: what of them is not judged is not used at all.
    """
    total, held_out, left = sum(map(len, found.values())), {}, count
    room = SHARE * total
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        pieces = min(left, MOST, len(found[name]) // length)
        if pieces and len(found[name]) <= room:
            held_out[name] = found[name][: pieces * length]
            left, room = left - pieces, room - len(found[name])
    rest = [name for name in found if name not in held_out]
    if not held_out or not rest:
        wanted = f"there must be one of {length:,} bytes or more that has at most {SHARE:.0%} of all"
        raise ValueError(f"{len(found)} packages of {total:,} bytes: nothing to hold out; {wanted}")
    return held_out, rest


def code(folders: list[Path], count: int, length: int) -> Data:
    found = packages(folders)
    held_out, rest = split(found, count, length)
    text = torch.frombuffer(bytearray().join(found[name] for name in rest), dtype=torch.uint8)
    judged = torch.frombuffer(bytearray().join(held_out.values()), dtype=torch.uint8)
    sizes = {"packages": len(found), "training_bytes": len(text), "held_out_bytes": len(judged)}
    parts = {name: len(part) for name, part in held_out.items()}
    digest = hashlib.sha256(text.numpy())
    digest.update(judged.numpy())
    return Data(text, judged.view(-1, length), {**sizes, "held_out": parts, "sha256": digest.hexdigest()})


def with_labels(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels of sequences (B, n)."""
    labels = sequences.long()
    return torch.nn.functional.pad(labels[:, :-1], (1, 0), value=BEGIN), labels


def octaves(length: int) -> list[int]:
    """The distances in rows of this length: powers of two up to half of it."""
    return [1 << exponent for exponent in range(6, (length // 2).bit_length())]


def planted(text: Tensor, length: int, rows: int, seed: int) -> recall.Planted:
    """The first bytes of a text as rows, with questions of all kinds at all distances."""
    found = text.reshape(-1)[: rows * length].view(rows, length)
    return recall.plant(found, octaves(length), questions=length // APART, seed=seed)


def step(data: Data, index: int, length: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and labels of a training step, and the weight of each: rows at places that the index decides, planted."""
    if len(data.text) < length:
        raise ValueError(f"there are {len(data.text):,} bytes to train on, and a row has {length:,}")
    number = seed * 1_000_003 + index
    drawn = torch.Generator().manual_seed(number)
    starts = torch.randint(len(data.text) - length + 1, (tokens // length,), generator=drawn)
    rows = torch.cat([data.text[start : start + length] for start in starts.tolist()])
    asked = planted(rows, length, len(starts), number)
    weights = torch.ones(asked.tokens.shape)
    weights[asked.rows.unsqueeze(1), asked.places.unsqueeze(1) + torch.arange(recall.WIDTH)] = WEIGHT
    return *with_labels(asked.tokens), weights
