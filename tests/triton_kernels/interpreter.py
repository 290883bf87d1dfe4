"""Triton's interpreter, less what it does for nothing: that took most of the time of our kernels in it.

Seen in Triton 3.7, and left out for that version only, because the names are Triton's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def quicken() -> None:
    """In this process, for good."""
    import triton
    from triton import language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.7."):
        return
    # every sum and product of integers is computed again in 64 bits, for a check that only the debug mode makes
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)

    # every call of a device function replaces all names of the language, as the launch has done already
    replace_names, done = interpreter._patch_lang, {}

    def once(function: Any) -> Any:
        if function not in done:
            done[function] = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        is_plain = any(tl.core.is_builtin(language.load) for language in done[function])
        return replace_names(function) if is_plain else interpreter._LangPatchScope()

    interpreter._patch_lang = once

    # every operator makes a dictionary of all types to look one up
    look_up, dtypes = interpreter._get_np_dtype, {}

    def known(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind)
        return dtypes[name]

    interpreter._get_np_dtype = known
