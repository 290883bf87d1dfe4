"""How far a run is: a bar with the time left on a terminal, lines on stderr elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from dilated_attention.bench.pace import Lines, Watch
from dilated_attention.cli.output import console
from dilated_attention.units import seconds_text


class Bar(Lines):
    """One line that changes, and above it what stays."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("starting", total=1.0, left="")

    def step(self, text: str, share: float, left: float) -> None:
        remaining = f"{seconds_text(max(1.0, round(left)))} left"
        self.progress.update(self.task, completed=share, description=text, left=remaining)

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
        BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}", markup=False, table_column=one_line),
    )  # fmt: skip
    with Progress(*columns, console=screen, transient=True, expand=True) as progress:
        yield Bar(progress)
