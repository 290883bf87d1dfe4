"""An implementation in a setting: what it takes, what it does, what the oracle says, and what it costs at least.

Legend: query, key, value (B, N, H, D), x (B, N, E) with E = H * D; with a group this rank's shard of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed import ProcessGroup

from dilated_attention.bench.results import DIRECTIONS
from dilated_attention.bench.run import Attention, Call, forward, forward_backward
from dilated_attention.bench.setting import Setting
from dilated_attention.pattern import DilatedPattern

FORWARD, BOTH = DIRECTIONS
PROJECTIONS = 4  # q, k, v and out


@dataclass(frozen=True)
class Subject:
    """An implementation built for a setting."""

    attention: Attention  # of the inputs
    exact: Attention  # of the inputs and the parameters, in any dtype
    pattern: DilatedPattern
    inputs: tuple[Tensor, ...]
    dout: Tensor
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    compiled: bool = False
    group: ProcessGroup | None = None  # whose ranks have the other tokens

    @property
    def projects(self) -> bool:
        """Whether out is more than attention itself, so that single rows of it cannot be checked."""
        return bool(self.parameters)

    def call(self, direction: str) -> Call:
        """What is timed."""
        if direction == FORWARD:
            return forward(self.attention, self.inputs)
        return forward_backward(self.attention, self.inputs, self.dout, self.parameters.values())


Build = Callable[[Setting], Subject]


@dataclass(frozen=True)
class Implementation:
    """One line of the comparison. ``build`` is pickled for ranks, so it is a partial of module-level functions."""

    name: str
    kind: str  # function, module, multihead, ring, baseline
    rule: str  # head_groups, longnet, torchscale, dense
    build: Build
    ours: bool = True
    ranks: int = 1
    whole: Build | None = None  # over ranks: the same on one device, against which they are checked
    why_not: Callable[[Setting], str | None] = lambda setting: None  # a sentence where it cannot run

    @property
    def projects(self) -> bool:
        return self.kind == "multihead" or "Multihead" in self.name or "RingAdvanced" in self.name


def least_work(implementation: Implementation, setting: Setting, direction: str) -> tuple[int, int]:
    """(FLOPs, bytes) that no way of computing it can do without, over all ranks.

    Bytes: q, k, v are read and out and lse written; backward reads these and dout and writes three gradients.
    """
    backward, pattern = direction == BOTH, setting.pattern(implementation.rule)
    flops = setting.samples * pattern.flops(
        setting.tokens, setting.heads, setting.head_dim, is_causal=setting.causal, backward=backward
    )
    rows = setting.samples * setting.tokens * setting.heads
    tensor, lse = rows * setting.head_dim * setting.dtype.itemsize, rows * 4
    count = 4 * tensor + lse
    if backward:
        count += 5 * tensor + lse + 3 * tensor
    if implementation.projects:
        weights = PROJECTIONS * setting.width**2
        flops += 2 * weights * setting.samples * setting.tokens * (3 if backward else 1)
        count += weights * setting.dtype.itemsize * (2 if backward else 1)
    return flops, count
