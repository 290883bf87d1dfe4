"""Slide encoders: their attention and the whole model, beside the released way of computing it.

The released way gathers padded copies of each branch for flash kernels, and mixes the branches by their lse. Its
feed-forward layers copy all rows to float32. The rest of the model is the same code for both. Before anything is timed,
rows of both are checked against float64.

Legend: q, k, v (1, 1 + L, H, D) for L tiles and the class token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention.bench import baselines, probes
from dilated_attention.bench.run import Call, forward, forward_backward
from dilated_attention.bench.session import Session, Step
from dilated_attention.functional import dilated_attention
from dilated_attention.models import SlideEncoder
from dilated_attention.models.layers import FeedForward, SelfAttention, Sequences
from dilated_attention.models.presets import slide_pattern
from dilated_attention.testing import make_qkv
from dilated_attention.units import GIB

SUITE, HEADS, PATTERN = "slides", 16, slide_pattern(262144, 256)
MODELS = ("gigapath_slide_enc12l768d", "gigapath_slide_enc12l384d")
HEAD_DIMS = (48, 24, 64)  # of these models, and one that kernels are made for
TILES = {"cuda": (10_000, 45_680, 200_000, 1_000_000), "cpu": (1_000, 10_000)}
TRAINED = {"cuda": 45_680, "cpu": 1_000}
MOST_COPIED = 300_000  # tiles whose copies the released way trains on: more take most of a large GPU's memory
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dilated_attention(q, k, v, PATTERN)


def released(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return baselines.gather_pad_scatter(q, k, v, PATTERN)


WAYS: dict[str, Attention] = {"this library": ours, "released way": released}


class ReleasedAttention(nn.Module):
    """The attention of a layer, computed the released way."""

    def __init__(self, inner: SelfAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, rows: Sequences) -> Tensor:
        out = released(*self.inner.project(x)).flatten(2)
        found: Tensor = self.inner.out_proj(self.inner.inner_attn_ln(out))
        return found


class ReleasedFeedForward(nn.Module):
    """The feed-forward half of a layer as released: all rows at once, GELU on a float32 copy."""

    def __init__(self, inner: FeedForward) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.fc1(x)
        found: Tensor = self.inner.fc2(self.inner.ffn_layernorm(F.gelu(x.float()).type_as(x)))
        return found


WRAPPERS: dict[str, Any] = {"self_attn": ReleasedAttention, "ffn": ReleasedFeedForward}


def steps(session: Session) -> list[Step]:
    seconds = 60.0 if session.on_cuda else 90.0
    return [Step(attention_table, seconds), Step(model_table, seconds), Step(training_table, 10.0)]


def attention_table(session: Session) -> None:
    rows: list[list[Any]] = []
    for dim in HEAD_DIMS:
        for tiles in TILES[session.device.type]:
            session.pace.step(f"attention of {tiles:,} tiles, head dim {dim}", 8.0)
            options: dict[str, Any] = {"dtype": session.dtypes[0], "device": session.device}
            qkv = make_qkv(1, tiles + 1, HEADS, dim, **options)
            dout = make_qkv(1, tiles + 1, HEADS, dim, seed=1, **options)[0]
            rows += [[dim, tiles, *_attention_row(session, name, qkv, dout)] for name in WAYS]
            columns = ["head dim", "tiles", "way", "forward ms", "forward + backward ms", "peak GiB", "error"]
            session.table(SUITE, "Attention of slides", f"{HEADS} heads, {PATTERN}.", columns, rows)


def _attention_row(session: Session, name: str, qkv: tuple[Tensor, ...], dout: Tensor) -> list[Any]:
    attention, device = WAYS[name], session.device
    with torch.no_grad():
        check = probes.check_rows(attention(*qkv), qkv, PATTERN, False)
    if not session.judge(f"slides, {name}", check["worst"], check["limit"], False, PATTERN.rule):
        return [name, None, None, None, check["worst"]]
    calls: dict[str, Call] = {"forward": forward(attention, qkv)}
    peak = probes.peak_bytes(calls["forward"], device) / GIB
    if name == "this library" or qkv[0].shape[1] <= MOST_COPIED:
        calls["both"] = forward_backward(attention, qkv, dout)
    times = {key: timing.median for key, timing in session.time(calls, 0.5).items()}
    return [name, times["forward"], times.get("both"), peak, check["worst"]]


@torch.no_grad()
def model_table(session: Session) -> None:
    rows: list[list[Any]] = []
    for preset in MODELS:
        torch.manual_seed(0)
        model = SlideEncoder.preset(preset, global_pool=True).to(session.device, session.dtypes[0]).eval()
        for tiles in TILES[session.device.type]:
            session.pace.step(f"{preset}, {tiles:,} tiles", 8.0)
            given, outs = _slide(session, model, tiles), {}
            for name in WAYS:
                _attend(model, name)
                call: Call = functools.partial(_embedding, model, given)
                outs[name], peak = call(), probes.peak_bytes(call, session.device) / GIB
                ms = session.time({"": call}, 0.5)[""].median
                rows.append([preset, tiles, name, ms, peak, float((outs[name] - outs["this library"]).abs().max())])
                columns = ["model", "tiles", "way", "ms", "peak GiB", "difference"]
                session.table(SUITE, "Whole slide encoders, forward", f"{PATTERN}.", columns, rows)
            _attend(model, "this library")


def _embedding(model: SlideEncoder, given: tuple[Tensor, Tensor]) -> Tensor:
    [found] = model(*given)
    embedding: Tensor = found
    return embedding


def training_table(session: Session) -> None:
    """One step with checkpointing, in the main dtype by autocast; weights and gradients are float32. Beside it a
    rollout, which is a forward pass and the gradients of attention alone."""
    rows, tiles = [], TRAINED[session.device.type]
    columns = ["model", "tiles", "ms", "peak GiB", "rollout ms", "rollout peak GiB"]
    for preset in MODELS:
        session.pace.step(f"fine-tuning {preset}", 5.0)
        model = SlideEncoder.preset(preset, global_pool=True, checkpoint_activations=True).to(session.device)
        given = _slide(session, model, tiles)

        def step(model: SlideEncoder = model, given: tuple[Tensor, Tensor] = given) -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast(session.device.type, session.dtypes[0], enabled=session.on_cuda):
                loss = model(*given)[0].square().mean()
            loss.backward()

        def rollout(model: SlideEncoder = model, given: tuple[Tensor, Tensor] = given) -> None:
            with torch.autocast(session.device.type, session.dtypes[0], enabled=session.on_cuda):
                model.eval().rollout(*given)
            model.train()

        step()
        calls: dict[str, Call] = {"step": step, "rollout": rollout}
        weights = sum(x.nbytes for x in model.parameters())
        peaks = [(probes.peak_bytes(call, session.device) + weights) / GIB for call in calls.values()]
        times = [timing.median for timing in session.time(calls, 0.5).values()]
        both = [x for pair in zip(times, peaks, strict=True) for x in pair]
        rows.append([preset, tiles, *both])
        session.table(SUITE, "A fine-tuning step and a rollout", "With checkpointing.", columns, rows)


def _slide(session: Session, model: SlideEncoder, tiles: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator(session.device).manual_seed(tiles)
    channels = model.patch_embed.proj.in_features
    features = torch.randn(1, tiles, channels, generator=draws, device=session.device)
    cells = torch.arange(tiles, device=session.device)
    coords = torch.stack([cells % 1000, cells // 1000], -1) * 256
    return features.to(session.dtypes[0]), coords.unsqueeze(0)


def _attend(model: SlideEncoder, way: str) -> None:
    """Let every layer compute this way."""
    for layer in model.encoder.layers:
        for name, wrapper in WRAPPERS.items():
            here: Any = layer.get_submodule(name)
            inner = here.inner if isinstance(here, wrapper) else here
            layer.add_module(name, wrapper(inner) if way == "released way" else inner)
