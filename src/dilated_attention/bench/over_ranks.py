"""Implementations over several ranks, built inside a rank for its shard of the tokens.

The mesh class has the heads on two ranks, and with four the sequence on two of each as well. The oracle is that of the
whole sequence.

Legend: query, key, value, out (B, n, H, D), x (B, n, E): this rank's shard, n = N / ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention.bench import multihead
from dilated_attention.bench.setting import Build, Implementation, Setting, Subject
from dilated_attention.compat import RingAdvancedDistributedDilatedAttention
from dilated_attention.distributed.sequence import shard_sequence
from dilated_attention.nn import MultiheadDilatedAttention


def spread(one: Implementation, ranks: int) -> Implementation:
    """The same with the sequence over processes, which meet over gloo; checked against one device."""
    name, build = f"{one.name}, {ranks} ranks", partial(sharded, one.build)
    return replace(one, name=name, kind="ring", build=build, whole=one.build, ranks=ranks)


def on_mesh(ranks: int) -> Implementation:
    name = f"{RingAdvancedDistributedDilatedAttention.__name__}, {ranks} ranks"
    whole = partial(multihead.ours, MultiheadDilatedAttention)
    return Implementation(name, "ring", "head_groups", _on_mesh, whole=whole, ranks=ranks, why_not=_no_mesh)


def _no_mesh(setting: Setting) -> str | None:
    if setting.device.type == "cuda":
        return "gloo gathers no CUDA tensors for DTensor, and NCCL wants a GPU for each rank"
    return None


def sharded(build: Build, setting: Setting, group: dist.ProcessGroup | None = None) -> Subject:
    """In a rank: with its shard of the inputs. A module finds its group when it is called."""
    group = group or dist.group.WORLD
    assert group is not None
    whole = build(setting)
    inputs = tuple(shard_sequence(x, group) for x in whole.inputs)
    return replace(whole, inputs=inputs, dout=shard_sequence(whole.dout, group), group=group)


def _on_mesh(setting: Setting) -> Subject:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # takes a while

    ranks = dist.get_world_size()
    shape, names = ((2,), ("heads",)) if ranks == 2 else ((ranks // 2, 2), ("sequence", "heads"))
    mesh = init_device_mesh(setting.device.type, shape, mesh_dim_names=names)
    segments = setting.segments("head_groups")
    whole = MultiheadDilatedAttention(setting.width, setting.heads, *segments)
    module = RingAdvancedDistributedDilatedAttention(
        setting.width, setting.heads, *segments, mesh, device=setting.device, dtype=setting.dtype
    )
    state = multihead.filled(whole, setting).state_dict()
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))

    def build(setting: Setting) -> Subject:
        return multihead.subject(module, module.pattern, lambda x: module(x, is_causal=setting.causal)[0], setting)

    return build(setting) if len(shape) == 1 else sharded(build, setting, mesh.get_group("sequence"))
