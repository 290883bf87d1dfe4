"""A whole call by our kernels: one launch forward and two backward, where the pattern allows it.

Branches that share no table take one launch each; later launches take in what earlier ones found, in float32.

Legend: q, out (B, N, H, D); k, v (B, N, Hk, D); lse (B, N, H); padding (B, N), True = ignore; stats (B, H, N, 2).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.problem import Gradients, Inputs, Outputs, Pair
from dilated_attention.backends.triton import dispatch, fuse, launch, nesting, strips
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.launch import Launch, Strides
from dilated_attention.backends.triton.tiling import Nest
from dilated_attention.call import Call, sample_ends
from dilated_attention.pattern import DilatedPattern


class Prepared(NamedTuple):
    """The launches of one direction of a call, in their order."""

    launches: tuple[Launch, ...]
    dtype: torch.dtype  # that they write
    blank: bool  # whether what they write must be blank before

    def nbytes(self) -> int:
        return sum(launch.nbytes for launch in self.launches)

    def results_like(self, x: Tensor) -> Tensor:
        """A tensor that the launches write. (new_empty would take twice as long.)"""
        make = torch.zeros_like if self.blank else torch.empty_like
        return make(x, dtype=self.dtype, memory_format=torch.contiguous_format)


def forward(call: Call, inputs: Inputs) -> Pair:
    out, lse = _unrounded(call, inputs)
    return out if out.dtype is call.dtype else out.to(call.dtype), lse


def _unrounded(call: Call, inputs: Inputs, is_part: bool = False) -> Pair:
    """The results, out maybe in float32."""
    q, k, v = _readable(*inputs[:3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not call.rows:
        return torch.empty_like(q), lse
    strides = q.stride(), k.stride(), v.stride()
    prepared = CACHE.kept.get((call.device, call, strides, False))
    if prepared is None:
        most = nesting.heads_at_once(call)
        if most < call.kv_heads:
            return _some_heads_at_a_time(call, inputs._replace(q=q, k=k, v=v), lse, most)
        prepared = _prepared(call, strides)
        together = prepared.launches
        trains = not is_part and any(x.requires_grad for x in inputs[:3])
        if trains and call.device.type == "cuda" and dispatch.preference(call, True)[0]:
            together += _prepared(call, (*strides, torch.empty(q.shape, device="meta").stride())).launches
        _compile(together)
    padding = None if inputs.padding is None else inputs.padding.contiguous()
    ends = sample_ends(padding) if call.adds_zeros and padding is not None else None
    out = prepared.results_like(q)
    if prepared.blank:
        lse.fill_(-torch.inf)
    # an optional tensor that is not there is never read: q stands in for it
    given = (q if padding is None else padding, q if ends is None else ends, q if inputs.seed is None else inputs.seed)
    for kernel in prepared.launches:
        kernel(q, k, v, out, lse, *given)
    return out, lse


def _some_heads_at_a_time(call: Call, inputs: Inputs, lse: Tensor, most: int) -> Pair:
    """The same call in parts, each of some of the heads. (A backward pass has no parts.)"""
    out, first = torch.empty_like(inputs.q, memory_format=torch.contiguous_format), call.first_head
    every = (*inputs[:3], out, lse)
    some = (x.split(most * x.shape[2] // call.kv_heads, 2) for x in every)  # type: ignore[no-untyped-call]
    for q, k, v, some_out, some_lse in zip(*some, strict=True):
        part = call._replace(heads=q.shape[2], kv_heads=k.shape[2], first_head=first, total_heads=call.model_heads)
        found, found_lse = _unrounded(part, inputs._replace(q=q, k=k, v=v), is_part=True)
        some_lse.copy_(found_lse)
        fuse.put_(some_out, found, add=False)  # rounded as it is copied
        del found  # its memory is free before the next heads begin
        first += k.shape[2]
    return out, lse


def backward(call: Call, inputs: Inputs, results: Outputs) -> Gradients:
    q, k, v, dout = _readable(*inputs[:3], results.dout)
    if not call.rows:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    strides, has_dlse = tuple(x.stride() for x in (q, k, v, dout)), results.dlse is not None
    prepared = CACHE.kept.get((call.device, call, strides, has_dlse))
    if prepared is None:
        prepared = _prepared(call, strides, has_dlse)
        _compile(prepared.launches)
    dq, dk, dv = map(prepared.results_like, (q, k, v))
    stats = torch.empty((call.samples, call.heads, call.queries, 2), dtype=torch.float32, device=q.device)
    out, lse = results.out.contiguous(), results.lse.contiguous()
    dlse = q if results.dlse is None else results.dlse.resolve_neg().contiguous()
    given = (q if inputs.padding is None else inputs.padding.contiguous(), q if inputs.seed is None else inputs.seed)
    for kernel in prepared.launches:
        if kernel.name == "dq":
            kernel(q, k, v, dout, out, lse, dlse, dq, stats, *given)
        else:
            kernel(q, k, v, dout, stats, dk, dv, *given)
    return dq.to(call.dtype), dk.to(call.dtype), dv.to(call.dtype)


def _prepared(call: Call, strides: Strides, has_dlse: bool = False) -> Prepared:
    """The launches of a call on tensors of these strides, kept from now on: backward if dout is one of them."""

    def prepare() -> Prepared:
        is_forward, is_dilated = len(strides) == 3, isinstance(call.pattern, DilatedPattern)
        # all of dq comes first: it makes the statistics of the rows that dk and dv meet
        names = ("forward",) if is_forward else ("dq", "dkdv")
        todo = {name: strips.launches(call, name) or () for name in names}
        # out of several launches is merged in float32; so are the sums of gradients, of which rectangles have many
        several = any(len(some) > 1 for some in todo.values()) and (is_forward or not is_dilated)
        dtype = torch.float32 if several else call.dtype
        made = []
        for name, every in todo.items():
            for at, some in enumerate(every):
                is_nested = isinstance(some[0], Nest) and len(some[0].widths) > 1
                config = dispatch.config(name, call, "nested" if is_nested else dispatch.form_of(call, alone=True))
                made.append(launch.prepare(name, call, strides, some, config, dtype, at > 0, has_dlse))
        blank = not all(some and strips.cover(some[0], call) for some in todo.values())
        return Prepared(tuple(made), dtype, blank)

    found: Prepared = CACHE.get((call.device, call, strides, has_dlse), prepare)
    return found


def _compile(launches: tuple[Launch, ...]) -> None:
    """Compile the kernels that are new, all at once: one after the other they would take twice as long."""
    if not launches or not launches[0].on_device or torch.cuda.is_current_stream_capturing():
        return
    new = {each.kind: each for each in launches if each.kind not in CACHE.compiled}
    if len(new) > 1:
        with ThreadPoolExecutor(len(new)) as pool:
            list(pool.map(Launch.compile, new.values()))
    CACHE.compiled.update(new)


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with a unit last stride and no sign to be turned, which the kernels take for granted."""
    for x in tensors:
        if x.is_neg() or x.stride(-1) != 1:
            return tuple((x if x.stride(-1) == 1 else x.contiguous()).resolve_neg() for x in tensors)
    return tensors
