"""Why a ring with ring_size=1 was slower: what taking rows out by index, by slice and by einops costs.

Legend: x (B, N, H, D); rows (B * S, L, H, D), the L rows that a branch takes from each of S segments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dilated_attention.bench import implementations as known
from dilated_attention.bench.session import PATTERNS, Session, Step

TOKENS = (2048, 8192, 32768)
WAYS = ("head_groups, auto", "DilatedAttention", "RingDilatedAttention", known.SLICES, known.GATHER)
WIDTH, RATE, OFFSET = 1024, 2, 1
TITLE = "Taking out the rows of one branch"


def steps(session: Session) -> list[Step]:
    settings = [session.setting(tokens, PATTERNS[0]) for tokens in (*TOKENS, 262144)]
    return [*(session.comparing("copies", known.named(*WAYS), setting) for setting in settings), Step(rows_table)]


def rows_table(session: Session) -> None:
    """The same rows taken out in each way; a way that gives other rows stops the run."""
    session.pace.step(TITLE, 5.0)
    rows = []
    for tokens in TOKENS:
        x = session.setting(tokens, PATTERNS[0]).qkv()[0]
        ways = ways_to_take(tokens, x.device)
        expected = ways["strided view"](x)
        for name, take in ways.items():
            if not torch.equal(take(x), expected):
                raise RuntimeError(f"{name} takes other rows than a strided view")
        for name, timing in session.time({name: partial(take, x) for name, take in ways.items()}).items():
            copies = ways[name](x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            rows.append([tokens, name, "yes" if copies else "no", timing.median, timing.lower, timing.upper])
    note = f"Segments of {WIDTH}, every second row, all heads. A view costs what Python costs, whatever the length."
    if importlib.util.find_spec("einops") is None:
        note += " einops is not installed, so it was not measured."
    session.table("copies", TITLE, note, ["tokens", "way", "copies", "ms", "lower", "upper"], rows)


def ways_to_take(tokens: int, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    segment = torch.arange(tokens // WIDTH, device=device)[:, None] * WIDTH
    index = (segment + torch.arange(OFFSET, WIDTH, RATE, device=device)).flatten()

    def strided(x: Tensor) -> Tensor:
        return torch.unflatten(x, 1, (-1, WIDTH))[:, :, OFFSET::RATE].flatten(0, 1)

    def folded(x: Tensor) -> Tensor:  # by reshape: the rate becomes an axis
        samples, _, heads, dim = x.shape
        return x.reshape(samples * tokens // WIDTH, WIDTH // RATE, RATE, heads, dim)[:, :, OFFSET]

    def rows(taken: Tensor) -> Tensor:
        return torch.unflatten(taken, 1, (-1, WIDTH // RATE)).flatten(0, 1)

    found: dict[str, Callable[[Tensor], Tensor]] = {
        "strided view": strided,
        "reshape": folded,
        "slice, then contiguous": lambda x: strided(x).contiguous(),
        "index_select": lambda x: rows(x.index_select(1, index)),
        "advanced indexing": lambda x: rows(x[:, index]),
    }
    if importlib.util.find_spec("einops"):
        from einops import rearrange

        form = "b (s l r) h d -> r (b s) l h d"
        found["einops"] = lambda x: rearrange(x, form, l=WIDTH // RATE, r=RATE)[OFFSET]
        found["einops, then contiguous"] = lambda x: found["einops"](x).contiguous()
    return found
