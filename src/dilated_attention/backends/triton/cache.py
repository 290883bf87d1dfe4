"""What our kernels have prepared: launches found again by their call, within a bound on their memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch


class LaunchCache:
    """Prepared launches by key; the first entry of a key is the device. The oldest go when a device has too many."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes  # of tables on one device
        self.kept: dict[tuple[Any, ...], Any] = {}
        self.nbytes: Counter[torch.device] = Counter()  # of all tables that are kept
        # launches kept until `clear`: a CUDA graph reads their tables, and does not say when the graph ends
        self.pinned: set[Hashable] = set()
        self.compiled: set[Hashable] = set()  # kinds of kernels
        # what was dropped since the device was last waited for: another thread may still use it
        self._dropped: dict[torch.device, list[Any]] = {}
        self._making = threading.Lock()

    def get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What is kept under the key; made if there is none. It has a method nbytes()."""
        with self._making:  # two threads that made the same would each launch their own
            if key not in self.kept:
                made, device = make(), key[0]
                self.nbytes[device] += made.nbytes()
                if self.nbytes[device] > self.most_bytes:
                    self.forget(device, self.most_bytes // 2)
                self.kept[key] = made
            return self.kept[key]

    def forget(self, device: torch.device, most: int = -1) -> None:
        """Drop the oldest of a device, until ``most`` bytes are left, or all. Their memory is free the next time, when
        the device was waited for."""
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            torch.cuda.synchronize(device)
        self._dropped[device] = []
        for key in [key for key in self.kept if key[0] == device]:
            if self.nbytes[device] <= most:
                break
            self._dropped[device].append(self.kept.pop(key))
            self.nbytes[device] -= self._dropped[device][-1].nbytes()

    def clear(self) -> None:
        """Forget everything. A CUDA graph with calls of ours must not be replayed after it."""
        for device in {key[0] for key in self.kept if key[0].type == "cuda"}:
            torch.cuda.synchronize(device)  # a kernel may still read a table
        with self._making:
            for kept in (self.kept, self.nbytes, self._dropped, self.pinned, self.compiled):
                kept.clear()


CACHE = LaunchCache(most_bytes=128 << 20)
