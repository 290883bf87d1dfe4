"""Dilated attention for Hugging Face transformers: existing decoders, a bounded cache, LongNet as a model of theirs."""

from dilated_attention.integrations.transformers.cache import DilatedCache
from dilated_attention.integrations.transformers.collator import ShardingCollator, shard_batch
from dilated_attention.integrations.transformers.config import set_pattern
from dilated_attention.integrations.transformers.model import LongNetConfig, LongNetForCausalLM, register

__all__ = [
    "DilatedCache", "LongNetConfig", "LongNetForCausalLM", "ShardingCollator", "register", "set_pattern", "shard_batch",
]  # fmt: skip
