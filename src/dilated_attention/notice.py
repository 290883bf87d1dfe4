"""The one warning of this library."""

from __future__ import annotations

import sys
import warnings


class DilatedAttentionWarning(UserWarning):
    """Warns of a call or pattern that is valid and computed correctly, but probably not what you meant.

    The text names the cure. Python shows it once for each line of code that does it.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("ignore", da.DilatedAttentionWarning)  # if you do mean it
        >>> pattern = da.DilatedPattern.longnet([1, 2], [512, 1024])  # the lists are swapped: lengths come first
    """


def warn(text: str) -> None:
    """Warn at the line of the caller's code, so that Python shows it once for each such line."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("dilated_attention", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, DilatedAttentionWarning, stacklevel=level)
