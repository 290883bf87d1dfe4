"""The models of benchmarks/tasks.py: how they train by the clock, and how they are judged.

Legend: S held-out sequences of n bytes; a window is what a model sees at once; inputs, labels (B, n); bits (S, n).
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tasks_data
import torch
import train_lm
from tasks_data import BEGIN, Data
from torch import Tensor

from dilated_attention.bench import machine
from dilated_attention.bench.suites.models import dense
from dilated_attention.models import LMConfig, LongNetLM, recall, token_losses

STEP = 1 << 15  # tokens: short training needs many steps
POINTS, CHECKS = 100, 5  # of the curve of training, and on held-out text
CHECKED = 1 << 20  # bytes of held-out text that a point needs
ASKED = 1 << 20  # bytes of rows with questions that are judged: at least ROWS rows
ROWS, CHECKED_ROWS = 4, 8
AT_ONCE = 1 << 18  # tokens that are judged at a time
CHUNK = 1 << 16  # tokens whose logits are there at a time: the vocabulary is small
PAUSE = 5.0  # seconds between two writings of a file
BITS = 1 / math.log(2)  # in a nat


class Run(NamedTuple):
    attention: str
    window: int  # tokens
    seed: int
    part: str  # "pilot", "exploration" or "registered"

    @property
    def name(self) -> str:
        return f"{self.attention}-{self.window >> 10}k-{self.seed}"


class DenseLM(LongNetLM):
    """The same model with PyTorch's own attention in training: every token sees all before it."""

    def forward(self, tokens: Tensor, labels: Tensor, *, chunk: int) -> Tensor:  # type: ignore[override]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.states(tokens, positions, [dense] * self.config.depth)
        return token_losses(states, self.head.weight, labels, chunk)


class Timed(train_lm.Trainer):
    """Trains until its clock has reached the limit; the log of `train_lm.run`, too.

    Rows grow: each of ``lengths`` but the last has a quarter of the time. The clock begins after a step of each length,
    in which kernels are compiled, and once ``may_begin`` returns: the device may still be busy with another run. It
    stands still while held-out text is judged. The host makes the rows of a step while the device computes the last.
    """

    def __init__(
        self, options: argparse.Namespace, config: LMConfig, lengths: list[int], data: Data, file: Path, is_dense: bool,
        may_begin: Callable[[], Any] = bool,
    ) -> None:  # fmt: skip
        self.kind = DenseLM if is_dense else LongNetLM
        super().__init__(options, config)
        self.lengths, self.data, self.file, self.may_begin = lengths, data, file, may_begin
        self.tokens = max(STEP // options.shrink, lengths[-1])  # of a step
        self.elapsed, self.began, self.paused, self.written = 0.0, math.inf, 0.0, 0.0
        self.recent, self.by_length = list[float](), [0] * len(lengths)
        self.parameters = sum(x.numel() for x in self.model.parameters())
        self.found: dict[str, Any] = {"complete": False, "curve": [], "held_out_curve": []}
        self.made = self.make(0)

    def done(self) -> float:
        return self.elapsed / self.options.seconds

    def make(self, step: int) -> tuple[int, tuple[Tensor, ...]]:
        """The number of the length of a step's rows, and the rows."""
        last = len(self.lengths) - 1
        phase = step if step <= last else min(last, int(4 * self.done()))
        return phase, tasks_data.step(self.data, step, self.lengths[phase], self.tokens, self.options.seed)

    def gradients(self, rows: Any) -> Tensor:
        phase, made = self.made
        inputs, labels, weights = (x.to(self.options.device) for x in made)
        self.by_length[phase] += self.tokens
        losses = self.model(inputs, labels, chunk=CHUNK)
        ((losses * weights).sum() / weights.sum()).backward()
        self.made = self.make(self.step + 1)
        return losses.detach().mean()  # type: ignore[no-any-return]

    def update(self) -> float:
        norm = super().update()  # it waits for the device
        if self.step == len(self.lengths):
            self.may_begin()
            self.began, self.paused = time.perf_counter(), 0.0
        self.elapsed = max(0.0, time.perf_counter() - self.began - self.paused)
        return norm

    def add(self, step: int, loss: float, norm: float) -> None:
        """A point of the curve now and then: seconds, tokens, bits per byte on average since the last point."""
        self.recent.append(loss * BITS)
        curve, tokens = self.found["curve"], step * self.tokens
        if self.elapsed >= len(curve) / POINTS * self.options.seconds:
            curve.append([round(self.elapsed, 2), tokens, sum(self.recent) / len(self.recent)])
            self.recent.clear()
        checks, now = self.found["held_out_curve"], time.perf_counter()
        if self.elapsed >= (len(checks) + 1) / CHECKS * self.options.seconds:
            checks.append([round(self.elapsed, 2), tokens, *self.check()])
            bits, hits = checks[-1][2:]
            print(f"{self.file.stem}: {self.elapsed:.0f} s, {tokens:,} tokens, {bits:.4f} bits, recall {hits:.3f}")
            self.paused += time.perf_counter() - now
        if now > self.written + PAUSE:
            self.write()

    def write(self, **more: Any) -> None:
        trained = {"seconds": self.elapsed, "steps": self.step, "tokens": self.step * self.tokens}
        self.found |= {**trained, "tokens_by_length": self.by_length, **more}
        machine.write_json(self.file, self.found)
        self.written = time.perf_counter()

    def plain(self) -> LongNetLM:
        """The model as it is now, without anything of training."""
        model = self.kind(self.config, device=self.options.device)
        model.load_state_dict(self.state()["model"])
        return model if self.options.device == "cpu" or self.options.float32 else model.bfloat16()

    def check(self) -> tuple[float, float]:
        """Bits and recall in windows of the last length, from a part of the held-out text."""
        model, window, held_out = self.plain(), self.lengths[-1], self.data.held_out
        some = held_out[:: max(1, held_out.numel() // CHECKED)]
        asked = tasks_data.planted(held_out, window, min(CHECKED_ROWS, held_out.numel() // window), 0)
        hits = recall.answered(asked, recall.logits_of(model, BEGIN))
        return bits_of(model, some, window).mean().item(), score(recall.by_distance(asked, hits), window)

    def judged(self, windows: list[int]) -> dict[str, Any]:
        """For each length of windows: bits per byte, by position; and the share of right answers by distance."""
        model, held_out, found = self.plain(), self.data.held_out, dict[str, Any]()
        for window in windows:
            rows = min(max(ROWS, ASKED // self.options.shrink // window), held_out.numel() // window)
            asked = tasks_data.planted(held_out, window, rows, 1)
            hits = recall.answered(asked, recall.logits_of(model, BEGIN))
            found[str(window)] = {"recall": recall.by_distance(asked, hits)}
            if window <= held_out.shape[1]:
                bits = bits_of(model, held_out, window)
                found[str(window)] |= {"bits": bits.mean().item(), "by_position": by_position(bits.view(-1, window))}
        return found


@torch.no_grad()
def bits_of(model: LongNetLM, sequences: Tensor, window: int) -> Tensor:
    """The bits of each byte, (S, n). A window sees nothing before its first byte."""
    device, losses = model.embed.weight.device, list[Tensor]()
    for part in sequences.reshape(-1, window).split(max(1, AT_ONCE // window)):
        inputs, labels = (x.to(device) for x in tasks_data.with_labels(part))
        losses.append(model(inputs, labels, chunk=CHUNK).double().cpu() * BITS)
    return torch.cat(losses).view(sequences.shape)


def by_position(bits: Tensor) -> list[dict[str, Any]]:
    """The mean over positions ``first`` to ``last`` of all windows (S, n), two bins for each doubling."""
    length = bits.shape[1]
    edges = sorted({round(2 ** (i / 2)) for i in range(2 * length.bit_length()) if 2 ** (i / 2) < length} | {0, length})
    bins = itertools.pairwise(edges)
    return [{"first": first, "last": end - 1, "bits": bits[:, first:end].mean().item()} for first, end in bins]


def score(found: list[dict[str, Any]], window: int) -> float:
    """The recall in windows: the mean over all distances, and kinds of questions, up to half of the window."""
    shares = [one["right"] for one in found if one["from"] in tasks_data.octaves(window)]
    return sum(shares) / len(shares)
