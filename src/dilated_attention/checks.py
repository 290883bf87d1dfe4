"""Checks of single values that users give, and the one warning of this library."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import SupportsIndex

import torch

Ints = tuple[int, ...]
MAX_NUMBER = 2**48  # lengths and rates beyond it would overflow 64-bit strides


def check_int(name: str, value: object, *, least: int = 1) -> int:
    """value as an int of ``least`` or more, or an error that says what it should have been."""
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be {least} or more, got {number}")
    if number > MAX_NUMBER:
        raise ValueError(f"{name} must be at most 2**48, got {number}")
    return number


def check_ints(name: str, values: object) -> Ints:
    """Those of a list with one number per branch."""
    if isinstance(values, (str, bytes, Set, Mapping, torch.Tensor)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of whole numbers, one per branch and in their order, got {values!r}")
    numbers = tuple(check_int(f"every entry of {name}", value) for value in values)
    if not numbers:
        raise ValueError(f"{name} is empty: a pattern needs at least one branch")
    return numbers


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_tensor(name: str, value: object, if_nested: str = "") -> None:
    """Raise unless it is a tensor with the layout of all others. ``if_nested``: what to do with a nested one."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.is_nested and if_nested:
        raise ValueError(f"{name} is a nested tensor: {if_nested}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {value.layout}: pass {name}.to_dense()")


def checked_probability(p: float, name: str = "dropout_p") -> float:
    if not is_number(p) or not 0.0 <= p <= 1.0:  # false for NaN too
        raise ValueError(f"{name} must be a number in [0, 1], got {p!r}")
    return float(p)


def checked_scale(scale: float, name: str = "scale") -> float:
    if not is_number(scale) or not 0.0 <= scale <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number of 0 or more, got {scale!r}")
    return float(scale)


def is_number(value: object) -> bool:
    # a float is asked for first, as looking for an abstract class takes longer than all else here
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
