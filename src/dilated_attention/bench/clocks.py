"""What the GPU's clock was while something was measured: a card at its power limit lowers it.

The same kernel takes longer in a long measurement than in a short one, and on another card: with its clock beside it,
a time can be compared.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from typing import Any, NamedTuple

import torch

EVERY_MS = 50
QUERY = "clocks.sm,power.draw"


class Sample(NamedTuple):
    seconds: float  # of time.monotonic
    megahertz: float
    watts: float


class Clocks:
    """Reads clock and power in the background, inside of a ``with``, where there is an nvidia-smi that tells them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[Sample] = []
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        program = shutil.which("nvidia-smi") if self.device.type == "cuda" else None
        if program is not None:
            which = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            asked = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
            self.process = subprocess.Popen(
                [program, f"--id={which}", *asked], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self.read, args=(self.process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                megahertz, watts = (float(word) for word in line.split(","))
            except ValueError:  # "[N/A]", or a message
                continue
            self.samples.append(Sample(time.monotonic(), megahertz, watts))

    def since(self, start: float) -> dict[str, Any]:
        """Medians from ``start`` (of time.monotonic) to now; nothing where nothing was read."""
        found = [sample for sample in self.samples if sample.seconds >= start]
        if not found:
            return {}
        clock, power = (statistics.median(x) for x in zip(*(sample[1:] for sample in found), strict=True))
        return {"sm_mhz": clock, "watts": power}
