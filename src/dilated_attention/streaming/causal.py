"""Causal: every chunk is computed at once; of earlier tokens, the K and V rows of open segments are kept, dilated.

A chunk's queries see the kept rows of each branch, merged with the chunk's own keys: the same blocks as in a ring,
where the rows come from an earlier rank.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H), of one chunk; kept k, v (B, rows, h, D) of the h heads
of a branch: row i of a head is the i-th token of its offset in the open segment.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.tensors import finished, no_autocast
from dilated_attention.blocks import Block, Placed, View, head_runs
from dilated_attention.call import Call
from dilated_attention.merge import merge_
from dilated_attention.pattern import rows_at_offset
from dilated_attention.streaming.stream import Parts, rows_of

Pair = tuple[Tensor, Tensor]  # k and v, or out and lse


class CausalParts(Parts):
    """Tokens that continue a causal sequence, and the rows that are kept of earlier ones."""

    def __init__(self, call: Call, kept: list[Pair], position: int) -> None:
        """``kept``: k and v of each branch, with room for the rows that are to come; ``position``: earlier tokens."""
        super().__init__(call)
        self.kept, self.position = kept, position

    def seen(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(out, lse) of the next tokens: to the end of the period they continue, and those that begin one, where they
        lie. Nothing of them is kept yet."""
        first = min(q.shape[1], -self.position % self.period)
        if first:
            yield self.continued(q[:, :first], k[:, :first], v[:, :first])
        if first < q.shape[1]:
            yield self.attend(q[:, first:], k[:, first:], v[:, first:])

    def continued(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of tokens in the midst of segments."""
        with no_autocast(q.device):
            work = self.work(q, k, v, self.position % self.period)
            out, lse = work.forward()
            for index in range(len(self.branches)):
                self.visit(index, work, out, lse)
        return finished(out, work.call, q.dtype), lse

    def visit(self, index: int, work: Work, out: Tensor, lse: Tensor) -> None:
        """Merge what new tokens see in the kept rows of a branch."""
        q_per_kv, seen = self.call.q_per_kv, self.position % self.branches[index].length
        blocks = [block for block in self.blocks(index, seen, work.q, q_per_kv) if block.keys.rows]
        rows = rows_of(self.branches[index], seen)
        sources = Inputs(work.q, *(work.readable(x[:, :rows]) for x in self.kept[index]))
        for block, (part, part_lse) in work.each(blocks, sources):
            merge_(block.queries.of(out, q_per_kv), block.queries.of(lse, q_per_kv), part, part_lse)

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Take what later tokens see of new ones."""
        self.position += k.shape[1]
        for index, branch in enumerate(self.branches):
            seen = self.position % branch.length  # tokens of the open segment; 0: it is complete
            new = min(seen, k.shape[1])  # if that is all that was seen, the rows of the segment before are written over
            for rows, x in zip(self.kept[index], (k, v), strict=True):
                x = x[:, x.shape[1] - new :]
                for block in self.blocks(index, seen - new, x, 1):
                    view, already, first = block.queries, block.keys.rows, block.keys.head
                    heads = slice(first, first + view.heads * view.head_step, view.head_step)
                    rows[:, already : already + view.rows, heads] = view.of(x)

    def blocks(self, index: int, before: int, x: Tensor, q_per_kv: int) -> list[Block]:
        """The rows of x in the segment after its first ``before`` tokens as queries, with the kept rows as keys."""
        branch = self.branches[index]
        stop = min(before + x.shape[1], branch.length)
        placed: list[Placed] = []
        counts = {}
        for head in branch.heads:
            offset = branch.offset(head)
            earlier, upto = (rows_at_offset(token, branch.rate, offset) for token in (before, stop))
            if upto > earlier:
                placed.append((head, offset + branch.rate * earlier - before))
                counts[head] = earlier, upto - earlier
        found = []
        for run in head_runs(placed, counts.__getitem__, q_per_kv):
            (head, at), (head_step, step), (earlier, rows) = run.first, run.steps, counts[run.first[0]]
            heads, samples = (run.heads, head_step), x.shape[0]
            queries = View(0, samples, at, 1, stop - before, rows, branch.rate, head, *heads, step)
            keys = View(0, samples, 0, 1, earlier, earlier, 1, head - branch.first, *heads, 0)
            starts = tuple(before + at + i * step for i in range(run.heads))
            found.append(Block(index, branch.rate, queries, keys, False, starts, starts, 0))
        return found
