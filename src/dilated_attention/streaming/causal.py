"""Causal: every chunk is computed at once; of earlier tokens, the K and V rows of open segments are kept, dilated.

A chunk's queries see the kept rows of each branch (dense, as a ring does with the rows of an earlier rank), merged with
the chunk's own keys (causal).

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H), of one chunk; kept k, v (B, rows, h, D) of the h heads
of a branch: row i of a head is the i-th token of its offset in the open segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from dilated_attention._engine import finished_out, no_autocast
from dilated_attention._plan import Lane, lanes
from dilated_attention._shards import Shards
from dilated_attention._work import Work
from dilated_attention.backends.problem import Masking
from dilated_attention.backends.slices import of_heads
from dilated_attention.merge import merge_
from dilated_attention.streaming.problem import Branch, Problem
from dilated_attention.streaming.window import Rows


class AtOnce:
    """The work of a causal stream."""

    def __init__(self, problem: Problem, deliver: Callable[[Tensor], None]) -> None:
        self.problem, self.deliver, self.position = problem, deliver, 0
        self.kept = [Kept(branch, problem) for branch in problem.branches]

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The next tokens: to the end of the period they continue, and those that begin one, where they lie."""
        first = min(q.shape[1], -self.position % self.problem.period)
        if first:
            self.deliver(self.continued(*(x[:, :first] for x in (q, k, v))))
        if first < q.shape[1]:
            q, k, v = (x[:, first:] for x in (q, k, v))
            out, _ = self.problem.attend(q, k, v)
            self.deliver(out)
            self.keep(k, v)

    def end(self) -> None:
        """Nothing waits."""

    def continued(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output of tokens in the midst of segments."""
        with no_autocast(q.device):
            work = self.problem.work(q, k, v, self.position % self.problem.period)
            out, lse = work.forward()
            for kept in self.kept:
                kept.visit(work, self.position % kept.branch.width, out, lse)
        self.keep(k, v)
        return finished_out(out, q)

    def keep(self, k: Tensor, v: Tensor) -> None:
        self.position += k.shape[1]
        for kept in self.kept:
            kept.keep(self.position % kept.branch.width, k, v)


class Kept:
    """The K and V rows of a branch's open segment."""

    def __init__(self, branch: Branch, problem: Problem) -> None:
        kind = problem.kind
        sizes = (kind.samples, len(branch.heads), kind.head_dim)
        self.branch, self.group = branch, problem.group
        self.k, self.v = (Rows(sizes, kind.dtype, kind.device, branch.rows(branch.width)) for _ in range(2))

    def keep(self, seen: int, k: Tensor, v: Tensor) -> None:
        """Take what is needed of new tokens, after which ``seen`` of the segment have come; 0: it is complete."""
        new = min(seen, k.shape[1])  # if that is all that was seen, the rows of the segment before are written over
        for rows, x in ((self.k, k[:, k.shape[1] - new :]), (self.v, v[:, v.shape[1] - new :])):
            rows.resize(self.branch.rows(seen))
            for lane in self.lanes(seen - new, x, 1):
                already, some = lane.theirs.rows, lane.block.rows
                rows.all[:, already : already + some, self.heads(lane)] = lane.block.view(x)

    def visit(self, work: Work, seen: int, out: Tensor, lse: Tensor) -> None:
        """Merge what new tokens see in the kept rows, those that continue the segment after ``seen`` tokens of it."""
        for lane in self.lanes(seen, work.q, self.group):
            if not lane.theirs.rows:
                continue
            k, v = (work.usable(x.all[:, : lane.theirs.rows, self.heads(lane)]) for x in (self.k, self.v))
            q, here, here_lse = (lane.block.view(x, self.group) for x in (work.q, out, lse))
            for _, heads, (part, part_lse) in work.attend(q, k, v, Masking(work.settings.scale)):
                merge_(of_heads(here, heads), of_heads(here_lse, heads), part, part_lse)

    def lanes(self, before: int, x: Tensor, group: int) -> Iterator[Lane]:
        """The rows of x in the segment after its first ``before`` tokens, with as many heads to a view as can be."""
        shards = Shards.of((before, x.shape[1]))
        found = lanes(self.branch.channel, shards, 1, 0, x.shape[0], group)
        return (lane for lane in found if lane.block.rows)

    def heads(self, lane: Lane) -> slice:
        """Where a lane's heads are in the kept rows."""
        first = lane.block.head - self.branch.heads.start
        return slice(first, first + lane.block.heads * lane.block.head_step, lane.block.head_step)
