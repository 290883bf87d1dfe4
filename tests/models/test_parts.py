"""Long rows go through a block in parts: same results and gradients, and no part is computed for nothing."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dilated_attention as da
from dilated_attention.models import LMConfig, LongNetLM, parts, shifted
from dilated_attention.pattern import DilatedPattern
from dilated_attention.ranks import pool
from tests.over_ranks import world

TOKENS, AT_ONCE = 37, 8
PATTERN = DilatedPattern.longnet([8, 16], [1, 2])


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "AT_ONCE", AT_ONCE)


def model_of(**changes: Any) -> LongNetLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 19, "dim": 8, "depth": 3, "heads": 2, "pattern": PATTERN, **changes}
    return LongNetLM(LMConfig(**sizes), dtype=torch.float64)


def found(model: LongNetLM, checkpointing: bool | int, length: int = TOKENS) -> tuple[Any, ...]:
    """The loss, and the gradients of all weights; always with the same numbers drawn."""
    torch.manual_seed(3)
    tokens = torch.randint(19, (2, length), generator=torch.Generator().manual_seed(1))
    model.checkpointing = checkpointing
    model.zero_grad(set_to_none=True)
    loss = model(tokens, shifted(tokens), reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), *(weight.grad for weight in model.parameters())


close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


KINDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "sinks and near": {"sinks": True, "near": 1},
    "qwen": {"ffn": "swiglu", "norm": "rms", "sub_norm": False, "qk_norm": True, "kv_heads": 1, "head_dim": 6},
    "no positions": {"rotary_base": None},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["none", "embed", "norm", "blocks.1"])
def test_parts_change_nothing(kind: str, frozen: str) -> None:
    model = model_of(tied=False, **KINDS[kind])
    for name, weight in model.named_parameters():
        weight.requires_grad_(frozen not in name)
    close(found(model, True), found(model, False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_part_is_computed_for_nothing(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows attention is computed twice: forward, and for gradients. torch's reentrant checkpoint cannot stop
    early. The last block has no checkpoint; it alone is late, and goes in parts through what comes before attention."""
    model, widths = model_of(), {"up": [], "qkv": []}
    for name, layer in model.named_modules():
        if name.endswith((".up", ".qkv")):
            seen = widths[name.rsplit(".")[-1]]
            layer.register_forward_hook(lambda layer, inputs, output, seen=seen: seen.append(output.shape[1]))
    if reentrant:
        monkeypatch.setattr(model, "checkpoint", lambda f, *inputs: checkpoint(f, *inputs, use_reentrant=True))
    found(model, True)
    of_a_row = -(-TOKENS // AT_ONCE)
    assert max(widths["up"]) == AT_ONCE
    assert len(widths["up"]) == of_a_row * (3 * 2 + 2 * reentrant)
    assert widths["qkv"].count(TOKENS) == 2 * 2
    assert len(widths["qkv"]) == 2 * 2 + of_a_row * 2


def test_a_weight_may_be_unused() -> None:
    model = model_of()
    model.blocks[1].up.spare = spare = torch.nn.Parameter(torch.ones(3))  # type: ignore[union-attr]
    expected = found(model, False)
    for got, wanted, weight in zip(found(model, True)[1:], expected[1:], model.parameters(), strict=True):
        if weight is not spare:  # None or zeros
            close(got, wanted)


class Draws(torch.nn.Module):
    """Dropout in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[-1]) < 0.5)


@pytest.mark.parametrize("length", [AT_ONCE, TOKENS])
@pytest.mark.parametrize("kind", [torch.nn.Dropout, Draws])
def test_a_block_that_draws_numbers(kind: Any, length: int) -> None:
    """What someone put into a block draws the same when it is computed again."""
    model = model_of()
    for block in model.blocks:
        block.down = torch.nn.Sequential(block.down, kind())  # type: ignore[union-attr, operator, arg-type]
    close(found(model, True, length), found(model, False, length))


@pytest.mark.parametrize("by", [0, 1])
def test_second_derivatives_are_refused(by: int) -> None:
    """Of a sum, whose gradient is a constant; also by one input alone, as in a gradient penalty."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(1, TOKENS, 4, requires_grad=True)
    (out,) = parts.in_parts(lambda x: (layer(x) ** 2,), (x,), [layer.weight, layer.bias], again=True)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(grad.square().sum(), (x, layer.weight)[by])


def test_parts_follow_autocast() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(1, TOKENS, 4, requires_grad=True)
    weights = [layer.weight, layer.bias]
    with torch.autocast("cpu", torch.bfloat16):
        outs = parts.in_parts(lambda x: (layer(x),), (x,), weights, again=True)[0], layer(x)
    (one, dweight), (other, expected) = (torch.autograd.grad(y.float().square().sum(), [x, weights[0]]) for y in outs)
    assert outs[0].dtype == torch.bfloat16
    assert torch.equal(one, other)
    assert torch.allclose(dweight, expected, 0.02, 0.02)


def test_compiled_parts() -> None:
    """Halves are compiled for the parts; a copy is not compiled, and computes with its own weights."""
    model, graphs = model_of(), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    expected = found(model, True, 5 * AT_ONCE)
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    got = found(model, True, 5 * AT_ONCE)
    assert len(graphs) == 5  # before attention and after it, in parts with gradients and without; before it, whole
    close(got, expected)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].down.weight.zero_()  # type: ignore[union-attr, operator]
    assert not torch.allclose(found(other, True, 5 * AT_ONCE)[0], expected[0])
    close(found(model, True, 5 * AT_ONCE), expected)


def sharded(tokens: Tensor, reshard: bool) -> list[Tensor]:
    """Gradients over ranks that share the row; each has its part of the weights as well."""
    before, parts.AT_ONCE = parts.AT_ONCE, AT_ONCE
    model = model_of(**KINDS["qwen"])
    model.checkpointing = True
    for part in (*model.blocks, model):
        fully_shard(part, reshard_after_forward=reshard)
    mine = [da.shard_sequence(x, world()) for x in (tokens, shifted(tokens))]
    positions = da.local_positions(tokens.shape[1], world())
    loss = model(*mine, positions=positions, group=world(), reduction="sum") * torch.distributed.get_world_size()
    loss.backward()  # FSDP2 averages
    parts.AT_ONCE = before
    return [weight.grad.full_tensor() for weight in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("reshard", [False, True])
def test_over_ranks_with_fsdp2(reshard: bool) -> None:
    model, tokens = model_of(**KINDS["qwen"]), torch.arange(5 * AT_ONCE).unsqueeze(0) ** 2 % 19
    model(tokens, shifted(tokens), reduction="sum").backward()
    for grads in pool(2).run(sharded, tokens, reshard):
        close(grads, [weight.grad for weight in model.parameters()])
