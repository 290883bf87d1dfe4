"""How far a run is, told to whoever watches: as lines of a log here, as a bar in `cli.output`."""

from __future__ import annotations

import sys

from dilated_attention.units import seconds_text


def log(text: str, share: float | None = None, left: float | None = None) -> None:
    """What has ended; with ``share`` what begins: so much of the run is done, and it takes ``left`` seconds more."""
    more = "" if left is None else f", {seconds_text(max(1.0, round(left)))} left"
    print(text if share is None else f"[{share:.0%}{more}] {text}", file=sys.stderr, flush=True)
