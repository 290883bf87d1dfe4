"""Batches whose tokens lie on several ranks: `shard_batch` in your own loop, ShardingCollator in the Trainer.

Legend: B samples, N tokens in a row, n of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.call import checked_cu_seqlens
from dilated_attention.context_parallel import ContextParallel
from dilated_attention.distributed.agreement import ask, same_on_all
from dilated_attention.distributed.group import GroupTransport, wire_device
from dilated_attention.distributed.sequence import Group, gather_sequence, process_group, shard_sequence
from dilated_attention.models.lm import document_positions
from dilated_attention.models.loss import IGNORED, shifted
from dilated_attention.resolve import cu_seqlens_on_host

FILL = {"input_ids": 0, "labels": IGNORED}
OF_DOCUMENTS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def shard_batch(batch: Mapping[str, Any], group: Group | ContextParallel) -> dict[str, Any]:
    """Gives this rank its part of a batch for a causal language model: ``model(**shard_batch(batch, group))``.

    The logits are those of this rank's tokens. **Average over the ranks**, as DDP and FSDP do with gradients: the mean
    of ``loss`` and of the gradients are those of one device. Nothing is communicated here.

    Args:
        batch: the whole batch, the same on every rank: input_ids (B, N), and perhaps labels, which are not shifted yet,
            and attention_mask, with padding on the right only. For documents packed in one row, also position_ids
            that begin again at 0, or cu_seq_lens_q.
        group: the ranks that share the sequence, as a process group, a 1-D DeviceMesh or a ContextParallel.

    Example:
        >>> from dilated_attention.integrations.transformers import shard_batch
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> batch = shard_batch({"input_ids": tokens, "labels": tokens}, group)
        >>> batch["shift_labels"]
        tensor([[   2,    3,    4, -100]])
    """
    over = ContextParallel.of(group)
    ranks, tokens, labels, ends = over.process_group(), batch["input_ids"], batch.get("labels"), _ends(batch)
    if tokens.shape[1] < ranks.size():
        raise ValueError(f"a row of {tokens.shape[1]} tokens cannot lie on {ranks.size()} ranks: take longer rows")
    found: dict[str, Any] = {"use_cache": False, "group": replace(over, total_length=tokens.shape[1])}
    if len(ends) > 2:
        found["cu_seq_lens_q"] = ends
    if not _is_real(batch).all():
        found["is_causal"] = True  # then nobody sees the padding; a model that is not causal refuses this word
    cut = {"input_ids": tokens, "position_ids": document_positions(ends, tokens.device).expand(len(tokens), -1)}
    if labels is not None:  # labels are there for the Trainer to count, shift_labels for the loss
        cut["labels"] = cut["shift_labels"] = shifted(labels)  # as transformers does on one device
        found["num_items_in_batch"] = (cut["labels"] != IGNORED).sum() / ranks.size()
    return {name: shard_sequence(x, ranks) for name, x in cut.items()} | found


def _is_real(batch: Mapping[str, Any]) -> Tensor:
    """(B, N)"""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _ends(batch: Mapping[str, Any]) -> Tensor:
    """Where packed documents begin, and the end of the last, on the host. Raises if a batch cannot be cut."""
    if unknown := set(batch) - {*FILL, *OF_DOCUMENTS, "attention_mask"}:
        raise ValueError(f"a batch over ranks cannot have {', '.join(sorted(unknown))}: leave this out")
    (samples, length), real = batch["input_ids"].shape, _is_real(batch)
    positions, ends = batch.get("position_ids"), batch.get("cu_seq_lens_q")
    if ends is None:
        starts = [0] if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
        ends = [*starts, length]
    ends = cu_seqlens_on_host(ends, "cu_seq_lens_q")
    checked_cu_seqlens(ends, length)
    if positions is not None and bool((positions != document_positions(ends, positions.device)).any()):
        raise ValueError("position_ids must begin at 0 in each document, and grow by 1 from token to token")
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError("rows are padded on the left, or between tokens: set tokenizer.padding_side = 'right'")
    if len(ends) > 2 and (samples > 1 or not real.all()):
        raise ValueError("packed documents must lie in one row without padding: see DataCollatorWithFlattening")
    return ends


class ShardingCollator:
    """Collects the samples of all ranks of a group, and gives each rank its contiguous part of every row.

    A batch has the rows of all P ranks, and 1 / P of the tokens of each row, with what `shard_batch` adds. If the
    collator packs documents in one row, the rows of all ranks become one. Use it as ``data_collator=`` with
    ``dataloader_num_workers=0``, as ranks talk while they collate.

    Args:
        collator: gives ``input_ids`` and ``labels``, (samples, tokens), padded on the right if at all; or packs them,
            as DataCollatorWithFlattening does.
        group: the ranks that share sequences: a process group or a 1-D DeviceMesh.

    Example:
        >>> from transformers import default_data_collator
        >>> from dilated_attention.integrations.transformers import ShardingCollator
        >>> collate = ShardingCollator(default_data_collator, group)
        >>> batch = collate([{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}])
        >>> batch["shift_labels"]
        tensor([[   2,    3,    4, -100]])
    """

    def __init__(self, collator: Callable[[Any], Any], group: Group) -> None:
        self.collator, self.group = collator, process_group(group)

    def __call__(self, features: Any) -> dict[str, Any]:
        wire = wire_device(self.group, torch.device("cpu"))
        with same_on_all(partial(ask, GroupTransport(self.group, wire, None), "ShardingCollator()")) as same:
            batch = dict(self.collator(features))
            if not FILL.keys() <= batch.keys():
                raise ValueError(f"a batch must have input_ids and labels, got {sorted(batch)}")
            ends = _ends(batch)
            is_packed = len(batch["input_ids"]) == 1 and any(name in batch for name in OF_DOCUMENTS)
            same["packed documents"] = is_packed
        whole = {name: batch[name] for name in FILL}
        if is_packed:
            whole["position_ids"] = document_positions(ends).unsqueeze(0)
        else:  # padding comes after all real tokens, and causal attention does not see it from there
            longest = torch.tensor(batch["input_ids"].shape[1], device=wire)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
            whole = {name: F.pad(x, (0, int(longest) - x.shape[1]), value=FILL[name]) for name, x in whole.items()}
        dim = 1 if is_packed else 0
        found = shard_batch({name: gather_sequence(x, self.group, dim) for name, x in whole.items()}, self.group)
        del found["num_items_in_batch"]  # the Trainer counts those of several batches
        return found
