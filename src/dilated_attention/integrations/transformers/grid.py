"""Where the tokens of a Hugging Face batch are: what is padding, where documents begin, where the queries are.

Legend: B samples, n queries, N keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import causal_mask_function

from dilated_attention.integrations.transformers.config import ALL, check_model, own_pattern
from dilated_attention.models.lm import within
from dilated_attention.pattern import Pattern

IN_THE_DATA = (
    "without attention_mask, transformers looks for packed documents in position_ids, and their number depends on the "
    "data: if there are none, pass an attention_mask for fullgraph=True"
)
RESET = "before another text, call reset() on the cache"


class Padding(NamedTuple):
    """Which tokens count: these are moved to the front, as segments begin at the first one and skip padding."""

    before: Tensor  # (B,) tokens that count, before the queries
    order: Tensor  # (B, N): the keys of each sample that count in order, then the others
    query_order: Tensor  # (B, n), the same of the queries
    query_places: Tensor  # (B, n), where each query is in that order
    real: Tensor  # (B, n), which queries count, where they are
    hidden: Tensor | None = None  # (B, N), in this order: keys that are seen by nobody, although they come first

    @classmethod
    def of(cls, counts: Tensor, start: int | Tensor, queries: int, hidden: Tensor | None = None) -> Padding:
        """``counts``, ``hidden``: (B, N), where the keys are; ``start``: that of the queries among them."""
        column = torch.arange(counts.shape[1], device=counts.device)
        real, (order, _) = counts[:, start + column[:queries]], _first(counts & (column < start + queries))
        before = (counts & (column < start)).sum(1)
        return cls(before, order, *_first(real), real, None if hidden is None else taken(hidden, order))

    def to(self, device: torch.device | str) -> Padding:
        """On a device."""
        moved: Any = (x if x is None else x.to(device) for x in self)
        return Padding(*moved)


@dataclass(eq=False)
class Grid(BlockMask):
    """What our mask function makes, once per forward pass; transformers hands it to every layer.

    It is a BlockMask in name alone: transformers passes only these, and tensors of four dimensions, on as they are.
    """

    queries: int  # n
    keys: int  # N; a static cache has room for more than it holds
    own: Pattern  # what the model itself does in these layers
    start: int | Tensor = 0  # the column of the first query; () of a static cache
    padding: Padding | None = None
    cu_seqlens: Tensor | None = None  # of all rows one after the other, on the CPU
    placed: Padding | None = None  # for that: as the model does, it counts padding that is between tokens
    dropped: int = 0  # columns that a cache has dropped: the keys begin after them
    is_causal: bool = True

    shape = 1, 1, 1, 1
    ndim = 4

    @property
    def is_plain(self) -> bool:
        """The queries are the last of the keys, or all of them, and nothing is padding."""
        return self.padding is None and self.cu_seqlens is None and self.end == self.keys + self.dropped

    @property
    def end(self) -> int | None:
        """The keys after so many are not there yet; None: a tensor says how many."""
        return None if isinstance(self.start, Tensor) else self.start + self.queries

    def first(self, device: torch.device) -> Tensor:
        """Where the queries of each sample begin among its real tokens, (B,) or ()."""
        return torch.as_tensor(self.start if self.padding is None else self.padding.before, device=device)

    def positions(self, samples: int, device: torch.device) -> Tensor:
        """The place of each query in its document, or among the real tokens of its sample, (B or 1, n)."""
        if self.cu_seqlens is not None:
            place = torch.arange(samples * self.queries, device=device)
            return within(self.cu_seqlens.to(device), place).view(samples, -1)
        if self.padding is not None:
            return (self.padding.real.cumsum(1) - 1 + self.padding.before.unsqueeze(1)).clamp(min=0)
        return (torch.arange(self.queries, device=device) + self.start).unsqueeze(0)

    def to(self, device: torch.device | str) -> Grid:
        """On a device, as accelerate asks for it where a model has several."""
        start = self.start.to(device) if isinstance(self.start, Tensor) else self.start
        padding, placed = self.padding and self.padding.to(device), self.placed and self.placed.to(device)
        return replace(self, start=start, padding=padding, placed=placed)

    def __getitem__(self, index: Any) -> Any:
        raise ValueError("dilated attention cannot run in this model: it cuts or changes its mask by itself")

    def contiguous(self) -> Grid:
        """Itself: generate() asks for it."""
        return self


def grid_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None, local_size: int | None = None,
    use_vmap: bool = False, device: Any = "cpu", config: Any = None, **more: Any,
) -> Grid:  # fmt: skip
    """The mask function of "dilated"."""
    # a compiler cannot know where the queries of a static cache begin, nor whether anything is padding
    is_known = not torch.compiler.is_compiling()
    if is_known:
        check_model(config)
    if use_vmap:
        raise ValueError("dilated attention cannot honour mask functions: its pattern says who sees whom")
    if is_known and not q_length and bool(q_offset > 0):
        raise ValueError(f"there are no new tokens: the cache holds all of them already; {RESET}")
    is_causal, total = "allow_is_bidirectional_skip" not in more, kv_offset + kv_length
    if not is_causal and kv_length != q_length:
        raise ValueError("dilated attention takes no cross-attention")
    own = own_pattern(config, local_size, is_causal)
    grid = Grid(q_length, kv_length, own, q_offset, dropped=kv_offset, is_causal=is_causal)
    if is_causal and mask_function is not causal_mask_function:
        if kv_length == q_length and attention_mask is None:
            return replace(grid, cu_seqlens=_documents(mask_function, own, batch_size, kv_length, device))
        if local_size is None:
            raise ValueError("dilated attention takes packed documents only without a cache and without attention_mask")
    if isinstance(q_offset, Tensor):
        # a copy: the cache counts on in this very tensor before the first layer attends
        q_offset = grid.start = q_offset.to(device=device, dtype=torch.int64, copy=True).reshape(())
    mask = None
    if attention_mask is not None:
        if attention_mask.shape[:-1] != (batch_size,):
            raise ValueError(f"attention_mask must be ({batch_size}, tokens), got {tuple(attention_mask.shape)}")
        width = attention_mask.shape[1]
        if is_known or not isinstance(q_offset, Tensor):
            end = int(q_offset) + q_length
            if width < end or width > total == end:  # that of a static cache, which has more room, may be longer
                there, used = f"{end - q_length} tokens in the cache and {q_length} new ones", end > q_length
                raise ValueError(
                    f"attention_mask has {width} columns, and there are {there}: it must have a column for each"
                    + f"; {RESET}" * used
                )
        mask = F.pad(attention_mask, (0, total - width)).bool()  # to the keys: cut, where it is longer
        if is_known and bool(mask[:, :end].all()):  # what comes after is not there yet
            mask = None
    if mask is not None:
        grid.padding = Padding.of(mask, q_offset, q_length, None if is_causal else ~mask)
    chunk = getattr(own.listed[0], "length", 0)
    if chunk and kv_offset and mask is None:  # keys may begin within a chunk
        mask = torch.ones(batch_size, total, dtype=torch.bool, device=device)
    sees_all = own is ALL and is_causal and not kv_offset  # Moshi's cache drops rows that its mask does not hide
    grid.placed = grid.padding if mask is None or sees_all else _placed(mask, grid, chunk, is_known)
    return grid


def _placed(mask: Tensor, grid: Grid, chunk: int, is_known: bool) -> Padding:
    """From the first real token to the last one, or from where the chunk of the first query begins."""
    column = torch.arange(mask.shape[1], device=mask.device)
    first = (~mask).long().cumprod(1).sum(1, keepdim=True)
    if chunk:
        first += (grid.start - first).clamp(min=0) // chunk * chunk
    counts = (column >= first) & mask.flip(1).cummax(1).values.flip(1)
    hidden = counts & ~mask if grid.is_causal else ~mask
    sees_all = is_known and not bool(hidden.any())
    counts, hidden = (x[:, grid.dropped :] for x in (counts, hidden))
    return Padding.of(counts, grid.start - grid.dropped, grid.queries, None if sees_all else hidden)


def _first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The columns in order, those that count first, and the place of each in it.

    They are counted, not sorted: torch.compile makes one Triton kernel of all sorts, and it compiles for minutes.
    """
    column = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    seen = mask.cumsum(1)
    places = torch.where(mask, seen - 1, seen[:, -1:] + column - seen)
    return places.scatter(1, places, column), places


@torch.compiler.disable(reason=IN_THE_DATA)  # type: ignore[no-untyped-call, untyped-decorator]
def _documents(mask_function: Any, own: Pattern, samples: int, tokens: int, device: Any) -> Tensor | None:
    """A document begins wherever a token does not see the one before it; so may a chunk, which changes nothing."""
    position, sample = torch.arange(tokens, device=device), torch.arange(samples, device=device).unsqueeze(1)
    before = (position - 1).clamp(min=0)
    if bool(mask_function(sample, 0, before, position)[..., 1:].any()):
        raise ValueError("dilated attention cannot honour a mask in which tokens see later ones")
    seen: Tensor = mask_function(sample, 0, position, before)
    begins = ~seen.expand(samples, tokens) | (position == 0)
    are_inside = begins & own.listed[0].sees(0, position, before) & (position > 0)  # of a row, and of chunks
    if not bool(are_inside.any()):
        return None  # a compiler asks also where there are none
    return F.pad(begins.flatten().nonzero().flatten().cpu(), (0, 1), value=samples * tokens)


def taken(x: Tensor, order: Tensor) -> Tensor:
    """The tokens of each sample in this order."""
    return torch.take_along_dim(x, order[(..., *[None] * (x.dim() - 2))], 1)
