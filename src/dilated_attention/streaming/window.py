"""Not causal: tokens wait, copied, until their segments are complete.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); the window holds the tokens whose output is not yet
known, which begin at ``base`` and end where the stream now does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dilated_attention.call import accumulate_dtype
from dilated_attention.merge import merge_
from dilated_attention.streaming.problem import Branch, Problem


class Rows:
    """Rows of one tensor, (B, n, ...), in one piece: more come at the end, the first ones go."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, most: int) -> None:
        """``sizes``: B and those after n. ``most``: beyond so many rows no room is made in advance."""
        self.store = torch.empty((sizes[0], 0, *sizes[1:]), dtype=dtype, device=device)
        self.first = self.last = 0
        self.most = most

    @property
    def all(self) -> Tensor:
        return self.store[:, self.first : self.last]

    def resize(self, count: int) -> None:
        """So many rows from now on; new ones are still to be written."""
        if self.first + count > self.store.shape[1]:
            held = self.last - self.first
            room = max(count, min(2 * count, self.most))
            store = self.store.new_empty((self.store.shape[0], room, *self.store.shape[2:]))
            store[:, :held] = self.all
            self.store, self.first = store, 0
        self.last = self.first + count

    def add(self, count: int) -> Tensor:
        """Room for so many more rows."""
        self.resize(self.last - self.first + count)
        return self.store[:, self.last - count : self.last]

    def shrink(self) -> None:
        """Let go of room that a long chunk took for a while."""
        if self.store.shape[1] > self.most:
            self.store, self.first, self.last = self.all.clone(), 0, self.last - self.first

    def drop(self, count: int) -> None:
        self.first += count
        if self.first == self.last:
            self.first = self.last = 0


class Window:
    """The work of a stream that is not causal."""

    def __init__(self, problem: Problem, deliver: Callable[[Tensor], None]) -> None:
        self.problem, self.deliver = problem, deliver
        self.base = self.position = 0
        self.done = [0] * len(problem.branches)  # where each branch's first segment begins that is not yet computed
        kind, most = problem.kind, problem.most_tokens()
        row = (kind.samples, kind.heads, kind.head_dim)
        key_row = (kind.samples, kind.kv_heads, kind.head_dim)
        exact = accumulate_dtype(kind.dtype)
        self.inputs = [Rows(sizes, kind.dtype, kind.device, most) for sizes in (row, key_row, key_row)]
        self.out, self.lse = (Rows(sizes, exact, kind.device, most) for sizes in (row, row[:2]))

    @property
    def held(self) -> list[Rows]:
        return [*self.inputs, self.out, self.lse] if self.problem.straddles else self.inputs

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The next tokens: to the end of the period, whole periods where they lie, and the rest."""
        period, tokens = self.problem.period, q.shape[1]
        first = min(tokens, -self.position % period)
        last = tokens - (tokens - first) % period
        self.wait_for(q[:, :first], k[:, :first], v[:, :first])
        if last > first:
            out, _ = self.problem.attend(q[:, first:last], k[:, first:last], v[:, first:last])
            self.deliver(out)
            self.base = self.position = self.position + last - first
            self.done = [self.position] * len(self.done)
        self.wait_for(q[:, last:], k[:, last:], v[:, last:])

    def wait_for(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A period of straddling segments may be far longer than the longest: no more than that is copied at a time."""
        step = self.problem.longest if self.problem.straddles else max(1, q.shape[1])
        for at in range(0, q.shape[1], step):
            self.wait(*(x[:, at : at + step] for x in (q, k, v)))
        for rows in self.held:
            rows.shrink()

    def wait(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take a copy, and compute what is complete by it."""
        tokens = q.shape[1]
        for rows, x in zip(self.inputs, (q, k, v), strict=True):
            rows.add(tokens).copy_(x)
        self.position += tokens
        if self.problem.straddles:
            self.out.add(tokens).zero_()
            self.lse.add(tokens).fill_(-torch.inf)
            for index, branch in enumerate(self.problem.branches):
                self.compute_branch(index, self.position - self.position % branch.width)
            self.give(min(self.done))
        elif self.position % self.problem.period == 0:
            self.compute()

    def end(self) -> None:
        """There are no more tokens: the last segments are as long as they are."""
        if self.problem.straddles:
            for index in range(len(self.done)):
                self.compute_branch(index, self.position, self.done[index])
            self.give(self.position)
        elif self.position > self.base:
            self.compute(self.base)

    def compute(self, before: int = 0) -> None:
        """All that waits, in one call."""
        q, k, v = (rows.all for rows in self.inputs)
        out, _ = self.problem.attend(q, k, v, before=before)
        self.deliver(out.to(self.problem.kind.dtype).contiguous())
        self.drop(self.position)

    def compute_branch(self, index: int, stop: int, before: int = 0) -> None:
        """One branch's segments up to a token, merged with what other branches gave."""
        start, self.done[index] = self.done[index], stop
        if start == stop:
            return
        branch, tokens = self.problem.branches[index], slice(start - self.base, stop - self.base)
        q, k, v = self.inputs
        queries, keys = _heads(branch, self.problem.group), _heads(branch, 1)
        part, part_lse = self.problem.attend(
            q.all[:, tokens, queries], k.all[:, tokens, keys], v.all[:, tokens, keys], branch, before
        )
        merge_(self.out.all[:, tokens, queries], self.lse.all[:, tokens, queries], part, part_lse)

    def give(self, stop: int) -> None:
        """The outputs up to a token are complete."""
        if stop > self.base:
            out = self.out.all[:, : stop - self.base]
            self.deliver(out.to(self.problem.kind.dtype, copy=True))
            self.drop(stop)

    def drop(self, stop: int) -> None:
        for rows in self.held:
            rows.drop(stop - self.base)
        self.base = stop


def _heads(branch: Branch, group: int) -> slice:
    return slice(branch.heads.start * group, branch.heads.stop * group)
