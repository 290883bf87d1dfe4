"""Witten-Bell models of bytes, or of smaller symbols: what a language model must beat. No Python loop over bytes.

    p(c | context) = (count(context, c) + kinds(context) * p(c | shorter context)) / (count(context) + kinds(context))

kinds(context) is how many different bytes followed it; before any context every byte has 1 / 256.
"""

import torch
from torch import Tensor


def codes(text: Tensor, order: int, width: int = 8) -> Tensor:
    """For each byte, its context of ``order`` bytes and itself as one number; the text begins with that many zeros."""
    padded = torch.cat((text.new_zeros(order), text))
    found = torch.zeros_like(text, dtype=torch.int64)
    for back in range(order, -1, -1):
        found = (found << width) | padded[order - back : len(padded) - back]
    return found


def looked_up(keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    """The value of each wanted key, 0 where there is none; keys are sorted."""
    place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return torch.where(keys[place] == wanted, values[place], 0)


def bits_per_byte(train: bytes, held_out: bytes, orders=(2, 5), *, width=8, device="cpu") -> dict[int, float]:
    """The cross-entropy of held-out bytes under models of these orders, in bits. Bytes are below ``2**width``."""
    longest = 64 // width - 1  # the bytes of a context and the one after it are one int64 number
    if not train or not held_out or max(orders) > longest:
        raise ValueError(f"give some bytes to count, some to judge, and orders up to {longest}, got {orders}")
    seen, new = (torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) for text in (train, held_out))
    share, found = torch.full_like(new, 2.0**-width, dtype=torch.float64), {}
    for order in range(max(orders) + 1):
        pairs, counts = codes(seen, order, width).unique(return_counts=True)
        contexts, of_pair, kinds = (pairs >> width).unique(return_inverse=True, return_counts=True)
        totals = torch.zeros_like(kinds).index_add_(0, of_pair, counts)
        wanted = codes(new, order, width)
        count = looked_up(pairs, counts, wanted)
        kind = looked_up(contexts, kinds, wanted >> width)
        total = looked_up(contexts, totals, wanted >> width) + kind
        share = torch.where(total > 0, (count + kind * share) / total.clamp(min=1), share)  # else: a new context
        if order in orders:
            found[order] = -share.log2().mean().item()
    return found
