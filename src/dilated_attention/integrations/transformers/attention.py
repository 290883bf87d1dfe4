"""attn_implementation="dilated": the attention function of Hugging Face decoders, and how it is registered.

Legend: query (B, H, n, D), key, value (B, Hk, N, D), as transformers has them; q (B, n, H, D), k, v (B, N, Hk, D), as
the library has them.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from dilated_attention import functional
from dilated_attention.call import read_sequences
from dilated_attention.checks import warn
from dilated_attention.context_parallel import ContextParallel
from dilated_attention.integrations.transformers.cache import DilatedLayer
from dilated_attention.integrations.transformers.config import is_first, pattern_of
from dilated_attention.integrations.transformers.faults import (
    BREAKS,
    DIFFERS,
    JUMPS,
    KEYS,
    NO_WEIGHTS,
    NOT_CAUSAL,
    checked,
)
from dilated_attention.integrations.transformers.grid import Grid, check_keys, grid_mask, put_back, taken, weights_fault
from dilated_attention.pattern import DilatedPattern
from dilated_attention.resolve import borders_of
from dilated_attention.ring.run import Ranks

NAME = "dilated"
ALONE = "over a group, a model takes no padding, no documents and no cache: leave them out"
REFUSED = {
    "softcap": "soft caps",
    "head_mask": "head masks",
    "output_attentions": NO_WEIGHTS,
    "sliding_window": "sliding-window layers: set sliding_window=None in the config",
    "position_bias": "position biases",
    "cache": "a paged cache",
    "indices": "sparse attention by an indexer",
    "block_indices": "sparse attention by an indexer",
}


def register() -> None:
    """Makes ``attn_implementation="dilated"`` known to transformers, for attention and masks together.

    The pattern is in the config of a model: see `set_pattern`.
    """
    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("this transformers is too old for dilated attention: install transformers 5.18 or newer")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, grid_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer."""
    refuse(options)
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(NOT_CAUSAL)
    grid, looks = Grid.read(attention_mask, query.shape[2]), is_first(module)
    is_told, group = options.get("cu_seq_lens_q") is not None, options.get("group")
    kept = DilatedLayer.behind(key)
    keys = key.shape[2] if kept is None else kept.length
    if not looks or grid.order is None:  # else a mask is too wide: see `attend`
        check_keys(attention_mask, query.shape[2], keys)
    before = keys - query.shape[2]
    if group is not None and (before or kept is not None):
        _refuse(group, query)
    if is_told:
        cache = before or options.get("use_cache") or kept
        grid = told(grid, len(query), query.shape[2], cache, options, looks=looks)
    if looks:
        query = checked(query, weights_fault())
        if kept is not None:
            kept.check_past(grid, len(query))
        if "position_ids" not in options and not torch.compiler.is_compiling():
            warn(
                f"{type(module).__name__} does not tell its attention of position_ids, so nobody checks them: with a "
                "cache, packed documents would be read as one sequence; pass use_cache=False with them"
            )
        positions = options.get("position_ids")
        query = check_positions(query, positions, grid, group, before=before, is_told=is_told)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    more: dict[str, Any] = {"scale": scaling, "dropout_p": dropout}
    out, lse = attend(pattern_of(module), q, k, v, grid, kept, group, **more)
    if options.get("s_aux") is not None:  # learned sinks
        out = out * torch.sigmoid(lse - options["s_aux"]).unsqueeze(-1).to(out.dtype)
    return out.contiguous(), None


def refuse(options: dict[str, Any]) -> None:
    """Raise if something is asked for that cannot be honoured."""
    for name, what in REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"dilated attention cannot honour {what}")
    if options.get("cu_seq_lens_k") is not None and options.get("cu_seq_lens_q") is None:
        raise ValueError("cu_seq_lens_k came without cu_seq_lens_q: pass both, and the same, or cu_seq_lens_q alone")


def attend(
    pattern: DilatedPattern,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    kept: DilatedLayer | None = None,
    group: Any = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries on their grid. ``kept``: the cache layer that k and v were given to, if it keeps rows."""

    def attended(q: Tensor, k: Tensor, v: Tensor, **where: Any) -> tuple[Tensor, Tensor]:
        # a short prompt has fewer tokens than heads: nobody is to be warned of it
        return functional.attend(
            q, k, v, pattern, True, scale, dropout_p, enable_gqa=True, ranks=Ranks.of(group), warns=False, **where
        )

    if group is not None:
        if grid != Grid() or kept is not None:
            _refuse(group, q)
        return attended(q, k, v)
    if kept is not None:
        if kept.pattern.text != pattern.text:  # by their texts, which a compiler can compare
            raise ValueError(
                f"a layer of the model has {pattern}, and that of the DilatedCache {kept.pattern}: make the cache with "
                "DilatedCache(model.config)"
            )
        if dropout_p:
            raise ValueError("DilatedCache does not support dropout: call model.eval()")
        out, lse = kept.attend(q, k, v, grid, scale)
        return out, lse
    if grid.documents is not None:
        one, two, three = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        out, lse = attended(one, two, three, cu_seqlens=grid.documents)
        return out.view(q.shape), lse.view(q.shape[:3])
    width = k.shape[1] if grid.order is None else grid.order.shape[1]
    if width != k.shape[1] or (isinstance(grid.query_start, int) and k.shape[1] == q.shape[1]):
        raise ValueError(
            f"attention_mask has more columns than the {k.shape[1]} tokens of this call: give it one column per token"
        )
    if grid.order is not None and grid.query_order is not None:
        start = None if q.shape[1] == k.shape[1] else grid.query_start
        q, k, v = taken(q, grid.query_order), taken(k, grid.order), taken(v, grid.order)
        out, lse = attended(q, k, v, query_offset=start)
        return put_back(out, grid.query_order), put_back(lse, grid.query_order)
    if isinstance(grid.query_start, Tensor):
        return attended(q, k, v, query_offset=grid.query_start.expand(len(q)).contiguous())
    if grid.query_start is not None:  # 0: the keys after them are not there yet
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    return attended(q, k, v)


def _refuse(group: Any, x: Tensor) -> NoReturn:
    with functional.telling(group, x):
        raise ValueError(ALONE)


def told(grid: Grid, samples: int, tokens: int, cache: Any, options: dict[str, Any], *, looks: bool = True) -> Grid:
    """Documents by cu_seq_lens_q, as flash attention takes them. ``looks``: check the numbers, which one layer does."""
    ends, keys = borders_of(options["cu_seq_lens_q"], "cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if grid._replace(documents=None) != Grid() or samples != 1 or cache:
        raise ValueError(
            "cu_seq_lens_q is for one row of packed tokens without padding and without a cache: leave attention_mask "
            "out, and pass use_cache=False"
        )
    if looks and keys is not None:
        keys = borders_of(keys, "cu_seq_lens_k")
        differ = _fault(keys != ends, KEYS) if len(keys) == len(ends) else torch.full((), KEYS)
        ends = checked(ends, differ)
    if looks and not torch.compiler.is_compiling():  # else the op of the attention itself looks at them
        read_sequences(ends, tokens, "cu_seq_lens_q")
    return Grid(documents=ends)


def check_positions(
    x: Tensor, positions: Tensor | None, grid: Grid, group: Any, *, before: int | Tensor = 0, is_told: bool = False
) -> Tensor:
    """Returns x, or raises if position_ids do not fit the grid: they must grow by 1, except where a document begins.

    ``x``: the tokens, (B, ...). Use the result in place of x, or a compiler drops the check: see `checked`.
    ``before``: tokens in the cache, after which they must go on. ``is_told``: the documents were given as
    cu_seq_lens_q.
    """
    # one token has no jump; where it must go on is not checked in compiled code, as a CUDA graph cannot hold the check
    least = 2 if group is None and torch.compiler.is_compiling() else 1
    if positions is None or positions.dim() != 2 or positions.shape[1] < least:
        return x
    samples, tokens = len(x), positions.shape[1]
    positions = positions.expand(samples, -1)
    if group is not None:
        _check_shard(positions, group)
        return x
    jumps = positions.diff() != 1
    if grid.documents is not None:
        begins = torch.zeros(samples * tokens + 1, dtype=torch.bool, device=positions.device)
        # clamped: that they are wrong is told elsewhere
        begins[grid.documents.to(positions.device).clamp(0, samples * tokens)] = True
        begins = begins[:-1].view(samples, tokens)[:, 1:]
        late, jumps = _fault(positions[:, 1:] * begins, DIFFERS if is_told else JUMPS), jumps & ~begins
        return checked(x, torch.where(late == 0, _fault(jumps, DIFFERS if is_told else BREAKS), late))
    first, is_real = positions[:, 0], torch.ones((), dtype=torch.bool, device=positions.device)
    column: Any = before
    if grid.order is not None and grid.query_order is not None and grid.real is not None:
        real = torch.arange(1, tokens, device=positions.device) < grid.real[:, None]
        ordered = positions.gather(1, grid.query_order)
        counted = (ordered.diff() != 1) & real
        jumps = counted & jumps.any()  # positions that count on over padding as well are no fault: nothing jumps then
        assert isinstance(grid.query_start, Tensor)
        first, before, is_real = ordered[:, 0], grid.query_start, grid.real > 0
        # of the first new token: as many real ones are before it. A model may count over padding, too.
        column = grid.order.gather(1, before[:, None].clamp(max=grid.order.shape[1] - 1))[:, 0]
    elif grid.query_start is not None:  # of a static cache
        before = column = grid.query_start
    # the first tokens of all may begin at any number, and none is skipped by that
    skips = (first != before) & (first != column) & (before > 0)
    return checked(x, torch.maximum(_fault(jumps, BREAKS), _fault(((first < before) | skips) & is_real, BREAKS)))


def _fault(wrong: Tensor, number: int) -> Tensor:
    return wrong.any().long() * number


@torch.compiler.disable(reason="ranks are asked")  # type: ignore[no-untyped-call, untyped-decorator]
def _check_shard(positions: Tensor, group: Any) -> None:
    """Raise unless this rank's tokens follow one another, and those of the ranks before it."""
    rank, tokens = ContextParallel.of(group).process_group().rank(), positions.shape[1]
    first = int(positions[0, 0])
    wanted = first + torch.arange(tokens, device=positions.device)  # in every row: none is padded
    if (positions != wanted).any() or not rank * tokens <= first <= rank * (tokens + 1):
        with functional.telling(group, positions):
            raise ValueError(
                f"position_ids of rank {rank} go from {first} to {int(positions[0, -1])}, in {tokens} tokens: shards "
                "must be contiguous and in the order of the ranks; pass local_positions(N, group)[None], and turn off "
                "load balancers that reorder tokens"
            )
