"""Attention that a checkpoint keeps: the backward pass computes a layer again, and not its attention.

The backward pass of attention needs q, k, v, out and lse. A layer that is computed again gives q, k and v; out and lse
are kept from the first time, for as many layers as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention.autograd import FORWARD
from dilated_attention.call import accumulate_dtype
from dilated_attention.checks import check_int
from dilated_attention.resolve import computed_dtype

SPARE = 0.05  # of the memory: what lies between tensors


class SavedAttention:
    """An attention for one layer and one step: what its op gave the first time, it gives the second time.

    Over a group of ranks no op runs: attention is then computed again.
    """

    def __init__(self, attend: Callable[..., Any]) -> None:
        self.attend, self.results, self.again = attend, list[Any](), False

    def __call__(self, *qkv: Tensor) -> Any:
        mode = _Giving(self.results) if self.again else _Taking(self.results)
        self.again = not self.again  # a third time is that of a second backward pass: nothing is left for it
        with mode:
            return self.attend(*qkv)


class _Taking(TorchDispatchMode):
    def __init__(self, results: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        if op is FORWARD.default:  # detached: the graph would hold itself
            self.results.append(tuple(x.detach() for x in found))
        return found


class _Giving(_Taking):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.pop(0) if op is FORWARD.default else op(*args, **(kwargs or {}))


class Room:
    """How many bytes kept attention may take on a GPU. The first step keeps nothing: it shows what a step needs."""

    def __init__(self) -> None:
        self.first: tuple[int, int] = (0, 1)  # bytes allocated before the first step, and its tokens
        self.needed: float | None = None  # by a step, for each token

    def bytes(self, x: Tensor) -> int:
        """For a step on states x (B, n, E)."""
        allocated, _, all_there_is = memory(x.device)
        tokens = max(1, x.shape[0] * x.shape[1])
        if self.needed is None:
            self.first = allocated, tokens
            return 0
        return max(0, int((1 - SPARE) * all_there_is - allocated - self.needed * tokens))

    def watch(self, x: Tensor) -> None:
        """``x``: the states after the first layer. When their gradient is there, the step needs no more."""
        if self.needed is None and x.requires_grad:
            x.register_hook(self._measure)  # type: ignore[no-untyped-call]

    def _measure(self, grad: Tensor) -> None:
        _, peak, _ = memory(grad.device)
        self.needed = (peak - self.first[0]) / self.first[1]


def memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes allocated now, the most so far, and what this process can have."""
    if device.type != "cuda":
        raise ValueError(f'checkpointing="auto" needs a GPU, whose memory it looks at: give bytes on {device.type}')
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device), free + reserved


def layers_kept(checkpointing: bool | int | str, room: Room, x: Tensor, config: Any) -> int:
    """Of how many layers out and lse are kept, for states x (B, n, E) and a model's config."""
    if checkpointing is True:
        return 0
    most = room.bytes(x) if checkpointing == "auto" else check_int("checkpointing", checkpointing, least=0)
    dtype = computed_dtype(x)
    row = config.head_dim * dtype.itemsize + accumulate_dtype(dtype).itemsize
    each = x.shape[0] * x.shape[1] * config.heads * row * (1 if config.near is None else 2)  # near keys apart
    return int(most // max(1, each))
