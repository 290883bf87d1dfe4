"""A call on one device as one autograd node, and as two registered ops wherever torch looks at ops.

Plain tensors go straight to the kernels: dispatching an op costs more than a short call's kernels. Compilers, fake
tensors, tracers and subclasses see `dilated_attention::forward_2` and `::backward_2`, which do without the wrappers of
`torch.library.custom_op`: those took a large part of a short compiled step (benchmarks/results/turns.json).

Legend: query (B, n, H, D); key, value (B, N, Hk, D); lse (B, n, H).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dilated_attention.backends import run
from dilated_attention.backends.problem import Gradients, Inputs, Pair
from dilated_attention.call import Call, accumulate_dtype, checked_cu_seqlens, settings, unpacked

INPUTS, SEED, CU_SEQLENS = len(Inputs._fields), Inputs._fields.index("seed"), Inputs._fields.index("cu_seqlens")
NO_GRADIENTS = (None,) * (INPUTS - 2)  # of what is given to the node beside q, k and v
PLAIN = (Tensor, torch.nn.Parameter)
NOT_TWICE = (
    "dilated_attention cannot be differentiated twice: its backward has no derivative. "
    "Drop create_graph=True, or use dilated_attention.reference.attention() for short sequences"
)
NOT_COMPILED = (
    "dilated_attention does not go through torch.func inside of torch.compile: leave one of the two out. torch.func "
    "works without torch.compile, and backward() works in compiled code"
)
NO_FORWARD_MODE = (
    "dilated_attention has no forward-mode derivative: use backward(), or for short sequences "
    "dilated_attention.reference.attention()"
)


def attend(inputs: Inputs, call: Call) -> Pair:
    """(out, lse), differentiable. While torch.compile traces, the call has no shapes: the op reads them as it runs."""
    q, k, v = inputs[:3]
    if is_plain(q, k, v):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _apply_plain(*inputs, Direct(call))  # type: ignore[no-any-return]
        return run.forward(call, inputs)
    if is_compiling() or not torch._C._are_functorch_transforms_active():
        out, lse = FORWARD(q, k, v, _others(inputs), *call.packed())
        return out, lse
    return Attention.apply(*inputs, Direct(call))  # type: ignore[no-untyped-call, no-any-return]


def _others(inputs: Inputs) -> list[Tensor | None]:
    """What the ops are given beside q, k and v: nothing, where nothing is there."""
    others = inputs[3:]
    return [] if all(x is None for x in others) else list(others)


@dataclass(slots=True)  # not a tuple, which torch.func would take apart
class Direct:
    """The way to the kernels, for plain tensors."""

    call: Call

    def forward(self, inputs: Inputs) -> Pair:
        return run.forward(self.call.now(inputs.q), inputs)  # vmap gives more samples

    def backward(self, *given: Any) -> Gradients:
        """``given``: the inputs, out, lse, and what comes back of both."""
        return run.backward(self.call.now(given[0]), Inputs(*given[:INPUTS]), *given[INPUTS:])


@dataclass(slots=True)
class Registered:
    """The way to the registered ops, for tensors that a compiler, a mode or a subclass sees."""

    packed: Sequence[Any]  # as of `Call.packed`

    def forward(self, inputs: Inputs) -> Pair:
        return _below_autograd(FORWARD, *inputs[:3], _others(inputs), *self.packed)  # type: ignore[no-any-return]

    def backward(self, *given: Any) -> Gradients:
        return BACKWARD(*given[-2:], list(given[:-2]), *self.packed)  # type: ignore[no-any-return]


def _mapped(cls: Any, info: Any, in_dims: tuple[Any, ...], *given: Any) -> Any:
    """A node of all mapped values, with as many times the samples; or one for each, where keys that are not mapped
    would be copied as often, and with dropout, which depends on the number of a sample."""
    count = info.batch_size
    given = tuple(x if dim is None else x.movedim(dim, 0) for x, dim in zip(given, in_dims, strict=True))
    pairs = [*zip(given, in_dims, strict=True)]
    if in_dims[1] is None or given[SEED] is not None:
        calls = [cls.apply(*(x if dim is None else x[i] for x, dim in pairs)) for i in range(count)]
        results = tuple(map(torch.stack, zip(*calls, strict=True)))
    else:
        whole = list(given)
        for at, (x, dim) in enumerate(pairs):
            if isinstance(x, Tensor) and at != CU_SEQLENS:
                whole[at] = (x.expand(count, *x.shape) if dim is None else x).flatten(0, 1)
        results = tuple(x.unflatten(0, (count, -1)) for x in cls.apply(*whole))
    return results, (0,) * len(results)


class Attention(torch.autograd.Function):
    """The node: keeps q, k, v, out and lse, and no more."""

    vmap = classmethod(_mapped)

    @staticmethod
    def forward(*given: Any) -> Pair:
        out, lse = given[INPUTS].forward(Inputs(*given[:INPUTS]))
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
        ctx.save_for_backward(*inputs[:INPUTS], *output)
        ctx.way = inputs[INPUTS]
        ctx.set_materialize_grads(False)  # None tells that lse was not used, which spares its pass

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, way = ctx.saved_tensors, ctx.way
        if isinstance(way, Direct):
            if torch.is_grad_enabled() or not is_plain(dout, dlse):
                return (*Refusing.apply(*saved, dout, dlse, way.backward, NOT_TWICE), *NO_GRADIENTS)  # type: ignore[no-untyped-call]
            if is_batched(dout) or is_batched(dlse):  # with is_grads_batched=True: torch loops over the op
                way = Registered(way.call.packed())
        return (*way.backward(*saved, dout, dlse), *NO_GRADIENTS)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_FORWARD_MODE)


# What Function.apply comes to outside of torch.func. It would first look up the signature of forward, which takes as
# long as a short call's kernels.
_apply_plain: Any = super(torch.autograd.Function, Attention).apply


class Refusing(torch.autograd.Function):
    """A result without a derivative, of tensors, what computes it from them, and the words of its error: its backward
    pass raises."""

    vmap = classmethod(_mapped)

    @staticmethod
    def forward(*given: Any) -> Any:
        *tensors, compute, _ = given
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.why = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(ctx.why)


# --- derivatives that are refused -------------------------------------------------------------------------------------


def is_plain(*tensors: Tensor | None) -> bool:
    """No compiler, dispatch mode or functorch transform is active, and no tensor is a subclass or without data."""
    if is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:  # noqa: SIM110 - a generator would take longer than the rest
        if x is not None and (type(x) not in PLAIN or x.is_meta):
            return False
    return True


def is_mapped(*gradients: Tensor | None) -> bool:
    """Whether a backward pass is asked for many gradients at once: by torch.func, or with is_grads_batched=True."""
    return torch._C._are_functorch_transforms_active() or any(is_batched(x) for x in gradients)


def is_batched(x: Tensor | None) -> bool:
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def once(why: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a backward that has no derivative: whoever differentiates its result gets an error that says ``why``.

    Such a backward returns the gradients, and the inputs of its forward that they depend on. torch's
    `once_differentiable` looks at incoming gradients alone. That of a sum is a constant: a second derivative would be
    left out without an error.
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor) -> Any:
            with torch.no_grad():
                computed, inputs = backward(ctx, *grads)
            if not torch.is_grad_enabled() or is_compiling():
                return computed
            return Refusing.apply(*grads, *inputs, lambda *_: computed, why)  # type: ignore[no-untyped-call]

        return run

    return decorated


# --- the registered ops -------------------------------------------------------------------------------------------

# The number in a name goes up when what an op is given does: torch keeps compiled code on disk, and finds it by names.
_library: Any = torch.library.Library("dilated_attention", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "forward_2(Tensor query, Tensor key, Tensor value, Tensor?[] others, SymInt[] numbers, float scale, "
    "float dropout_p, str call) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "backward_2(Tensor? dout, Tensor? dlse, Tensor?[] saved, SymInt[] numbers, float scale, float dropout_p, str call) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward(query: Tensor, key: Tensor, value: Tensor, others: Sequence[Any], *packed: Any) -> Pair:
    """``others``: padding, seed, positions and cu_seqlens, or nothing."""
    inputs = Inputs(query, key, value, *others)
    return run.forward(_read(inputs, packed), inputs)


def _backward(dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Any], *packed: Any) -> Gradients:
    inputs, (out, lse) = Inputs(*saved[:INPUTS]), saved[INPUTS:]
    return run.backward(_read(inputs, packed), inputs, out, lse, dout, dlse)


def _read(inputs: Inputs, packed: Sequence[Any]) -> Call:
    """The call of an op, from what it was given."""
    q, k, cu_seqlens = inputs.q, inputs.k, inputs.cu_seqlens
    numbers, *others = packed
    tensors = q.shape, k.shape, q.dtype, q.device, inputs.padding is not None, numbers[0]
    call = unpacked(tuple(numbers), *others, tensors, settings(q.dtype, q.device))
    return call if cu_seqlens is None else call._replace(cu_seqlens=checked_cu_seqlens(cu_seqlens, k.shape[1]))


def _below_autograd(op: Any, *given: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*given)


def _autograd_forward(*given: Any) -> Pair:
    """What torch calls first. In a compiled graph no gradient is wanted, and the kernels come at once."""
    if torch._C._are_functorch_transforms_active():
        _refuse_transforms()
    q, k, v, others, *packed = given
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply_plain(*Inputs(q, k, v, *others), Registered(packed))  # type: ignore[no-any-return]
    return _forward(*given) if is_plain(q, k, v) else _below_autograd(FORWARD, *given)


def _autograd_backward(*given: Any) -> Gradients:
    """The same for the backward pass; whoever differentiates it gets an error."""
    dout, dlse, saved, *packed = given
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (dout, dlse, *saved)):
        return Refusing.apply(*saved, dout, dlse, Registered(packed).backward, NOT_TWICE)  # type: ignore[no-any-return, no-untyped-call]
    if is_plain(dout, dlse, *saved[:3]):
        return _backward(*given)
    return _below_autograd(BACKWARD, *given)  # type: ignore[no-any-return]


def _refuse_transforms(*_: Any) -> Any:
    """Without torch.compile, torch.func never comes to the ops."""
    raise NotImplementedError(NOT_COMPILED)


def _fake_forward(query: Tensor, *_: Any) -> Pair:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))


def _fake_backward(dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Any], *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in saved[:3])


FORWARD, BACKWARD = torch.ops.dilated_attention.forward_2, torch.ops.dilated_attention.backward_2
torch.library.register_vmap("dilated_attention::forward_2", _refuse_transforms, lib=_library)
for _name, _first, _below, _fake in (
    ("forward_2", _autograd_forward, _forward, _fake_forward),
    ("backward_2", _autograd_backward, _backward, _fake_backward),
):
    _library.impl(_name, _first, "Autograd")
    _library.impl(_name, _below, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dilated_attention::{_name}", _fake, lib=_library)
