"""Text for training: files as documents of tokens, (n,) int32 each; rows (1, T) of them, with cu_seqlens."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.models.generate import BEGIN
from dilated_attention.models.scoring import SUFFIXES, files

BYTES = BEGIN + 1  # tokens that bytes need
PIECE = 64  # tokens of the pieces that the first rows of a training may be joined of


def read_texts(paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES) -> list[bytes]:
    """The contents of files, and of all files with these suffixes in folders, in the order of their names."""
    texts = []
    for file in files(paths, suffixes):
        if b"\0" in (text := file.read_bytes()):
            raise ValueError(f"{file} is not text: it has zero bytes; leave it out")
        texts += [text] if text else []
    if len(texts) < 2:
        names = ", ".join(map(str, paths))
        raise ValueError(f"at least two files with text are needed, as one is held out, got {len(texts)} in {names}")
    return texts


def tokens_of(texts: Iterable[bytes], vocab_size: int, tokenizer: Any = None) -> list[Tensor]:
    """Documents as tokens: BEGIN and bytes, or those of a Hugging Face tokenizer."""
    try:
        numbers = [[BEGIN, *text] if tokenizer is None else tokenizer(text.decode())["input_ids"] for text in texts]
    except UnicodeDecodeError as error:
        raise ValueError(f"a text is not UTF-8, which a tokenizer needs: {error}") from error
    documents = [torch.tensor(some, dtype=torch.int32) for some in numbers if some]
    most = max((int(document.max()) for document in documents), default=-1)
    if most >= vocab_size:
        raise ValueError(f"token {most} is outside the vocabulary of {vocab_size}: give a vocab_size above {most}")
    return documents


def summary(documents: Sequence[Tensor]) -> str:
    """A short text that identifies documents: their number, tokens and hash. Another order gives another text."""
    sizes = torch.tensor([*map(len, documents)])
    digest = hashlib.blake2b(torch.cat((sizes, *documents)).numpy().astype("<i8").tobytes(), digest_size=8)
    return f"{len(documents)} documents of {sizes.sum()} tokens ({digest.hexdigest()})"


class PackedRows:
    """Documents one after the other, cut into rows of ``tokens``; what is left over at the end is left out.

    ``rows[i]`` depends on i alone, so it is the same on every rank; rows[count] begins the second round. A ``seed``
    shuffles documents and rows in each round: rows that follow one another would be too much alike for one step. The
    first ``short`` rows are joined of pieces from all over the text, which do not see one another.
    """

    def __init__(self, documents: list[Tensor], tokens: int, seed: int | None = None, short: int = 0) -> None:
        self.documents, self.tokens, self.seed, self.short, self.round = documents, tokens, seed, short, -1
        self.piece = min(PIECE, tokens)
        total = sum(map(len, documents))
        self.count = total // tokens  # rows, each time round
        if not self.count:
            raise ValueError(f"the text has {total} tokens, and a row {tokens}: give more text, or shorter rows")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """A row, and cu_seqlens. A document that a row cuts goes on in the next one as if it began there."""
        around, place = divmod(index, self.count)
        if around != self.round:
            self._arrange(around)
        size, order = (self.piece, self.pieces) if index < self.short else (self.tokens, self.order)
        each = self.tokens // size
        parts = order[each * place : each * (place + 1)]
        ends = (self.begins - size * parts.unsqueeze(1)).clamp(0, size) + size * torch.arange(each).unsqueeze(1)
        return self.whole.unfold(0, size, size)[parts].reshape(1, -1).long(), ends.unique()

    def _arrange(self, around: int) -> None:
        sizes = len(self.documents), self.count, self.count * (self.tokens // self.piece)
        documents, self.order, self.pieces = map(torch.arange, sizes)
        if self.seed is not None:
            drawn = torch.Generator().manual_seed(self.seed + around)
            documents, self.order, self.pieces = (torch.randperm(size, generator=drawn) for size in sizes)
        arranged = [self.documents[index] for index in documents]
        self.whole, self.round = torch.cat(arranged), around
        self.begins = torch.tensor([0, *map(len, arranged)]).cumsum(0)


def held_out_rows(documents: list[Tensor], lengths: Iterable[int], most: int = 1 << 16) -> dict[int, PackedRows]:
    """Held-out documents in rows of each length: their first ``most`` tokens, or one row if a row is longer."""
    rows, begins = {}, [*accumulate(map(len, documents), initial=0)]
    for length in lengths:
        if begins[-1] < length:
            raise ValueError(f"held-out text does not fill a row of {length}: it has {begins[-1]} tokens")
        left = [max(0, max(most, length) - begin) for begin in begins]
        rows[length] = PackedRows([document[:n] for document, n in zip(documents, left, strict=False)], length)
        if not any(bool((rows[length][index][1].diff() > 1).any()) for index in range(rows[length].count)):
            raise ValueError(f"in held-out rows of {length}, no token has a next one: give longer texts or rows")
    return rows
