"""Dilated attention for Hugging Face transformers: existing decoders, a bounded cache, LongNet as a model of theirs."""

from dilated_attention.integrations.transformers.attention import register
from dilated_attention.integrations.transformers.cache import DilatedCache
from dilated_attention.integrations.transformers.config import set_pattern

__all__ = ["DilatedCache", "register", "set_pattern"]
