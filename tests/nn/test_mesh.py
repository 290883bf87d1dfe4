"""The module on a mesh of real ranks: all must come out as MultiheadDilatedAttention computes it on one device."""

from __future__ import annotations

import copy
import functools
import logging
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

from dilated_attention import ContextParallel, MultiheadDilatedAttention, sequence_mean, shard_sequence
from dilated_attention.compat import RingAdvancedDistributedDilatedAttention
from dilated_attention.context_parallel import ROUTES
from dilated_attention.ranks import pool
from dilated_attention.testing import error
from tests.over_ranks import changed, raised

pytestmark = pytest.mark.usefixtures("pools_that_end")
E, H, N, SAMPLES = 24, 6, 13, 4
# four branches for six heads: with heads over two ranks, head_groups cuts through the second branch
LENGTHS, RATES = [4, 8, 6, 32], [1, 2, 3, 1]
RULES = ["longnet", "torchscale", "head_groups"]
OF_ONE_DEVICE = ("bias", "layer_norm", "rule", "num_kv_heads")
TOLERANCE = 1e-12


def name(axes: Any) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def on_ranks(axes: dict[str, int], function: Any, *args: Any) -> list[Any]:
    return pool(math.prod(axes.values()) if axes else 1).run(function, *args, axes)


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def one_device(**options: Any) -> Any:
    torch.manual_seed(0)
    return changed(MultiheadDilatedAttention(E, H, LENGTHS, RATES, dtype=torch.float64, **options))


def on_mesh(mesh: DeviceMesh, **options: Any) -> Any:
    """With the weights of `one_device`."""
    module = RingAdvancedDistributedDilatedAttention(E, H, LENGTHS, RATES, mesh, dtype=torch.float64, **options)
    plain = one_device(**{x: options[x] for x in OF_ONE_DEVICE if x in options})
    set_model_state_dict(module, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    return module


def batch(seed: int = 1) -> Tensor:
    return torch.randn(SAMPLES, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padding() -> Tensor:
    mask = torch.zeros(SAMPLES, N, dtype=torch.bool)
    mask[0, -4:] = mask[1, 2] = mask[3, :9] = True
    return mask


def samples(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Those of this rank's data coordinate."""
    names = mesh.mesh_dim_names or ()
    return x.tensor_split(mesh["data"].size())[mesh["data"].get_local_rank()] if "data" in names else x


def part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's samples and tokens."""
    x = samples(x, mesh)
    return shard_sequence(x, mesh["sequence"]) if "sequence" in (mesh.mesh_dim_names or ()) else x.clone()


def loss_of(out: Tensor, mesh: DeviceMesh) -> Tensor:
    """As the class says: the mean over the sequence, with gradients that are going to be averaged."""
    losses = (out * part(batch(2), mesh)).sum(-1)
    return sequence_mean(losses, mesh["sequence"]) if "sequence" in (mesh.mesh_dim_names or ()) else losses.mean()


def averaged(gradient: Tensor, mesh: DeviceMesh) -> Tensor:
    """What DDP and FSDP2 do: over data and sequence, and not over heads."""
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    for axis in {"data", "sequence"}.intersection(mesh.mesh_dim_names or ()):
        dist.all_reduce(whole, group=mesh.get_group(axis))
        whole /= mesh[axis].size()
    return whole


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in module.state_dict().items()}


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert list(got) == list(expected)
    found = {key: error(value.detach(), expected[key].detach()) for key, value in got.items()}
    return {key: value for key, value in found.items() if not value <= TOLERANCE}


# --- the computation --------------------------------------------------------------------------------------------


def compared(
    mesh: DeviceMesh, options: dict[str, Any], call: dict[str, Any], padded: bool, count: int = 1
) -> dict[str, float]:
    """What differs from one device: output, gradients of the inputs (``count`` of q, k, v) and of every parameter."""
    one = one_device(**{x: options[x] for x in OF_ONE_DEVICE if x in options})
    many = on_mesh(mesh, **options)
    whole = [batch(seed + 3).requires_grad_() for seed in range(count)]
    mine = [part(x, mesh).detach().requires_grad_() for x in whole]
    mask = {"key_padding_mask": padding()} if padded else {}
    out, weights = many(*mine, **call, **{key: part(value, mesh) for key, value in mask.items()})
    expected = one(*whole, **call, **mask)[0]
    assert weights is None
    loss_of(out, mesh).backward()
    (expected * batch(2)).sum(-1).mean().backward()
    # this rank's loss counts as one of so many in the average
    parallel = mesh.size() // (mesh["heads"].size() if "heads" in (mesh.mesh_dim_names or ()) else 1)
    found, wanted = {"out": out}, {"out": part(expected, mesh)}
    for index, (x, all_of_it) in enumerate(zip(mine, whole, strict=True)):
        found[f"input {index}"], wanted[f"input {index}"] = x.grad / parallel, part(all_of_it.grad, mesh)
    for key, parameter in many.named_parameters():
        found[key], wanted[key] = averaged(parameter.grad, mesh), dict(one.named_parameters())[key].grad
    return differences(found, wanted)


def computes_alike(axes: dict[str, int]) -> dict[str, Any]:
    mesh, wrong = mesh_of(axes), {}
    cases: list[tuple[Any, ...]] = [
        ({"rule": rule, "parallel": ContextParallel(exchange=exchange)}, {"is_causal": rule != "longnet"}, True)
        for rule, exchange in zip(RULES, ROUTES, strict=True)
    ]
    cases += [({"layer_norm": False}, {}, False), ({"bias": False, "use_checkpointing": False}, {}, False)]
    cases += [({"num_kv_heads": 2, "rule": "longnet", "batch_first": True}, {}, True), ({}, {}, False, 3)]
    for case in cases:
        found = compared(mesh, *case)
        if found:
            wrong[str(case)] = found
    return wrong


@pytest.mark.parametrize(
    "axes", [{"heads": 2}, {"data": 2, "sequence": 2}, {"data": 2, "sequence": 2, "heads": 2}], ids=name
)
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


def drops_alike(seeds: str, axes: dict[str, int]) -> dict[str, float]:
    """Each data rank against one device that has its samples and the seed of the first of its ranks."""
    mesh = mesh_of(axes)
    at = dict(zip(axes, mesh.get_coordinate() or (), strict=True))
    first = 100 * at.get("data", 0)
    wrong: dict[str, float] = {}
    for rule in RULES:
        many, one = on_mesh(mesh, rule=rule, dropout=0.4), one_device(rule=rule)
        one.dropout = 0.4
        whole, x = samples(batch(), mesh), part(batch(), mesh)
        torch.manual_seed(first + (10 * at["sequence"] + at["heads"] if seeds == "different" else 0))
        out = many(x)[0]
        after = torch.get_rng_state()
        torch.manual_seed(first)
        expected = one(whole)[0]
        wrong |= differences({rule: out}, {rule: shard_sequence(expected, mesh["sequence"])})
        if (seeds == "same" or at["heads"] == 0 == at["sequence"]) and not torch.equal(after, torch.get_rng_state()):
            wrong["random state"] = 1.0
        if error(many.eval()(x)[0], shard_sequence(one.eval()(whole)[0], mesh["sequence"])) > TOLERANCE:
            wrong["eval"] = 1.0
    return wrong


@pytest.mark.parametrize(
    ("seeds", "axes"),
    [("same", {"sequence": 2, "heads": 2}), ("different", {"data": 2, "sequence": 2, "heads": 2})],
    ids=["same", "different"],
)
def test_dropout_is_that_of_one_device(seeds: str, axes: dict[str, int]) -> None:
    assert not any(on_ranks(axes, drops_alike, seeds))


# --- with what trains models ------------------------------------------------------------------------------------


def trained(how: str, axes: dict[str, int]) -> dict[str, float]:
    """Two steps of SGD: what differs from one device's, in losses and parameters."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it tells how full_tensor() is slow
    mesh = mesh_of(axes)
    one: nn.Module = one_device()
    many: nn.Module = on_mesh(mesh)
    if how == "ddp":
        trainer: nn.Module = DistributedDataParallel(many)
    else:
        trainer = fully_shard(many, mesh=mesh["data", "sequence"])
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.5) for x in (one, trainer)]
    before = {key: value.clone() for key, value in whole_parameters(one).items()}
    wrong = {}
    for step in range(2):
        expected = (one(batch(7 + step))[0] * batch(2)).sum(-1).mean()
        expected.backward()
        loss = loss_of(trainer(part(batch(7 + step), mesh))[0], mesh)
        loss.backward()
        mean = averaged(loss.detach(), mesh)
        wrong |= differences({f"loss {step}": mean}, {f"loss {step}": expected})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = whole_parameters(one)
    # a bias of the keys adds the same to all scores of a row: its gradient is zero
    assert not any(torch.equal(before[key], value) for key, value in after.items() if key != "k_proj.bias")
    return wrong | differences(whole_parameters(many), after)


@pytest.mark.parametrize(
    ("how", "axes"),
    [("ddp", {"data": 2, "sequence": 2}), ("fsdp", {"data": 2, "sequence": 2, "heads": 2})],
    ids=["ddp", "fsdp"],
)
def test_training_equals_one_device(how: str, axes: dict[str, int]) -> None:
    assert not any(on_ranks(axes, trained, how))


# --- parameters -------------------------------------------------------------------------------------------------


def saved(folder: str, axes: dict[str, int]) -> None:
    module = on_mesh(mesh_of(axes))
    if "data" in axes:
        fully_shard(module, mesh=mesh_of(axes)["data", "sequence"])
    dcp.save(get_model_state_dict(module), checkpoint_id=folder)


def loaded(folder: str, axes: dict[str, int]) -> dict[str, float]:
    """Into a module with other weights, on a mesh; without axes into MultiheadDilatedAttention."""
    expected = one_device()
    torch.manual_seed(99)
    if axes:
        mesh = mesh_of(axes)
        module: nn.Module = RingAdvancedDistributedDilatedAttention(E, H, LENGTHS, RATES, mesh, dtype=torch.float64)
    else:
        module = MultiheadDilatedAttention(E, H, LENGTHS, RATES, dtype=torch.float64)
    state = get_model_state_dict(module)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state)
    for key, value in whole_parameters(module).items():
        assert torch.equal(value, expected.state_dict()[key]), key
    x = part(batch(), mesh) if axes else batch()
    out = expected(batch())[0]
    return differences({"out": module(x)[0]}, {"out": part(out, mesh) if axes else out})


@pytest.mark.parametrize("axes", [{"sequence": 2, "heads": 2}, {"data": 2, "sequence": 2}], ids=name)
def test_checkpoints_load_on_any_mesh(axes: dict[str, int], tmp_path: Path) -> None:
    """Of one size or of another, and on one device."""
    on_ranks(axes, saved, str(tmp_path))
    for other in ({"sequence": 2, "heads": 2}, {"heads": 2}, {"data": 1, "sequence": 2, "heads": 1}, {}):
        assert not any(on_ranks(other, loaded, str(tmp_path)))


def parameters() -> None:
    """Keys, whole shapes and values; with a heads axis all are DTensors, without one none is."""
    for axes in ({"sequence": 2, "heads": 1}, {"heads": 2}):
        mesh = mesh_of(axes)
        torch.manual_seed(5)
        plain = MultiheadDilatedAttention(E, H, LENGTHS, RATES, gamma_init=0.7)
        for device in ("cpu", "meta"):
            torch.manual_seed(5 + mesh.get_local_rank("heads"))  # the first rank's count
            many = RingAdvancedDistributedDilatedAttention(E, H, LENGTHS, RATES, mesh, gamma_init=0.7, device=device)
            if device == "meta":
                many.to_empty(device="cpu")
                for module in (plain, many):
                    torch.manual_seed(5)
                    module.reset_parameters()
            assert {isinstance(x, DTensor) for x in many.parameters()} == {axes["heads"] == 2}
            assert list(many.state_dict()) == list(plain.state_dict())
            for key, value in whole_parameters(many).items():
                assert torch.equal(value, plain.state_dict()[key]), (axes, device, key)
        twin = copy.deepcopy(many)
        assert torch.equal(twin(batch().float())[0], many(batch().float())[0])
        assert all(a is not b for a, b in zip(twin.parameters(), many.parameters(), strict=True))
        assert ("held_heads=(" in repr(many)) == (axes["heads"] == 2)


def test_parameters_are_those_of_one_device() -> None:
    pool(2).run(parameters)


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
        (line(), {}, f"have no names: pass mesh_dim_names, out of {names}, to init_device_mesh()"),
        (other, {}, f"ValueError: the mesh has axes ('dp', 'sequence'), and ['dp'] are not among {names}"),
        (other, {"data": "dp"}, "nothing raised"),
        (
            four,
            {"data": "heads"},
            "ValueError: data, sequence and heads must name three different axes, got 'heads', 'sequence'",
        ),
        (line(mesh_dim_names=("heads",)), {}, "ValueError: 6 key/value heads cannot be divided evenly"),
        (outside, {}, "ValueError: this process is not a member of"),
        (None, {}, "TypeError: mesh must be a DeviceMesh, got None"),
        (
            four,
            {"parallel": ContextParallel(world)},
            "ValueError: parallel has a group, and the ranks are those of the",
        ),
        (four, {"nonsense": 1}, "got an unexpected keyword argument 'nonsense'"),
        (four, {"parallel": world}, "TypeError: parallel must be a ContextParallel, got ProcessGroup"),
    ]
    make = functools.partial(RingAdvancedDistributedDilatedAttention, E, H, LENGTHS, RATES)
    return [said for mesh, options, wanted in cases if wanted not in (said := raised(make, mesh, **options))]


def test_errors_of_the_mesh() -> None:
    assert pool(4).run(unexpected_errors) == [[]] * 4
