"""What the GPU's clock was while something was measured: a card at its power limit lowers it."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile

import torch

QUERY = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--loop-ms=50")


class Clocks:
    """Inside of a ``with``, nvidia-smi writes clock and power to a file, if there is a GPU and an nvidia-smi."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.file = device, tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        program = shutil.which("nvidia-smi") if self.device.type == "cuda" else None
        if program is not None:
            which = f"--id=GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            quiet = {"stdout": self.file, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen([program, which, *QUERY], text=True, **quiet)  # type: ignore[call-overload]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.file.close()

    def medians(self) -> tuple[float, ...]:
        """MHz and W so far; nothing where nothing was read."""
        self.file.seek(0)
        lines = [line.split(",") for line in self.file.read().splitlines()[:-1]]  # the last may be half written
        found = [tuple(map(float, words)) for words in lines if all(_is_number(word) for word in words)]
        return tuple(map(statistics.median, zip(*found, strict=True)))


def _is_number(word: str) -> bool:
    return word.strip().replace(".", "", 1).isdigit()  # not "[N/A]"
