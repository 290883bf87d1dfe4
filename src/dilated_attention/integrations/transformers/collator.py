"""ShardingCollator: batches of the Hugging Face Trainer, each row cut over the ranks of a group.

Legend: B samples of all ranks, N tokens in a row, n of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.distributed.agreement import ask, together
from dilated_attention.distributed.group import GroupTransport, wire_device
from dilated_attention.distributed.sequence import (
    Group,
    gather_sequence,
    local_positions,
    process_group,
    shard_sequence,
)
from dilated_attention.models.loss import IGNORED, shifted

FILL = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}


class ShardingCollator:
    """Collects the samples of all ranks of a group, and gives each rank its contiguous part of every row.

    A batch has the rows of all P ranks, and 1 / P of the tokens of each row: input_ids, labels and shift_labels (both
    shifted before rows are cut), position_ids, use_cache and group. Use it as ``data_collator=`` with
    ``dataloader_num_workers=0``, as ranks talk while they collate.

    Args:
        collator: gives ``input_ids`` and ``labels``, (samples, tokens), padded on the right if at all.
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
        with together(partial(ask, GroupTransport(self.group, wire, None), "ShardingCollator()")):
            batch = self._collected(features)
        longest = torch.tensor(batch["input_ids"].shape[1], device=wire)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        tokens, labels = (self._gathered(name, batch[name], int(longest)) for name in ("input_ids", "labels"))
        labels = shard_sequence(shifted(labels), self.group)
        positions = local_positions(tokens.shape[1], self.group).expand(len(tokens), -1)
        # labels are there for the Trainer to count, shift_labels for the loss
        return {
            "input_ids": shard_sequence(tokens, self.group),
            "labels": labels,
            "shift_labels": labels,
            "position_ids": positions.contiguous(),
            "use_cache": False,
            "group": self.group,
        }

    def _collected(self, features: Any) -> dict[str, Tensor]:
        batch = dict(self.collator(features))
        unknown = set(batch) - set(FILL)
        if unknown or "input_ids" not in batch or "labels" not in batch:
            raise ValueError(f"a batch must have input_ids and labels, perhaps attention_mask, got {sorted(batch)}")
        mask = batch.pop("attention_mask", None)
        if mask is not None and bool((mask.diff(dim=1) > 0).any()):
            raise ValueError("rows are padded on the left, or between tokens: set tokenizer.padding_side = 'right'")
        return batch

    def _gathered(self, name: str, x: Tensor, tokens: int) -> Tensor:
        """(B, N). Padding comes after all real tokens, and causal attention does not see it from there."""
        return gather_sequence(F.pad(x, (0, tokens - x.shape[1]), value=FILL[name]), self.group, dim=0)
