"""DilatedCache: a cache of transformers whose layers keep only the rows that later tokens can see.

A layer keeps what `KVCache` keeps, and the last chunk as it came: until the next one comes it can still be cropped.

Legend: keys, values (B, Hk, n, D), as transformers has them; q, k, v (B, n, H, D).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dilated_attention.integrations.transformers.config import patterns_of
from dilated_attention.integrations.transformers.grid import Grid
from dilated_attention.pattern import Pattern
from dilated_attention.streaming.kv_cache import KVCache, any_mode
from dilated_attention.streaming.slots import Slot

BY_POSITION = "which rows DilatedCache keeps depends on how many tokens came before"


class LastTokens(NamedTuple):
    """The last tokens, real ones first, and where they are in their sequences."""

    kv: Tensor | None  # (2, B, n, Hk, D); None: a single token, which was kept at once
    real: Tensor  # (B, n), in the order of the input; fewer than n after a crop
    at: Tensor


class DilatedLayer(CacheLayerMixin):
    """The cache of one attention layer. It computes attention itself, as its rows are no sequence."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    kept: KVCache | None
    last: LastTokens | None
    length: int  # tokens that were given, padding included
    waiting: int  # tokens of `update` that were not yet attended
    is_padded: bool  # whether some of the tokens were padding

    def __init__(self, pattern: Pattern, shared: dict[Any, Any]) -> None:
        """``shared``: by the layers of a cache, what they need to know of a token."""
        super().__init__()
        self.pattern, self.shared = pattern, shared
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.kept = KVCache(self.pattern, key_states[:, :, :0].transpose(1, 2), tokens=1)
        self.is_initialized = True

    @torch.compiler.disable(reason=BY_POSITION)  # type: ignore[no-untyped-call, untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Gives the new keys and values back. The attention function finds this layer by them, and calls `attend`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.waiting:
            raise RuntimeError(
                'DilatedCache works with attn_implementation="dilated" only, and takes no model that changes its keys '
                "again: use DynamicCache there; after an error in a call, call reset()"
            )
        self.check_samples(len(key_states))
        self.waiting = key_states.shape[2]
        self.length += self.waiting
        key_states.kept_by = self  # type: ignore[attr-defined]
        return key_states, value_states

    @torch.compiler.disable(reason=BY_POSITION)  # type: ignore[no-untyped-call, untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, scale: float | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of new tokens, real ones first. They are the last chunk now, and that before them is kept."""
        assert self.kept is not None
        n = q.shape[1]
        self.kept.reserve(self.length)
        tables = self.kept.tables
        if self.shared.get(tables, (None,))[0] is not grid:  # the host waits once for all layers that are alike
            self.shared[tables] = grid, *self.placed(grid, len(q), n, q.device)
        _, chunk, count, slots = self.shared[tables]
        if self.waiting != n:
            raise RuntimeError("DilatedCache takes no model with two attentions in a layer: use DynamicCache")
        self.waiting, last = 0, self.last
        self.is_padded |= grid.padding is not None
        if last is not None and last.kv is not None:
            self.kept.keep(last.kv[0], last.kv[1], last.at, last.real.sum(1))
        out, lse = self.kept.attend(q, k, v, chunk.at, count, scale=scale, slots=slots)
        if n > 1:
            with any_mode():
                chunk = chunk._replace(kv=torch.stack((k, v)))
        self.last = chunk
        return out, lse

    @any_mode()
    def placed(
        self, grid: Grid, samples: int, n: int, device: torch.device
    ) -> tuple[LastTokens, Tensor | None, list[Slot] | None]:
        """Where n tokens are: a chunk without rows, how many are real, if not all, and the slots of a single one."""
        assert self.kept is not None
        between = grid.placed.hidden if grid.placed and self.pattern.text == grid.own.text else None
        if between is not None and bool(between.any()):
            raise ValueError("DilatedCache takes no padding between tokens in windows and chunks: pad on the left")
        at, count = grid.first(device).expand(samples).clone(), None
        real = torch.ones(samples, n, dtype=torch.bool, device=device)
        if grid.padding is not None:
            real = grid.padding.real
            count = real.sum(1)
        return LastTokens(None, real, at), count, self.kept.slots(at, count) if n == 1 else None

    def check_samples(self, samples: int) -> None:
        """Raise if there are others than before: one would get the rows of another."""
        held = samples if self.kept is None else len(self.kept.like)
        if held != samples:
            raise ValueError(f"this DilatedCache holds {held} samples, and this call has {samples}: call reset()")

    @torch.compiler.disable(reason=BY_POSITION)  # type: ignore[no-untyped-call, untyped-decorator]
    def check_past(self, grid: Grid, samples: int) -> None:
        """Raise unless attention_mask has as many real tokens before the new ones as were kept, of each sample."""
        self.check_samples(samples)
        last = self.last
        if last is None or not (self.is_padded or grid.padding is not None):
            return
        if bool((last.at + last.real.sum(1) != grid.first(last.at.device)).any()):
            raise ValueError(
                "attention_mask has other real tokens before this call than DilatedCache kept: pass the columns of all "
                "earlier calls as they were, or none if none had any; before another text, call reset()"
            )

    @property
    def nbytes(self) -> int:
        """What is held."""
        return sum(held.nbytes for held in (self.last and self.last.kv, self.kept) if held is not None)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.kept, self.last, self.length, self.waiting = None, None, 0, 0
        self.is_initialized = self.is_padded = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: as many as the last chunk had, at most."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to forget, got {tokens_to_remove}")
        held = 0 if self.last is None else self.last.real.shape[1]
        if -tokens_to_remove > held:
            raise ValueError(f"DilatedCache can forget the last {held} tokens, and not {-tokens_to_remove}")
        if tokens_to_remove and self.last is not None:
            self.last = self.last._replace(real=self.last.real[:, :tokens_to_remove])
            self.length += tokens_to_remove

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kept is not None:
            self.batch_select_indices(torch.arange(len(self.kept.like)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kept is not None:
            indices = torch.arange(len(self.kept.like), device=self.device)[indices.to(self.device)]
            self.kept.select(indices)
            if (last := self.last) is not None:
                kv = None if last.kv is None else last.kv.index_select(1, indices)
                self.last = LastTokens(kv, last.real[indices], last.at[indices])

    reorder_cache = batch_select_indices


class DilatedCache(Cache):
    """A cache that keeps only the key and value rows that later tokens can see, and the last chunk.

    It stops growing once the sequence is as long as the longest segment. Give it as ``past_key_values=`` to a model
    with ``attn_implementation="dilated"``, or to its ``generate()``. ``config`` is that of the model.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from dilated_attention.integrations.transformers import DilatedCache, register, set_pattern
        >>> register()
        >>> config = LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> config = set_pattern(config, da.DilatedPattern.longnet([4, 8], [1, 2]))
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="dilated")
        >>> tokens, cache = torch.arange(40).reshape(1, 40), DilatedCache(config)
        >>> model.generate(tokens, past_key_values=cache, min_new_tokens=3, max_new_tokens=3).shape
        torch.Size([1, 43])
    """

    def __init__(self, config: Any) -> None:
        config = config.get_text_config(decoder=True)
        shared: dict[Any, Any] = {}
        super().__init__(layers=[DilatedLayer(pattern, shared) for pattern in patterns_of(config)])

    @property
    def nbytes(self) -> int:
        """What all layers hold."""
        return sum(layer.nbytes for layer in self.layers)
