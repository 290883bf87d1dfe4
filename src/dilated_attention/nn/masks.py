"""The masks that nn.MultiheadAttention takes, read as what dilated attention can do with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dilated_attention.autograd import is_plain
from dilated_attention.resolve import check_layout, check_padding_mask

MOST_CHECKED = 4096  # tokens of an attn_mask whose values are looked at


def ignored(mask: Tensor, x: Tensor) -> Tensor:
    """The padding mask of tokens (B, N, E) as bool; nn.TransformerEncoderLayer hands over a float one."""
    if isinstance(mask, Tensor) and mask.is_floating_point():
        check_layout("key_padding_mask", mask)
        wanted = "key_padding_mask must be bool, True = ignore this key, or float of 0 (keep) and -inf (ignore) only"
        is_ignored = mask == -torch.inf
        known = is_ignored | (mask == 0)
        if torch.compiler.is_compiling() or mask.is_meta:  # no value to look at yet
            torch._assert_async(known.all(), wanted)
        elif not unmapped(known).all():
            raise ValueError(wanted)
        mask = is_ignored
    check_padding_mask(mask, x)
    return mask


def unmapped(x: Tensor) -> Tensor:
    """The numbers themselves, where torch.func looks on."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def check_causal_mask(mask: Tensor, is_causal: bool, tokens: int, rows: int) -> None:
    """Raise unless ``mask`` is the causal one, which the caller says with ``is_causal``. rows: samples * heads."""
    if not is_causal:
        raise ValueError(
            "attn_mask must be None unless it is the causal mask and is_causal=True: the pattern says who sees whom; "
            "for causal attention pass is_causal=True, and for padded tokens key_padding_mask"
        )
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    check_layout("attn_mask", mask)
    is_bool = mask.dtype == torch.bool
    if mask.shape not in ((tokens, tokens), (rows, tokens, tokens)) or not (is_bool or mask.is_floating_point()):
        raise ValueError(
            f"attn_mask must be ({tokens}, {tokens}) or ({rows}, {tokens}, {tokens}) like the tokens, and bool or "
            f"float, got {tuple(mask.shape)} of {mask.dtype}"
        )
    if not is_plain(mask) or mask.device.type != "cpu" or tokens > MOST_CHECKED:
        return  # the caller's word is taken: there is no value yet, or the host would wait for it
    causal = nn.Transformer.generate_square_subsequent_mask(tokens)
    if not (mask == (causal < 0 if is_bool else causal)).all():
        raise ValueError(
            "attn_mask is not the causal mask (True or -inf above the diagonal, False or 0 elsewhere), and "
            "is_causal=True says that it is. The pattern says who sees whom: leave attn_mask out"
        )
