"""Where the tokens of a Hugging Face batch stand: what is padding, where documents begin, where the queries are.

transformers asks for a mask once per forward pass and hands it to every layer. Ours is a small integer tensor, a grid.
It has four dimensions, because transformers passes such a mask on as it is, and rebuilds all others. Its shape says
what kind it is, so that no layer waits for the device:

    (1, M, 0, N)        the queries are the last of the keys, and nothing is padding; it is empty, so that no copy costs
    (1, M, 1, 2)        the queries begin at the key whose number it holds: a static cache
    (1, M, 1, 3)        the queries are the first of the keys: a static cache that was empty
    (B, M, 2, N + 1)    padding: real keys and real queries in order, and how many keys are real before the queries
    (1, M, 3, docs + 1) packed documents: cu_seqlens of all rows one after the other, on the CPU

Legend: B samples, n queries, N keys; M is MARK, by which a grid is told from a mask that someone passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils import output_capturing

from dilated_attention.integrations.transformers.config import check_model
from dilated_attention.integrations.transformers.faults import NOT_CAUSAL, SHORT, WEIGHTS, checked, no_fault

IN_THE_DATA = (
    "without attention_mask, transformers looks for packed documents in position_ids, and their number depends on the "
    "data: if there are none, pass an attention_mask for fullgraph=True"
)


MARK = 11  # a mask has 1 there, or as many as heads. Small: whoever copies a grid to another device copies all of them


class Grid(NamedTuple):
    """A grid, read from its tensor."""

    query_start: Tensor | int | None = None  # of the queries among the keys; None: they are the last
    order: Tensor | None = None  # (B, N): the real keys of each sample in order, then the others
    query_order: Tensor | None = None  # (B, n), the same of the queries
    real: Tensor | None = None  # (B,) how many queries are real
    documents: Tensor | None = None  # cu_seqlens

    @staticmethod
    def read(mask: Tensor | None, queries: int) -> Grid:
        """The grid in a tensor that `grid_mask` made, or an error that says what came instead."""
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.dtype != torch.int64 or mask.shape[1] != MARK:
            got = "no mask" if mask is None else f"the mask {type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}"
            raise ValueError(
                f"dilated attention got {got}, and needs one that its own mask function made: pass attention_mask as "
                "(batch, tokens), and call register() before the model runs"
            )
        kind, width = mask.shape[2:]
        if kind == 3:
            return Grid(documents=mask[0, 0, 0])
        if kind == 0:
            return Grid()
        if kind == 1:
            return Grid(query_start=mask[0, 0, 0, 0] if width == 2 else 0)
        keys, others = mask[:, 0].unbind(1)
        return Grid(keys[:, -1], keys[:, :-1], others[:, :queries], others[:, -1])


def check_keys(mask: Tensor, queries: int, keys: int) -> None:
    """Raise if a layer has another number of keys than the grid, which is made for those of the first layer."""
    kind, width = mask.shape[2:]
    wanted = width - kind // 2
    if kind in (0, 2) and keys != wanted:
        raise ValueError(
            f"a layer has {keys - queries} tokens in its cache, and this call goes on after {wanted - queries}: an "
            "earlier call stopped between two layers, or gradient checkpointing left the cache out; make a new cache, "
            "and train without one"
        )


def grid_mask(*given: Any, **named: Any) -> Tensor:
    """The mask function of "dilated": a grid, see above."""
    return _grid(*given, **named).expand(-1, MARK, -1, -1)


def _grid(
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
) -> Tensor:
    """The grid, with 1 in the place of M."""
    if not torch.compiler.is_compiling():
        check_model(config)
        no_fault(weights_fault())
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
        found: Tensor = _documents(mask_function, batch_size, kv_length, device)
        return found
    if attention_mask is not None:
        width = attention_mask.shape[1] if attention_mask.dim() == 2 else 0
        if attention_mask.shape != (batch_size, width):
            raise ValueError(
                f"attention_mask must be (batch, tokens), and the batch has {batch_size}, got "
                f"{tuple(attention_mask.shape)}"
            )
        # a compiler cannot know where the queries of a static cache begin, nor whether anything is padding
        is_known = not torch.compiler.is_compiling()
        end = (int(q_offset) if is_known else q_offset) + q_length
        if isinstance(end, Tensor):
            fault = None if width >= kv_length else (end > width).long().reshape(()) * SHORT
            q_offset = checked(q_offset, fault)  # type: ignore[arg-type]
        elif width < end or width > kv_length == end:  # that of a static cache, which has more room, may be longer
            raise ValueError(
                f"attention_mask has {width} columns, and there are {end - q_length} tokens in the cache and "
                f"{q_length} new ones: it must have a column for each"
            )
        mask = F.pad(attention_mask[:, :kv_length], (0, max(0, kv_length - width)))
        if not is_known or not bool(mask[:, :end].all()):  # what comes after is not there yet
            return _padded(mask.bool(), q_length, q_offset)
    if isinstance(q_offset, Tensor):
        # a copy: the cache counts on in this very tensor before the first layer attends
        return q_offset.to(device=device, dtype=torch.int64, copy=True).reshape(1, 1, 1, 1).expand(1, 1, 1, 2)
    if q_offset + q_length == kv_length:
        return torch.zeros(1, 1, 0, kv_length, dtype=torch.int64, device=device)
    if not q_offset:
        return torch.zeros(1, 1, 1, 3, dtype=torch.int64, device=device)
    return torch.full((1, 1, 1, 2), q_offset, dtype=torch.int64, device=device)


def weights_fault() -> Tensor | None:
    """GPT-2 tells its attention function nothing of output_attentions, but whoever asks for them waits for them here.

    In compiled code only if that, too, was compiled: what was not has asked before, when the mask was made.
    """
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None or (torch.compiler.is_compiling() and not getattr(collector, "compiling", False)):
        return None
    return torch.full((), WEIGHTS) if "attentions" in (collector.get() or ()) else None


def _padded(mask: Tensor, queries: int, start: int | Tensor) -> Tensor:
    """Moves the real tokens of each sample to the front: its segments begin at the first one, and skip padding."""
    position = torch.arange(mask.shape[1], device=mask.device)
    place = start + torch.arange(queries, device=mask.device)
    before = (mask & (position < start)).sum(1)
    order = _real_first(mask & (position < start + queries))
    real = mask[:, place]
    query_order = F.pad(_real_first(real), (0, mask.shape[1] - queries))
    keys = torch.cat((order, before[:, None]), 1)
    others = torch.cat((query_order, real.sum(1)[:, None]), 1)
    return torch.stack((keys, others), 1).unsqueeze(1)


def _real_first(mask: Tensor) -> Tensor:
    return (~mask).long().argsort(dim=1, stable=True)


@torch.compiler.disable(reason=IN_THE_DATA)  # type: ignore[no-untyped-call, untyped-decorator]
def _documents(mask_function: Callable[..., Any], samples: int, tokens: int, device: torch.device | str) -> Tensor:
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
        return torch.zeros(1, 1, 0, tokens, dtype=torch.int64, device=device)
    return torch.cat((ends, ends.new_tensor([samples * tokens]))).view(1, 1, 1, -1).expand(1, 1, 3, -1)


def taken(x: Tensor, order: Tensor) -> Tensor:
    """The tokens of each sample in this order."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """The tokens where `taken` took them from."""
    return taken(x, order.argsort(dim=1))
