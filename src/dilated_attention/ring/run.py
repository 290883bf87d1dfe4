"""The operation over a group of ranks: agree on the call, exchange rows, compute; one autograd node.

Legend: query (B, n, H, D), key, value (B, n, Hk, D), lse (B, n, H): n tokens of this rank's shard.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_unflatten

from dilated_attention.autograd import NOT_TWICE, is_mapped, once
from dilated_attention.backends import run
from dilated_attention.backends.blockwise import MemoryCap
from dilated_attention.backends.choose import choose
from dilated_attention.backends.problem import Inputs, Pair
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.context_parallel import ContextParallel, Over
from dilated_attention.distributed.agreement import Agreement, ask, errors_reach_all
from dilated_attention.distributed.group import GroupTransport, Stats, reachable_device
from dilated_attention.resolve import check_cu_seqlens_end, check_total_length
from dilated_attention.ring.alltoall import AllToAll, can_deal
from dilated_attention.ring.circulate import Circulation
from dilated_attention.ring.cost import fastest_exchange
from dilated_attention.ring.parallel import ParallelCall
from dilated_attention.ring.shards import Shards

CALL, BACKWARD = "dilated_attention", "the backward of dilated_attention"
ALIKE = ("dtype", "pattern", "is_causal", "scale", "dropout_p", "cu_seqlens")  # fields of a call, on all ranks
FIRST_CALLS = 64  # that "first" checks, of each group: forward and backward count


@dataclass(eq=False)
class Ranks:
    """The ranks that calls go over: what the user chose, and what a module counts and keeps from call to call."""

    parallel: ContextParallel
    ring_size: int | None = None  # how many there must be; 1: this process alone, whatever group there is
    memory_cap: MemoryCap | None = None
    stats: Stats = field(default_factory=Stats)

    @classmethod
    def of(cls, group: Over) -> Ranks | None:
        """Those that a function is given as ``group=``."""
        if group is None:
            return None
        parallel = ContextParallel.of(group)
        parallel.process_group()  # raises where there is none
        return cls(parallel)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """A copy of a module runs over the same ranks, as a process group cannot be copied, and counts on its own."""
        return replace(self, stats=Stats(), memory_cap=self.memory_cap and MemoryCap(self.memory_cap.max_bytes))

    @property
    def group(self) -> ProcessGroup | None:
        """None: this process alone. Found anew each time, as a process group can come after the module."""
        alone = self.ring_size == 1 or (self.parallel.group is None and dist.group.WORLD is None)
        return None if alone else self.parallel.process_group()

    @property
    def size(self) -> int:
        group = self.group
        return 1 if group is None else group.size()

    def for_call(self) -> Ranks | None:
        """Itself, where a call has to know of it."""
        group = self.group
        size = None if group is None else group.size()
        if self.ring_size not in (None, 1, size):
            there = "no process group is initialised" if size is None else f"the process group has {size} ranks"
            raise ValueError(
                f"ring_size is {self.ring_size} and {there}: start as many ranks with torchrun, pass a group of that "
                "size, or leave ring_size out"
            )
        alone = group is None and self.memory_cap is None and self.parallel.total_length is None
        return None if alone else self

    def transport(self, device: torch.device) -> Checks:
        over = self.parallel
        return Checks(over.process_group(), device, over.timeout, over.debug, self.stats, verify=over.verify)

    def before_calls(self, x: object) -> Checks:
        """For what is said before there is a call: on the device of x, a tensor of it, if that can be."""
        return self.transport(reachable_device(self.parallel.process_group(), x))

    def __repr__(self) -> str:
        where = "default group" if self.parallel.group is None else f"{self.size} ranks"
        return f"{self.parallel.exchange}, {'one device' if self.ring_size == 1 else where}"


def attend_over_ranks(inputs: Inputs, call: Call, ranks: Ranks, sinks: bool = False) -> Pair:
    """(out, lse) of this rank's shard; ``sinks``: whether the caller adds some. Never traced by torch.compile: what is
    sent depends on what others say."""
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:  # not as a decorator: it imports the compiler
        return torch.compiler.disable(_attend)(inputs, call, ranks, sinks)  # type: ignore[no-any-return, no-untyped-call]
    return _attend(inputs, call, ranks, sinks)


def _attend(inputs: Inputs, call: Call, ranks: Ranks, sinks: bool) -> Pair:
    """The call is of this rank's shard alone, until the ranks agree on the lengths of all."""
    parallel = ranks.parallel
    with errors_reach_ranks(ranks, inputs.q):
        if not call.kv_heads:  # compiled code around this call had no numbers for the shapes
            call = call.of(inputs.q, inputs.k, inputs.padding, call.start)
        transport = ranks.transport(call.device)
        if parallel.exchange == "alltoall" and not can_deal(call.pattern):
            raise ValueError(
                f"exchange='alltoall' is for patterns of Dilated branches with counts='sum', got {call.pattern}: use "
                "'ring', 'allgather' or 'auto'"
            )
        wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:3])
        fields = _fields(call, choose(call).name, parallel, transport.verify, wants_gradients)
        fields["sinks"] = "given" if sinks else "not given"
    lengths, seed = transport.agree(fields, call.queries, inputs.seed)
    check_total_length(parallel.total_length, lengths)
    transport.past.calls += 1  # two calls that look alike still have backward passes of their own
    transport.number = transport.past.calls
    transport.warm_up()
    shards = Shards.of(lengths, call.cu_seqlens)
    check_cu_seqlens_end(call.cu_seqlens, shards.tokens)
    exchange = parallel.exchange or "auto"
    if exchange == "auto":
        # in the dtype that travels, and without what differs from rank to rank or is known of the shards
        device = torch.device(call.device.type)
        alike = call._replace(dtype=call.computed, device=device, queries=0, keys=0, total=0, cu_seqlens=())
        exchange = fastest_exchange(alike, shards, transport.backend)
    kind: type[ParallelCall] = AllToAll if exchange == "alltoall" else Circulation
    start, keeps = shards.starts[transport.rank], wants_gradients and parallel.use_checkpointing is False
    placed = call._replace(start=start, key_start=start, total=shards.tokens)
    way = kind(placed, transport, shards, exchange, keeps)
    return _Parallel.apply(way, *inputs[:4], seed)  # type: ignore[no-any-return, no-untyped-call]


def errors_reach_ranks(ranks: Ranks | None, x: object) -> AbstractContextManager[None]:
    """For all that is done before the ranks agree on a call: an error in here reaches the others, and they raise, too.

    ``x``: a tensor of the call, on whose device the ranks are told if that can be.
    """
    if ranks is None or ranks.size == 1:
        return contextlib.nullcontext()
    return errors_reach_all(lambda fields: ranks.before_calls(x).refuse(CALL, fields))


def _fields(
    call: Call, backend: str, parallel: ContextParallel, verify: str | None, wants_gradients: bool
) -> dict[str, object]:
    """What must be alike on all ranks."""
    return {
        "shape": f"(batch {call.samples}, tokens, heads {call.heads}, head_dim {call.head_dim})",
        "key heads": call.kv_heads,
        "device": call.device.type,
        "backend": backend,  # with device and dtype, what decides how rows are packed
        "computed in": call.computed,
        **{name: getattr(call, name) for name in ALIKE},
        "heads": f"{call.kv_heads} from {call.first_head} on, of {call.model_heads}",
        "key_padding_mask": "given" if call.has_padding else "not given",
        "exchange": parallel.exchange or "auto",
        "use_checkpointing": parallel.use_checkpointing is not False,
        "total_length": parallel.total_length,
        "verify": verify,
        "gradients": "wanted" if wants_gradients else "not wanted",
    }


@dataclass(eq=False)
class Checks(GroupTransport):
    """Messages among ranks, and whether and how they compare first what they are about to do."""

    verify: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.verify = self.verify or ("always" if self.agrees_on_host else "first")

    @property
    def is_due(self) -> bool:
        """Whether this call is checked: the same answer on every rank, as all have seen the same calls.

        With shards of several lengths every call is: one rank's own length does not tell it those of the others.
        """
        return self.verify == "always" or self.past.checks < FIRST_CALLS or len(self.past.lengths) != 1

    def ask(self, *given: Any, **more: Any) -> Agreement:
        """As the function, counted."""
        self.past.checks += 1
        return ask(self, *given, **more)

    def refuse(self, call: str, fields: Mapping[str, object]) -> None:
        """Tell the other ranks, where they ask, why this one cannot run the call."""
        if self.is_due:
            self.ask(call, fields)

    def agree(self, fields: Mapping[str, object], length: int, seed: Tensor | None) -> tuple[Ints, Tensor | None]:
        """The lengths of all shards and rank 0's seed."""
        if self.is_due:
            agreement = self.ask(CALL, fields, length, 0 if seed is None else int(seed.item()))
            self.past.lengths.add(agreement.lengths)
            return agreement.lengths, None if seed is None else torch.full_like(seed, agreement.seeds[0])
        (known,) = self.past.lengths
        rank, had = self.rank, known[self.rank]
        if length != had:
            raise ValueError(
                f"rank {rank} has {length} tokens and had {had} in all checked calls over this group; later "
                "ones are not checked: for shards that vary in length give verify='always'"
            )
        if seed is not None:  # it stays on the device: reading it would make the host wait
            seed = self.from_all("the seed", seed)[0]
        return known, seed

    def agree_on_backward(self, way: ParallelCall, dlse: Tensor | None, lse: Tensor) -> Tensor | None:
        """All ranks are here; dlse, where some rank has one."""
        is_wanted = way.name == "alltoall"
        if self.is_due:
            fields = {
                "the backward of": way.call.pattern,
                "shape": tuple(lse.shape[::2]),
                "exchange": way.name,
                "the number of the call (all ranks must run their backward passes in one order)": self.number,
            }
            said = self.ask(BACKWARD, fields, lse.shape[1], flags=int(dlse is not None))
            is_wanted = any(said.flags)
        return torch.zeros_like(lse) if is_wanted and dlse is None else dlse


def check_transforms(*gradients: Tensor | None) -> None:
    """Raise under torch.func, whose many calls ranks cannot make as one, forward or backward."""
    if not torch.compiler.is_compiling() and is_mapped(*gradients):
        raise NotImplementedError(
            "torch.func and is_grads_batched do not go over a group of ranks: use backward(), once for each gradient"
        )


class _Parallel(torch.autograd.Function):
    """A call over ranks as one node. Rows that are kept are saved tensors, which checkpoints drop and make again."""

    @staticmethod
    def forward(ctx: Any, way: ParallelCall, *inputs: Any) -> Pair:
        with way.transport.closed_on_error():
            out, lse = run.forward(way.call, Inputs(*inputs), way)
        kept, ctx.kept_as = tree_flatten(way.kept)
        ctx.save_for_backward(*inputs, out, lse, *kept)
        ctx.way, way.kept = way, []
        ctx.set_materialize_grads(False)  # None tells that lse was not used, which spares its pass
        return out, lse

    @staticmethod
    @once(NOT_TWICE)
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        way, transport = ctx.way, ctx.way.transport
        with errors_reach_all(functools.partial(transport.refuse, BACKWARD)):
            q, k, v, padding, seed, out, lse, *kept = ctx.saved_tensors
            way.kept = tree_unflatten(kept, ctx.kept_as)
            check_transforms(dout, dlse)
        dlse = transport.agree_on_backward(way, dlse, lse)
        with transport.closed_on_error():
            grads = run.backward(way.call, Inputs(q, k, v, padding, seed), out, lse, dout, dlse, way)
        return (None, *grads, None, None), (q, k, v)
