"""Packed rows of text: documents of tokens, one after the other.

Legend: a document (n,); a row (1, T), with cu_seqlens of the documents in it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PackedRows:
    """Documents one after the other, cut into rows of ``tokens``; what is left over at the end is left out.

    ``rows[i]`` depends on i alone: it is the same on every rank, in whatever order rows are read. rows[count] begins
    the second round over the documents. With a ``seed``, the documents and then the rows are shuffled, anew in each
    round: rows that follow one another in a document would be too much alike for one step.
    """

    def __init__(self, documents: list[Tensor], tokens: int, seed: int | None = None) -> None:
        self.documents, self.tokens, self.seed, self.round = documents, tokens, seed, -1
        total = sum(map(len, documents))
        self.count = total // tokens  # rows, each time round
        if not self.count:
            raise ValueError(f"the text has {total} tokens, and a row {tokens}: give more text, or shorter rows")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """A row, and cu_seqlens. A document that a row cuts goes on in the next one as if it began there."""
        around, place = divmod(index, self.count)
        if around != self.round:
            self._arrange(around)
        first = int(self.order[place]) * self.tokens
        ends = (self.begins - first).clamp(0, self.tokens).unique_consecutive()  # type: ignore[no-untyped-call]
        return self.whole[first : first + self.tokens].long().unsqueeze(0), ends

    def _arrange(self, around: int) -> None:
        sizes = len(self.documents), self.count
        documents, self.order = map(torch.arange, sizes)
        if self.seed is not None:
            drawn = torch.Generator().manual_seed(self.seed + around)
            documents, self.order = (torch.randperm(size, generator=drawn) for size in sizes)
        arranged = [self.documents[index] for index in documents]
        self.whole, self.round = torch.cat(arranged), around
        self.begins = torch.tensor([0, *map(len, arranged)]).cumsum(0)
