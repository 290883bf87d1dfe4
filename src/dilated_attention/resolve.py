"""What can be wrong with a call, found before any work: each check raises one line that says what to do.

Legend: query (B, N, H, D); key, value (B, N, Hk, D). Decoding: query has fewer rows than key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention.backends.choose import NAMES, Backend
from dilated_attention.call import ON_DEVICE, outside, read_sequences
from dilated_attention.checks import is_int, warn
from dilated_attention.derivatives import NO_FORWARD_MODE, is_plain
from dilated_attention.pattern import DilatedPattern

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def computed_dtype(x: Tensor) -> torch.dtype:
    """Under autocast, the dtype that F.scaled_dot_product_attention would compute in; float64 is left alone."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast, and raises when asked
        return x.dtype
    return torch.get_autocast_dtype(device) if x.dtype in DTYPES and x.dtype != torch.float64 else x.dtype


def check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    key_padding_mask: Tensor | None,
    enable_gqa: bool,
    *,
    whole: bool = True,
    decodes: bool = False,
) -> None:
    """``whole``: these are all heads; ``decodes``: query may have fewer rows than key."""
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}: make one with .longnet(...)")
    duals = not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # inside of forward_ad.dual_level()
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested:
            jagged = hasattr(x, "offsets")  # to ask for its layout would be an operation
            rows = f"{name}.values()" if jagged else f"torch.cat({name}.unbind())"
            ends = f"{name}.offsets()" if jagged else "[0, ...], where each sequence begins and ends"
            raise ValueError(f"{name} is a nested tensor: pass {rows}.unsqueeze(0), and cu_seqlens={ends}")
        check_layout(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, head_dim), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")
        if duals and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(NO_FORWARD_MODE)
        alike = x.dtype is query.dtype or computed_dtype(x) == computed_dtype(query)
        if not alike or x.device != query.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} and query {query.dtype} on {query.device}: give both one dtype and "
                "one device"
            )
    q_shape, k_shape = query.shape, key.shape  # asking a tensor takes longer than all that is compared here
    if k_shape != value.shape:
        raise ValueError(f"key and value must have one shape, got {tuple(k_shape)} and {tuple(value.shape)}")
    samples, tokens, heads, head_dim = q_shape
    key_samples, key_tokens, key_heads, key_dim = k_shape
    if tokens > key_tokens or (tokens < key_tokens and not decodes):
        wanted = "no more queries than keys" if decodes else "equal lengths"
        raise ValueError(
            f"query has {tokens} tokens and key {key_tokens}: dilated attention is self-attention and needs {wanted}"
        )
    if samples != key_samples or head_dim != key_dim:
        raise ValueError(f"query and key must agree in batch and head_dim, got {tuple(q_shape)} and {tuple(k_shape)}")
    if heads != key_heads and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {key_heads}: make them equal, or set enable_gqa=True")
    if head_dim < 1:
        raise ValueError("head_dim must be 1 or more, got 0")
    pattern.check_heads(heads, key_heads, whole=whole)
    if key_padding_mask is not None:
        check_padding_mask(key_padding_mask, key)


def check_layout(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {x.layout}: pass {name}.to_dense()")


def check_padding_mask(mask: Tensor, key: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor, got {type(mask).__name__}")
    check_layout("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool with True = ignore this key, got {mask.dtype}")
    if mask.shape != key.shape[:2]:
        raise ValueError(f"key_padding_mask must be (batch, tokens) = {tuple(key.shape[:2])}, got {tuple(mask.shape)}")
    if mask.device != key.device:
        raise ValueError(f"key_padding_mask is on {mask.device} and query on {key.device}: move it")


def warn_of_mistakes(query: Tensor, key: Tensor, pattern: DilatedPattern, mask: Tensor | None) -> None:
    """Warn of what is exact, and probably not meant. Nothing is read that the host would have to wait for."""
    if torch.compiler.is_compiling():
        return
    _, tokens, heads, _ = shape = tuple(query.shape)
    if heads > tokens == key.shape[1] > 1 and tokens < min(pattern.segment_lengths):
        warn(
            f"query has shape {shape}, read as (batch, tokens, heads, head_dim): it has more heads than tokens, and "
            "every segment is longer than the sequence. If it is (batch, heads, tokens, head_dim), pass "
            "query.transpose(1, 2)"
        )
    if mask is None or mask.device.type != "cpu" or not mask.numel() or not is_plain(mask):
        return
    if bool(mask.all()):
        warn(
            "key_padding_mask ignores every key of every sample, so all outputs are 0: True = ignore, as in "
            "nn.MultiheadAttention; pass ~mask if True means keep"
        )


def check_backend(backend: Backend) -> None:
    if backend not in NAMES:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(NAMES)}")


def checked_heads(heads: tuple[int, int], key_heads: int) -> tuple[int, int]:
    """(first, total) of the key/value heads, of which a call has ``key_heads``."""
    if not isinstance(heads, tuple | list) or len(heads) != 2 or not all(is_int(x) for x in heads):
        raise TypeError(f"heads must be two whole numbers, (first, total) of the key/value heads, got {heads!r}")
    first, total = heads
    if not 0 <= first <= total - key_heads:
        raise ValueError(
            f"key has {key_heads} heads: heads must be (first, total) with 0 <= first <= total - {key_heads}, got "
            f"{heads}"
        )
    return first, total


def checked_start(query: Tensor, key: Tensor, offset: int | Tensor | None, *, is_alone: bool) -> int:
    """Where among the keys the first query is. Positions in a tensor are looked at where they are used:
    on CUDA the host would wait for them."""
    last = key.shape[1] - query.shape[1]
    if offset is None:
        return last
    if not is_alone:
        raise ValueError("query_offset is for one device: it cannot be given together with a group")
    if isinstance(offset, Tensor):
        if offset.dtype not in (torch.int32, torch.int64) or offset.shape != query.shape[:1]:
            raise ValueError(
                "query_offset must be an int, or an int32 or int64 tensor of shape (batch,) = "
                f"{tuple(query.shape[:1])}, got {offset.dtype} of shape {tuple(offset.shape)}"
            )
        if offset.device != query.device:
            raise ValueError(f"query_offset is on {offset.device} and query on {query.device}: move it, or give an int")
        return ON_DEVICE
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise TypeError(f"query_offset must be an int or a tensor, got {offset!r}")
    if not 0 <= offset <= last:
        raise ValueError(outside("query_offset", offset, query.shape[1], key.shape[1]))
    return offset


def checked_sequences(
    given: Sequence[int] | Tensor | None, query: Tensor, key: Tensor, mask: Tensor | None, *, in_parts: bool
) -> tuple[tuple[int, ...], Tensor | None]:
    """``cu_seqlens`` as a call holds them, and as registered ops read them. A compiler sees no numbers: ops check."""
    if given is None:
        return (), None
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"cu_seqlens needs as many queries as keys, got {query.shape[1]} queries and {key.shape[1]} keys: leave "
            "cu_seqlens out, or pass whole sequences"
        )
    if query.shape[0] != 1:
        raise ValueError(f"cu_seqlens is for one row, (1, tokens, heads, head_dim), got a batch of {query.shape[0]}")
    if mask is not None:
        raise ValueError("cu_seqlens takes no key_padding_mask: leave ignored tokens out of the packed row instead")
    tensor = borders_of(given)
    if torch.compiler.is_compiling():
        return (), tensor
    return read_sequences(tensor, None if in_parts else key.shape[1]), tensor


def borders_of(given: Sequence[int] | Tensor, name: str = "cu_seqlens") -> Tensor:
    """``cu_seqlens`` as a tensor on the host; its numbers are not looked at."""
    if isinstance(given, Tensor):
        if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"{name} must be a list of whole numbers, or an int32 or int64 tensor of one dimension, got "
                f"{given.dtype} of shape {tuple(given.shape)}"
            )
        return given.cpu()
    if not isinstance(given, Sequence) or not all(is_int(x) or isinstance(x, torch.SymInt) for x in given):
        raise TypeError(f"{name} must be a list of whole numbers, or an integer tensor, got {given!r}")
    return torch.tensor(given, dtype=torch.int64)


def check_sequences_end(sequences: tuple[int, ...], tokens: int) -> None:
    """Raise if packed sequences do not end where the shards of all ranks end."""
    if sequences and sequences[-1] != tokens:
        raise ValueError(f"cu_seqlens ends with {sequences[-1]}, and all ranks together have {tokens} tokens")


def check_total_length(total: int | None, lengths: tuple[int, ...]) -> None:
    """Raise if shards of these lengths do not make up a sequence of ``total`` tokens."""
    if total is not None and sum(lengths) != total:
        whole = "every rank seems to have passed the whole sequence: " if set(lengths) == {total} else ""
        raise ValueError(
            f"the ranks have {', '.join(map(str, lengths))} tokens, {sum(lengths)} in all, and total_length is "
            f"{total}: {whole}cut each tensor once, with shard_sequence()"
        )
