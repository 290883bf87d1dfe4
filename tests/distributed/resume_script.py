"""A small training over the ranks of torchrun that goes on from its last checkpoint, wherever it was ended.

torchrun --standalone --nproc-per-node=2 --max-restarts=3 resume_script.py FOLDER STEPS [STEP RANK]
With STEP and RANK, that rank kills itself in the backward pass of that step, in its first life only.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dilated_attention as da

VOCABULARY, DIM, HEADS, TOKENS, SAMPLES = 17, 16, 4, 70, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)
        self.head, group = nn.Linear(DIM, VOCABULARY), da.ContextParallel(timeout=30.0)
        self.attention = da.RingMultiheadDilatedAttention(DIM, HEADS, [16, 128], [1, 2], dropout=0.1, group=group)

    def forward(self, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = self.tokens(tokens) + self.positions(da.local_positions(TOKENS, group))
        return self.head(F.dropout(x + self.attention(x, is_causal=True)[0], 0.1))


def save(path: Path, state: dict[str, Any]) -> None:
    """All or nothing: a rank may die while it writes."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def random_states(group: dist.ProcessGroup) -> list[Tensor]:
    """Of all ranks, each of which drops out elements of its own."""
    mine = torch.get_rng_state()
    states = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(states, mine, group=group)
    return states


def train(folder: Path, steps: int, death: tuple[int, int] | None, group: dist.ProcessGroup) -> None:
    rank, checkpoint = group.rank(), folder / "checkpoint.pt"
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    torch.manual_seed(1 + rank)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
        torch.set_rng_state(state["random"][rank])
    for step in range(len(losses), steps):
        tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        inputs, targets = da.shard_sequence(tokens[:, :-1], group), da.shard_sequence(tokens[:, 1:], group)
        logits = model(inputs, group)
        if (step, rank) == death:
            logits.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss = da.sequence_mean(F.cross_entropy(logits.mT, targets, reduction="none"), group, gradients="sum")
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        losses.append(loss.item())
        states = random_states(group)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            save(checkpoint, {**state, "random": states})
        dist.barrier(group)


def meet(life: int) -> dist.ProcessGroup:
    """The group of all ranks. torchrun keeps its store over restarts, and in it the addresses of ranks now gone."""
    address, port, rank, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    store = dist.PrefixStore(f"life {life}", dist.TCPStore(address, int(port), int(size), is_master=False))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
    group = dist.group.WORLD
    assert group is not None
    return group


def main() -> None:
    folder, steps, *death = Path(sys.argv[1]), *map(int, sys.argv[2:])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(folder / "lives", "a") as file:
        file.write(f"{life} {os.getpid()}\n")
    train(folder, steps, (death[0], death[1]) if death and life == 0 else None, meet(life))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
