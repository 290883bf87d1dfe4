"""attn_implementation="dilated": the attention function of Hugging Face decoders, and how it is registered.

Legend: query (B, H, n, D), key, value (B, Hk, N, D), as transformers has them; q (B, n, H, D), k, v (B, N, Hk, D), as
the library has them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import output_capturing

from dilated_attention import functional
from dilated_attention.backends.problem import Inputs
from dilated_attention.checks import warn
from dilated_attention.integrations.transformers.cache import DilatedLayer
from dilated_attention.integrations.transformers.config import ALL, is_first, pattern_of
from dilated_attention.integrations.transformers.grid import RESET, Grid, taken
from dilated_attention.models.lm import within
from dilated_attention.pattern import Pattern
from dilated_attention.resolve import Options, check_total_length, cu_seqlens_on_host
from dilated_attention.ring.run import Ranks

ALONE = "over a group, a model takes no attention_mask and no cache: shard_batch() makes what it takes"
REFUSED = {
    "softcap": "soft caps",
    "head_mask": "head masks",
    "output_attentions": "output_attentions: the attention weights are never held in memory",
    "position_bias": "position biases",
    "cache": "a paged cache",
    "indices": "sparse attention by an indexer",
    "block_indices": "sparse attention by an indexer",
}
JUMPS = "position_ids must begin at 0 in each packed document, and grow by 1 inside it: pass them with cu_seq_lens_q"
MOVING = (
    "over a group, rope_type cannot be 'dynamic' or 'longrope': each rank would take its frequencies from its own "
    "largest position; set 'linear', 'yarn' or 'llama3'"
)
BREAKS = (
    "position_ids must grow by 1 from token to token; packed documents may begin again at 0 without attention_mask and "
    "with use_cache=False; if the model does not tell its masks of them, pass cu_seq_lens_q, too"
)
USED = (
    "position_ids must grow by 1 from token to token, and go on after those in the cache, which may hold some of these "
    f"tokens already: {RESET}"
)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, group: Any = None, watch: Any = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls in every layer. The first one checks what is in the numbers of tensors."""
    kept = getattr(key, "kept_by", None)  # the layer of a DilatedCache, which made these keys
    is_cached = bool(kept or options.get("use_cache") or key.shape[2] > query.shape[2])
    looks = is_first(module)  # at what is in tensors, and at what is asked of the whole model
    if looks and not torch.compiler.is_compiling():
        if "attentions" in (output_capturing._active_collector.get() or ()):  # GPT-2 does not pass this option on
            options["output_attentions"] = True
        if "position_ids" not in options and getattr(attention_mask, "is_causal", False):
            name = type(module).__name__
            warn(f"{name} does not pass position_ids on: with packed documents, call the model with use_cache=False")
    grid = read_grid(attention_mask, len(query), options, is_cached)
    if looks:
        if kept is not None:
            kept.check_past(grid, len(query))
        check_positions(options.get("position_ids"), len(query), grid, group)
        rope = getattr(module.config, "rope_parameters", None) or {} if group is not None else {}
        if {"dynamic", "longrope"} & {x.get("rope_type") for x in (rope, *rope.values()) if isinstance(x, dict)}:
            raise ValueError(MOVING)
    width = value.shape[3]
    if width < key.shape[3]:  # multi-head latent attention
        value = F.pad(value, (0, key.shape[3] - width))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    run = partial(attend, q=q, k=k, v=v, grid=grid, kept=kept, group=group, scale=scaling, dropout_p=dropout)
    # `integrations.stored` passes ``watch`` to a model, and the model to each layer
    seen = None if watch is None else watch(module.layer_idx, k.shape[2], run)
    out, lse = seen or run(pattern_of(module, grid.own))
    if options.get("s_aux") is not None:  # learned sinks
        out, _ = functional.with_sinks(out, lse, options["s_aux"])
    return out[..., :width].contiguous(), None


def read_grid(
    mask: Any, samples: int, options: dict[str, Any], is_cached: bool, refused: dict[str, str] = REFUSED
) -> Grid:
    """The grid of a call, or an error if something is asked for that cannot be honoured."""
    for name, what in refused.items():
        if isinstance(given := options.get(name), Tensor) or given:
            raise ValueError(f"dilated attention cannot honour {what}")
    if not isinstance(mask, Grid):
        raise ValueError(
            "dilated attention needs a mask of its own mask function: call register() before the model runs, and "
            'pass attention_mask as (batch, tokens); with pictures, attn_implementation={"text_config": "dilated"}'
        )
    if options.get("is_causal", mask.is_causal) != mask.is_causal:
        raise ValueError(f"is_causal is {not mask.is_causal}, and the mask of this model is not: leave is_causal out")
    ends, keys = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if ends is None and keys is None:
        return mask
    is_known = keys is not None and not torch.compiler.is_compiling()
    if ends is None or (is_known and torch.as_tensor(ends).tolist() != torch.as_tensor(keys).tolist()):
        raise ValueError("cu_seq_lens_k must be the same as cu_seq_lens_q: dilated attention is self-attention")
    if (not mask.is_plain and mask.cu_seqlens is None) or samples != 1 or is_cached:
        raise ValueError(
            "cu_seq_lens_q is for one row of packed tokens: leave attention_mask out, and pass use_cache=False"
        )
    return replace(mask, cu_seqlens=cu_seqlens_on_host(ends, "cu_seq_lens_q"))  # of one row


def attend(
    pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, grid: Grid, kept: DilatedLayer | None = None,
    group: Any = None, *, scale: float | None = None, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of queries on their grid. ``kept``: the cache layer that k and v were given to, if it keeps rows."""
    is_whole = grid.padding is None and grid.queries == grid.keys and kept is None
    if group is not None and not is_whole:
        with functional.errors_reach_group(group, q):
            raise ValueError(ALONE)
    keys = k.shape[1] if kept is None else kept.length
    if keys != grid.keys:
        raise ValueError(
            f"a layer has {keys} tokens, cached and new, and attention_mask or the first layer has {grid.keys}: give "
            "attention_mask one column per token; if an earlier call was interrupted, call reset() on the cache; with "
            "gradient checkpointing, train without one"
        )
    is_own = pattern.text == grid.own.text  # by their texts, which a compiler can compare
    if grid.dropped and not is_own:
        raise ValueError("dilated attention cannot run on a cache that drops its first rows: use DilatedCache")
    padding, hidden = grid.placed if is_own and kept is None else grid.padding, None
    if kept is not None and q.shape[1] == 1:
        padding = None  # a single token is in order
    if padding:
        order = padding.order if kept is None else padding.query_order  # a DilatedCache is given the new tokens alone
        q, k, v, hidden = taken(q, padding.query_order), taken(k, order), taken(v, order), padding.hidden
    if kept is not None:
        if kept.pattern.text != pattern.text:
            raise ValueError(
                f"a layer has {pattern}, and that of the cache {kept.pattern}: make it with DilatedCache(model.config)"
            )
        if dropout_p:
            raise ValueError("DilatedCache does not support dropout: call model.eval()")
        out, lse = kept.attend(q, k, v, grid, scale)
    else:
        shape = q.shape
        positions = cu_seqlens = None
        if grid.cu_seqlens is not None:
            cu_seqlens = grid.cu_seqlens
            q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        elif padding is None and grid.end is not None:
            end = grid.end - grid.dropped
            k, v = k[:, :end], v[:, :end]
        elif grid.queries < keys:
            start = grid.start - grid.dropped if padding is None else padding.before
            positions = torch.as_tensor(start, device=q.device).expand(len(q)).contiguous()
        # without a warning that there are fewer tokens than heads: short prompts have
        inputs = Inputs(q, k, v, hidden, positions=positions)
        options = Options(pattern, grid.is_causal, scale, dropout_p, True)
        out, lse = functional.attend(inputs, options, Ranks.of(group), cu_seqlens, warns=False)
        out, lse = out.view(shape), lse.view(shape[:3])
    if padding:
        out, lse = (taken(x, padding.query_places) for x in (out, lse))
    return out, lse


def check_positions(positions: Tensor | None, samples: int, grid: Grid, group: Any) -> None:
    """Raise if position_ids do not fit the grid: they must grow by 1 and go on after the cache, or a document begins.

    Compiled code has no numbers to look at: it checks nothing, but for the shards of a group.
    """
    if positions is None or positions.dim() != 2:
        return
    positions = positions.expand(samples, -1)
    if group is not None:
        _check_shard(positions, grid.cu_seqlens, group)
        return
    if torch.compiler.is_compiling() or not positions.shape[1]:
        return
    counted = grid.positions(samples, positions.device)
    if grid.cu_seqlens is not None:
        jumps, begins = positions.diff() != 1, positions[:, 1:] == 0
        # borders of chunks are not told apart from those of documents
        if bool((jumps & ~begins if grid.own.text != ALL.text else jumps.where(counted[:, 1:] > 0, ~begins)).any()):
            raise ValueError(JUMPS)
        return
    real = torch.ones_like(positions, dtype=torch.bool) if grid.padding is None else grid.padding.real
    columns = grid.start + torch.arange(positions.shape[1], device=positions.device)
    right = ~real.any(1)
    for expected in (counted, columns):  # positions that count on over padding as well are no fault
        off = positions - expected
        first = off.gather(1, real.long().argmax(1, keepdim=True))
        # the first tokens of all may begin at any number, and none is skipped by that
        begins = (first == 0) | ((first > 0) & (grid.first(first.device).view(-1, 1) == 0))
        right |= (begins & ((off == first) | ~real)).all(1)
    if not bool(right.all()):
        raise ValueError(USED if bool(grid.start > 0) else BREAKS)


@torch.compiler.disable(reason="ranks are asked")  # type: ignore[no-untyped-call, untyped-decorator]
def _check_shard(positions: Tensor, cu_seqlens: Tensor | None, group: Any) -> None:
    """Raise unless this rank's tokens follow those of the ranks before it. ``cu_seqlens``: of all ranks' tokens."""
    over = Ranks.of(group)
    if over is None or (ranks := over.group) is None:
        return
    checks, n = over.before_calls(positions), positions.shape[1]
    if not checks.is_due:
        return
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    lengths = checks.ask("a model over ranks", {"cu_seq_lens_q, as shard_batch() makes it,": ends}, n).lengths
    check_total_length(over.parallel.total_length, lengths)
    start = sum(lengths[: ranks.rank()])
    wanted = start + torch.arange(n)
    if cu_seqlens is not None:
        if int(cu_seqlens[-1]) != sum(lengths):
            raise ValueError(
                "over a group, documents need cu_seq_lens_q of the tokens of all ranks: pass what shard_batch() makes, "
                "and turn off load balancers that reorder tokens"
            )
        wanted = within(cu_seqlens, wanted)
    if bool((positions.cpu() != wanted).any()):  # in every row: none is padded
        with functional.errors_reach_group(group, positions):
            raise ValueError(
                f"position_ids of rank {ranks.rank()} are not those of tokens {start} to {start + n - 1}: pass what "
                "shard_batch() makes, and turn off load balancers that reorder tokens"
            )
