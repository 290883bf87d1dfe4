"""The module on a mesh of real ranks: all must come out as MultiheadDilatedAttention computes it on one device."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dilated_attention import ContextParallel, MultiheadDilatedAttention, global_mean_for_ddp
from dilated_attention.compat import RingAdvancedDistributedDilatedAttention
from dilated_attention.context_parallel import EXCHANGES
from dilated_attention.ranks import pool
from dilated_attention.testing import error
from tests.over_ranks import changed, raised

pytestmark = pytest.mark.usefixtures("pools_that_end")
E, H, N, SAMPLES = 24, 6, 13, 4
# four branches for six heads: with heads over two ranks, head_groups cuts through the second branch
LENGTHS, RATES = [4, 8, 6, 32], [1, 2, 3, 1]
RULES = ["longnet", "torchscale", "head_groups"]
OF_ONE_DEVICE = ("bias", "layer_norm", "rule", "num_kv_heads", "gamma_init")
TOLERANCE = 1e-12


def on_ranks(axes: dict[str, int], function: Any, *args: Any) -> list[Any]:
    return pool(math.prod(axes.values())).run(function, *args, axes)


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def one_device(**options: Any) -> Any:
    torch.manual_seed(0)
    given = {x: options[x] for x in OF_ONE_DEVICE if x in options}
    return changed(MultiheadDilatedAttention(E, H, LENGTHS, RATES, dtype=torch.float64, **given))


def on_mesh(mesh: DeviceMesh, **options: Any) -> Any:
    """With the weights of `one_device`."""
    module = RingAdvancedDistributedDilatedAttention(E, H, LENGTHS, RATES, mesh, dtype=torch.float64, **options)
    state = one_device(**options).state_dict()
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    return module


def batch(seed: int = 1) -> Tensor:
    return torch.randn(SAMPLES, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padding() -> Tensor:
    mask = torch.zeros(SAMPLES, N, dtype=torch.bool)
    mask[0, -4:] = mask[1, 2] = mask[3, :9] = True
    return mask


def size(mesh: DeviceMesh, axis: str) -> int:
    return mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1


def part(x: Tensor, mesh: DeviceMesh, axes: tuple[str, ...] = ("data", "sequence")) -> Tensor:
    """This rank's samples and tokens."""
    for dim, axis in enumerate(axes):
        x = x.tensor_split(size(mesh, axis), dim)[mesh.get_local_rank(axis)] if size(mesh, axis) > 1 else x
    return x.clone()


def loss_of(out: Tensor, mesh: DeviceMesh) -> Tensor:
    """As the class says: the mean over the sequence, with gradients that are going to be averaged."""
    losses = (out * part(batch(2), mesh)).sum(-1)
    return global_mean_for_ddp(losses, mesh["sequence"]) if size(mesh, "sequence") > 1 else losses.mean()


def trained(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """In what averages gradients over data and sequence, and not over heads."""
    if size(mesh, "heads") > 1 < size(mesh, "data"):
        return fully_shard(module, mesh=mesh["data", "sequence"])
    return DistributedDataParallel(module) if size(mesh, "data") > 1 else module


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {key: whole(x) for key, x in module.state_dict().items()}


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert list(got) == list(expected)
    found = {key: error(value.detach(), expected[key].detach()) for key, value in got.items()}
    return {key: value for key, value in found.items() if not value <= TOLERANCE}


# --- the computation --------------------------------------------------------------------------------------------


def compared(
    mesh: DeviceMesh, options: dict[str, Any], call: dict[str, Any], padded: bool, count: int = 1
) -> dict[str, float]:
    """What differs from one device: output, gradients of the inputs (``count`` of q, k, v) and of every parameter."""
    one, many, mask = one_device(**options), on_mesh(mesh, **options), padding() if padded else None
    inputs = [batch(seed + 3).requires_grad_() for seed in range(count)]
    mine = [part(x, mesh).detach().requires_grad_() for x in inputs]
    wrapped = trained(many, mesh)  # lives until the backward pass
    out, weights = wrapped(*mine, **call, key_padding_mask=None if mask is None else part(mask, mesh))
    expected = one(*inputs, **call, key_padding_mask=mask)[0]
    assert weights is None
    loss_of(out, mesh).backward()
    (expected * batch(2)).sum(-1).mean().backward()
    found, wanted = {"out": out}, {"out": part(expected, mesh)}
    # this rank's loss counts as one of so many in the average
    found |= {f"input {i}": x.grad * size(mesh, "heads") / mesh.size() for i, x in enumerate(mine)}
    wanted |= {f"input {i}": part(x.grad, mesh) for i, x in enumerate(inputs)}
    found |= {key: whole(x.grad) for key, x in many.named_parameters()}
    return differences(found, wanted | {key: x.grad for key, x in one.named_parameters()})


def computes_alike(axes: dict[str, int]) -> dict[str, Any]:
    mesh, wrong = mesh_of(axes), {}
    cases: list[tuple[Any, ...]] = [
        ({"rule": rule, "parallel": ContextParallel(exchange=exchange)}, {"is_causal": rule != "longnet"}, True)
        for rule, exchange in zip(RULES, EXCHANGES, strict=True)
    ]
    cases += [({"layer_norm": False}, {}, False), ({"bias": False, "use_checkpointing": False}, {}, False)]
    cases += [({"num_kv_heads": 2, "rule": "longnet", "batch_first": True}, {}, True), ({}, {}, False, 3)]
    for case in cases:
        found = compared(mesh, *case)
        if found:
            wrong[str(case)] = found
    return wrong


@pytest.mark.parametrize("axes", [{"heads": 2}, {"data": 2, "sequence": 2}, {"data": 2, "sequence": 2, "heads": 2}])
def test_equals_one_device(axes: dict[str, int]) -> None:
    assert not any(on_ranks(axes, computes_alike))


def collectives() -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode  # brings in the compiler, which is slow on every rank

    mesh = mesh_of({"heads": 2})
    module, x = on_mesh(mesh), batch().requires_grad_()
    with CommDebugMode() as forward:
        out = module(x)[0]
    with CommDebugMode() as backward:
        out.sum().backward()
    return {"forward": forward.get_total_counts(), "backward": backward.get_total_counts()}


def test_heads_cost_two_collectives_each_way() -> None:
    """Gathered for the norm and summed for the output; back the same, q, k and v being summed in one go."""
    assert pool(2).run(collectives) == [{"forward": 2, "backward": 2}] * 2


# --- dropout ----------------------------------------------------------------------------------------------------


def drops_alike(axes: dict[str, int]) -> dict[str, float]:
    """Each data rank against one device that has its samples and the seed of the first of its ranks."""
    mesh, wrong = mesh_of(axes), {}
    first = 100 * mesh.get_local_rank("data")
    own = first + 10 * mesh.get_local_rank("sequence") + mesh.get_local_rank("heads")
    samples, x = part(batch(), mesh, ("data",)), part(batch(), mesh)
    for rule in RULES:
        many, one = on_mesh(mesh, rule=rule, dropout=0.4), one_device(rule=rule)
        one.dropout = 0.4
        torch.manual_seed(own)
        out = many(x)[0]
        found = {"random state": torch.get_rng_state(), "out": out}
        torch.manual_seed(own)
        one(samples)
        wanted = {"random state": torch.get_rng_state()}
        torch.manual_seed(first)
        wanted["out"] = part(one(samples)[0], mesh, ("", "sequence"))
        found["eval"], wanted["eval"] = many.eval()(x)[0], part(one.eval()(samples)[0], mesh, ("", "sequence"))
        wrong |= {f"{rule} {key}": off for key, off in differences(found, wanted).items()}
    return wrong


def test_dropout_is_that_of_one_device() -> None:
    assert not any(on_ranks({"data": 2, "sequence": 2, "heads": 2}, drops_alike))


# --- parameters -------------------------------------------------------------------------------------------------


def saved(folder: str, axes: dict[str, int]) -> None:
    module = on_mesh(mesh_of(axes))
    if "data" in axes:
        fully_shard(module, mesh=mesh_of(axes)["data", "sequence"])
    dcp.save(get_model_state_dict(module), checkpoint_id=folder)


def loaded(folder: str, axes: dict[str, int]) -> dict[str, float]:
    """Into a module with other weights, on a mesh; without axes into MultiheadDilatedAttention."""
    mesh = mesh_of(axes or {"heads": 1})
    lists: Any = (E, H, LENGTHS, RATES)
    torch.manual_seed(99)
    module: nn.Module = MultiheadDilatedAttention(*lists, dtype=torch.float64)
    if axes:
        module = RingAdvancedDistributedDilatedAttention(*lists, mesh, dtype=torch.float64)
    state = get_model_state_dict(module)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state)
    expected = one_device()
    wrong = differences({"out": module(part(batch(), mesh))[0]}, {"out": part(expected(batch())[0], mesh)})
    return wrong | differences(whole_parameters(module), expected.state_dict())


@pytest.mark.parametrize("axes", [{"sequence": 2, "heads": 2}, {"data": 2, "sequence": 2}])
def test_checkpoints_load_on_any_mesh(axes: dict[str, int], tmp_path: Path) -> None:
    """Of one size or of another, and on one device."""
    on_ranks(axes, saved, str(tmp_path))
    for other in ({"sequence": 2, "heads": 2}, {"heads": 2}, {"data": 1, "sequence": 2, "heads": 1}, {}):
        assert not any(on_ranks(other, loaded, str(tmp_path)))


def parameters(axes: dict[str, int]) -> None:
    """Keys, whole shapes and values; with a heads axis all are DTensors, without one none is."""
    mesh, lists = mesh_of(axes), (E, H, LENGTHS, RATES)
    torch.manual_seed(5)
    plain = MultiheadDilatedAttention(*lists, gamma_init=0.7)
    for device in ("cpu", "meta"):
        torch.manual_seed(5 + mesh.get_local_rank("heads"))  # the first rank's count
        many = RingAdvancedDistributedDilatedAttention(*lists, mesh, gamma_init=0.7, device=device)
        if device == "meta":
            many.to_empty(device="cpu")
            many.reset_parameters()
            torch.manual_seed(5)
            plain.reset_parameters()
        assert {isinstance(x, DTensor) for x in many.parameters()} == {axes["heads"] == 2}
        assert not differences(whole_parameters(many), plain.state_dict())
    twin = copy.deepcopy(many)
    assert torch.equal(twin(batch().float())[0], many(batch().float())[0])
    assert all(a is not b for a, b in zip(twin.parameters(), many.parameters(), strict=True))
    assert ("held_heads=(" in repr(many)) == (axes["heads"] == 2)


@pytest.mark.parametrize("axes", [{"sequence": 2, "heads": 1}, {"heads": 2}])
def test_parameters_are_those_of_one_device(axes: dict[str, int]) -> None:
    on_ranks(axes, parameters)


# --- errors -----------------------------------------------------------------------------------------------------


def unexpected_errors() -> list[str]:
    """Of each mesh, what it raises if that is not what it should."""
    world, names = dist.group.WORLD, "('data', 'sequence', 'heads')"
    four = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sequence"))
    outside = DeviceMesh("cpu", [(dist.get_rank() + 1) % 4], mesh_dim_names=("sequence",), _init_backend=False)
    line = functools.partial(init_device_mesh, "cpu", (4,))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (world, {}, "TypeError: mesh must be a DeviceMesh, got"),
        (other, {}, f"ValueError: the mesh has axes ('dp', 'sequence'), and all must have names out of {names}"),
        (other, {"data": "dp"}, "nothing raised"),
        (four, {"data": "heads"}, "ValueError: data, sequence and heads must name three different axes, got ('heads'"),
        (line(mesh_dim_names=("heads",)), {}, "ValueError: 6 key/value heads cannot be divided evenly"),
        (outside, {}, "ValueError: this process is not a member of"),
        (four, {"parallel": ContextParallel(world)}, "ValueError: parallel has a group, and the ranks are those of"),
        (four, {"parallel": world}, "TypeError: parallel must be a ContextParallel, got ProcessGroup"),
    ]
    make = functools.partial(RingAdvancedDistributedDilatedAttention, E, H, LENGTHS, RATES)
    return [said for mesh, options, wanted in cases if wanted not in (said := raised(make, mesh, **options))]


def test_errors_of_the_mesh() -> None:
    assert pool(4).run(unexpected_errors) == [[]] * 4
