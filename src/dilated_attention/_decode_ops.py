"""Decoding as two registered ops: which way a call goes, one autograd node, shapes for fake tensors.

On CUDA the forward pass of few queries is the kernel of `backends.triton.decode`, which reads positions on the device.
Everything else, and every backward pass, is `_decode`, which wants them on the host.

Legend: query (B, n, H, D); key, value (B, N, Hk, D); lse (B, n, H); the first query stands at position ``first`` of N,
or in each sample at its own, ``firsts`` (B,).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dilated_attention import _decode, _ops
from dilated_attention._settings import Settings, sample_ends
from dilated_attention.backends import triton
from dilated_attention.backends.choose import choose
from dilated_attention.backends.problem import accumulate_dtype
from dilated_attention.pattern import DilatedPattern

FEW_QUERIES = 64  # beyond, most rows of the kernel's tiles sit out the dilated branches
LARGEST_HEAD_DIM = 256
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    offset: int | Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries from ``offset`` on; None: the last ones."""
    firsts = offset if isinstance(offset, Tensor) else None
    first = key.shape[1] - query.shape[1] if offset is None else 0 if isinstance(offset, Tensor) else offset
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not wants_gradients and _ops.is_plain(query, key, value):  # dispatching an op takes longer than a step's kernels
        return _forward(query, key, value, key_padding_mask, seed, firsts, first, settings)
    if torch._C._are_functorch_transforms_active():
        run = functools.partial(_run, first=first, settings=settings)
        differentiate = functools.partial(_gradients, first=first, settings=settings)
        given = (query, key, value, key_padding_mask, seed, firsts)
        return _ops.transformed(run, differentiate, settings, *given)
    pattern = settings.pattern
    out, lse = decode(
        query,
        key,
        value,
        key_padding_mask,
        seed,
        firsts,
        first,
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


def _run(*tensors: Any, first: int, settings: Settings) -> tuple[Tensor, Tensor]:
    query, key, value, padding, seed, firsts = tensors
    return attend(query, key, value, padding, seed, first if firsts is None else firsts, settings)


def _gradients(*tensors: Any, first: int, settings: Settings) -> _ops.Results:
    """dq, dk, dv from dout, dlse, query, key, value, padding, seed, firsts, out, lse, whoever looks on."""
    dout, dlse, query, key, value, padding, seed, firsts, out, lse = tensors
    if torch._C._are_functorch_transforms_active():
        differentiate = functools.partial(_gradients, first=first, settings=settings)
        return _ops.transformed_backward(differentiate, settings, *tensors)
    if _ops.is_plain(query, key, value):
        at = _positions(query, key, firsts, first)
        return _decode.backward(dout, dlse, query, key, value, padding, seed, out, lse, at, settings)
    pattern, op = settings.pattern, cast("Callable[..., _ops.Results]", decode_backward)
    return op(
        *tensors, first, pattern.rule, pattern.segment_lengths, pattern.dilation_rates, settings.is_causal,
        settings.scale, settings.dropout_p, settings.backend, settings.first_head, settings.total_heads,
    )  # fmt: skip


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    seed: Tensor | None,
    firsts: Tensor | None,
    first: int,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    if runs_kernel(query, firsts is not None, settings):
        return _kernel(query, key, value, padding, firsts, first, settings)
    return _decode.forward(query, key, value, padding, seed, _positions(query, key, firsts, first), settings)


def check_alone(offset: int | Tensor | None) -> None:
    """Of a call over a group."""
    if offset is not None:
        raise ValueError("query_offset is for one device: it cannot be given together with a group")


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    offset: int | Tensor | None,
    settings: Settings,
) -> None:
    """Raise if the positions are wrong, or a backend asked for by name cannot run the call.

    The positions in a tensor are looked at where they are used: on CUDA the host would wait for them.
    """
    if isinstance(offset, Tensor):
        if offset.dtype not in (torch.int32, torch.int64) or offset.shape != query.shape[:1]:
            raise ValueError(
                f"query_offset must be an int, or int32 or int64 of shape (batch,) = {tuple(query.shape[:1])}, got "
                f"{offset.dtype} of shape {tuple(offset.shape)}"
            )
        if offset.device != query.device:
            raise ValueError(f"query_offset is on {offset.device} and query on {query.device}: move it, or give an int")
    elif isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt, type(None))):
        raise TypeError(f"query_offset must be an int or a tensor, got {offset!r}")
    elif offset is not None and not 0 <= offset <= key.shape[1] - query.shape[1]:
        raise _outside("query_offset", offset, query, key)
    if torch.compiler.is_compiling() or settings.backend == "auto":
        return
    if settings.backend == "triton":
        wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        _refuse(unsupported(query, settings) + ["its decoding has no backward pass"] * wants_gradients)
    else:
        choose(settings.backend, settings.request(query, key_padding_mask is not None))


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ValueError(f"backend 'triton' cannot run this call: {'; '.join(reasons)}. Use backend='auto'")


def _outside(name: str, offset: int, query: Tensor, key: Tensor) -> ValueError:
    n, tokens = query.shape[1], key.shape[1]
    return ValueError(f"{name} is {offset}: {n} queries among {tokens} keys begin at 0 to {tokens - n}")


def unsupported(query: Tensor, settings: Settings) -> list[str]:
    """Why the kernel cannot run, one sentence each."""
    reasons, device = [], query.device
    if not triton.INSTALLED:
        reasons.append("triton is not installed: it comes with torch's CUDA builds")
    if device.type == "cuda":
        least = (8, 0) if query.dtype is torch.bfloat16 else (7, 5)
        if torch.cuda.get_device_capability(device) < least:
            reasons.append(f"{query.dtype} needs compute capability {least[0]}.{least[1]}")
    elif device.type != "cpu" or not triton.interpreted():
        reasons.append(f"it runs on CUDA, not on {device.type}")
    if query.dtype not in KERNEL_DTYPES:
        reasons.append(f"it computes in float16, bfloat16 and float32, not {query.dtype}")
    if query.shape[-1] > LARGEST_HEAD_DIM:
        reasons.append(f"it takes head_dim up to {LARGEST_HEAD_DIM}, not {query.shape[-1]}")
    if settings.dropout_p > 0:
        reasons.append("its decoding has no dropout")
    return reasons


def runs_kernel(query: Tensor, on_device: bool, settings: Settings) -> bool:
    """Whether the forward pass is the kernel. ``on_device``: positions are there, and reading them would wait."""
    if settings.backend == "auto":
        return (on_device or query.shape[1] <= FEW_QUERIES) and not unsupported(query, settings)
    if settings.backend == "triton":
        _refuse(unsupported(query, settings))
    return settings.backend == "triton"


@torch.library.custom_op("dilated_attention::decode", mutates_args=())
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    firsts: Tensor | None,
    first: int,
    rule: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
    first_head: int,
    total_heads: int,
) -> tuple[Tensor, Tensor]:
    numbers = (is_causal, scale, dropout_p, backend, first_head, total_heads)
    settings = _settings(rule, tuple(segment_lengths), tuple(dilation_rates), *numbers)
    return _forward(query, key, value, key_padding_mask, seed, firsts, first, settings)


@torch.library.custom_op("dilated_attention::decode_backward", mutates_args=())
def decode_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    firsts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    first: int,
    rule: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
    first_head: int,
    total_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    numbers = (is_causal, scale, dropout_p, backend, first_head, total_heads)
    settings = _settings(rule, tuple(segment_lengths), tuple(dilation_rates), *numbers)
    at = _positions(query, key, firsts, first)
    return _decode.backward(dout, dlse, query, key, value, key_padding_mask, seed, out, lse, at, settings)


@functools.lru_cache(maxsize=256)
def _settings(rule: str, lengths: tuple[int, ...], rates: tuple[int, ...], *numbers: Any) -> Settings:
    """An op takes no objects, so the settings travel as numbers; the pattern is checked once."""
    is_causal, scale, dropout_p, backend, first_head, total_heads = numbers
    return Settings(DilatedPattern(rule, lengths, rates), is_causal, scale, dropout_p, backend, first_head, total_heads)


def _positions(query: Tensor, key: Tensor, firsts: Tensor | None, first: int) -> list[int]:
    """Of each sample's first query; a tensor is read on the host, which on CUDA waits for the device."""
    if firsts is None:
        return [first] * query.shape[0]
    found: list[int] = firsts.tolist()
    for sample, at in enumerate(found):
        if not 0 <= at <= key.shape[1] - query.shape[1]:
            raise _outside(f"query_offset[{sample}]", at, query, key)
    return found


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    firsts: Tensor | None,
    first: int,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    from dilated_attention.backends.triton import decode as kernel  # here, as triton may be missing

    heads = settings.heads(key)
    ends = None
    has_zeros = settings.pattern.rule == "torchscale" and not settings.is_causal
    if has_zeros and padding is not None:
        ends = sample_ends(padding)
    branches = _branches(settings.pattern, heads.total)
    options = kernel.Options(branches, settings.is_causal, has_zeros, settings.scale, heads.first)
    return kernel.forward(query, key, value, padding, first if firsts is None else firsts, ends, options)


@functools.lru_cache(maxsize=256)
def _branches(pattern: DilatedPattern, kv_heads: int) -> Any:
    """The pattern as the kernel takes it: numbers that give each head's offset in each branch."""
    from dilated_attention.backends.triton.decode import Branch

    found = []
    for index, (width, rate) in enumerate(pattern.branches):
        heads = pattern.heads(index, kv_heads)
        step, shift = {
            "longnet": (1, 0),
            "torchscale": (-(-kv_heads // rate), 0),
            "head_groups": (kv_heads, index % rate),
        }[pattern.rule]
        found.append(Branch(width, rate, heads.start, heads.stop, step, shift))
    return tuple(found)


@decode.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))


@decode_backward.register_fake
def _(dout: Tensor | None, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.settings = inputs[6:]
    ctx.set_materialize_grads(False)  # None tells that lse was not used, which spares its pass


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = decode_backward(dout, dlse, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * 13)


decode.register_autograd(_differentiate, setup_context=_save)
decode_backward.register_autograd(_ops._no_double_backward)
