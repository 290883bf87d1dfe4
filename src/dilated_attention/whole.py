"""Whole numbers that users give, or an error that says what they should have been."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from typing import SupportsIndex

import torch

MAX_NUMBER = 2**48  # lengths and rates beyond it would overflow 64-bit strides


def whole_number(name: str, value: object, *, least: int = 1) -> int:
    """value as an int of ``least`` or more, or an error that says what it should have been."""
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be {least} or more, got {number}")
    if number > MAX_NUMBER:
        raise ValueError(f"{name} must be at most 2**48, got {number}")
    return number


def whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """Those of a list with one number per branch."""
    if isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be a list of whole numbers, got a tensor: pass its .tolist()")
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of whole numbers, one per branch, got {values!r}")
    if isinstance(values, (Set, Mapping)):
        raise TypeError(f"{name} must be a list of whole numbers in the order of the branches, got {values!r}")
    numbers = tuple(whole_number(f"every entry of {name}", value) for value in values)
    if not numbers:
        raise ValueError(f"{name} is empty: a pattern needs at least one branch")
    return numbers
