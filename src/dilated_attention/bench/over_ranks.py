"""The classes over several ranks, built inside a rank for its shard of the tokens.

The mesh class has the heads on two ranks, and with four the sequence on two of each as well. The oracle is that of the
whole sequence: `gathered` puts a rank's results together with those of the others.

Legend: query, key, value, out (B, n, H, D), x (B, n, E): this rank's shard, n = N / ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention import nn
from dilated_attention.bench import multihead
from dilated_attention.bench.run import oracle
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import Subject
from dilated_attention.distributed.sequence import gather_sequence, shard_sequence

MESH = "RingAdvancedDistributedDilatedAttention"
RULE_OF = {
    "RingDilatedAttention": "head_groups",
    "RingDilatedAttentionV2Collective": "head_groups",
    "RingDilatedAttentionProduction": "head_groups",
    "RingAttentionV2Simple": "dense",
    "RingMultiheadDilatedAttention": "head_groups",
    MESH: "head_groups",
}


def why_not(name: str, setting: Setting) -> str | None:
    if name == MESH and setting.device.type == "cuda":
        return "gloo gathers no CUDA tensors for DTensor, and NCCL wants a GPU for each rank"
    return None


def alone(name: str, setting: Setting, **options: Any) -> Subject:
    """The same on one device and the whole sequence: what the ranks together are checked against."""
    name = name.partition(",")[0]
    if name in (MESH, "RingMultiheadDilatedAttention"):
        return multihead.ours(nn.MultiheadDilatedAttention, setting)
    if name == "RingAttentionV2Simple":
        module, pattern = nn.RingAttentionV2Simple(), setting.pattern("dense")
    else:
        module = getattr(nn, name)(setting.lengths, setting.rates, **options)
        pattern = module.pattern
    call = partial(module, is_causal=setting.causal)
    return Subject(call, oracle(pattern, setting.causal), pattern, setting.qkv(), setting.dout())


def build(name: str, setting: Setting, **options: Any) -> Subject:
    """On every rank of the default group; ``options`` are of the classes that only attend."""
    if name == MESH:
        return _on_mesh(setting)
    group = dist.group.WORLD
    assert group is not None
    if name != "RingMultiheadDilatedAttention":
        return _sharded(alone(name, setting, **options), group)  # a module finds its group when it is called
    module = nn.RingMultiheadDilatedAttention(setting.width, setting.heads, setting.lengths, setting.rates)
    multihead.filled(module, setting)
    whole = multihead.subject(module, module.pattern, lambda x: module(x, is_causal=setting.causal)[0], setting)
    return _sharded(whole, group)


def _on_mesh(setting: Setting) -> Subject:
    ranks = dist.get_world_size()
    shape, names = ((2,), ("heads",)) if ranks == 2 else ((ranks // 2, 2), ("sequence", "heads"))
    mesh = init_device_mesh(setting.device.type, shape, mesh_dim_names=names)
    torch.manual_seed(0)
    whole = nn.MultiheadDilatedAttention(setting.width, setting.heads, setting.lengths, setting.rates)
    state = multihead.filled(whole, setting).state_dict()
    module = nn.RingAdvancedDistributedDilatedAttention(
        setting.width, setting.heads, setting.lengths, setting.rates, mesh, device=setting.device, dtype=setting.dtype
    )
    _load(module, state)
    subject = multihead.subject(module, module.pattern, lambda x: module(x, is_causal=setting.causal)[0], setting)
    return subject if len(shape) == 1 else _sharded(subject, mesh.get_group("sequence"))


def _load(module: torch.nn.Module, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))


def _sharded(whole: Subject, group: dist.ProcessGroup) -> Subject:
    inputs = tuple(shard_sequence(x, group) for x in whole.inputs)
    dout = shard_sequence(whole.dout, group)
    return Subject(whole.attention, whole.exact, whole.pattern, inputs, dout, whole.parameters, group=group)


def gathered(results: Mapping[str, Tensor], subject: Subject) -> dict[str, Tensor]:
    """Of the whole sequence: rows from the rank that has them, gradients of parameters summed over ranks."""
    return {name: _whole(value, name.removeprefix("d ") in subject.parameters, subject.group)
            for name, value in results.items()}  # fmt: skip


def _whole(value: Tensor, of_parameter: bool, group: dist.ProcessGroup | None) -> Tensor:
    whole = getattr(value, "full_tensor", lambda: value)()  # a DTensor over the heads axis
    if group is None:
        return whole.cpu()
    if not of_parameter:
        return gather_sequence(whole, group).cpu()
    total: Tensor = whole.double().cpu()
    dist.all_reduce(total, group=group)
    return total.to(value.dtype)
