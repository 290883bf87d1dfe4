"""What both kinds of stream share: the call that all chunks are parts of, and what may be held between them.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D), of n tokens in a row.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dilated_attention.call import Call
from dilated_attention.units import bytes_text


class Stream:
    """The work of a stream. Its call has the shapes of no tokens, alike for all chunks."""

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], num_tokens: int | None) -> None:
        lengths = call.dilated.segment_lengths
        self.call, self.deliver, self.position = call, deliver, 0
        self.branches = call.dilated.branches_for(call.kv_heads)
        self.period = math.lcm(*lengths)  # the segments of all branches begin together every so many tokens
        self.longest = max(lengths)
        self.most = self.longest if num_tokens is None else min(num_tokens, self.longest)  # tokens of a segment

    def end(self) -> None:
        """There are no more tokens."""

    def check_memory(self, held: int, max_bytes: int | None) -> None:
        """Raise if what is held from one chunk to the next does not fit. Nothing is held yet."""
        limit = _half_of_memory(self.call.device) if max_bytes is None else max_bytes
        if limit is None or held <= limit:
            return
        what, causal = "the longest segment", "is_causal=True, "
        if self.call.is_causal:
            what, causal = "the keys and values that later tokens see", ""
        raise ValueError(
            f"{what} would take {held:,} bytes ({bytes_text(held)}), and max_bytes is {limit:,}: use shorter segments, "
            f"{causal}fewer samples at a time or a larger max_bytes; if the stream is shorter than its segments, give "
            "num_tokens"
        )


@contextlib.contextmanager
def any_mode() -> Iterator[None]:
    """Whatever mode a chunk is taken in, nothing held is an inference tensor: the next may come in another mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _half_of_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None
