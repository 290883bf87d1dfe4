"""What our kernels have prepared: launches found again by their call, within a bound on their memory."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch


class LaunchCache:
    """Prepared launches by key; the first entry of a key is the device. The oldest go when a device has too many."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes  # of tables on one device
        self.pinned: set[Hashable] = set()
        self.compiled: set[Hashable] = set()  # kinds of kernels
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._bytes: Counter[torch.device] = Counter()
        # what was dropped since the device was last waited for: another thread may still use it
        self._dropped: dict[torch.device, list[Any]] = {}
        self._making = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def nbytes(self, device: torch.device) -> int:
        """The bytes of all tables that are kept for a device."""
        return self._bytes[device]

    def find(self, key: tuple[Any, ...]) -> Any:
        """What is kept under the key, or None."""
        return self._kept.get(key)

    def get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What is kept under the key; made if there is none. It has a method nbytes()."""
        found = self._kept.get(key)
        if found is None:
            with self._making:  # two threads that made the same would each launch their own
                found = self._kept.get(key)
                if found is None:
                    found, device = make(), key[0]
                    self._bytes[device] += found.nbytes()
                    if self._bytes[device] > self.most_bytes:
                        self.forget(device, self._bytes[device] - self.most_bytes // 2)
                    self._kept[key] = found
        return found

    def pin(self, launch: Hashable) -> None:
        """Keep a launch until `clear`: a CUDA graph reads its table, and does not say when the graph ends."""
        self.pinned.add(launch)

    def forget(self, device: torch.device, nbytes: float = math.inf) -> None:
        """Drop the oldest of a device. Its memory is free the next time, when the device was waited for."""
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            torch.cuda.synchronize(device)
        self._dropped[device] = []
        for key in [key for key in list(self._kept) if key[0] == device]:
            if nbytes <= 0:
                break
            dropped = self._kept.pop(key)
            self._dropped[device].append(dropped)
            self._bytes[device] -= dropped.nbytes()
            nbytes -= dropped.nbytes()

    def clear(self) -> None:
        """Forget everything. A CUDA graph with calls of ours must not be replayed after it."""
        for device in {key[0] for key in self._kept if key[0].type == "cuda"}:
            torch.cuda.synchronize(device)  # a kernel may still read a table
        with self._making:
            for kept in (self._kept, self._bytes, self._dropped, self.pinned, self.compiled):
                kept.clear()


CACHE = LaunchCache(most_bytes=128 << 20)
