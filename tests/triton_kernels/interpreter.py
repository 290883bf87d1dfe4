"""Triton's interpreter, less what it does for nothing: that took most of the time of our kernels in it.

Seen in Triton 3.7, and done for that version only, because the names are Triton's own. Every call of a device function
replaces all names of the language, as the launch has done already. Every sum and product of integers is computed once
more, for a check whose result is not looked at unless its option `debug` is on. The table of dtypes is made anew
whenever one is looked up.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """In this process, for good."""
    import triton
    from triton import language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.7."):
        return
    every: Any = interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def once(function: Any) -> Any:
        replaced = not any(tl.core.is_builtin(one.load) for one in languages(function))
        return interpreter._LangPatchScope() if replaced else every(function)

    slow: Any = interpreter._get_np_dtype
    looked_up = functools.cache(slow)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return slow(scalar) if scalar.is_ptr() else looked_up(scalar)  # pointers have no hash, and are soon found

    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "then overflows are looked at, and must be computed"
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = once
    interpreter._get_np_dtype = np_dtype
