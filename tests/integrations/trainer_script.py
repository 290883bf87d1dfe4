"""The Hugging Face Trainer on the ranks of torchrun, which share sequences; writes the weights it ends with.

torchrun --standalone --nproc-per-node=2 trainer_script.py FILE RANKS
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from dilated_attention.integrations.transformers import ShardingCollator
from tests.integrations.hf import PATTERN, config_of, made
from tests.integrations.test_collator import collated


def main() -> None:
    ranks = int(sys.argv[2])
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4 // ranks, max_steps=3, optim="sgd", learning_rate=1e-2,
        lr_scheduler_type="constant", dataloader_num_workers=0, remove_unused_columns=False, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    model = made(config_of(pattern=PATTERN)).train()
    drawn = torch.Generator().manual_seed(0)
    lengths = (20, 13, 17, 9, 20, 20, 5, 11, 18, 20, 16, 8)
    rows = [torch.randint(1, 40, (length,), generator=drawn) for length in lengths]
    collator: Any = collated
    if ranks > 1:
        group = dist.group.WORLD
        assert group is not None
        assert group.size() == ranks
        collator = ShardingCollator(collated, group)
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator).train()  # type: ignore[arg-type]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(model.state_dict(), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
