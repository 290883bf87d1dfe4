"""LongNetForCausalLM: the plain LongNetLM as a model of transformers, with generate(), saving and the Auto classes."""

from __future__ import annotations

import copy
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from dilated_attention.checks import warn
from dilated_attention.functional import errors_reach_group
from dilated_attention.integrations.transformers import attention
from dilated_attention.integrations.transformers.cache import DilatedCache
from dilated_attention.integrations.transformers.config import NAME, set_pattern
from dilated_attention.integrations.transformers.grid import Grid, grid_mask
from dilated_attention.models.lm import LongNetLM, checked_tokens
from dilated_attention.models.loss import IGNORED, shifted, summed_loss
from dilated_attention.models.transformer import Attend, LMConfig, read_pattern, written
from dilated_attention.pattern import DilatedPattern, Pattern

PAPER = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
RENAMED = {
    "dim": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "hidden_act", "ffn_dim": "intermediate_size",
    "tied": "tie_word_embeddings",
}  # fmt: skip
REFUSED = attention.REFUSED | {
    "sliding_window": "sliding_window: the config of LongNet says what a token sees",
    "dropout": "dropout: the config and the weights of LongNet say how it attends",
    "scaling": "scaling: the config and the weights of LongNet say how it attends",
    "s_aux": "s_aux: LongNet has sinks of its own",
    "output_hidden_states": "output_hidden_states: call model.lm.states() for the last ones",
}
# what LMConfig has, and as transformers calls it
NAMES = {one.name: RENAMED.get(one.name, one.name) for one in fields(LMConfig) if one.name not in ("pattern", "near")}


class LongNetConfig(PreTrainedConfig):
    """The config of LongNetForCausalLM: that of `LMConfig`, under the names that transformers has.

    hidden_act is its ffn, intermediate_size its ffn_dim, and tie_word_embeddings its tied. Set dilated_pattern with
    `set_pattern`; by default it is the LongNet paper's.
    """

    model_type = "longnet"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers adds a list to it

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "gelu"
    intermediate_size: int | None = None
    norm: str = "layer"
    norm_eps: float = 1e-5
    sub_norm: bool = True
    qk_norm: bool = False
    rotary_base: float | None = 10_000.0
    tie_word_embeddings: bool = True
    sinks: bool = False
    dilated_pattern: dict[str, Any] | list[dict[str, Any]] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.dilated_pattern is None:
            self.dilated_pattern = written(PAPER)
        if kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = NAME
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: LMConfig, **more: Any) -> LongNetConfig:
        """From the config of a plain model."""
        if config.near is not None:
            raise ValueError("near: a transformers class has no learned weights of far branches; use LongNetLM")
        found = cls(**{theirs: getattr(config, ours) for ours, theirs in NAMES.items()}, **more)
        set_pattern(found, config.pattern)
        return found

    def plain(self) -> LMConfig:
        """As the config of a plain model."""
        given = {ours: getattr(self, theirs) for ours, theirs in NAMES.items()}
        return LMConfig(**given, pattern=read_pattern(self.dilated_pattern))


class LongNetForCausalLM(PreTrainedModel, GenerationMixin):
    """LongNetLM as a transformers class; ``lm`` is the plain model. ``generate()`` runs on a `DilatedCache`.

    With ``labels`` the output has a loss and no logits: those of all tokens are never in memory at once.

    Example:
        >>> from dilated_attention.integrations.transformers import LongNetConfig, LongNetForCausalLM
        >>> config = LongNetConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model, tokens = LongNetForCausalLM(config).eval(), torch.arange(40).reshape(1, 40)
        >>> model(tokens).logits.shape
        torch.Size([1, 40, 100])
        >>> model.generate(tokens, max_new_tokens=3, do_sample=False).shape
        torch.Size([1, 43])
    """

    config_class = LongNetConfig
    base_model_prefix = "lm"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True
    _no_split_modules = ("TransformerBlock",)
    _skip_keys_device_placement = ("past_key_values",)
    _tied_weights_keys = {"lm.head.weight": "lm.embed.weight"}  # noqa: RUF012 - transformers wants it here

    def __init__(self, config: LongNetConfig) -> None:
        register()
        if config._attn_implementation != NAME:
            raise ValueError(
                f"LongNet always uses dilated attention: leave out attn_implementation={config._attn_implementation!r}"
            )
        super().__init__(config)
        self.lm, self.pattern_read = LongNetLM(config.plain()), None
        self.post_init()

    def init_weights(self) -> None:
        """The plain model has drawn them."""
        self.tie_weights(recompute_mapping=False)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw what a checkpoint has not got."""
        weights = self.lm.named_parameters()
        missing = {x: p for x, p in weights if not (p.is_meta or getattr(p, "_is_hf_initialized", False))}
        fresh = LongNetLM(self.lm.config) if missing else self.lm
        for name, weight in missing.items():
            weight.copy_(fresh.get_parameter(name))

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.lm.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm.head = value

    @property
    def gradient_checkpointing(self) -> bool:
        return self.lm.checkpointing is not False

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise ValueError(f"LongNet checkpoints every layer, not every {every_n_layers}: leave every_n_layers out")
        self.lm.checkpointing, self.lm.checkpoint = enable, gradient_checkpointing_func

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None, inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None, group: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As a decoder of transformers. ``group``: ranks that share the sequence, each with its shard of it.

        ``shift_labels``: labels that are shifted already, instead of ``labels``.
        """
        shift_labels = kwargs.pop("shift_labels", None)  # not by name: the Trainer would ask every dataset for it
        with errors_reach_group(group, input_ids):
            cache = self._cache(past_key_values, use_cache, group)
            if group is not None and labels is not None and shift_labels is None:
                raise ValueError("over a group, pass shift_labels: labels are shifted before a sequence is cut")
            if (input_ids is None) == (inputs_embeds is None):
                raise ValueError("give either input_ids or inputs_embeds")
            ids: Any = input_ids
            tokens = checked_tokens(ids) if inputs_embeds is None else inputs_embeds * self.lm.scale
            position_ids, grid = self._grid(tokens, attention_mask, position_ids, cache, kwargs)
            if isinstance(cache, DilatedCache):
                cache.layers[0].check_past(grid, len(tokens))
        positions = grid.positions(len(tokens), tokens.device) if position_ids is None else position_ids
        if position_ids is not None or group is not None:
            attention.check_positions(positions, len(tokens), grid, group)
        states = self.lm.states(tokens, positions, self._attends(grid, cache, group), apart=cache is not None)
        if labels is None and shift_labels is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutputWithPast(logits=self.lm.head(states[:, kept]), past_key_values=cache)
        loss = self._loss(states, labels, shift_labels, grid, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, past_key_values=cache)

    def _cache(self, cache: Any, is_wanted: bool | None, group: Any) -> Any:
        """The cache of a call: that which was given, a new one, or none."""
        asked, trains = cache is not None or is_wanted, torch.is_grad_enabled()
        if group is not None and asked:
            raise ValueError(attention.ALONE)
        if self.gradient_checkpointing and trains and asked:
            held = 0 if cache is None else cache.get_seq_length()
            if isinstance(held, Tensor) or held:  # without its tokens, the answer would be another one
                raise ValueError(
                    "gradient checkpointing computes layers again, and would give the cache their tokens twice: leave "
                    "past_key_values out, or call under torch.no_grad()"
                )
            if not torch.compiler.is_compiling():
                warn("gradient checkpointing leaves the cache out: pass use_cache=False, and no past_key_values")
            return None
        if cache is not None and not torch.compiler.is_compiling():
            held = {int(cache.get_seq_length(layer)) for layer in range(self.config.num_hidden_layers)}
            if len(held) > 1:
                raise ValueError(
                    "layers of the cache hold different numbers of tokens, as after an error: call reset()"
                )
        if is_wanted is None:
            is_wanted = self.config.use_cache and not trains and group is None
        return DilatedCache(self.config) if is_wanted and cache is None else cache

    def _grid(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor | None, Grid]:
        """position_ids as (1 or batch, tokens), and the grid of the tokens."""
        if options.get("output_hidden_states") is None:
            options["output_hidden_states"] = self.config.output_hidden_states
        samples, n = tokens.shape[:2]
        if positions is not None and positions.dim() == 1:
            positions = positions.unsqueeze(0)
        made = create_causal_mask(
            config=self.config, inputs_embeds=torch.empty(samples, n, 0, device=tokens.device), attention_mask=mask,
            past_key_values=cache, position_ids=positions,
        )  # fmt: skip
        return positions, attention.read_grid(made, samples, options, cache is not None, REFUSED)

    def _loss(self, states: Tensor, labels: Any, shift_labels: Any, grid: Grid, items: Any) -> Any:
        """The mean over the labels, or their part of that over ``items``: a trainer counts those of a larger batch."""
        share: Any = 1
        if shift_labels is None:
            shift_labels = shifted(labels)
            asked = (shift_labels != IGNORED).sum()
            if grid.padding is not None:  # which predicts nothing
                shift_labels = shift_labels.masked_fill(~grid.padding.real, IGNORED)
            if grid.cu_seqlens is not None:  # of all rows one after the other: none predicts the next one
                shift_labels.view(-1)[grid.cu_seqlens[1:].to(labels.device) - 1] = IGNORED
            # a trainer counts also those that were left out: the mean of this batch stays as it is
            share = (shift_labels != IGNORED).sum().clamp(min=1) / asked
        loss = summed_loss(states, self.lm.head.weight, shift_labels)
        return loss / ((shift_labels != IGNORED).sum() if items is None else items * share)

    def _attends(self, grid: Grid, cache: Any, group: Any) -> list[Attend]:
        if self.pattern_read != self.config.dilated_pattern:  # by `set_pattern`, since the model was made
            self.lm.config, self.pattern_read = self.config.plain(), copy.deepcopy(self.config.dilated_pattern)
        patterns = self.lm.config.patterns
        if cache is None:  # no layer has a number, so that all can share compiled code
            return [partial(attention.attend, pattern, grid=grid, group=group) for pattern in patterns]

        def attend(layer: int, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
            kept = getattr(keys, "kept_by", None)
            return attention.attend(pattern, q, keys.transpose(1, 2), values.transpose(1, 2), grid, kept)

        return [partial(attend, layer, pattern) for layer, pattern in enumerate(patterns)]

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *more: Any) -> Any:
        given = model_kwargs.get("past_key_values"), generation_config.cache_implementation
        # the cache of an assistant is cropped by many tokens at a time
        if given == (None, None) and generation_config.use_cache is not False and not generation_config.is_assistant:
            model_kwargs["past_key_values"] = DilatedCache(self.config)
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *more)


def register() -> None:
    """Makes ``attn_implementation="dilated"`` known to transformers, and LongNet to its Auto classes.

    The pattern is in the config of a model: see `set_pattern`. Calling it again changes nothing.
    """
    AttentionInterface.register(NAME, attention.attention)
    AttentionMaskInterface.register(NAME, grid_mask)
    AutoConfig.register(LongNetConfig.model_type, LongNetConfig, exist_ok=True)
    AutoModelForCausalLM.register(LongNetConfig, LongNetForCausalLM, exist_ok=True)
