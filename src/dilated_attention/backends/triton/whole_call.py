"""A whole call by our kernels: one launch forward and two backward, where the pattern allows it.

Branches that share no table take one launch each; later launches take in what earlier ones found, in float32.

Legend: q, out (B, N, H, D); k, v (B, N, Hk, D); lse (B, N, H); padding (B, N), True = ignore; stats (B, H, N, 2).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.backends.triton import fuse, launch, nesting
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.launch import Launch, Layout
from dilated_attention.backends.triton.tiling import Nests
from dilated_attention.call import Call, sample_ends


class Prepared(NamedTuple):
    """The launches of one direction of a call, in their order."""

    launches: tuple[Launch, ...]
    dtype: torch.dtype  # that they write
    blank: bool  # whether what they write must be blank before

    def nbytes(self) -> int:
        return sum(launch.nbytes for launch in self.launches)


def forward(call: Call, inputs: Inputs, trains: Callable[[], bool]) -> tuple[Tensor, Tensor]:
    """``trains``: whether our kernels will be asked for the backward pass; asked of calls that are new."""
    out, lse = _unrounded(call, inputs, trains)
    return out if out.dtype is call.dtype else out.to(call.dtype), lse


def _unrounded(call: Call, inputs: Inputs, trains: Callable[[], bool]) -> tuple[Tensor, Tensor]:
    """The results, out maybe in float32."""
    q, k, v = _readable(*inputs[:3])
    if not call.rows:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    prepared = CACHE.find((call.device, call, q.stride(), k.stride(), v.stride()))
    if prepared is None:
        most = nesting.heads_at_once(call)
        if most < call.kv_heads:
            return _some_heads_at_a_time(call, inputs._replace(q=q, k=k, v=v), most)
        prepared = _prepared(call, (q, k, v), call.device.type == "cuda" and trains())
    padding = ends = None
    if inputs.padding is not None:
        padding = inputs.padding.contiguous()
        ends = sample_ends(padding) if call.adds_zeros else None
    out = _empty_like(q, prepared.dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if prepared.blank:
        out.zero_()
        lse.fill_(-torch.inf)
    # an optional tensor that is not there is never read: q stands in for it
    given = (q if padding is None else padding, q if ends is None else ends, q if inputs.seed is None else inputs.seed)
    for one in prepared.launches:
        one(q, k, v, out, lse, *given)
    return out, lse


def _some_heads_at_a_time(call: Call, inputs: Inputs, most: int) -> tuple[Tensor, Tensor]:
    """The same call in parts, each of some of the heads. (A backward pass has no parts.)"""
    out, lse = _empty_like(inputs.q, call.dtype), inputs.q.new_empty(inputs.q.shape[:3], dtype=torch.float32)
    for first in range(0, call.kv_heads, most):
        held = min(most, call.kv_heads - first)
        kv, rows = slice(first, first + held), slice(first * call.q_per_kv, (first + held) * call.q_per_kv)
        some = inputs._replace(q=inputs.q[:, :, rows], k=inputs.k[:, :, kv], v=inputs.v[:, :, kv])
        part = call._replace(
            heads=held * call.q_per_kv, kv_heads=held, first_head=call.first_head + first, total_heads=call.held.total
        )
        _put(out[:, :, rows], lse[:, :, rows], *_unrounded(part, some, lambda: False))
    return out, lse


def _put(out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Copy the results of some heads. They are held here alone: their memory is free before the next heads begin."""
    fuse.put_(out, found, add=False)  # rounded as it is copied
    lse.copy_(found_lse)


def backward(call: Call, inputs: Inputs, results: Outputs) -> Gradients:
    q, k, v, dout = _readable(*inputs[:3], results.dout)
    dlse = None if results.dlse is None else results.dlse.resolve_neg()
    if not call.rows:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    given = (q, k, v, dout) if dlse is None else (q, k, v, dout, dlse)
    prepared = CACHE.find((call.device, call, *(x.stride() for x in given)))
    if prepared is None:
        prepared = _kept(call, _prepare_backward, *map(Layout.of, given))
        _compile(prepared.launches)
    dq, dk, dv = _empty_like(q, q.dtype), _empty_like(k, k.dtype), _empty_like(v, v.dtype)
    stats = torch.empty(_stats_shape(call), dtype=torch.float32, device=q.device)
    if prepared.blank:
        for grad in (dq, dk, dv):
            grad.zero_()
    out, lse = results.out.contiguous(), results.lse.contiguous()
    padding = q if inputs.padding is None else inputs.padding.contiguous()
    dlse, seed = q if dlse is None else dlse, q if inputs.seed is None else inputs.seed
    for for_dq, for_dkdv in zip(prepared.launches[::2], prepared.launches[1::2], strict=True):
        for_dq(q, k, v, out, lse, dout, dlse, dq, stats, padding, seed)
        for_dkdv(q, k, v, dout, stats, dk, dv, padding, seed)
    return dq, dk, dv


def _kept(call: Call, prepare: Callable[..., Prepared], *layouts: Layout) -> Prepared:
    """What is prepared for a call on tensors of these layouts, kept from now on."""
    key = (call.device, call, *(x.strides for x in layouts))
    found: Prepared = CACHE.get(key, lambda: prepare(call, *layouts))
    return found


def _prepared(call: Call, qkv: tuple[Tensor, ...], trains: bool) -> Prepared:
    """The forward pass of a call that is new, and the backward pass if it ``trains``: all kernels compile at once."""
    layouts = [Layout.of(x) for x in qkv]
    found = _kept(call, _prepare_forward, *layouts)
    together = found.launches
    if trains:
        dout = Layout.contiguous(qkv[0].shape, qkv[0].dtype)
        together += _kept(call, _prepare_backward, *layouts, dout).launches
    _compile(together)
    return found


def _compile(launches: tuple[Launch, ...]) -> None:
    """Compile the kernels that are new, all at once: one after the other they would take twice as long."""
    if not launches[0].on_device or torch.cuda.is_current_stream_capturing():
        return
    new = {one.kind: one for one in launches if one.kind not in CACHE.compiled}
    if len(new) > 1:
        with ThreadPoolExecutor(len(new)) as pool:
            list(pool.map(Launch.compile, new.values()))
    CACHE.compiled.update(new)


def _prepare_forward(call: Call, q: Layout, k: Layout, v: Layout) -> Prepared:
    todo = nesting.steps(call)
    dtype = torch.float32 if len(todo) > 1 else q.dtype
    out, lse = Layout.contiguous(q.shape, dtype), Layout.contiguous(q.shape[:3], torch.float32)
    made = []
    for index, nests in enumerate(todo):
        tile = nesting.config("forward", call, nests)
        made.append(launch.forward(q, k, v, out, lse, nests, call, tile, index > 0, fills(nests, index)))
    return Prepared(tuple(made), dtype, _must_be_blank(todo))


def _prepare_backward(
    call: Call, q: Layout, k: Layout, v: Layout, dout: Layout, dlse: Layout | None = None
) -> Prepared:
    """Two launches per step: for dq, and for dk and dv."""
    out, dq, dk, dv = (Layout.contiguous(x.shape, x.dtype) for x in (q, q, k, v))
    lse = Layout.contiguous(q.shape[:3], torch.float32)
    stats = Layout.contiguous(_stats_shape(call), torch.float32)
    todo, made = nesting.steps(call), []
    for index, nests in enumerate(todo):
        how = (index > 0, fills(nests, index))
        tile = nesting.config("dq", call, nests)
        made.append(launch.backward_dq(q, k, v, out, lse, dout, dlse, dq, stats, nests, call, tile, *how))
        tile = nesting.config("dkdv", call, nests)
        made.append(launch.backward_dkdv(q, k, v, dout, stats, dk, dv, nests, call, tile, *how))
    return Prepared(tuple(made), q.dtype, _must_be_blank(todo))


def _has_gaps(nests: Nests) -> bool:
    return any(nest.rates[0] > 1 for nest in nests)


def fills(nests: Nests, index: int) -> bool:
    """Whether a launch also writes the rows between its own: the first one does, where each nest is one branch."""
    return index == 0 and _has_gaps(nests) and all(len(nest.rates) == 1 for nest in nests)


def _must_be_blank(todo: tuple[Nests, ...]) -> bool:
    return _has_gaps(todo[0]) and not fills(todo[0], 0)


def _stats_shape(call: Call) -> tuple[int, ...]:
    return call.samples, call.heads, call.queries, 2


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)  # in half the time of new_empty


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with a unit last stride and no sign to be turned, which the kernels take for granted."""
    for x in tensors:
        if x.is_neg() or x.stride(-1) != 1:
            return tuple(x.resolve_neg() if x.stride(-1) == 1 else x.contiguous().resolve_neg() for x in tensors)
    return tensors
