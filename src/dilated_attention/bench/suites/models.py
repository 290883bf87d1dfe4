"""Suites of whole models: slide encoders beside the released way of computing them, and LongNet as a language model.

slides: the released way gathers padded copies of each branch for flash kernels, mixes the branches by their lse, and
copies all rows to float32 in feed-forward layers. There is one token more than tiles, the class token.
language: training steps by length beside dense attention, and generation. A step is forward and backward of one row,
with checkpointing and the loss in chunks; weights are in the main dtype, and there is no optimiser. Its attention is
checked against float64 first. TFLOP/s count the model's operations, not those of checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.bench import baselines
from dilated_attention.bench.implementations import RELEASED, named
from dilated_attention.bench.run import Call
from dilated_attention.bench.session import LONG, Row, Session, Step
from dilated_attention.models import LMConfig, LongNetLM, SlideEncoder, slide_pattern, summed_loss
from dilated_attention.models.layers import FeedForward, SelfAttention, Sequences, attend_whole
from dilated_attention.models.transformer import Attend
from dilated_attention.pattern import DilatedPattern
from dilated_attention.testing import make_qkv

SLIDES = slide_pattern(262144, 256)
ENCODERS = ("gigapath_slide_enc12l768d", "gigapath_slide_enc12l384d")
HEADS, HEAD_DIMS = 16, (48, 24, 64)  # of these models, and one that kernels are made for
TILES = {"cuda": (10_000, 45_680, 200_000, 1_000_000), "cpu": (1_000, 10_000)}
TRAINED = {"cuda": 45_680, "cpu": 1_000}


def slides(session: Session) -> list[Step]:
    tiles, attentions = TILES[session.device.type], named("torchscale, auto", RELEASED)
    segments = (SLIDES.segment_lengths, SLIDES.dilation_rates)
    settings = [session.setting(n + 1, segments, heads=HEADS, head_dim=dim) for dim, n in product(HEAD_DIMS, tiles)]
    columns = ["model", "tiles", "way", "ms", "peak GiB", "difference"]
    whole = [partial(of_encoder, session, name, n) for name, n in product(ENCODERS, tiles)]
    tuning = [partial(of_fine_tuning, session, name) for name in ENCODERS]
    return [
        *(partial(session.compare, "slides", attentions, setting) for setting in settings),
        *session.table("slides", "Whole slide encoders, forward", f"{SLIDES}.", columns, whole),
        *session.table("slides", "A fine-tuning step", "With checkpointing.", [*columns[:2], *columns[3:5]], tuning),
    ]


def released_attention(layer: SelfAttention, x: Tensor, rows: Sequences) -> Any:
    out = baselines.gather_pad_scatter(*layer.project(x), SLIDES).flatten(2)
    return layer.out_proj(layer.inner_attn_ln(out))


def released_feed_forward(layer: FeedForward, x: Tensor) -> Any:
    """All rows at once, GELU on a float32 copy."""
    x = layer.fc1(x)
    return layer.fc2(layer.ffn_layernorm(F.gelu(x.float()).type_as(x)))


@torch.no_grad()
def of_encoder(session: Session, preset: str, tiles: int) -> Iterator[Row]:
    torch.manual_seed(0)
    model = SlideEncoder.preset(preset, global_pool=True).to(session.device, session.dtypes[0]).eval()
    given, outs = slide(session, model, tiles), []
    for name in ("this library", "released way"):
        for layer in model.encoder.layers if name == "released way" else ():
            layer.self_attn.forward = partial(released_attention, layer.self_attn)
            layer.ffn.forward = partial(released_feed_forward, layer.ffn)
        outs.append(model(*given)[0])
        call: Call = partial(model, *given)
        peak, ms = session.peak(call), session.median(call)
        yield [preset, tiles, name, ms, peak, float((outs[-1] - outs[0]).abs().max())]


def of_fine_tuning(session: Session, preset: str) -> Iterator[Row]:
    """In the main dtype by autocast; weights and gradients are float32."""
    tiles = TRAINED[session.device.type]
    model = SlideEncoder.preset(preset, global_pool=True, checkpoint_activations=True).to(session.device).train()
    given = slide(session, model, tiles)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(session.device.type, session.dtypes[0], enabled=session.on_cuda):
            loss = model(*given)[0].square().mean()
        loss.backward()

    step()
    weights = sum(x.nbytes for x in model.parameters())
    yield [preset, tiles, session.median(step), session.peak(step, weights)]


def slide(session: Session, model: SlideEncoder, tiles: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(tiles)
    features = torch.randn(1, tiles, model.patch_embed.proj.in_features, **session.options)
    cells = torch.arange(tiles, device=session.device)
    return features, torch.stack([cells % 1000, cells // 1000], -1).unsqueeze(0) * 256


FAR = DilatedPattern.longnet([2048 << i for i in range(10)], [1 << i for i in range(10)])
SIZES: dict[str, dict[str, tuple[DilatedPattern, tuple[int, ...]]]] = {  # patterns, and tokens of a step
    "cuda": {"125M": (LONG, (1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 20)), "0.6B": (FAR, (1 << 17, 1 << 19, 1 << 20))},
    "cpu": {"125M": (LONG, (1 << 10,))},
}
MOST_DENSE = 1 << 19  # tokens: beyond, a step with dense attention takes minutes
COMPILED = (1 << 13, 1 << 17, 1 << 20)  # tokens of the steps that are compiled as well, which takes a while for each
KEPT = "longnet, attention kept"  # by checkpointing, where there is room
PROMPTS = {"cuda": (10_000, 1_000_000), "cpu": (1_000,)}
SMALL: dict[str, Any] = {"dim": 64, "depth": 2, "heads": 4, "kv_heads": 4, "vocab_size": 256}  # on a CPU
GENERATED = {"cuda": 1024, "cpu": 64}


def language(session: Session) -> list[Step]:
    """One for each length: they are long, and a run that dies keeps those that were done."""
    kind, found = session.device.type, list[Step]()
    columns = ["tokens", "attention", "s", "tokens/s", "peak GiB", "TFLOP/s"]
    for size, (pattern, lengths) in SIZES[kind].items():
        note = f"Causal, {pattern}{'' if session.on_cuda else ', with smaller layers'}."
        rows = [partial(of_training, session, size, pattern, tokens) for tokens in lengths]
        found += session.table("language", f"A training step, {size}", note, columns, rows)
    columns = ["prompt", "prompt and 16 tokens, s", "tokens/s"]
    rows = [partial(of_generation, session, prompt) for prompt in PROMPTS[kind]]
    return found + session.table("language", "Generation", "Batch of 1, the likeliest token.", columns, rows)


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention to every earlier token; nothing asks for its lse."""
    return baselines.dense(q, k, v, is_causal=True), q.new_empty(0)


def model_of(session: Session, size: str, pattern: DilatedPattern) -> LongNetLM:
    changes = {} if session.on_cuda else SMALL
    torch.manual_seed(0)
    with torch.device(session.device):
        model = LongNetLM(LMConfig.of(size, pattern, **changes), dtype=session.dtypes[0])
    model.checkpointing = True
    return model


def operations(config: LMConfig, parameters: int, tokens: int) -> float:
    """Of a step on one row: 6 per weight and token, and 12 per pair of query and key, for each channel of a head."""
    heads: Any = {"num_heads": config.heads, "num_kv_heads": config.kv_heads}
    pairs = sum(one.pairs(tokens, **heads, is_causal=True) for calls in config.calls for one in calls)
    return 6 * parameters * tokens + 12 * pairs * config.head_dim


def training_step(model: LongNetLM, tokens: int, attend: Attend, is_compiled: bool) -> Call:
    torch.compiler.reset()  # what was compiled for another length is of no use for this one
    if is_compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    weight = model.head.weight
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), device=weight.device)
    positions = torch.arange(tokens, device=weight.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        states = [model.states(ids[:, :-1], positions, [attend] * model.config.depth)]
        loss = summed_loss(states.pop(), weight, ids[:, 1:]) / tokens
        torch.autograd.backward(loss)

    return step


def of_training(session: Session, size: str, pattern: DilatedPattern, tokens: int) -> Iterator[Row]:
    config = model_of(session, size, pattern).config
    qkv = make_qkv(1, tokens, config.heads, config.head_dim, **session.options)
    longnet = partial(attend_whole, pattern, True, Sequences(), None)
    with torch.no_grad():
        out, _ = longnet(*qkv)
    if not session.rows_are_right("language model", out, qkv, pattern, True)[0]:
        return
    ways: dict[str, tuple[Attend, LMConfig]] = {"longnet": (longnet, config)}
    if session.on_cuda and tokens == max(COMPILED):
        ways[KEPT] = ways["longnet"]
    if pattern is LONG and tokens <= MOST_DENSE:
        ways["dense SDPA"] = dense, replace(config, pattern=DilatedPattern.longnet([tokens], [1]))
    for is_compiled in (False, True)[: 1 + (tokens in COMPILED)]:
        for name, (attend, counted) in ways.items():
            model = model_of(session, size, pattern)
            if name == KEPT:
                model.checkpointing = "auto"
            step = training_step(model, tokens, attend, is_compiled)
            # with weights, and gradients of the step before
            peak = session.peak(step, 2 * sum(x.nbytes for x in model.parameters()))
            seconds = session.median(step, warmups=0) / 1000  # the peak took a call or two
            tflops = operations(counted, sum(x.numel() for x in model.parameters()), tokens) / seconds / 1e12
            yield [tokens, name + ", compiled" * is_compiled, seconds, tokens / seconds, peak, tflops]


@torch.no_grad()
def of_generation(session: Session, prompt: int) -> Iterator[Row]:
    """Tokens per second after a prompt: the time of many new tokens less that of a few."""
    model = model_of(session, "125M", LONG).eval()
    ids = torch.randint(model.config.vocab_size, (1, prompt), device=session.device)
    few, many = 16, 16 + GENERATED[session.device.type]  # both have captured their graph
    ways = {count: partial(model.generate_tokens, ids, count) for count in (few, many)}
    found = {count: timing.median for count, timing in session.time(ways, 2.0).items()}
    yield [prompt, found[few] / 1000, (many - few) / (found[many] - found[few]) * 1000]
