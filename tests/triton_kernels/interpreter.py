"""Triton's interpreter, less what it does for nothing: that took half of the time of our kernels in it.

Every call of a device function replaces all names of the language, as the launch has done already. Seen in Triton 3.7,
and left out for that version only, because the names are Triton's own.
"""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    """In this process, for good."""
    import triton
    from triton import language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.7."):
        return
    replace_names, done = interpreter._patch_lang, {}

    def once(function: Any) -> Any:
        if function not in done:
            done[function] = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        is_plain = any(tl.core.is_builtin(language.load) for language in done[function])
        return replace_names(function) if is_plain else interpreter._LangPatchScope()

    interpreter._patch_lang = once
