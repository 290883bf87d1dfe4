"""How far a run is: a bar with the time left on a terminal, lines on stderr elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from dilated_attention.cli.output import console

if TYPE_CHECKING:
    from dilated_attention.bench.session import Watch

LONG = 86400.0  # seconds of past steps that tell how long the next ones take: all of them, as steps differ much


class Lines:
    """Each step is a line, for logs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.total, self.begun, self.start = clock, 0, 0, clock()

    def begin(self, total: int) -> None:
        self.total, self.begun, self.start = total, 0, self.clock()

    def step(self, text: str) -> None:
        done, self.begun = self.begun, self.begun + 1
        left = ""
        if done and self.total > done:
            left = f", {roughly((self.clock() - self.start) / done * (self.total - done))} left"
        self.say(f"[{self.begun}/{max(self.total, self.begun)}{left}] {text}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def roughly(seconds: float) -> str:
    """As exactly as an estimate is worth."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Bar:
    """One line that changes, and above it what is to stay."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.begun = progress, 0
        self.task = progress.add_task("starting", total=None)

    def begin(self, total: int) -> None:
        self.begun = 0
        self.progress.reset(self.task, total=total, completed=0)

    def step(self, text: str) -> None:
        """The one before is done when the next begins."""
        where, _, what = text.rpartition(": ")  # what is done comes first: a narrow window cuts the end
        self.progress.update(self.task, completed=self.begun, description=f"{what} {where}".rstrip())
        self.begun += 1

    def say(self, text: str) -> None:
        self.progress.console.print(text, soft_wrap=True)


@contextmanager
def watching() -> Iterator[Watch]:
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield Lines()
        return
    one_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # what room the others leave
    columns = (
        BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.description}", markup=False, table_column=one_line),
    )  # fmt: skip
    with Progress(*columns, console=screen, transient=True, expand=True, speed_estimate_period=LONG) as progress:
        yield Bar(progress)
