"""Exact, fast dilated attention for long sequences: LongNet's operation and its family, on PyTorch."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "Blocks", "CommunicationError", "ContextParallel", "Dense", "Dilated", "DilatedAttention",
    "DilatedAttentionWarning", "DilatedPattern", "Explanation", "Global", "MultiheadDilatedAttention", "Pattern",
    "Prefix", "RingDilatedAttention", "RingMultiheadDilatedAttention", "Strided", "Window", "attention_mass",
    "dilated_attention", "explain", "gather_sequence", "global_mean", "global_mean_for_ddp", "local_positions",
    "naming_lost_ranks", "plan_cost", "shard_sequence", "stream",
]  # fmt: skip


def _is_own_command() -> bool:
    """Whether this process is `dilated-attention` or `python -m dilated_attention`."""
    started = sys.orig_argv[1:3]
    return started == ["-m", __name__] or [os.path.basename(name) for name in started[:1]] == ["dilated-attention"]


# An ordinary program gets all names at once, and the registered ops with them. Only the command waits until a name is
# asked for: its help must come at once, and `import torch` takes seconds.
if TYPE_CHECKING or not _is_own_command():
    from dilated_attention.branches import Blocks, Dense, Dilated, Global, Prefix, Strided, Window
    from dilated_attention.checks import DilatedAttentionWarning
    from dilated_attention.compat import *  # noqa: F403 - old names can be imported from here, and are not shown
    from dilated_attention.context_parallel import ContextParallel
    from dilated_attention.distributed.group import CommunicationError
    from dilated_attention.distributed.sequence import (
        gather_sequence,
        global_mean,
        global_mean_for_ddp,
        local_positions,
        naming_lost_ranks,
        shard_sequence,
    )
    from dilated_attention.functional import Explanation, attention_mass, dilated_attention, explain
    from dilated_attention.nn import (
        DilatedAttention,
        MultiheadDilatedAttention,
        RingDilatedAttention,
        RingMultiheadDilatedAttention,
    )
    from dilated_attention.pattern import DilatedPattern, Pattern
    from dilated_attention.ring.cost import plan_cost
    from dilated_attention.streaming.chunks import stream
else:
    _HOMES = (
        "branches", "pattern", "functional", "nn", "context_parallel", "streaming.chunks", "checks",
        "ring.cost", "distributed.group", "distributed.sequence",
    )  # fmt: skip

    def __getattr__(name: str) -> object:
        for home in _HOMES if name in __all__ else ():
            value = vars(importlib.import_module(f"{__name__}.{home}")).get(name)
            if value is not None:
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
