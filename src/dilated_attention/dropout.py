"""Which (query, key) pairs dropout keeps: a counter-based hash of one seed, no state, no order.

The answer depends on (seed, branch, sample, head, query, key) alone, all of them global indices, so every tiling,
backend and number of ranks drops the same pairs. The arithmetic is on unsigned 32-bit words, held in int64 here.

Legend: rows (b, L, h), keys (b, L, h), masks (b, h, Lq, Lk).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_WORD = 0xFFFFFFFF
_SPREAD = 0x9E3779B1  # odd, so multiplying permutes the words


def mix(word: Tensor) -> Tensor:
    """A 32-bit avalanche: every input bit reaches every output bit."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def row_words(seed: Tensor, branch: int, sample: Tensor, head: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of each row: one chain from the seed's low half, one from its high half."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for index in (sample * 0 + branch, sample, head, query):
        step = (index * _SPREAD) & _WORD
        low, high = mix(low ^ step), mix((high + step) & _WORD)
    return low, high


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of one dense problem: its rows' words, its keys' positions and the probability."""

    p: float
    low: Tensor  # (b, Lq, h)
    high: Tensor  # (b, Lq, h)
    key: Tensor  # (b, Lk, h)

    def rows(self, samples: slice, rows: slice, keys: slice) -> Dropout:
        """The same dropout on a part of the problem."""
        return Dropout(self.p, self.low[samples, rows], self.high[samples, rows], self.key[samples, keys])

    def keep(self) -> Tensor:
        """(b, h, Lq, Lk) bool, True with probability 1 - p."""
        key = ((self.key * _SPREAD) & _WORD).transpose(1, 2).unsqueeze(-2)
        low, high = self.low.transpose(1, 2).unsqueeze(-1), self.high.transpose(1, 2).unsqueeze(-1)
        return mix((mix(key ^ low) + high) & _WORD) >= round(self.p * 2**32)

    @property
    def factor(self) -> float:
        """What kept weights are multiplied with."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0
