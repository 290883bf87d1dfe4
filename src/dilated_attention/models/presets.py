"""The sizes of the released slide encoders: by name, from their weights, and the pattern that goes with them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from dilated_attention.checks import check_int
from dilated_attention.models import weights
from dilated_attention.pattern import DilatedPattern

DILATION_RATES = (1, 2, 4, 8, 16)
PRESETS: dict[str, dict[str, int]] = {
    "gigapath_slide_enc12l768d": {"in_chans": 1536, "embed_dim": 768, "depth": 12},
    "gigapath_slide_enc12l384d": {"in_chans": 384, "embed_dim": 384, "depth": 12},
    "gigapath_slide_enc24l1024d": {"in_chans": 1536, "embed_dim": 1024, "depth": 24},
    "gigapath_slide_enc12l1536d": {"in_chans": 1536, "embed_dim": 1536, "depth": 12},
}


def slide_pattern(max_wsi_size: int = 262144, tile_size: int = 256) -> DilatedPattern:
    """Makes the pattern of the released models: rule torchscale, rates 1, 2, 4, 8 and 16.

    The five segment lengths grow geometrically from 1024 tokens to about (max_wsi_size / tile_size)², the most tiles on
    a slide. Both arguments are in pixels.

    Examples:
        >>> models.slide_pattern()
        DilatedPattern.torchscale(segment_lengths=[1024, 5792, 32768, 185363, 1048576], dilation_rates=[1, 2, 4, 8, 16])
    """
    across = check_int("max_wsi_size", max_wsi_size) // check_int("tile_size", tile_size)
    if across < 32:
        raise ValueError(f"max_wsi_size must be 32 tiles or more, got {max_wsi_size} with tile_size {tile_size}")
    top = int(math.log2(across**2))  # floored, as released
    return DilatedPattern.torchscale([int(2 ** (10 + (top - 10) * step / 4)) for step in range(5)], DILATION_RATES)


def sizes_of(state: dict[str, Tensor], said: str) -> dict[str, Any]:
    """Width, depth and in_chans of the weights of a slide encoder."""
    embed_dim, in_chans = weights.matrix(state, "patch_embed.proj.weight", said)
    inner, _ = weights.matrix(state, "encoder.layers.0.ffn.fc1.weight", said)
    mlp_ratio = inner / embed_dim
    if int(embed_dim * mlp_ratio) < inner:  # rounded down
        mlp_ratio = math.nextafter(mlp_ratio, math.inf)
    depth = weights.depth(state, "encoder.layers.", said)
    return {"embed_dim": embed_dim, "in_chans": in_chans, "depth": depth, "mlp_ratio": mlp_ratio}
