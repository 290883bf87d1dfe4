"""Triton's interpreter, less what it does for nothing: that took most of the time of our kernels in it.

Seen in Triton 3.7, and left out for that version only, because the names are Triton's own.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """In this process, for good."""
    import triton
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
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
    tl.pointer_type.__hash__ = tl.dtype.__hash__
    dtype_of = functools.lru_cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: dtype_of(kind.scalar)

    # every tensor has its shape unwrapped, checked, and wrapped again number by number
    make_type, make_tensor, unwrap = tl.block_type.__init__, tl.tensor.__init__, tl.core._unwrap_if_constexpr
    kinds, shapes, several = {}, {}, (list, tuple, tl.core.tuple)

    def typed(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(tl.core._unwrap_if_constexpr, shape))
        if key not in kinds:
            make_type(self, element_ty, shape)
            kinds[key] = {**vars(self), "shape": kinds.setdefault(key[1:], self.shape)}  # the same one of all dtypes
        vars(self).update(kinds[key])

    def shaped(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in shapes:
            make_tensor(self, handle, kind)
            shapes[kind.name] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[kind.name], handle=handle, type=kind, dtype=kind.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = typed, shaped
    tl.core._unwrap_if_constexpr = lambda x: (
        x.value if type(x) is tl.constexpr else unwrap(x) if isinstance(x, several) else x
    )

    # every operator goes through all rules of types and shapes, even where there is nothing to convert
    convert, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def converted(self: Any, lhs: Any, rhs: Any, *flags: bool, **more: bool) -> Any:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and len(flags) < 4:  # no quotient
            return self.broadcast_impl_value(lhs, rhs)
        return convert(self, lhs, rhs, *flags, **more)

    def spread(self: Any, lhs: Any, rhs: Any) -> Any:
        is_block = lhs.type.is_block()
        if is_block is rhs.type.is_block() and (not is_block or lhs.type.shape is rhs.type.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = converted, spread
    TritonSemantic.scalar_constant = functools.lru_cache(4096, typed=True)(TritonSemantic.scalar_constant)
