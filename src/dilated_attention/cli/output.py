"""How things are printed: in colour and as wide as the window on a terminal, plain and wide elsewhere, JSON if asked.

How far a run is: a bar with the time left on a terminal, lines on stderr elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from dilated_attention.bench.pace import log
from dilated_attention.bench.regress import TOO_SLOW
from dilated_attention.units import seconds_text

STYLES = {
    **dict.fromkeys(("exact", "right", "faster"), "green"), "skipped": "dim", "unclear": "yellow",
    **dict.fromkeys(("wrong", "slower", "out of memory", TOO_SLOW), "bold red"),
}  # fmt: skip
WIDE = 160  # where nobody's window says how wide: tables are not folded, and lines are not cut anyway


def console(*, stderr: bool = False) -> Console:
    """No markup: what is printed has names and errors in it, whose brackets are meant. A line of text is not folded."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, width=None if is_terminal else WIDE, highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def print_table(screen: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column is to be read, the others are numbers to the right; but one that starts with < is read, too."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        is_read = not index or name.startswith("<")
        made.add_column(name.removeprefix("<"), justify="left" if is_read else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in row))
    screen.print(Text(f"\n{title}", "bold"))
    screen.print(made, soft_wrap=False)


def print_json(thing: object) -> None:
    def plain(thing: Any) -> Any:
        """Of what JSON does not have: records by their fields, and anything else as text."""
        if dataclasses.is_dataclass(thing):
            return {x.name: getattr(thing, x.name) for x in dataclasses.fields(thing) if x.repr}
        return dict(thing) if isinstance(thing, Mapping) else str(thing).removeprefix("torch.")

    print(json.dumps(thing, indent=1, default=plain))


@contextmanager
def watching() -> Iterator[Callable[..., None]]:
    """A function as `log`: on a terminal one line that changes, and above it what stays."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield log
        return
    one_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # what room the others leave
    said = TextColumn("{task.description}", markup=False, table_column=one_line)
    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), said)
    with Progress(*columns, console=screen, transient=True, expand=True) as progress:
        bar = progress.add_task("starting", total=1.0)

        def watch(text: str, share: float | None = None, left: float | None = None) -> None:
            if share is None:
                progress.console.print(text)
                return
            remaining = "" if left is None else f"{seconds_text(max(1.0, round(left)))} left  "
            progress.update(bar, completed=share, description=remaining + text)

        yield watch
