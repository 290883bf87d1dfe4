"""Triton's interpreter, less what it does for nothing: that took most of the time of our kernels in it.

Seen in Triton 3.7, and done for that version only, because the names are Triton's own. Every call of a device function
replaces all names of the language, as the launch has done already. Every sum and product of integers is computed once
more, for a check whose result is not looked at unless its option `debug` is on. The table of dtypes is made anew
whenever one is looked up, and the shape of a type whenever a tensor has it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """In this process, for good."""
    import triton
    from triton import language as tl
    from triton.language import semantic
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
    quicken_types(tl.core)
    quicken_operands(semantic.TritonSemantic)


def quicken_types(core: Any) -> None:
    """Types remember their shapes, and the types that differ from them in the elements alone."""
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}
    unwrapped, other_elements, made = core._unwrap_if_constexpr, core.block_type.with_element_ty, core.block_type.to_ir

    def unwrap(x: Any) -> Any:
        kind = type(x)
        return x.value if kind is core.constexpr else x if kind in plain else unwrapped(x)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("of_its_tensors")
        if known is None:
            shape = type.shape if type.is_block() else ()
            sizes = core.tuple([core.constexpr(size) for size in shape])
            known = type.of_its_tensors = sizes, core.constexpr(math.prod(shape)), type.scalar
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known

    def with_element_ty(self: Any, element: Any) -> Any:
        if element.is_ptr():
            return other_elements(self, element)
        known = self.__dict__.setdefault("with_elements", {})
        if element.name not in known:
            known[element.name] = other_elements(self, element)
        return known[element.name]

    def to_ir(self: Any, builder: Any) -> Any:
        known = self.__dict__.get("ir")
        if known is None:
            known = self.ir = made(self, builder)
        return known

    first, blocks = core.block_type.__init__, {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(unwrap(size) for size in shape)
        known = blocks.get(key)
        if known is None:
            first(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    core._unwrap_if_constexpr = unwrap
    core.block_type.__init__ = block_type
    core.block_type.to_ir = to_ir
    core.tensor.__init__ = tensor
    core.block_type.with_element_ty = with_element_ty


def quicken_operands(semantic: Any) -> None:
    """Operands that are alike are left as they are, without a look at what else they could be."""
    every, cast = semantic.broadcast_impl_value, semantic.cast

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape is other.shape:  # there is one object for each shape
            return lhs, rhs
        if not one.is_block() and not other.is_block():
            return lhs, rhs
        found: tuple[Any, Any] = every(self, lhs, rhs)
        return found

    def to(self: Any, x: Any, dtype: Any, *rounding: Any) -> Any:
        return x if x.dtype is dtype else cast(self, x, dtype, *rounding)

    semantic.broadcast_impl_value, semantic.cast = broadcast, to
