"""Where the tokens of a Hugging Face batch are: what is padding, where documents begin, where the queries are.

Legend: B samples, n queries, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from dilated_attention.integrations.transformers.config import check_model

IN_THE_DATA = (
    "without attention_mask, transformers looks for packed documents in position_ids, and their number depends on the "
    "data: if there are none, pass an attention_mask for fullgraph=True"
)
NOT_CAUSAL = "dilated attention is for causal decoders: it takes no bidirectional and no cross-attention"


@dataclass(eq=False)
class Grid(BlockMask):
    """What our mask function makes, once per forward pass; transformers hands it to every layer.

    It is a BlockMask in name alone: transformers passes only these, and tensors of four dimensions, on as they are.
    """

    keys: int  # N; a static cache has room for more than it holds
    seen: int  # the keys after so many are not there yet
    query_start: Tensor | None = None  # where the queries begin among the keys, () or (B,); None: they are the last
    order: Tensor | None = None  # (B, N): the real keys of each sample in order, then the others
    query_order: Tensor | None = None  # (B, n), the same of the queries
    real: Tensor | None = None  # (B, n), which queries are real, where they are
    documents: Tensor | None = None  # cu_seqlens of all rows one after the other, on the CPU

    shape = 1, 1, 1, 1
    ndim = 4

    @property
    def is_plain(self) -> bool:
        """The queries are the last of the keys, or all of them, and nothing is padding."""
        return self.query_start is None and self.documents is None and self.seen == self.keys

    def to(self, device: torch.device | str) -> Grid:
        """On a device, as accelerate asks for it where a model has several."""
        names = "query_start", "order", "query_order", "real"
        return replace(self, **{x: getattr(self, x).to(device) for x in names if getattr(self, x) is not None})

    def contiguous(self) -> Grid:
        """Itself: generate() asks for it."""
        return self


def grid_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Grid:
    """The mask function of "dilated"."""
    if not torch.compiler.is_compiling():
        check_model(config)
    if local_size is not None:
        raise ValueError(
            "dilated attention cannot honour sliding-window or chunked layers: its pattern says who sees whom; in the "
            "config of Mistral or Qwen, set sliding_window=None, or layer_types to 'full_attention'"
        )
    if use_vmap:
        raise ValueError("dilated attention cannot honour mask functions: its pattern says who sees whom")
    if mask_function is bidirectional_mask_function:
        raise ValueError(NOT_CAUSAL)
    if kv_offset:
        raise ValueError("dilated attention cannot run on a cache that drops its first rows: use DilatedCache")
    if mask_function is not causal_mask_function:
        if kv_length != q_length or attention_mask is not None:
            raise ValueError("dilated attention takes packed documents only without a cache and without attention_mask")
        return Grid(kv_length, kv_length, documents=_documents(mask_function, batch_size, kv_length, device))
    if attention_mask is not None:
        width = attention_mask.shape[1] if attention_mask.dim() == 2 else 0
        if attention_mask.shape != (batch_size, width):
            raise ValueError(
                f"attention_mask must be (batch, tokens), and the batch has {batch_size}, got "
                f"{tuple(attention_mask.shape)}"
            )
        # a compiler cannot know where the queries of a static cache begin, nor whether anything is padding
        is_known = not torch.compiler.is_compiling()
        if is_known or not isinstance(q_offset, Tensor):
            end = int(q_offset) + q_length
            if width < end or width > kv_length == end:  # that of a static cache, which has more room, may be longer
                raise ValueError(
                    f"attention_mask has {width} columns, and there are {end - q_length} tokens in the cache and "
                    f"{q_length} new ones: it must have a column for each"
                )
        mask = F.pad(attention_mask[:, :kv_length], (0, max(0, kv_length - width))).bool()
        if not is_known or not bool(mask[:, :end].all()):  # what comes after is not there yet
            return _padded(mask, q_length, q_offset)
    if isinstance(q_offset, Tensor):
        # a copy: the cache counts on in this very tensor before the first layer attends
        start = q_offset.to(device=device, dtype=torch.int64, copy=True).reshape(())
        return Grid(kv_length, kv_length, start)
    return Grid(kv_length, q_offset + q_length)


def _padded(mask: Tensor, queries: int, start: int | Tensor) -> Grid:
    """Moves the real tokens of each sample to the front: its segments begin at the first one, and skip padding."""
    position = torch.arange(mask.shape[1], device=mask.device)
    order = _real_first(mask & (position < start + queries))
    real = mask[:, start + torch.arange(queries, device=mask.device)]
    before = (mask & (position < start)).sum(1)
    return Grid(mask.shape[1], mask.shape[1], before, order, _real_first(real), real)


def _real_first(mask: Tensor) -> Tensor:
    return (~mask).long().argsort(dim=1, stable=True)


@torch.compiler.disable(reason=IN_THE_DATA)  # type: ignore[no-untyped-call, untyped-decorator]
def _documents(
    mask_function: Callable[..., Any], samples: int, tokens: int, device: torch.device | str
) -> Tensor | None:
    """A document begins wherever a token does not see the one before it."""
    position = torch.arange(tokens, device=device)
    before = (position - 1).clamp(min=0)
    sample = torch.arange(samples, device=device).unsqueeze(1)
    seen: Tensor = mask_function(sample, 0, position, before)
    later: Tensor = mask_function(sample, 0, before, position)
    if bool((later & (position > 0)).any()):
        raise ValueError("dilated attention cannot honour a mask in which tokens see later ones")
    begins = ~seen.expand(samples, tokens) | (position == 0)
    ends = begins.flatten().nonzero().flatten().cpu()
    if len(ends) == samples:  # a compiler asks also where there are none
        return None
    return torch.cat((ends, ends.new_tensor([samples * tokens])))


def taken(x: Tensor, order: Tensor) -> Tensor:
    """The tokens of each sample in this order."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """The tokens where `taken` took them from."""
    return taken(x, order.argsort(dim=1))
