"""Hugging Face models whose tokens lie on several ranks: logits, losses and gradients are those of one device."""

from __future__ import annotations

import copy
import os
import re
import signal
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from dilated_attention import gather_sequence, naming_lost_ranks
from dilated_attention.integrations.transformers import shard_batch
from dilated_attention.models import document_positions, shifted
from dilated_attention.ranks import pool
from dilated_attention.testing import error
from tests.integrations.hf import LENGTHS, VOCABULARY, batch, config_of, made, model_of, packed, tokens
from tests.over_ranks import raised, world

pytestmark = pytest.mark.usefixtures("pools_that_end")
NAMES = ["llama", "qwen3", "mistral", "gpt2", "longnet"]
NEAR = 1e-6  # the loss of transformers is in float32, and the models in float64
ENDS = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]


def batch_of(kind: str) -> dict[str, Any]:
    """As a collator of transformers makes it, for one device."""
    if kind == "packed":  # a document begins with no label, as in DataCollatorWithFlattening
        ids = packed()["input_ids"]
        labels = ids.masked_fill(document_positions(ENDS) == 0, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": document_positions(ENDS)[None]}
    if kind == "rows":
        return {"input_ids": tokens(), "labels": tokens()}
    padded = batch("right")
    labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    return {"input_ids": padded["input_ids"], "labels": labels, "attention_mask": padded["attention_mask"]}


def cut_by_hand(batch: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, Any]:
    """As `shard_batch`, with shards of these lengths."""
    whole, documents = dict(batch), ENDS if "position_ids" in batch else None
    whole["labels"] = whole["shift_labels"] = shifted(batch["labels"], documents)
    whole.setdefault("position_ids", torch.arange(batch["input_ids"].shape[1]).expand(len(batch["input_ids"]), -1))
    whole.pop("attention_mask", None)
    cut = {name: x.split(lengths, 1)[dist.get_rank()].contiguous() for name, x in whole.items()}
    count = (whole["labels"] != -100).sum() / world().size()
    ends = {} if documents is None else {"cu_seq_lens_q": torch.tensor(documents, dtype=torch.int32)}
    return {**cut, **ends, "use_cache": False, "num_items_in_batch": count, "group": world()}


def model_for(name: str, is_checkpointed: bool = False) -> Any:
    model = copy.deepcopy(model_of(name)).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def results(model: Any, given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The logits, if there are some; the loss and the gradients."""
    out = model(**given)
    loss = out.loss
    logits = out.logits
    return logits, [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def over_ranks(name: str, kind: str, lengths: tuple[int, ...] | None, is_checkpointed: bool) -> tuple[float, float]:
    """How far logits, and the loss and gradients, are from those of one device."""
    group, given, model = world(), batch_of(kind), model_for(name, is_checkpointed)
    mine = shard_batch(given, group) if lengths is None else cut_by_hand(given, lengths)
    logits, got = results(model, mine)
    for x in got:
        dist.all_reduce(x)
        x /= group.size()
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    alone, expected = results(model, {**given, "use_cache": False})
    off = 0.0
    if logits is not None:
        whole = gather_sequence(logits.detach(), group)
        off = error(whole[real], alone.detach()[real])
    return off, max(error(x, y) for x, y in zip(got, expected, strict=True))


def all_over_ranks(names: list[str], *how: Any) -> dict[str, tuple[float, float]]:
    return {name: over_ranks(name, *how) for name in names}


@pytest.mark.parametrize(
    ("ranks", "kind", "lengths", "is_checkpointed"),
    [
        (3, "rows", None, False),
        (2, "padded", None, True),
        (3, "packed", None, True),
        (3, "packed", (1, 32, 7), False),
        (3, "rows", (13, 1, 6), False),
        pytest.param(4, "packed", None, False, marks=pytest.mark.slow),
    ],
)
def test_ranks_are_as_one(ranks: int, kind: str, lengths: Any, is_checkpointed: bool) -> None:
    for found in pool(ranks).run(all_over_ranks, NAMES, kind, lengths, is_checkpointed):
        for name, (of_logits, of_gradients) in found.items():
            assert of_logits < 1e-11, (name, of_logits)
            assert of_gradients < NEAR, (name, of_gradients)


def refusals() -> list[str]:
    """What a model says on this rank: the first two calls are wrong on all ranks, the others on rank 1 alone."""
    group, model = world(), model_of("llama")
    rows, documents = (shard_batch(batch_of(kind), group) for kind in ("rows", "packed"))
    length = documents["input_ids"].shape[1]
    restarts = {"cu_seq_lens_q": None, "position_ids": torch.arange(length)[None] % 5}
    odd = [
        rows | {name: batch_of("rows")[name] for name in ("input_ids", "labels")} | {"position_ids": None},
        documents | restarts,
        rows | {"position_ids": None},
        rows | {"position_ids": rows["position_ids"] + 1},
        documents | {"cu_seq_lens_q": torch.tensor([0, 9, length])},
    ]
    right = [rows, documents, rows, rows, documents]
    return [raised(model, **(right[i] if i > 1 and group.rank() != 1 else odd[i])) for i in range(len(odd))]


def test_what_is_refused_over_ranks() -> None:
    says = [
        "every rank seems to have passed the whole sequence", "documents need cu_seq_lens_q of the tokens of all ranks",
        *["position_ids of rank 1 are not those of tokens 10 to 19: pass what shard_batch"] * 2,
        "cu_seq_lens_q, as shard_batch() makes it, is [0, 20, 33, 40] on rank 0 and [0, 9, 20] on rank 1",
    ]  # fmt: skip
    for found in pool(2).run(refusals):
        for text, wanted in zip(found, says, strict=True):
            assert text.startswith("ValueError"), text
            assert wanted in text


def moving(kind: str, **more: Any) -> str:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}
    return raised(made(config_of(rope_parameters=rope)), **shard_batch(batch_of("rows"), world()))


def test_frequencies_that_follow_the_largest_position_are_refused() -> None:
    factors = {name: [1.0] * 4 for name in ("short_factor", "long_factor")}
    for kind, more in {"dynamic": {}, "longrope": {**factors, "original_max_position_embeddings": 8}}.items():
        assert all(
            "rope_type cannot be 'dynamic' or 'longrope'" in text for text in pool(2).run(partial(moving, kind, **more))
        )


def cut(over: Any, **batch: Any) -> str:
    return raised(shard_batch, {"input_ids": torch.ones(2, 6).long(), **batch}, over or world())


def uncut() -> list[str]:
    mask, row = torch.ones(2, 6).long(), torch.ones(1, 6).long()
    left = mask.clone()
    left[1, 0] = 0
    restarts = torch.arange(6)[None] % 3
    return [
        cut(None, attention_mask=left), cut(None, position_ids=restarts.expand(2, -1)),
        cut(None, input_ids=row, position_ids=restarts + 1), cut(None, input_ids=row, cu_seq_lens_q=[0, 2, 5]),
        cut(None, input_ids=row, cu_seq_lens_q=[0, 2, 6], position_ids=restarts), cut(None, pixel_values=mask),
        cut(None, input_ids=row[:, :1]), cut("world"),
    ]  # fmt: skip


def test_what_cannot_be_cut() -> None:
    says = [
        "padding_side = 'right'", "packed documents must lie in one row without padding", "begin with 0",
        "end with 6", "position_ids must begin at 0 in each document", "cannot have pixel_values",
        "a row of 1 tokens cannot lie on 2 ranks", "group must be",
    ]  # fmt: skip
    for found in pool(2).run(uncut):
        for text, wanted in zip(found, says, strict=True):
            assert wanted in text


def trained(steps: int, killed_at: int = -1) -> list[float]:
    """The losses of a training: under FSDP2 if there are ranks, of which rank 1 ends at a step, in the last layer."""
    group, losses = dist.group.WORLD, []
    model = model_for("llama", is_checkpointed=True).float()
    if group is not None:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        row = torch.randint(VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(step % 5))
        whole = {"input_ids": row, "labels": row}
        if step == killed_at and dist.get_rank() == 1:
            last = model.model.layers[-1].self_attn
            last.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        loss = model(**(whole if group is None else shard_batch(whole, group))).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        if group is not None:
            dist.all_reduce(loss)
            loss /= group.size()
        losses.append(float(loss))
    return losses


@pytest.mark.slow
def test_a_training_over_ranks_is_one_on_one_device() -> None:
    one, *several = trained(100), *pool(3).run(trained, 100)
    assert one[-1] < one[0] / 3
    for losses in several:
        assert max(abs(x - y) for x, y in zip(losses, one, strict=True)) < 1e-4


def killed() -> None:
    with naming_lost_ranks(world()):
        trained(3, killed_at=1)


def test_every_other_rank_names_the_one_that_was_killed() -> None:
    """Wherever it was noticed: in a collective of FSDP, or in one of ours."""
    for rank, outcome in enumerate(pool(3).run(killed, check=False, timeout=60.0)):
        assert outcome.error_type == ("died" if rank == 1 else "CommunicationError"), outcome
        assert rank == 1 or re.match(rf"rank {rank} (lost|waited .* for) rank 1", outcome.error or ""), outcome.error
