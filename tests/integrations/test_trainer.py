"""The Hugging Face Trainer itself, on two ranks of torchrun that share sequences: they run this file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from dilated_attention.integrations.transformers import ShardingCollator
from dilated_attention.testing import error
from tests.integrations.hf import config_of, made
from tests.integrations.test_collator import collated, flattened
from tests.over_ranks import world

ROOT = Path(__file__).parents[2]


def main(folder: str, ranks: int, kind: str) -> None:
    """Writes the losses, and the weights after three steps of plain gradient descent, which shows how large gradients
    are."""
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4 // ranks, max_steps=3, optim="sgd", learning_rate=1e-2,
        lr_scheduler_type="constant", dataloader_num_workers=0, remove_unused_columns=False, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=1,
    )  # fmt: skip
    model = made(config_of()).train()
    drawn = torch.Generator().manual_seed(0)
    lengths = (20, 13, 17, 9, 20, 20, 5, 11, 18, 20, 16, 8)
    rows: Any = [torch.randint(1, 40, (length,), generator=drawn) for length in lengths]
    collator: Any = {"padded": collated, "packed": flattened}[kind]
    collator = ShardingCollator(collator, world()) if ranks > 1 else collator
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    losses = torch.tensor([step["loss"] for step in trainer.state.log_history[:-1]])  # the last is the train_loss
    if ranks == 1 or dist.get_rank() == 0:
        torch.save(model.state_dict() | {"losses": losses}, Path(folder, f"{ranks}.pt"))


def trained(folder: Path, ranks: int, kind: str) -> dict[str, torch.Tensor]:
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words += [__file__, str(folder), str(ranks), kind]
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, torch.Tensor] = torch.load(folder / f"{ranks}.pt", weights_only=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_the_trainer_on_two_ranks(kind: str, tmp_path: Path) -> None:
    one, two = trained(tmp_path, 1, kind), trained(tmp_path, 2, kind)
    assert max(error(two[name], one[name]) for name in one) < 1e-6  # the loss of Llama is in float32


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
