"""Rows of the Hugging Face Trainer over two ranks: losses and gradients as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DataCollatorWithFlattening

from dilated_attention import gather_sequence
from dilated_attention.integrations.transformers import ShardingCollator
from dilated_attention.ranks import pool
from dilated_attention.testing import error
from tests.integrations.hf import LENGTHS, model_of, tokens
from tests.over_ranks import raised, world

SAMPLES = [row[:length] for row, length in zip(tokens(), LENGTHS, strict=True)] + [tokens()[0, 3:18]]


def collated(rows: list[Tensor]) -> dict[str, Tensor]:
    """As a collator of transformers does: padded on the right, labels -100 there."""
    pad: Any = torch.nn.utils.rnn.pad_sequence
    ids, mask = pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model: Any, batch: dict[str, Any], group: dist.ProcessGroup | None) -> list[Tensor]:
    """The loss and gradients that the Trainer gets: by the number of labels of all ranks, averaged over ranks."""
    labels = batch["labels"] if group is not None else batch["labels"][:, 1:]
    count, ranks = (labels != -100).sum(), 1 if group is None else group.size()
    if group is not None:
        dist.all_reduce(count, group=group)
    loss = model(**batch, num_items_in_batch=count).loss * ranks
    found = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for x in found:
        if group is not None:
            dist.all_reduce(x, group=group)
            x /= ranks
    return found


def flattened(rows: list[Tensor]) -> dict[str, Tensor]:
    """Packed, as transformers packs them."""
    packed: dict[str, Tensor] = DataCollatorWithFlattening()([{"input_ids": row} for row in rows])
    return packed


def over_ranks(kind: str, collator: Any) -> float:
    """How far a step is from that of one device; each rank is dealt its samples, of different lengths."""
    group = world()
    mine = SAMPLES[group.rank() :: group.size()]
    batch = ShardingCollator(collator, group)(mine)
    order = [SAMPLES[i] for rank in range(group.size()) for i in range(rank, len(SAMPLES), group.size())]
    whole = collator(order)
    rows, positions = (gather_sequence(batch[name], group) for name in ("input_ids", "position_ids"))
    assert torch.equal(rows, whole["input_ids"])  # contiguous, in the order of the ranks
    assert torch.equal(positions[:1], whole.get("position_ids", torch.arange(rows.shape[1])[None]))
    model = model_of(kind)
    got, expected = step(model, batch, group), step(model, {**whole, "use_cache": False}, None)
    return max(error(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", ["llama", "longnet"])
@pytest.mark.parametrize("collator", [collated, flattened])
def test_two_ranks_are_as_one(kind: str, collator: Any) -> None:
    limit = 1e-6 if kind == "llama" else 1e-10  # its loss is in float32
    assert max(pool(2).run(over_ranks, kind, collator)) < limit


def refusals() -> list[str]:
    """Head and tail of a sequence on each rank, as a balancer deals them; ranks in another order; padding."""
    group, model, plain = world(), model_of("llama"), model_of("longnet")
    batch = ShardingCollator(collated, group)(SAMPLES)
    positions = batch["position_ids"]
    ends = torch.cat((positions[:, :5], positions[:, 5:] + 5), 1)
    padded = batch | {"attention_mask": torch.zeros_like(batch["input_ids"])}
    cache = model(**batch | {"use_cache": True}).past_key_values  # which transformers makes unless it is told not to
    left = [{key: value.flip(1) for key, value in collated(SAMPLES).items()}]
    return [
        raised(model, **batch | {"position_ids": ends}),
        raised(model, **batch | {"position_ids": positions + 10 * (1 - 2 * group.rank())}),
        raised(model, **(padded if group.rank() else batch)),  # on one rank alone: the others are told
        raised(model, **batch | ({"past_key_values": cache} if group.rank() else {})),
        raised(plain, **batch | ({"use_cache": True} if group.rank() else {})),
        raised(plain, input_ids=batch["input_ids"], labels=batch["input_ids"], group=group),
        raised(plain, **batch | ({"softcap": 30.0} if group.rank() else {})),  # again on one rank alone
        raised(ShardingCollator(lambda rows: rows[0], group), left if group.rank() else [collated(SAMPLES)]),
        raised(ShardingCollator(lambda rows: {"input_ids": rows}, group), SAMPLES),
    ]


def test_what_is_refused() -> None:
    for found in pool(2).run(refusals):
        for says, text in zip(
            (
                *["turn off load balancers that reorder"] * 2,
                *["no attention_mask and no cache"] * 3,
                "pass shift_labels",
                "soft caps",
                "padding_side",
                "labels",
            ),
            found,
            strict=True,
        ):
            assert text.startswith("ValueError"), text
            assert says in text
