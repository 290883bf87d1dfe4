"""The operation as one autograd node: plain in eager mode, two registered ops wherever torch looks at ops.

A registered op is opaque to torch.compile and has shapes for fake tensors; dispatching one costs more than a short
call's kernels, so that plain tensors outside of any transform go straight to the engine.

Legend: query (B, N, H, D); key, value (B, N, Hk, D); lse (B, N, H).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dilated_attention import _engine
from dilated_attention._settings import Settings
from dilated_attention.backends.problem import accumulate_dtype
from dilated_attention.pattern import DilatedPattern

Results = tuple[Tensor, ...]
NO_FORWARD_MODE = (
    "dilated_attention has no forward-mode derivative: use backward(), or for short sequences "
    "dilated_attention.reference.attention()"
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, seed: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable."""
    if is_plain(query, key, value):
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            out, lse = Attention.apply(query, key, value, padding, seed, settings)  # type: ignore[no-untyped-call]
            return out, lse
        return _engine.forward(query, key, value, padding, seed, settings)
    if torch._C._are_functorch_transforms_active():
        run = functools.partial(_attend, settings=settings)
        differentiate = functools.partial(_gradients, settings=settings)
        return transformed(run, differentiate, settings, query, key, value, padding, seed)
    pattern = settings.pattern
    out, lse = forward(
        query,
        key,
        value,
        padding,
        seed,
        pattern.rule,
        pattern.segment_lengths,
        pattern.dilation_rates,
        settings.is_causal,
        settings.scale,
        settings.dropout_p,
        settings.backend,
        settings.first_head,
        settings.total_heads,
    )
    return out, lse


def is_plain(*tensors: Tensor) -> bool:
    """Whether nobody looks on: no compiler, no dispatch mode, no transform, no subclass, no device without data."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:  # noqa: SIM110 - a short call notices what a generator costs
        if type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta:
            return False
    return True


class Attention(torch.autograd.Function):
    """The node of eager mode."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        seed: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _engine.forward(query, key, value, padding, seed, settings)
        ctx.save_for_backward(query, key, value, padding, seed, out, lse)
        ctx.settings = settings
        ctx.set_materialize_grads(False)  # None tells that lse was not used, which spares its pass
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, padding, seed, out, lse = ctx.saved_tensors
        given = (dout, dlse, query, key, value, padding, seed, out, lse, ctx.settings)
        if is_mapped(dout, dlse):
            return (*_gradients(*given[:-1], settings=ctx.settings), None, None, None)
        if not torch.is_grad_enabled():
            return (*_engine.backward(*given), None, None, None)
        with torch.no_grad():
            found = _engine.backward(*given)
        return (*once(found, dout, dlse, query, key, value), None, None, None)


def once(found: tuple[Tensor, ...], *others: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients made with create_graph=True: whoever differentiates them, by what they came from, is told."""
    return Once.apply(*found, *others)  # type: ignore[no-untyped-call, no-any-return]


class Once(torch.autograd.Function):
    """Gradients that have none themselves."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(x.view_as(x) for x in inputs[:3] if x is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        _no_double_backward(ctx, *grads)


# --- under torch.func -------------------------------------------------------------------------------------------


def is_mapped(*gradients: Tensor | None) -> bool:
    """Whether a backward pass is asked for many gradients at once: by torch.func, or with is_grads_batched=True."""
    if torch._C._are_functorch_transforms_active():
        return True
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients)


def transformed(
    run: Callable[..., Results], differentiate: Callable[..., Results], settings: Settings, *tensors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) = run(*tensors) where torch.func looks on; differentiate(dout, dlse, *tensors, out, lse)."""
    # which pairs are dropped depends on the number of the sample, which folding would change
    out, lse = Transformed.apply(run, differentiate, settings.dropout_p == 0, *tensors)  # type: ignore[no-untyped-call]
    return out, lse


def transformed_backward(differentiate: Callable[..., Results], settings: Settings, *tensors: Tensor | None) -> Results:
    folds = settings.dropout_p == 0
    return cast("Results", TransformedBackward.apply(differentiate, folds, *tensors))  # type: ignore[no-untyped-call]


class Transformed(torch.autograd.Function):
    """The node that torch.func can nest (grad, vjp, jacrev, vmap); to apply it takes longer than to apply `Attention`.

    The tensors: query, key, value, padding, seed and what else `run` takes.
    """

    @staticmethod
    def forward(run: Callable[..., Results], differentiate: Any, folds: bool, *tensors: Tensor | None) -> Results:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        _, ctx.differentiate, ctx.folds, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = TransformedBackward.apply(ctx.differentiate, ctx.folds, dout, dlse, *saved)  # type: ignore[no-untyped-call]
        return (None, None, None, *grads, *(None,) * (len(saved) - 5))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], run: Any, differentiate: Any, folds: bool, *tensors: Any) -> Any:
        return _mapped(run, folds and in_dims[4] is not None, info.batch_size, in_dims[3:], tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        _no_forward_mode()


class TransformedBackward(torch.autograd.Function):
    """Its backward pass."""

    @staticmethod
    def forward(differentiate: Callable[..., Results], folds: bool, *tensors: Tensor | None) -> Results:
        return differentiate(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        _no_double_backward(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], differentiate: Any, folds: bool, *tensors: Any) -> Any:
        return _mapped(differentiate, folds and in_dims[5] is not None, info.batch_size, in_dims[2:], tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        _no_forward_mode()


def _mapped(
    function: Callable[..., Results], folds: bool, size: int, in_dims: tuple[Any, ...], tensors: tuple[Any, ...]
) -> tuple[Results, tuple[int, ...]]:
    """The function for each of ``size`` mapped values: one call with as many times the samples, or a call for each.

    Keys that are not mapped are not folded: they would be copied as often.
    """
    given = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, in_dims, strict=True)]
    if folds:
        whole = [
            x if dim is not None or x is None else x.expand(size, *x.shape)
            for x, dim in zip(given, in_dims, strict=True)
        ]
        found = function(*(None if x is None else x.flatten(0, 1) for x in whole))
        results = tuple(x.view(size, x.shape[0] // size, *x.shape[1:]) for x in found)
    else:
        calls = [
            function(*(x if dim is None else x[i] for x, dim in zip(given, in_dims, strict=True))) for i in range(size)
        ]
        results = tuple(torch.stack(some) for some in zip(*calls, strict=True))
    return results, (0,) * len(results)


def _attend(*tensors: Any, settings: Settings) -> Results:
    query, key, value, padding, seed = tensors
    return attend(query, key, value, padding, seed, settings)


def _gradients(*tensors: Any, settings: Settings) -> Results:
    """dq, dk, dv from dout, dlse, query, key, value, padding, seed, out, lse, whoever looks on."""
    if torch._C._are_functorch_transforms_active():
        return transformed_backward(functools.partial(_gradients, settings=settings), settings, *tensors)
    dout, dlse, query, key, value, padding, seed, out, lse = tensors
    if is_plain(query, key, value) and not is_mapped(dout, dlse):
        return _engine.backward(dout, dlse, query, key, value, padding, seed, out, lse, settings)
    pattern, op = settings.pattern, cast("Callable[..., Results]", backward)
    return op(
        *tensors, pattern.rule, pattern.segment_lengths, pattern.dilation_rates, settings.is_causal, settings.scale,
        settings.dropout_p, settings.backend, settings.first_head, settings.total_heads,
    )  # fmt: skip


# --- registered ops ---------------------------------------------------------------------------------------------


@torch.library.custom_op("dilated_attention::forward", mutates_args=())
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    rule: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
    first_head: int = 0,
    total_heads: int = 0,
) -> tuple[Tensor, Tensor]:
    pattern = _pattern(rule, tuple(segment_lengths), tuple(dilation_rates))
    settings = Settings(pattern, is_causal, scale, dropout_p, backend, first_head, total_heads)
    return _engine.forward(query, key, value, key_padding_mask, seed, settings)


@torch.library.custom_op("dilated_attention::backward", mutates_args=())
def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rule: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
    first_head: int = 0,
    total_heads: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    pattern = _pattern(rule, tuple(segment_lengths), tuple(dilation_rates))
    settings = Settings(pattern, is_causal, scale, dropout_p, backend, first_head, total_heads)
    return _engine.backward(dout, dlse, query, key, value, key_padding_mask, seed, out, lse, settings)


@functools.lru_cache(maxsize=256)
def _pattern(rule: str, lengths: tuple[int, ...], rates: tuple[int, ...]) -> DilatedPattern:
    """An op takes no objects, so the pattern travels as numbers; it is checked once."""
    return DilatedPattern(rule, lengths, rates)


@forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))


@backward.register_fake
def _(dout: Tensor | None, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.settings = inputs[5:]
    ctx.set_materialize_grads(False)  # None tells that lse was not used, which spares its pass


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = backward(dout, dlse, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * 11)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "dilated_attention cannot be differentiated twice: its backward has no derivative. "
        "Drop create_graph=True, or use dilated_attention.reference.attention() for short sequences"
    )


def _no_forward_mode() -> None:
    raise NotImplementedError(NO_FORWARD_MODE)


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(_no_double_backward)
