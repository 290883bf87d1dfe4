"""Causal: every chunk is computed at once; of earlier tokens, the K and V rows of open segments are kept, dilated.

A chunk's queries see the kept rows of each branch (dense, as a ring does with the rows of an earlier rank), merged with
the chunk's own keys (causal).

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H), of one chunk; kept k, v (B, rows, h, D) of the h heads
of a branch: row i of a head is the i-th token of its offset in the open segment.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dilated_attention.backends.blockwise import Sources, Work, finished, no_autocast
from dilated_attention.blocks import Block, Placed, View, head_runs
from dilated_attention.merge import merge_
from dilated_attention.pattern import rows_at_offset
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
        return finished(out, work.call, q.dtype)

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
            for block in self.blocks(seen - new, x, 1):
                view, already = block.queries, block.keys.rows
                rows.all[:, already : already + view.rows, self.heads(view)] = view.of(x)

    def visit(self, work: Work, seen: int, out: Tensor, lse: Tensor) -> None:
        """Merge what new tokens see in the kept rows, those that continue the segment after ``seen`` tokens of it."""
        blocks = [block for block in self.blocks(seen, work.q, self.group) if block.keys.rows]
        sources = Sources(work.q, *(work.readable(rows.all) for rows in (self.k, self.v)))
        for block, (part, part_lse) in work.each(blocks, sources):
            merge_(block.queries.of(out, self.group), block.queries.of(lse, self.group), part, part_lse)

    def blocks(self, before: int, x: Tensor, group: int) -> list[Block]:
        """The rows of x in the segment after its first ``before`` tokens, each with the rows that are kept as keys."""
        branch, rate = self.branch, self.branch.rate
        stop = min(before + x.shape[1], branch.width)
        placed: list[Placed] = []
        counts = {}
        for head, offset in branch.placed:
            earlier, upto = (rows_at_offset(token, rate, offset) for token in (before, stop))
            if upto > earlier:
                placed.append((head, offset + rate * earlier - before))
                counts[head] = earlier, upto - earlier
        found = []
        for run in head_runs(placed, counts.__getitem__, group):
            (head, at), (head_step, step), (earlier, rows) = run.first, run.steps, counts[run.first[0]]
            queries = View(0, x.shape[0], at, 1, stop - before, rows, rate, head, run.heads, head_step, step)
            kept_head = head - branch.heads.start
            keys = View(0, x.shape[0], 0, 1, earlier, earlier, 1, kept_head, run.heads, head_step, 0)
            starts = tuple(before + at + i * step for i in range(run.heads))
            found.append(Block(branch.index, rate, queries, keys, False, starts, starts, 0))
        return found

    def heads(self, view: View) -> slice:
        """Where a view's heads are in the kept rows."""
        first = view.head - self.branch.heads.start
        return slice(first, first + view.heads * view.head_step, view.head_step)
