"""The pattern in the config of a Hugging Face model: written as plain JSON, so that it is saved with the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dilated_attention.models.transformer import per_layer, written
from dilated_attention.pattern import Pattern

FIELD = "dilated_pattern"


def set_pattern(config: Any, pattern: Pattern | Sequence[Pattern]) -> Any:
    """Writes a pattern into a config, and returns the config.

    Args:
        config: a config, or a model that has one.
        pattern: one for all layers, or a list with one per layer.
    """
    config = getattr(config, "config", config)
    check_model(config)
    if hasattr(config, "num_hidden_layers"):
        per_layer(pattern, config.num_hidden_layers)
    setattr(config, FIELD, written(pattern))
    return config


def check_model(config: Any) -> None:
    """Refuse models that compute attention by themselves: they would add our grid to their scores, as if a mask."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is not None and not model._can_set_attn_implementation():
        raise ValueError(
            f"dilated attention cannot run in {model.__name__}: this model computes attention by itself; use one that "
            "asks transformers for it, such as Llama, Qwen, Mistral or GPT-2"
        )


def patterns_of(config: Any) -> tuple[Pattern, ...]:
    """The pattern of each layer, from a config."""
    given = getattr(config, FIELD, None)
    if given is None:
        raise ValueError(f"the config has no {FIELD}: call set_pattern(config, pattern) before the model is made")
    return per_layer(given, config.num_hidden_layers)


def pattern_of(module: Any) -> Pattern:
    """The pattern of an attention module, read anew only if its config has changed."""
    now = getattr(module.config, FIELD, None)
    kept = getattr(module, "_dilated", None)
    if kept is None or kept[0] != now:
        kept = copy.deepcopy(now), patterns_of(module.config)[getattr(module, "layer_idx", 0)]
        if not torch.compiler.is_compiling():
            module._dilated = kept
    return kept[1]


def is_first(module: Any) -> bool:
    """Whether an attention module is the first of its model. Layers before it may be of another kind."""
    kinds = getattr(module.config, "layer_types", None) or getattr(module.config, "layers_block_type", None) or ()
    first = next((i for i, kind in enumerate(kinds) if kind in ("full_attention", "attention", "hybrid")), 0)
    return getattr(module, "layer_idx", None) in (None, first)
