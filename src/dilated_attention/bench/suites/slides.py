"""Slide encoders: their attention and the whole model, beside the released way of computing it.

The released way gathers padded copies of each branch for flash kernels, and mixes the branches by their lse. Its
feed-forward layers copy all rows to float32. The rest of the model is the same code for both. There are as many tokens
as tiles, and one more, the class token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.bench import baselines
from dilated_attention.bench.implementations import RELEASED as RELEASED_NAME
from dilated_attention.bench.implementations import named
from dilated_attention.bench.run import Call
from dilated_attention.bench.session import Row, Session, Step
from dilated_attention.models import SlideEncoder, slide_pattern
from dilated_attention.models.layers import FeedForward, SelfAttention, Sequences

SUITE, HEADS, PATTERN = "slides", 16, slide_pattern(262144, 256)
SEGMENTS = (PATTERN.segment_lengths, PATTERN.dilation_rates)
MODELS = ("gigapath_slide_enc12l768d", "gigapath_slide_enc12l384d")
HEAD_DIMS = (48, 24, 64)  # of these models, and one that kernels are made for
TILES = {"cuda": (10_000, 45_680, 200_000, 1_000_000), "cpu": (1_000, 10_000)}
TRAINED = {"cuda": 45_680, "cpu": 1_000}


def released_attention(layer: SelfAttention, x: Tensor, rows: Sequences) -> Any:
    out = baselines.gather_pad_scatter(*layer.project(x), PATTERN).flatten(2)
    return layer.out_proj(layer.inner_attn_ln(out))


def released_feed_forward(layer: FeedForward, x: Tensor) -> Any:
    """All rows at once, GELU on a float32 copy."""
    x = layer.fc1(x)
    return layer.fc2(layer.ffn_layernorm(F.gelu(x.float()).type_as(x)))


def steps(session: Session) -> list[Step]:
    tiles, attentions = TILES[session.device.type], named("torchscale, auto", RELEASED_NAME)
    settings = [session.setting(n + 1, SEGMENTS, heads=HEADS, head_dim=dim) for dim, n in product(HEAD_DIMS, tiles)]
    columns = ["model", "tiles", "way", "ms", "peak GiB", "difference"]
    whole = {f"{name}, {n:,} tiles": partial(of_models, session, name, n) for name, n in product(MODELS, tiles)}
    training = {f"fine-tuning {name}": partial(of_training, session, name) for name in MODELS}
    return [
        *(session.comparing(SUITE, attentions, setting) for setting in settings),
        *session.table(SUITE, "Whole slide encoders, forward", f"{PATTERN}.", columns, whole),
        *session.table(SUITE, "A fine-tuning step", "With checkpointing.", ["model", "tiles", *columns[3:5]], training),
    ]


@torch.no_grad()
def of_models(session: Session, preset: str, tiles: int) -> Iterator[Row]:
    torch.manual_seed(0)
    model = SlideEncoder.preset(preset, global_pool=True).to(session.device, session.dtypes[0]).eval()
    given, outs = _slide(session, model, tiles), []
    for name in ("this library", "released way"):
        for layer in model.encoder.layers if name == "released way" else ():
            layer.self_attn.forward = partial(released_attention, layer.self_attn)
            layer.ffn.forward = partial(released_feed_forward, layer.ffn)
        outs.append(model(*given)[0])
        call: Call = partial(model, *given)
        peak, ms = session.peak(call), session.median(call)
        yield [preset, tiles, name, ms, peak, float((outs[-1] - outs[0]).abs().max())]


def of_training(session: Session, preset: str) -> Iterator[Row]:
    """With checkpointing, in the main dtype by autocast; weights and gradients are float32."""
    tiles = TRAINED[session.device.type]
    model = SlideEncoder.preset(preset, global_pool=True, checkpoint_activations=True).to(session.device).train()
    given = _slide(session, model, tiles)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(session.device.type, session.dtypes[0], enabled=session.on_cuda):
            loss = model(*given)[0].square().mean()
        loss.backward()

    step()
    weights = sum(x.nbytes for x in model.parameters())
    yield [preset, tiles, session.median(step), session.peak(step, weights)]


def _slide(session: Session, model: SlideEncoder, tiles: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(tiles)
    features = torch.randn(1, tiles, model.patch_embed.proj.in_features, **session.options)
    cells = torch.arange(tiles, device=session.device)
    return features, torch.stack([cells % 1000, cells // 1000], -1).unsqueeze(0) * 256
