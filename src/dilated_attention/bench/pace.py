"""How far a run is, told to whoever watches: lines for a log here, a bar in `cli.output`."""

from __future__ import annotations

import sys

from dilated_attention.units import seconds_text


class Lines:
    """A line for each step."""

    def step(self, text: str, share: float, left: float | None = None) -> None:
        """This begins now; that share of the work is done, and it takes so many more seconds if that is known."""
        more = "" if left is None else f", {seconds_text(max(1.0, round(left)))} left"
        self.say(f"[{share:.0%}{more}] {text}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
