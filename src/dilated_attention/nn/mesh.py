"""The multihead module on a mesh of ranks: samples, the sequence and the heads are each split along one named axis.

Each rank passes its samples (data axis) and its shard of their tokens (sequence axis). Ranks along the heads axis pass
the same tensor. The result is laid out in the same way. An axis that the mesh does not have counts as size 1.

Along the heads axis the parameters are DTensors, whose gradients need nothing from the caller. Over the data and
sequence axes average the gradients, as DDP and FSDP2 do: for example ``fully_shard(attention, mesh=mesh["data",
"sequence"])``, and the loss by ``global_mean_for_ddp(..., mesh["sequence"])``. The state dict has the keys and whole
shapes of MultiheadDilatedAttention: a checkpoint of torch.distributed.checkpoint loads on a mesh of any shape, and a
plain one by ``set_model_state_dict(..., StateDictOptions(full_state_dict=True))``.

Dropout drops the same pairs as on one device: the first rank along the sequence and heads axes draws the seed. Seed
ranks along the data axis differently. Of one rank's wrong arguments, ranks with other heads hear at once if the mesh's
groups have gloo for the CPU; otherwise they wait for the timeout of their collectives.

Legend: E = H * D; T ranks along the heads axis, each with H / T heads; q, k, v here (B, n, H / T, D).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention import functional
from dilated_attention.context_parallel import ContextParallel
from dilated_attention.distributed.agreement import ask, same_on_all
from dilated_attention.distributed.group import GroupTransport, wire_device
from dilated_attention.nn.core import Lengths
from dilated_attention.nn.multihead import MultiheadOptions, each
from dilated_attention.nn.ring import RingMultiheadDilatedAttention


class RingAdvancedDistributedDilatedAttention(RingMultiheadDilatedAttention):
    """Is MultiheadDilatedAttention over a ``DeviceMesh`` whose axes split samples, tokens and heads.

    Without a heads axis RingMultiheadDilatedAttention does the same.

    Args:
        mesh: required. A DeviceMesh that has some or all of the three axes that the next arguments name, and no others.
        data, sequence, heads: the names of these axes in the mesh. ``num_heads``, and ``num_kv_heads`` if given, must
            be a multiple of the size of the heads axis.
        parallel: a ContextParallel without a group, for the sequence axis; its exchange is "auto" by default.
        others: see MultiheadDilatedAttention.
    """

    exchange = "auto"
    shown = (*RingMultiheadDilatedAttention.shown, "held_heads")

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Lengths = None, dilation_rates: Lengths = None,
        mesh: DeviceMesh | None = None, dropout: float = 0.0, bias: bool = True, layer_norm: bool = True,
        use_checkpointing: bool | None = None, *, parallel: ContextParallel | None = None, data: str = "data",
        sequence: str = "sequence", heads: str = "heads", **options: Unpack[MultiheadOptions],
    ) -> None:  # fmt: skip
        mesh = _checked(mesh, data, sequence, heads)
        if not isinstance(parallel, ContextParallel | None):
            raise TypeError(f"parallel must be a ContextParallel, got {type(parallel).__name__}")
        parallel, axes = parallel or ContextParallel(), mesh.mesh_dim_names or ()
        if parallel.group is not None:
            raise ValueError("parallel has a group, and the ranks are those of the mesh's axes: leave the group out")
        cut = sequence in axes  # else every rank is on its own, whatever default group there is
        super().__init__(
            embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias, layer_norm, None if cut else 1,
            use_checkpointing, group=replace(parallel, group=mesh[sequence]) if cut else parallel, **options,
        )  # fmt: skip
        self.over_heads: ContextParallel | None = None
        if heads in axes and mesh[heads].size() > 1:
            self._split(mesh[heads])

    def _split(self, mesh: DeviceMesh) -> None:
        """Split the parameters. The norm, which is over all heads, runs whole on every rank, so it is gathered for."""
        # not at the top: it takes long
        from torch.distributed.tensor import Replicate, Shard, distribute_module
        from torch.distributed.tensor import parallel as tp

        share, rest = divmod(self.num_kv_heads, mesh.size())
        if rest:
            raise ValueError(f"{self.num_kv_heads} key/value heads cannot be divided evenly among {mesh.size()} ranks")
        self.held_heads = mesh.get_local_rank() * share, self.num_kv_heads
        self.over_heads = ContextParallel(mesh)  # which a copy of the module shares: a group cannot be copied
        plan: dict[str, Any] = {name: tp.ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan["out_proj"] = tp.RowwiseParallel()
        if isinstance(self.norm, nn.LayerNorm):
            distribute_module(self.norm, mesh)
            plan["norm"] = tp.PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Replicate())
            plan["out_proj"] = tp.RowwiseParallel(input_layouts=Replicate())
        tp.parallelize_module(self, mesh, plan)

    def _draw(self, weight: Any, gain: float) -> None:
        """Draws a weight as on one device, and then splits it: parts drawn with one seed would all be equal."""
        is_cut = hasattr(weight, "device_mesh")  # a DTensor
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if is_cut else weight
        super()._draw(whole, gain)
        if is_cut:
            from torch.distributed.tensor import distribute_tensor

            weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))

    @contextmanager
    def _errors_reach_ranks(self, x: Tensor) -> Iterator[None]:
        def say(fields: Mapping[str, object]) -> None:  # to ranks with other heads of the same tokens
            if self.over_heads is not None:
                device, timeout = self.out_proj.weight.device, self.ranks.parallel.timeout
                transport = GroupTransport(self.over_heads.process_group(), device, timeout)
                if transport.agrees_on_host:
                    ask(transport, "dilated_attention over heads", fields)

        with super()._errors_reach_ranks(x), same_on_all(say):
            yield

    def _project(self, *given: Tensor) -> tuple[Tensor, ...]:
        if self.over_heads is not None:
            from torch.distributed.tensor import DTensor, Replicate

            mesh: Any = self.over_heads.group
            # each tensor once: what q, k and v send back to the same one is added up before it is summed over ranks
            given = each(lambda x: DTensor.from_local(x, mesh, [Replicate()], run_check=False), *given)
        return super()._project(*given)

    def _seed(self, x: Tensor) -> Tensor | None:
        """The first rank's draw: one seed says for all heads what is dropped, and nothing else makes ranks agree."""
        if self.over_heads is None:
            return None
        group = self.over_heads.process_group()
        first = functional.drawn_seed(x.device).to(wire_device(group, x.device))
        dist.broadcast(first, group=group, group_src=0)
        return first.to(x.device)


def _checked(mesh: DeviceMesh | None, data: str, sequence: str, heads: str) -> DeviceMesh:
    """A mesh whose axes are all known."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r}: make one with init_device_mesh()")
    known, names = (data, sequence, heads), mesh.mesh_dim_names
    if len({*known}) < 3:
        raise ValueError(f"data, sequence and heads must name three different axes, got {known}")
    if names is None or not {*names} <= {*known}:
        raise ValueError(f"the mesh has axes {names}, and all must have names out of {known}: rename them")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not a member of {mesh}: make the module only on the ranks in it")
    return mesh
