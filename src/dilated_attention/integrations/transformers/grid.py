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
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from dilated_attention.integrations.transformers.config import check_model
from dilated_attention.models.lm import within

IN_THE_DATA = (
    "without attention_mask, transformers looks for packed documents in position_ids, and their number depends on the "
    "data: if there are none, pass an attention_mask for fullgraph=True"
)
OWN_WINDOW = (
    "in the config of Mistral or Qwen, set sliding_window=None, or layer_types to 'full_attention', and give these "
    "layers da.Pattern([da.Window(sliding_window - 1)])"
)
NOT_CAUSAL = "dilated attention is for causal decoders: it takes no bidirectional and no cross-attention"


class Padding(NamedTuple):
    """Which tokens are real: these are moved to the front, as segments begin at the first real one and skip padding."""

    before: Tensor  # (B,) real tokens before the queries
    order: Tensor  # (B, N): the real keys of each sample in order, then the others
    query_order: Tensor  # (B, n), the same of the queries
    real: Tensor  # (B, n), which queries are real, where they are


@dataclass(eq=False)
class Grid(BlockMask):
    """What our mask function makes, once per forward pass; transformers hands it to every layer.

    It is a BlockMask in name alone: transformers passes only these, and tensors of four dimensions, on as they are.
    """

    queries: int  # n
    keys: int  # N; a static cache has room for more than it holds
    start: int | Tensor = 0  # the column of the first query; () of a static cache
    padding: Padding | None = None
    documents: Tensor | None = None  # cu_seqlens of all rows one after the other, on the CPU

    shape = 1, 1, 1, 1
    ndim = 4

    @property
    def is_plain(self) -> bool:
        """The queries are the last of the keys, or all of them, and nothing is padding."""
        return self.padding is None and self.documents is None and self.end == self.keys

    @property
    def end(self) -> int | None:
        """The keys after so many are not there yet; None: a tensor says how many."""
        return None if isinstance(self.start, Tensor) else self.start + self.queries

    def first(self, device: torch.device) -> Tensor:
        """Where the queries of each sample begin among its real tokens, (B,) or ()."""
        return torch.as_tensor(self.start if self.padding is None else self.padding.before, device=device)

    def positions(self, samples: int, device: torch.device) -> Tensor:
        """The place of each query in its document, or among the real tokens of its sample, (B or 1, n)."""
        if self.documents is not None:
            place = torch.arange(samples * self.queries, device=device)
            return within(self.documents.to(device), place).view(samples, -1)
        if self.padding is not None:
            return (self.padding.real.cumsum(1) - 1 + self.padding.before.unsqueeze(1)).clamp(min=0)
        return (torch.arange(self.queries, device=device) + self.start).unsqueeze(0)

    def to(self, device: torch.device | str) -> Grid:
        """On a device, as accelerate asks for it where a model has several."""
        start = self.start.to(device) if isinstance(self.start, Tensor) else self.start
        padding = None if self.padding is None else Padding(*(x.to(device) for x in self.padding))
        return replace(self, start=start, padding=padding)

    def contiguous(self) -> Grid:
        """Itself: generate() asks for it."""
        return self


def grid_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None, local_size: int | None = None,
    use_vmap: bool = False, device: Any = "cpu", config: Any = None, **_: Any,
) -> Grid:  # fmt: skip
    """The mask function of "dilated"."""
    if not torch.compiler.is_compiling():
        check_model(config)
    if local_size is not None:
        raise ValueError(f"dilated attention cannot honour sliding-window or chunked layers: {OWN_WINDOW}")
    if use_vmap:
        raise ValueError("dilated attention cannot honour mask functions: its pattern says who sees whom")
    if mask_function is bidirectional_mask_function:
        raise ValueError(NOT_CAUSAL)
    if kv_offset:
        raise ValueError("dilated attention cannot run on a cache that drops its first rows: use DilatedCache")
    if mask_function is not causal_mask_function:
        if kv_length != q_length or attention_mask is not None:
            raise ValueError("dilated attention takes packed documents only without a cache and without attention_mask")
        return Grid(q_length, kv_length, documents=_documents(mask_function, batch_size, kv_length, device))
    if isinstance(q_offset, Tensor):
        # a copy: the cache counts on in this very tensor before the first layer attends
        q_offset = q_offset.to(device=device, dtype=torch.int64, copy=True).reshape(())
    if attention_mask is not None:
        if attention_mask.shape[:-1] != (batch_size,):
            raise ValueError(f"attention_mask must be ({batch_size}, tokens), got {tuple(attention_mask.shape)}")
        width = attention_mask.shape[1]
        # a compiler cannot know where the queries of a static cache begin, nor whether anything is padding
        is_known = not torch.compiler.is_compiling()
        if is_known or not isinstance(q_offset, Tensor):
            end = int(q_offset) + q_length
            if width < end or width > kv_length == end:  # that of a static cache, which has more room, may be longer
                there = f"there are {end - q_length} tokens in the cache and {q_length} new ones"
                raise ValueError(f"attention_mask has {width} columns, and {there}: it must have a column for each")
        mask = F.pad(attention_mask, (0, kv_length - width)).bool()  # to the keys: cut, where it is longer
        if not is_known or not bool(mask[:, :end].all()):  # what comes after is not there yet
            column = torch.arange(kv_length, device=mask.device)
            real, order = mask[:, q_offset + column[:q_length]], _real_first(mask & (column < q_offset + q_length))
            padding = Padding((mask & (column < q_offset)).sum(1), order, _real_first(real), real)
            return Grid(q_length, kv_length, q_offset, padding)
    return Grid(q_length, kv_length, q_offset)


def _real_first(mask: Tensor) -> Tensor:
    return (~mask).long().argsort(dim=1, stable=True)


@torch.compiler.disable(reason=IN_THE_DATA)  # type: ignore[no-untyped-call, untyped-decorator]
def _documents(mask_function: Any, samples: int, tokens: int, device: Any) -> Tensor | None:
    """A document begins wherever a token does not see the one before it."""
    position, sample = torch.arange(tokens, device=device), torch.arange(samples, device=device).unsqueeze(1)
    before = (position - 1).clamp(min=0)
    if bool(mask_function(sample, 0, before, position)[..., 1:].any()):
        raise ValueError("dilated attention cannot honour a mask in which tokens see later ones")
    seen: Tensor = mask_function(sample, 0, position, before)
    begins = ~seen.expand(samples, tokens) | (position == 0)
    ends = begins.flatten().nonzero().flatten().cpu()
    if len(ends) == samples:  # a compiler asks also where there are none
        return None
    return F.pad(ends, (0, 1), value=samples * tokens)


def taken(x: Tensor, order: Tensor) -> Tensor:
    """The tokens of each sample in this order."""
    return torch.take_along_dim(x, order[(..., *[None] * (x.dim() - 2))], 1)
