"""Whole segments for some of the heads: rows go to the ranks that compute them, and results come back.

Where a segment lies on s ranks, each of them computes it whole for 1/s of the heads. So the work is even when causal
too, and no sum over ranks ever travels. A rank gets no head of a branch where heads are fewer than ranks.

Legend as in `_work` and `_packing`; a bundle is some heads of a channel that one rank computes, with the same number
of rows each: L rows in all, of which each member of the channel holds some.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention import _packing
from dilated_attention._packing import Expected, Fields, Travelling
from dilated_attention._plan import Lane, lanes
from dilated_attention._shards import Channel, Shards
from dilated_attention._work import Rows, Work
from dilated_attention.backends.problem import Masking
from dilated_attention.distributed.routes import share
from dilated_attention.distributed.transport import Pending, Transport
from dilated_attention.dropout import Dropout, row_words
from dilated_attention.merge import add_zero_keys_, merge_


class Bundle(NamedTuple):
    channel: Channel  # with the bundle's heads only
    target: int  # the rank that computes it


Segments = dict[Bundle, list[Tensor]]


@functools.lru_cache(maxsize=256)
def bundles(channels: tuple[Channel, ...], shards: Shards, apart: bool) -> tuple[Bundle, ...]:
    """Every channel's heads dealt to its members; those with equally many rows everywhere are one bundle.

    ``apart``: only heads of one offset are.
    """
    found = []
    for channel in channels:
        pieces = [channel.piece(shards, member) for member in channel.members]
        for index, member in enumerate(channel.members):
            alike: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            turn = (index - channel.branch) % len(channel.members)  # where heads are few, others in each branch
            for at in share(len(channel.heads), len(channel.members), turn):
                head, offset = channel.heads[at]
                rows = (*(channel.rows(offset, piece) for piece in pieces), offset if apart else 0)
                alike.setdefault(rows, []).append((head, offset))
            found += [Bundle(replace(channel, heads=tuple(heads)), member) for heads in alike.values()]
    return tuple(found)


@dataclass
class AllToAll:
    """One rank's part in the exchange of one call."""

    work: Work
    transport: Transport
    channels: tuple[Channel, ...]

    def __post_init__(self) -> None:
        work = self.work
        # kernels that group heads want one padding for all of them
        self.bundles = bundles(self.channels, work.shards, work.padding is not None and work.group > 1)
        self.samples = work.q.shape[0]
        self.fields = Travelling.of(work.q.dtype, work.group, work.q.shape[3], work.padding is not None)

    def forward(self, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse, and the q, k, v of the segments computed here if they are to be kept for the backward pass."""
        work = self.work
        posted = self.post("hop 1 of the forward alltoall", self.fields.inputs, self.input_tensors)
        out, lse = work.forward()
        kept: list[Tensor] = []
        results: Segments = {}
        for bundle, segment in self.segments(posted, self.fields.inputs).items():
            q, k, v, *padding = segment
            parts = [part.results for part in work.attend(q, k, v, self.masking(bundle, padding))]
            part, part_lse = (torch.cat(some, 2) if len(some) > 1 else some[0] for some in zip(*parts, strict=True))
            results[bundle] = [part_lse, part.to(work.q.dtype)]
            kept += segment if keep else []
        for bundle, (part_lse, part) in self.send_back(
            "hop 2 of the forward alltoall", self.fields.results, results
        ).items():
            for lane in self.lanes(bundle, work.group):
                here, here_lse = (lane.packed(x, self.samples, work.group) for x in (part, part_lse))
                log_zeros = work.log_zero_keys(lane.block)
                if log_zeros is not None:
                    here, here_lse = here.to(here_lse.dtype, copy=True), here_lse.clone()
                    add_zero_keys_(here, here_lse, log_zeros)
                merge_(lane.block.view(out, work.group), lane.block.view(lse, work.group), here, here_lse)
        return out, lse, kept

    def backward(self, rows: Rows, kept: list[Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's rows. ``kept``: q, k, v of the segments computed here; None: they travel again."""
        work = self.work
        tensors, fields = [rows.lse, rows.dout, rows.out], self.fields.rows
        if rows.dlse is not None:  # a column more
            tensors, fields = [rows.dlse, *tensors], (fields[0], *fields)
        of_rows = len(tensors)
        if kept is None:
            tensors, fields = [*tensors, *self.input_tensors], (*fields, *self.fields.inputs)
        posted = self.post("hop 1 of the backward alltoall", fields, tensors)
        grads = work.backward(rows)
        waiting = iter(kept or ())
        results: Segments = {}
        for bundle, segment in self.segments(posted, fields).items():
            *dlse, lse, dout, out = segment[:of_rows]
            q, k, v, *padding = segment[of_rows:] or [next(waiting) for _ in self.fields.inputs]
            if kept is not None and q.device.type == "cpu":  # as `without_bad_rows` has made the rows of this rank
                q = q.masked_fill((lse == torch.inf).unsqueeze(-1), 0.0)
            here = Rows(dout, dlse[0] if dlse else None, out, lse)
            parts = [part.results for part in work.attend_backward(here, q, k, v, self.masking(bundle, padding))]
            whole = (torch.cat(some, 2) if len(some) > 1 else some[0] for some in zip(*parts, strict=True))
            results[bundle] = [x.to(work.q.dtype) for x in whole]
        home = self.send_back("hop 2 of the backward alltoall", self.fields.gradients, results)
        for bundle, packed in home.items():
            for grad, part, group in zip(grads, packed, (work.group, 1, 1), strict=True):
                for lane in self.lanes(bundle, group):
                    lane.block.view(grad, group).add_(lane.packed(part, self.samples, group))
        return grads

    @property
    def input_tensors(self) -> list[Tensor]:
        work = self.work
        return [work.q, work.k, work.v, *([work.padding_of_heads] if work.padding is not None else [])]

    def lanes(self, bundle: Bundle, group: int) -> tuple[Lane, ...]:
        """This rank's rows of a bundle, in place and packed."""
        work, channel = self.work, bundle.channel
        length, tokens = channel.stop - channel.start, work.shards.tokens
        zeros = (
            work.settings.pattern.zeros_in_segment(channel.branch, length, offset, tokens)
            for _, offset in channel.heads
        )
        return lanes(channel, work.shards, work.rank, work.rank, self.samples, group, tuple(zeros))

    def rows(self, bundle: Bundle, member: int) -> int:
        return self.samples * bundle.channel.packed_rows(self.work.shards, member)

    # --- rows to whoever computes them --------------------------------------------------------------------------

    def post(self, name: str, fields: Fields, tensors: Sequence[Tensor]) -> tuple[Pending, dict[Bundle, Tensor]]:
        """Send this rank's rows to the ranks that compute them; also gives those that stay."""
        me = self.work.rank
        messages: dict[int, list[Tensor]] = {}
        staying: dict[Bundle, Tensor] = {}
        for bundle in self.bundles:
            rows = self.rows(bundle, me)
            part = torch.empty(_packing.part_bytes(fields, rows), dtype=torch.uint8, device=self.work.q.device)
            _packing.pack(part, fields, rows, self.lanes(bundle, max(field.heads for field in fields)), tensors)
            if bundle.target == me:
                staying[bundle] = part
            else:
                messages.setdefault(bundle.target, []).append(part)
        sends = {peer: _packing.join(parts) for peer, parts in messages.items()}
        sizes = _packing.totals(self.expected(staying, fields))
        return self.transport.post(name, sends, sizes, collective=True), staying

    def expected(self, computed: Iterable[Bundle], fields: Fields) -> list[Expected]:
        """What other members send for the bundles computed here."""
        return [
            Expected(member, _packing.part_bytes(fields, self.rows(bundle, member)))
            for bundle in computed
            for member in bundle.channel.members
            if member != self.work.rank
        ]

    def segments(self, posted: tuple[Pending, dict[Bundle, Tensor]], fields: Fields) -> Segments:
        """The whole segments computed here: for each field (B, L, heads of the bundle, ...)."""
        pending, staying = posted
        messages = pending.wait()
        parts = _packing.split(messages, self.expected(staying, fields))
        found: Segments = {}
        for bundle, own in staying.items():
            pieces = [
                self.by_head(bundle, own if member == self.work.rank else next(parts), fields, member)
                for member in bundle.channel.members
            ]
            whole = (torch.cat(some, 2) for some in zip(*pieces, strict=True))
            found[bundle] = [x.movedim(0, 2) for x in whole]
        self.transport.release(messages)
        return found

    def by_head(self, bundle: Bundle, part: Tensor, fields: Fields, member: int) -> list[Tensor]:
        """A member's rows of each field as (heads, B, rows, ...)."""
        tensors = _packing.unpack(part, fields, self.rows(bundle, member))
        heads = len(bundle.channel.heads)
        return [
            x.view(heads * field.heads, self.samples, -1, *field.sizes)
            for x, field in zip(tensors, fields, strict=True)
        ]

    # --- results home -------------------------------------------------------------------------------------------

    def send_back(self, name: str, fields: Fields, results: Segments) -> Segments:
        """Results (B, L, heads, ...) of the segments computed here for those of this rank's rows, packed."""
        me, shards = self.work.rank, self.work.shards
        found: Segments = {}
        messages: dict[int, list[Tensor]] = {}
        for bundle, tensors in results.items():
            offset, at = bundle.channel.heads[0][1], 0
            for member in bundle.channel.members:
                count = bundle.channel.rows(offset, bundle.channel.piece(shards, member))
                rows = self.rows(bundle, member)
                part = torch.empty(_packing.part_bytes(fields, rows), dtype=torch.uint8, device=self.work.q.device)
                for place, x in zip(self.by_head(bundle, part, fields, member), tensors, strict=True):
                    place.copy_(x[:, at : at + count].movedim(2, 0))
                at += count
                if member == me:
                    found[bundle] = _packing.unpack(part, fields, rows)
                else:
                    messages.setdefault(member, []).append(part)
        away = [bundle for bundle in self.bundles if bundle.target != me]
        expected = [Expected(one.target, _packing.part_bytes(fields, self.rows(one, me))) for one in away]
        sends = {peer: _packing.join(parts) for peer, parts in messages.items()}
        arrived = self.transport.post(name, sends, _packing.totals(expected), collective=True).wait()
        for bundle, part in zip(away, _packing.split(arrived, expected), strict=True):
            found[bundle] = _packing.unpack(part, fields, self.rows(bundle, me))
        self.transport.release(arrived, reuse=False)
        return found

    def masking(self, bundle: Bundle, padding: list[Tensor]) -> Masking:
        work = self.work
        dropout = None
        if work.seed is not None:
            channel = bundle.channel
            device, group = work.q.device, work.group
            heads, offsets = (torch.tensor(x, device=device) for x in zip(*channel.heads, strict=True))
            count = channel.rows(channel.heads[0][1], (channel.start, channel.stop))
            key = channel.start + offsets + channel.dilation * torch.arange(count, device=device).unsqueeze(1)
            key = key.repeat_interleave(group, dim=1).expand(self.samples, -1, -1)
            head = (heads + work.settings.first_head).unsqueeze(1) * group + torch.arange(group, device=device)
            sample = torch.arange(self.samples, device=device)[:, None, None].expand_as(key)
            words = row_words(work.seed, channel.branch, sample, head.flatten().expand_as(key), key)
            dropout = Dropout(work.settings.dropout_p, *words, key)
        ignored = padding[0] if padding else None
        if ignored is not None and work.group > 1:
            ignored = ignored[:, :, :1].expand_as(ignored)
        return Masking(work.settings.scale, work.settings.is_causal, ignored, dropout)
