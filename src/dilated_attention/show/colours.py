"""The colours of pictures and pages: from none of the branches to all of them."""

from __future__ import annotations

NOTHING = {"light": "#eef1f4", "dark": "#1d2733"}
RAMP = {"light": ("#b9d3ea", "#5d9bd0", "#1f4e79"), "dark": ("#2a5b8c", "#4fa3e0", "#c4e7ff")}
QUERY = {"light": "#d9480f", "dark": "#ffa94d"}


def blend(ramp: tuple[str, ...], place: float) -> str:
    """The colour at a place from 0 to 1."""
    at = min(int(place * (len(ramp) - 1)), len(ramp) - 2)
    rest = place * (len(ramp) - 1) - at
    channels = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in ramp[at : at + 2])
    return "#" + "".join(f"{round(a + (b - a) * rest):02x}" for a, b in zip(*channels, strict=True))


def levels(most: int, theme: str = "light") -> list[str]:
    """The colours of 0, 1, ... most."""
    if most == 1:
        return [NOTHING[theme], blend(RAMP[theme], 0.5)]
    return [NOTHING[theme], *(blend(RAMP[theme], i / (most - 1)) for i in range(most))]
