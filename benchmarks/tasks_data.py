"""The data of benchmarks/tasks.py: Python files of installed packages, and one genome.

Legend: text (T,) and sequences (S, n), uint8; inputs and labels (B, n), int64, where labels[i] is what comes after
inputs[0 .. i], and inputs[0] is a token that only begins: every symbol is predicted once.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

BASES = b"ACGT"  # 3 - x is the base on the other strand
SHARE = 0.1  # of all bytes, at most, are in packages that are held out
MOST = 8  # sequences of one package
HELD_OUT = 0.2  # of the genome, its end


class Data(NamedTuple):
    text: Tensor  # to train on
    held_out: Tensor  # (S, n)
    begin: int  # the token that begins a window: symbols are 0 ... begin - 1
    facts: dict[str, Any]


# --- code -------------------------------------------------------------------------------------------------------


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
        raise ValueError(
            f"{len(found)} packages of {total:,} bytes: nothing to hold out; there must be one of {length:,} bytes "
            f"or more that has at most {SHARE:.0%} of all"
        )
    return held_out, rest


def code(folders: list[Path], count: int, length: int) -> Data:
    found = packages(folders)
    held_out, rest = split(found, count, length)
    text = torch.frombuffer(bytearray().join(found[name] for name in rest), dtype=torch.uint8)
    judged = torch.frombuffer(bytearray().join(held_out.values()), dtype=torch.uint8)
    sizes = {"packages": len(found), "training_bytes": len(text), "held_out_bytes": len(judged)}
    parts = {name: len(part) for name, part in held_out.items()}
    facts = {**sizes, "held_out": parts, "sha256": digest_of(text, judged)}
    return Data(text, judged.view(-1, length), 256, facts)


# --- the genome -------------------------------------------------------------------------------------------------


def genome(file: Path) -> Data:
    """The longest sequence of a FASTA file, which may be packed by gzip. Its end is held out, as one sequence."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rb") as stream:
        records = [record.partition(b"\n") for record in stream.read().split(b">") if record.strip()]
    if not records:
        raise ValueError(f"{file} has no sequence: give a FASTA file")
    name, _, letters = max(records, key=lambda record: len(record[2]))
    letters = b"".join(letters.upper().split())
    known = letters.translate(None, delete=bytes(x for x in range(256) if x not in BASES))
    bases = torch.frombuffer(bytearray(known.translate(bytes.maketrans(BASES, bytes(range(4))))), dtype=torch.uint8)
    if len(bases) < 2:
        raise ValueError(f"the longest sequence of {file} has {len(bases)} bases: two are the least")
    text, end = bases.split([len(bases) - (cut := max(1, int(HELD_OUT * len(bases)))), cut])
    sizes = {"training_bases": len(text), "held_out_bases": len(end), "other_letters": len(letters) - len(known)}
    facts = {"name": name.decode(errors="replace").strip(), **sizes, "sha256": digest_of(text, end)}
    return Data(text, end.unsqueeze(0), len(BASES), facts)


def both_strands(text: Tensor) -> Tensor:
    """The bases, and after them those of the other strand, which is read backwards."""
    return torch.cat((text, len(BASES) - 1 - text.flip(0)))


# --- both -------------------------------------------------------------------------------------------------------


def digest_of(*texts: Tensor) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.numpy())
    return found.hexdigest()


def with_labels(sequences: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of sequences (B, n)."""
    labels = sequences.long()
    return torch.nn.functional.pad(labels[:, :-1], (1, 0), value=begin), labels


class Windows:
    """Steps of training: ``windows[i]`` are inputs and labels of ``count`` windows, at places that the index decides.

    ``strands``: each window of a genome is read on one of its two strands, as a coin decides.
    """

    def __init__(self, data: Data, length: int, count: int, seed: int, strands: bool) -> None:
        if len(data.text) < length:
            raise ValueError(f"there are {len(data.text):,} symbols to train on, and a window has {length:,}")
        self.data, self.length, self.count, self.seed, self.strands = data, length, count, seed, strands

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        text = self.data.text
        starts = torch.randint(len(text) - self.length + 1, (self.count,), generator=drawn)
        found = torch.stack([text[start : start + self.length] for start in starts.tolist()])
        if self.strands:
            coins = torch.randint(2, (self.count, 1), generator=drawn, dtype=torch.bool).to(text.device)
            found = torch.where(coins, self.data.begin - 1 - found.flip(1), found)
        return with_labels(found, self.data.begin)
