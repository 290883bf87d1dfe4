"""How long a run takes: estimated before it starts, then corrected by what its steps really took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from dilated_attention.units import seconds_text

TRUST = 15.0  # seconds for which the plan is believed before what was measured outweighs it


class Watch(Protocol):
    """Whoever shows how far a run is."""

    def begin(self, seconds: float) -> None:
        """The run will take about so long."""

    def step(self, text: str, share: float, left: float) -> None:
        """This begins now; that share of the run is done, and it takes so many more seconds."""

    def say(self, text: str) -> None:
        """Something that stays readable."""


class Lines:
    """A line for each step, for logs."""

    def begin(self, seconds: float) -> None:
        self.say(f"this takes about {seconds_text(max(1.0, round(seconds)))}")

    def step(self, text: str, share: float, left: float) -> None:
        self.say(f"[{share:.0%}, {seconds_text(max(1.0, round(left)))} left] {text}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Quiet(Lines):
    """Nobody looks."""

    def say(self, text: str) -> None:
        pass


class Pace:
    """Counts the planned seconds of the steps that are done."""

    def __init__(self, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self.watch, self.clock = watch, clock
        self.planned, self.done, self.current, self.began = 1.0, 0.0, 0.0, clock()

    def begin(self, planned: float) -> None:
        self.planned, self.done, self.current, self.began = max(planned, 1e-9), 0.0, 0.0, self.clock()
        self.watch.begin(planned)

    def step(self, text: str, seconds: float = 0.0) -> None:
        """``seconds``: what was planned for this step. The step before it is done."""
        self.done, self.current = min(self.planned, self.done + self.current), seconds
        self.watch.step(text, self.done / self.planned, self.left())

    def left(self) -> float:
        slower = (self.clock() - self.began + TRUST) / (self.done + TRUST)
        return slower * (self.planned - self.done)

    def say(self, text: str) -> None:
        self.watch.say(text)
