"""The pattern of each layer of a Hugging Face model: what was set in its config, or what the model itself does there.

A pattern that was set is plain JSON, and is saved with the model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from dilated_attention.branches import Dense, Dilated, Window
from dilated_attention.models.transformer import per_layer, written
from dilated_attention.pattern import Pattern

NAME = "dilated"
FIELD = "dilated_pattern"
ALL = Pattern([Dense()])
FULL = ("full_attention", "attention", "hybrid")  # names of layers in which a token sees all earlier ones
SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def set_pattern(config: Any, pattern: Pattern | Sequence[Pattern], layers: str | None = None) -> Any:
    """Writes a pattern into a config, which then chooses ``attn_implementation="dilated"``, and returns the config.

    Args:
        config: a config, or a model that has one.
        pattern: one for all these layers, or a list with one per layer.
        layers: only those of this type, such as "full_attention"; the others stay what they are. None: all layers.
    """
    model, config = config, getattr(config, "config", config)
    check_model(config)
    text = config.get_text_config(decoder=True)  # of a model that also sees pictures, that of its decoder
    kinds = kinds_of(text)
    if layers not in (None, *kinds):
        raise ValueError(f"no layer is of type {layers!r}: use one of {', '.join(sorted(set(kinds)))}")
    if layers is None:
        per_layer(pattern, len(kinds))
        found = written(pattern)
    else:
        new, old = iter(per_layer(pattern, kinds.count(layers))), set_patterns(text)
        listed = [next(new) if kind == layers else one for kind, one in zip(kinds, old, strict=True)]
        found = [None if one is None else written(one) for one in listed]
    setattr(text, FIELD, found)
    parts = [name for name in config.sub_configs if getattr(config, name) is text]
    chosen = {parts[0]: NAME} if parts else NAME
    if model is config:
        config._attn_implementation = chosen
    elif text._attn_implementation != NAME:
        model.set_attn_implementation(chosen)
    config.attn_implementation = chosen  # which transformers saves, and reads when it makes a config from a folder
    return config


def check_model(config: Any) -> None:
    """Refuse models that compute attention by themselves: they would add our grid to their scores, as if a mask."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or MODEL_MAPPING.get(type(config), None)
    if hasattr(model, "_can_set_attn_implementation") and not model._can_set_attn_implementation():
        raise ValueError(
            f"dilated attention cannot run in {model.__name__}: this model computes attention by itself; use one that "
            "asks transformers for it, such as Llama, Qwen, Mistral or GPT-2"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError("dilated attention takes no cross-attention: use a decoder or an encoder alone")


def kinds_of(config: Any) -> tuple[str, ...]:
    """The type of each layer, as transformers itself reads it from a config."""
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kind = next((kind for kind, size in SIZES.items() if getattr(config, size, None) is not None), FULL[0])
    return tuple(listed or [kind] * config.num_hidden_layers)


def own_pattern(config: Any, size: int | None, is_causal: bool = True) -> Pattern:
    """What the model itself does in a layer; ``size``: of its window or chunk, None: it has none."""
    if size is None or (size == 0 and "sliding_attention" not in kinds_of(config)):  # Qwen2-MoE makes masks nobody has
        return ALL
    if getattr(config, "sliding_window", None) is None:
        return getattr(Made, _made(Dilated, size))  # type: ignore[no-any-return]
    # encoders count the distance, decoders the tokens
    return getattr(Made, _made(Window, size - is_causal))  # type: ignore[no-any-return]


class Made:
    """Patterns by names: a compiler can read them here, but cannot make any."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made(kind: type[Dilated | Window], size: int) -> str:
    name = f"{kind.kind}_{size}"
    if not hasattr(Made, name):
        setattr(Made, name, Pattern([kind(size)]))
    return name


def patterns_of(config: Any) -> tuple[Pattern, ...]:
    """The pattern of each layer of a decoder."""
    found = []
    for given, kind in zip(set_patterns(config), kinds_of(config), strict=True):
        if kind not in (*FULL, *SIZES):
            raise ValueError(f"layers of type {kind!r} have no pattern, and no room in DilatedCache: use DynamicCache")
        size = getattr(config, SIZES[kind]) if kind in SIZES else None
        found.append(own_pattern(config, size) if given is None else given)
    return tuple(found)


def set_patterns(config: Any) -> tuple[Pattern | None, ...]:
    """The pattern that was set for each layer."""
    given: Any = getattr(config, FIELD, None)
    layers: int = config.num_hidden_layers
    if given is None:
        return (None,) * layers
    listed = given if isinstance(given, list | tuple) else [given] * layers
    read = per_layer([ALL if one is None else one for one in listed], layers)
    return tuple(None if one is None else pattern for one, pattern in zip(listed, read, strict=True))


def pattern_of(module: Any, own: Pattern) -> Pattern:
    """The pattern of an attention module, read anew only if its config has changed. ``own``: what it does itself."""
    now = getattr(module.config, FIELD, None)
    if now is None:
        return own
    kept = getattr(module, "_dilated", None)
    if kept is None or kept[0] != now:
        index = getattr(module, "layer_idx", None)
        if index is None and isinstance(now, list | tuple) and any(one != now[0] for one in now):
            name = type(module).__name__
            raise ValueError(f"{name} does not say which layer it is in: set the same pattern for all its layers")
        kept = copy.deepcopy(now), set_patterns(module.config)[index or 0]
        if not torch.compiler.is_compiling():
            module._dilated = kept
            module.config.attn_implementation = NAME  # as after `set_pattern`: loading has taken it away
    return own if kept[1] is None else kept[1]


def is_first(module: Any) -> bool:
    """Whether an attention module is the first of its model. Layers before it may be of another kind."""
    first = getattr(module, "_first", None)  # to read a config takes long
    if first is None:
        first = next((index for index, kind in enumerate(kinds_of(module.config)) if kind in FULL), 0)
        if not torch.compiler.is_compiling():
            module._first = first
    return getattr(module, "layer_idx", None) in (None, first)
