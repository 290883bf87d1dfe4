"""Small Hugging Face decoders with dilated attention, in float64, and batches for them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config, StaticCache
from transformers.models.auto import AutoModelForCausalLM

from dilated_attention import Dilated, DilatedPattern, Pattern, Prefix, Window, ranks
from dilated_attention.integrations.transformers import DilatedCache, LongNetConfig, register, set_pattern
from tests.over_ranks import changed

ranks.PRELOADED.append(__name__)  # each rank would import transformers for itself, in three seconds

PATTERN = DilatedPattern.longnet([4, 8, 16], [1, 2, 4])
UNION = Pattern([Window(3), Dilated(16, 4), Prefix(2), Window(4, rate=2, heads=[0])])
OTHER = DilatedPattern.head_groups([6, 20], [1, 2])
LENGTHS = [20, 13, 7]
CACHES = [DynamicCache, StaticCache, DilatedCache]
VOCABULARY, PAD = 40, 0
CLOSE = 1e-11

SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": PAD,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": PAD, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, SHAPE),
    "qwen3": (Qwen3Config, SHAPE),
    "mistral": (MistralConfig, {**SHAPE, "sliding_window": None}),
    "gpt2": (GPT2Config, GPT2),
    "longnet": (LongNetConfig, {**SHAPE, "hidden_act": "swiglu", "sinks": True}),
}


def config_of(name: str = "llama", pattern: Any = PATTERN, **changes: Any) -> Any:
    kind, shape = CONFIGS[name]
    return set_pattern(kind(**{**shape, **changes}), pattern)


def patterns_of(name: str) -> tuple[Pattern, ...]:
    """One per layer."""
    return (UNION if name in ("mistral", "qwen3", "gpt2") else PATTERN), OTHER


def made(config: Any) -> Any:
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="dilated", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # or the likeliest tokens would soon repeat
    return changed(model).eval()


@functools.cache
def model_of(name: str = "llama") -> Any:
    return made(config_of(name, patterns_of(name)))


@functools.cache
def tokens() -> Tensor:
    """(3, 20), none of them padding."""
    return torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))


def alone() -> list[Tensor]:
    return [row[None, :length] for row, length in zip(tokens(), LENGTHS, strict=True)]


@torch.no_grad()
def expected(name: str = "llama") -> Tensor:
    """The logits of each sample alone."""
    return torch.cat([model_of(name)(row, use_cache=False).logits[0] for row in alone()])


def cache_of(kind: Any, model: Any) -> Any:
    return kind(config=model.config, **({"max_cache_len": 30} if kind is StaticCache else {}))


def batch(side: str, junk: int = 7) -> dict[str, Tensor]:
    """Samples of different lengths, padded with junk: left, right, or in the midst. Positions count real tokens."""
    most = max(LENGTHS)
    position = torch.arange(most)
    length = torch.tensor(LENGTHS)[:, None]
    mask = {
        "right": position < length,
        "left": position >= most - length,
        "middle": (position < 3) | (position >= most - length + 3),
    }[side]
    ids = torch.full((len(LENGTHS), most), junk)
    ids[mask] = torch.cat([row[0] for row in alone()])
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def packed() -> dict[str, Any]:
    """The samples one after the other."""
    ids = torch.cat([row[0] for row in alone()])[None]
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None], "use_cache": False}


def refused(model: Any, says: str, **given: Any) -> None:
    with pytest.raises(ValueError, match=says):
        model(**({"input_ids": tokens()} | given))
