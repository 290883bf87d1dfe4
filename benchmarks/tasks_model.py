"""The models of benchmarks/tasks.py: how they train by the clock, and how they are judged position by position.

Legend: S held-out sequences of n symbols; a window is what a model sees at once; inputs, labels (B, n); bits (S, n).
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import train_lm
from tasks_data import Data, with_labels
from torch import Tensor

from dilated_attention.bench import machine
from dilated_attention.bench.suites.models import dense
from dilated_attention.models import LMConfig, LongNetLM, token_losses

WARM = 3  # steps before the clock begins
POINTS, CHECKS = 100, 10  # of the curve of training, and on held-out text
CHECKED = 1 << 20  # symbols of held-out text that a point needs
JUDGED_AT_ONCE = 1 << 19  # tokens
CHUNK = 1 << 16  # tokens whose logits are there at a time: the vocabulary is small
PAUSE = 5.0  # seconds between two writings of a file
BITS = 1 / math.log(2)  # in a nat


class Run(NamedTuple):
    attention: str
    window: int  # tokens
    step: int = 1 << 17  # tokens
    reach: int = 0  # the longest segment, if it is not the window
    warmup: int = 100  # steps


class DenseLM(LongNetLM):
    """The same model with PyTorch's own attention: every token sees all before it, whatever the pattern."""

    def forward(self, tokens: Tensor, labels: Tensor, *, chunk: int) -> Tensor:  # type: ignore[override]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.states(tokens, positions, [dense] * self.config.depth)
        return token_losses(states, self.head.weight, labels, chunk)


class Timed(train_lm.Trainer):
    """Trains until its clock has reached the limit; the log of `train_lm.run`, too."""

    def __init__(self, options: argparse.Namespace, config: LMConfig, run: Run, data: Data, file: Path) -> None:
        self.kind = DenseLM if run.attention == "dense" else LongNetLM
        super().__init__(options, config)
        self.run, self.data, self.file = run, data, file
        self.elapsed, self.began, self.paused, self.written = 0.0, math.inf, 0.0, 0.0
        self.recent: list[float] = []
        self.parameters = sum(x.numel() for x in self.model.parameters())
        self.found: dict[str, Any] = {"complete": False, "curve": [], "held_out_curve": []}

    def done(self) -> float:
        return self.elapsed / self.options.seconds

    def losses(self, row: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Of inputs and labels as `Windows` makes them: every label counts."""
        return self.model(row, documents, chunk=CHUNK), torch.ones_like(documents, dtype=torch.bool)

    def update(self) -> float:
        norm = super().update()  # it waits for the device
        if self.step == WARM:
            self.began = time.perf_counter()
        self.elapsed = max(0.0, time.perf_counter() - self.began - self.paused)
        return norm

    def add(self, step: int, loss: float, norm: float) -> None:
        """A point of the curve now and then: seconds, tokens, bits per symbol on average since the last point."""
        self.recent.append(loss * BITS)
        curve, tokens = self.found["curve"], step * self.run.step
        if self.elapsed >= len(curve) / POINTS * self.options.seconds:
            curve.append([round(self.elapsed, 2), tokens, sum(self.recent) / len(self.recent)])
            self.recent.clear()
        checks, now = self.found["held_out_curve"], time.perf_counter()
        if self.elapsed >= (len(checks) + 1) / CHECKS * self.options.seconds:
            some = self.data.held_out[:: max(1, self.data.held_out.numel() // CHECKED)]
            checks.append([round(self.elapsed, 2), tokens, self.bits_of(some, self.run.window).mean().item()])
            print(f"{self.file.stem}: {self.elapsed:.0f} s, {tokens:,} tokens, {checks[-1][2]:.4f} bits", flush=True)
            self.paused += time.perf_counter() - now
        if now > self.written + PAUSE:
            self.write()

    def write(self, **more: Any) -> None:
        self.found |= {"seconds": self.elapsed, "steps": self.step, "tokens": self.step * self.run.step, **more}
        machine.write_json(self.file, self.found)
        self.written = time.perf_counter()

    @torch.no_grad()
    def bits_of(self, sequences: Tensor, window: int) -> Tensor:
        """The bits of each symbol, (S, n). A window sees nothing before its first symbol."""
        whole = sequences.shape[1] // window * window
        parts = sequences[:, :whole].reshape(-1, window), sequences[:, whole:]
        found = []
        for part in (x for x in parts if x.numel()):
            some = part.split(max(1, JUDGED_AT_ONCE // part.shape[1]))
            pairs = (with_labels(x.to(self.options.device), self.data.begin) for x in some)
            losses = [self.losses(*pair)[0].double() * BITS for pair in pairs]
            found.append(torch.cat(losses).reshape(len(sequences), -1))
        return torch.cat(found, 1)


# --- by position ------------------------------------------------------------------------------------------------


def by_position(bits: Tensor) -> list[dict[str, Any]]:
    """The mean over positions ``first`` to ``last`` of all windows (S, n), two bins for each doubling.

    ``error`` is the standard error over the windows: None for a single one.
    """
    windows, length = bits.shape
    edges = sorted({round(2 ** (i / 2)) for i in range(2 * length.bit_length()) if 2 ** (i / 2) < length} | {0, length})
    found = []
    for first, end in itertools.pairwise(edges):
        means = bits[:, first:end].mean(1)
        error = None if windows == 1 else means.std().item() / math.sqrt(windows)
        found.append({"first": first, "last": end - 1, "bits": means.mean().item(), "error": error})
    return found


def judged(trainer: Timed, windows: tuple[int, ...], shortest: int) -> dict[str, Any]:
    """For each length of windows: bits per symbol, by position, and by the distance from a border of segments."""
    found: dict[str, Any] = {}
    for window in windows:
        held_out = trainer.data.held_out
        length = min(window, held_out.shape[1])
        bits = trainer.bits_of(held_out, length)
        inside = bits[:, : bits.shape[1] // length * length].reshape(-1, length)  # a shorter last window is left out
        found[str(window)] = {"bits": bits.mean().item(), "by_position": by_position(inside)}
        later = inside[:, shortest : length // shortest * shortest]
        if later.numel():
            found[str(window)]["after_a_border"] = by_position(later.reshape(-1, shortest))
    return found
