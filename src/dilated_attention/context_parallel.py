"""ContextParallel: how one sequence is spread over a group of ranks. Options only; nothing here communicates."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dilated_attention.checks import check_flag, check_int, is_number
from dilated_attention.distributed.group import LONGEST_TIMEOUT
from dilated_attention.distributed.sequence import Group, process_group

Exchange = Literal["auto", "ring", "allgather", "alltoall"]
Verify = Literal["always", "first"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)[1:]  # that "auto" chooses from


@dataclass(frozen=True)
class ContextParallel:
    """Says how one sequence is spread over a group of ranks.

    Give it as ``group=`` where a bare process group is not enough. It is frozen and hashable, and checks its values. A
    row is the key or value vector of one token and head. A hop is one step of an exchange, in which ranks send and
    receive.

    Args:
        group: a ``torch.distributed`` process group or a 1-D ``DeviceMesh``; None: the default group.
        exchange: how key and value rows of other ranks reach this one, straight from the rank that has them. "ring": in
            step t those of the rank t places before, so that a rank holds rows of two ranks at a time. "allgather": all
            of them in one step. "alltoall": each rank gets whole segments, but only some of the heads; for `Dilated`
            branches that are summed. "auto": the exchange whose communication time
            :func:`plan_cost` estimates as the shortest; one whose received rows would take more than twice the memory
            of this rank's q, k, v, out and lse is left out. None: the default of the class or function:
            "allgather" in :class:`RingDilatedAttentionV2Collective`, "ring" in the other Ring classes, "auto" in
            :func:`dilated_attention` and :class:`RingAdvancedDistributedDilatedAttention`.
        use_checkpointing: True, or None: received rows are dropped after the forward pass, and sent again in the
            backward pass. False: they are kept. Attention is not computed again in either case.
        timeout: seconds to wait for another rank before an error that names it (gloo; NCCL has its own).
        verify: whether the ranks compare their arguments before they compute, so that a mismatch is an error and not a
            hang. "always": in every forward and backward pass. "first": in the first 64 passes over a group, and in
            all later ones if the shard lengths changed between those passes. None: "always" if the group has gloo for
            the CPU ("gloo", "cpu:gloo,cuda:nccl"); else "first", as reading the answer makes the host wait for the
            device.
        debug: make the host wait after every hop, so that an error is raised where it happens.
        total_length: the tokens of the whole sequence. A call whose shards do not add up to it is an error, for
            example one in which every rank passes the whole sequence.

    Examples:
        >>> over = da.ContextParallel(group, exchange="alltoall", timeout=30.0, total_length=64)
        >>> shard = da.shard_sequence(torch.randn(1, 64, 4, 8), group)
        >>> out = da.dilated_attention(shard, shard, shard, da.DilatedPattern.longnet([16, 64], [1, 4]), group=over)
        >>> out.shape == shard.shape  # this rank's part of the result
        True
    """

    group: Group | None = None
    _: KW_ONLY
    exchange: Exchange | None = None
    use_checkpointing: bool | None = None
    timeout: float = 60.0
    verify: Verify | None = None
    debug: bool = False
    total_length: int | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            process_group(self.group)
        for name, allowed in (("exchange", get_args(Exchange)), ("verify", get_args(Verify))):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"unknown {name} {value!r}: use one of {', '.join(allowed)}, or None")
        if not isinstance(self.use_checkpointing, bool | None):
            raise TypeError(f"use_checkpointing must be True, False or None, got {self.use_checkpointing!r}")
        check_flag("debug", self.debug)
        if not is_number(self.timeout) or not 0 < self.timeout <= LONGEST_TIMEOUT:
            seconds = f"a positive number of seconds, at most {LONGEST_TIMEOUT} (a year)"
            raise ValueError(f"timeout must be {seconds}, got {self.timeout!r}")
        if self.total_length is not None:
            object.__setattr__(self, "total_length", check_int("total_length", self.total_length))

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Itself: nothing in it changes, and a process group cannot be copied."""
        return self

    @classmethod
    def of(cls, group: Over) -> ContextParallel:
        """What was given as ``group=``, with all options at their defaults if it is a bare group."""
        return group if isinstance(group, ContextParallel) else cls(group)

    def process_group(self) -> ProcessGroup:
        """The group that a call goes over."""
        group = dist.group.WORLD if self.group is None else self.group
        if group is None:
            raise ValueError(
                "ContextParallel has no group, and no default process group is initialised: call "
                "torch.distributed.init_process_group() first, or pass a group"
            )
        return process_group(group)


Over = Group | ContextParallel | None  # the ranks of which each has a shard of every sequence
