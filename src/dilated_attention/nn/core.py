"""What all modules share: the options they take, the call they make, and the ranks it goes over."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention import functional
from dilated_attention.backends.blockwise import MemoryCap
from dilated_attention.backends.choose import Backend
from dilated_attention.checks import check_int, checked_probability
from dilated_attention.context_parallel import ContextParallel, Exchange
from dilated_attention.distributed.group import Buffers
from dilated_attention.distributed.sequence import Group
from dilated_attention.distributed.transport import Stats
from dilated_attention.pattern import DilatedPattern, Rule
from dilated_attention.resolve import check_backend
from dilated_attention.ring.run import Link


class Core(nn.Module):
    """Pattern, dropout and backend of a module, and the call that they make."""

    softmax_scale: float | None = None  # 1/sqrt(D), which only the tensors know
    ranks: Ranks | None = None  # None: one device

    def __init__(
        self,
        segment_lengths: Iterable[int] | None,
        dilation_rates: Iterable[int] | None,
        dropout: float,
        pattern: DilatedPattern | None,
        rule: Rule | None,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.pattern = _pattern(segment_lengths, dilation_rates, pattern, rule)
        self.dropout = checked_probability(dropout, "dropout")
        self.backend: Backend = backend
        check_backend(self.backend)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        heads: tuple[int, int] | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        out, _ = functional.attend(
            q, k, v, self.pattern, is_causal, self.softmax_scale, self.dropout if self.training else 0.0,
            key_padding_mask, True, self.backend, heads, None if self.ranks is None else self.ranks.link(), seed,
        )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        ranks = "" if self.ranks is None else f", {self.ranks}"
        return f"{self.pattern}, dropout={self.dropout}, backend={self.backend!r}{ranks}"


def _pattern(
    segment_lengths: Iterable[int] | None,
    dilation_rates: Iterable[int] | None,
    pattern: DilatedPattern | None,
    rule: Rule | None,
) -> DilatedPattern:
    """The pattern given, or that of the two lists."""
    if pattern is None:
        if segment_lengths is None or dilation_rates is None:
            raise ValueError("no pattern: give segment_lengths and dilation_rates, or pattern=")
        return DilatedPattern.of(rule or "head_groups", segment_lengths, dilation_rates)
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}: make one with .longnet(...)")
    if segment_lengths is not None or dilation_rates is not None:
        raise ValueError(f"pattern={pattern} and a list of lengths or rates were given: give the lists or the pattern")
    if rule not in (None, pattern.rule):
        raise ValueError(f"rule={rule!r} and pattern={pattern} were both given: leave rule out")
    return pattern


class Ranks:
    """Which ranks a module runs over, found anew at each call: a process group can come after the module."""

    def __init__(
        self,
        group: Group | ContextParallel | None,
        ring_size: int | None,
        use_checkpointing: bool | None,
        exchange: Exchange,
        only: str = "",
    ) -> None:
        """``only``: the name of a class that has no other exchange."""
        parallel = ContextParallel() if group is None else ContextParallel.of(group)
        if only and parallel.exchange not in (None, exchange):
            raise ValueError(
                f"{only} has the exchange {exchange!r}, and ContextParallel says {parallel.exchange!r}: leave exchange "
                "out, or call dilated_attention(), which takes every exchange"
            )
        if None not in (kept := (use_checkpointing, parallel.use_checkpointing)) and kept[0] != kept[1]:
            raise ValueError(f"use_checkpointing is {kept[0]!r}, and {kept[1]!r} in ContextParallel: give it once")
        # errors now rather than in the first step
        self.parallel = replace(
            parallel,
            exchange=parallel.exchange or exchange,
            use_checkpointing=next((x for x in kept if x is not None), True),
        )
        self.ring_size = None if ring_size is None else check_int("ring_size", ring_size)
        self.memory_cap: MemoryCap | None = None
        self.stats = Stats()
        self.buffers: Buffers | None = None
        self.link()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """A copy of a module runs over the same ranks, as a process group cannot be copied, and counts on its own."""
        twin = copy.copy(self)
        twin.stats = Stats()
        twin.memory_cap = None if self.memory_cap is None else MemoryCap(self.memory_cap.max_bytes)
        return twin

    def link(self) -> Link | None:
        """How to reach the ranks; None: there is only this one."""
        group, how = None, self.parallel
        if self.ring_size != 1 and (how.group is not None or (dist.is_available() and dist.is_initialized())):
            group = how.process_group()
        found = None if group is None else group.size()
        if self.ring_size not in (None, 1) and found != self.ring_size:
            there = "no process group is initialised" if found is None else f"the process group has {found} ranks"
            raise ValueError(
                f"ring_size is {self.ring_size} and {there}: start as many ranks with torchrun, pass a group of that "
                "size, or leave ring_size out"
            )
        if group is None and self.memory_cap is None and how.total_length is None:
            return None
        return Link(
            group, how.exchange or "auto", how.use_checkpointing is not False, how.timeout, how.verify, how.debug,
            self.memory_cap, self.stats, self.buffers, how.total_length,
        )  # fmt: skip

    def __repr__(self) -> str:
        group = self.parallel.group
        ranks = "default group" if group is None else f"{self.parallel.process_group().size()} ranks"
        return f"{self.parallel.exchange}, {'one device' if self.ring_size == 1 else ranks}"
