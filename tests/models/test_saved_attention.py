"""Attention that a checkpoint keeps: the same gradients bit for bit, and how often attention is computed."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dilated_attention as da
from dilated_attention.backends import run
from dilated_attention.models import LMConfig, LongNetEncoder, LongNetLM, parts, saved_attention, shifted
from dilated_attention.ranks import pool
from tests.over_ranks import world

DEPTH, TOKENS, HEADS, DIM = 5, 37, 4, 6
EACH = 2 * TOKENS * HEADS * (DIM + 1) * 8  # bytes of out and lse of a layer, in float64
ALL = 1 << 30
PATTERN = da.DilatedPattern.longnet([8, 16], [1, 2])
KINDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "sinks": {"sinks": True, "kv_heads": 2},
    "near": {"near": 1},  # attention twice in a layer
    "union": {"pattern": (da.Pattern([da.Window(3), da.Prefix(2)]),) * DEPTH},
}


def model_of(kind: str = "paper", make: Any = LongNetLM) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 19, "dim": 8, "depth": DEPTH, "heads": HEADS, "head_dim": DIM}
    return make(LMConfig(**{**sizes, "pattern": PATTERN, **KINDS[kind]}), dtype=torch.float64)


def batch() -> Tensor:
    return torch.randint(19, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def found(model: Any, checkpointing: Any, backward: int = 1) -> tuple[int, list[Tensor]]:
    """How often attention was computed, and the loss and the gradients of all weights."""
    model.checkpointing, tokens = checkpointing, batch()
    model.zero_grad()
    with mock.patch.object(run, "forward", wraps=run.forward) as counted:
        loss = model(tokens, shifted(tokens)).sum() if isinstance(model, LongNetLM) else model(tokens).square().sum()
        for again in range(backward, 0, -1):
            loss.backward(retain_graph=again > 1)
    return counted.call_count, [loss.detach(), *(weight.grad for weight in model.parameters())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("long", [False, True])
def test_gradients_are_the_same_and_attention_is_computed_once(
    kind: str, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer has no checkpoint."""
    if long:
        monkeypatch.setattr(parts, "AT_ONCE", 8)
    model, times = model_of(kind), 2 if kind == "near" else 1
    count, expected = found(model, True)
    assert count == times * (2 * DEPTH - 1)
    for room, layers in ((0, 0), (times * EACH - 1, 0), (2 * times * EACH, 2), (ALL, DEPTH - 1)):
        count, got = found(model, room)
        assert count == times * (2 * DEPTH - 1 - layers)
        assert same(got, expected)


def test_an_encoder_a_reentrant_checkpoint_and_a_second_backward_pass() -> None:
    model = model_of(make=LongNetEncoder)
    assert same(found(model, ALL)[1], found(model, True)[1])
    model = model_of()
    expected = found(model, True, backward=2)[1]
    count, got = found(model, ALL, backward=2)
    assert same(got, expected)
    assert count == DEPTH + DEPTH - 1  # the second time, nothing is left
    model.checkpoint = partial(checkpoint, use_reentrant=True)
    count, got = found(model, ALL)
    assert count == DEPTH
    assert same(got, found(model, True)[1])


def test_nothing_outlives_the_step() -> None:
    """Not even a graph that nobody goes back through."""
    results, taking = [], saved_attention._Taking.__torch_dispatch__

    def watched(self: Any, op: Any, *given: Any) -> Any:
        found = taking(self, op, *given)
        results.extend(weakref.ref(x) for pair in self.results for x in pair)
        return found

    model, tokens = model_of(), batch()
    model.checkpointing = ALL
    with mock.patch.object(saved_attention._Taking, "__torch_dispatch__", watched):
        for _ in range(2):
            loss = model(tokens, shifted(tokens)).sum()
        loss.backward()
    del loss
    assert results
    assert not any(x() is not None for x in results)


def test_compiled_blocks() -> None:
    model = model_of()
    expected = found(model, ALL)[1]
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    count, got = found(model, ALL)
    assert count == DEPTH
    torch.testing.assert_close(got, expected)


def test_half_precision_by_autocast() -> None:
    model = model_of().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, (count, got) = found(model, True)[1], found(model, ALL)
    assert count == DEPTH
    assert same(got, expected)


def test_auto_keeps_what_has_room_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step needs 1000 bytes, and shows it; the optimizer then allocates 500."""
    model, spare = model_of(), saved_attention.SPARE
    there_is = (1500 + 1000 + 3 * EACH + 1) / (1 - spare) + 1
    told = [(1000, 1000, 0), (1200, 2000, 0), (1500, 1500, there_is), (1500, 9000, there_is), (1500, 9000, 2500)]
    monkeypatch.setattr(saved_attention, "memory", lambda device: told.pop(0))
    expected = found(model_of(), True)[1]
    for layers in (0, 3, 3, 0):
        count, got = found(model, "auto")
        assert count == 2 * DEPTH - 1 - layers
        assert same(got, expected)
    assert not told
    monkeypatch.undo()
    for wrong, says in (("auto", "needs a GPU"), (-1, "must be 0 or more"), ("on", "must be a whole number")):
        with pytest.raises((ValueError, TypeError), match=says):
            found(model, wrong)


def over_ranks() -> list[Tensor]:
    group, tokens = world(), batch()
    model = model_of()
    model.checkpointing = ALL
    mine = [da.shard_sequence(x, group) for x in (tokens, shifted(tokens))]
    losses = model(*mine, positions=da.local_positions(TOKENS, group), group=group)
    losses.sum().backward()
    for weight in model.parameters():
        torch.distributed.all_reduce(weight.grad)
    return [weight.grad for weight in model.parameters()]


def test_over_ranks_attention_is_computed_again() -> None:
    for grads in pool(2).run(over_ranks):
        torch.testing.assert_close(grads, found(model_of(), False)[1][1:])


@pytest.mark.gpu
def test_auto_on_a_gpu() -> None:
    """The first step keeps nothing; a small model has room for all in the next ones."""
    model, fewest = model_of().cuda().float(), []
    for _ in range(3):
        with mock.patch.object(
            saved_attention.SavedAttention,
            "__call__",
            autospec=True,
            side_effect=saved_attention.SavedAttention.__call__,
        ) as calls:
            tokens = batch().cuda()
            model.checkpointing = "auto"
            model(tokens, shifted(tokens)).sum().backward()
        fewest.append(calls.call_count)
    assert fewest == [0, 2 * (DEPTH - 1), 2 * (DEPTH - 1)]
