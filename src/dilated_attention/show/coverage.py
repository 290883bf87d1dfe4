"""How many rows some branch covers; the others get output 0.

A branch covers token p where (p mod w) mod r is an offset of its heads. That repeats every r tokens where r divides w
and every w tokens elsewhere, so one common period tells of any length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dilated_attention.pattern import rows_at_offset

LONGEST_PERIOD = 2**20  # tokens that are looked at
NAMED = 6  # rows named as examples


class Covering(NamedTuple):
    """A branch and the offsets of the heads in question."""

    width: int
    rate: int
    offsets: frozenset[int]

    def rows(self, tokens: int) -> int:
        """How many of the first tokens it covers."""
        whole, rest = divmod(tokens, self.width)
        return sum(
            whole * rows_at_offset(self.width, self.rate, offset) + rows_at_offset(rest, self.rate, offset)
            for offset in self.offsets
        )

    def period(self, tokens: int) -> int:
        return self.rate if self.width >= tokens or self.width % self.rate == 0 else self.width


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of so many rows at least and at most so many are covered: the same number, but for periods beyond 2**20."""

    tokens: int
    least: int
    most: int
    missing: tuple[int, ...]  # the first rows that are not covered

    @property
    def is_exact(self) -> bool:
        return self.least == self.most

    @classmethod
    def of(cls, branches: Sequence[Covering], tokens: int) -> Coverage:
        rows = [branch.rows(tokens) for branch in branches]
        if tokens in rows:
            return cls(tokens, tokens, tokens, ())
        period = math.lcm(*(branch.period(tokens) for branch in branches))
        looked_at = min(tokens, period, LONGEST_PERIOD)
        covered = torch.zeros(looked_at, dtype=torch.bool)
        for branch in branches:
            # where r divides w, or w is beyond the end, one long segment covers the same
            width = branch.width if branch.period(tokens) == branch.width < looked_at else looked_at
            here = torch.zeros(-(-looked_at // width), width, dtype=torch.bool)
            for offset in branch.offsets:
                here[:, offset :: branch.rate] = True
            covered |= here.flatten()[:looked_at]
        missing = (~covered).nonzero()[:NAMED, 0].tolist()
        if looked_at < min(tokens, period):
            return cls(tokens, max(rows), min(tokens - len(missing), sum(rows)), tuple(missing))
        whole, rest = divmod(tokens, looked_at)
        exact = whole * int(covered.sum()) + int(covered[:rest].sum())
        again = (row + turn * looked_at for turn in range(NAMED) for row in missing)
        return cls(tokens, exact, exact, tuple(row for row in again if row < tokens)[:NAMED])
