"""torchscale's models: outputs of the released code from its weights, xPos at its limits, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.models.layers import XPos
from dilated_attention.models.torchscale import LongNetDecoder, LongNetEncoder, longvit_encoder
from tests.models.golden import CLOSE, golden


def converted(name: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    config, state, data = golden(name)
    cls = LongNetDecoder if config["kind"] == "decoder" else LongNetEncoder
    sizes = {key: config[key] for key in ("segment_lengths", "dilation_rates")}
    return cls.from_torchscale(state, num_heads=config["heads"], **sizes, **options).double(), data


@pytest.mark.parametrize("name", ["torchscale_encoder", "torchscale_decoder", "torchscale_decoder_xpos"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_outputs_are_the_released_ones(name: str, backend: str) -> None:
    model, data = converted(name, backend=backend)
    assert not model.training
    torch.testing.assert_close(model(data["tokens"]), data["out"], **CLOSE)
    torch.testing.assert_close(model(embeddings=model.embed_tokens(data["tokens"])), data["out"], **CLOSE)
    are_shared = model.output_projection.weight is model.embed_tokens.weight
    assert are_shared == (name != "torchscale_encoder")


@torch.no_grad()
def test_positions_and_norms_of_embeddings() -> None:
    """Parts that the golden models lack: rows from 2 on, then the LayerNorm; the scale is the root of the width."""
    _, state, data = golden("torchscale_encoder")
    table, norm = torch.randn(152, 32), {"weight": torch.randn(32), "bias": torch.randn(32)}
    state = state | {"embed_positions.weight": table} | {f"layernorm_embedding.{k}": x for k, x in norm.items()}
    sizes: Any = {"num_heads": 4, "segment_lengths": [16, 64, 256], "dilation_rates": [1, 2, 4]}
    model = LongNetEncoder.from_torchscale(state, scale_embedding=True, **sizes).double()
    plain, _ = converted("torchscale_encoder")
    x = math.sqrt(32) * plain.embed_tokens(data["tokens"]) + table[2:]
    wanted = plain(embeddings=torch.nn.functional.layer_norm(x, (32,), *(norm[k].double() for k in norm)))
    torch.testing.assert_close(model(data["tokens"]), wanted, **CLOSE)
    with pytest.raises(ValueError, match="for 150 tokens, got 151"):
        model(torch.zeros(1, 151, dtype=torch.long))


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    state, name = golden("torchscale_encoder")[1], "layers.0.moe_layer.gate.weight"
    for weights, says in (
        (state | {name: torch.zeros(4)}, f'the state dict does not fit LongNetEncoder: Unexpected .* "{name}"'),
        (state | {"embed_tokens.weight": torch.zeros(0, 32)}, r"is \(0, 32\), and must be a matrix"),
        ({}, "no weights of such a model: laye"),
    ):
        with pytest.raises(ValueError, match=says):
            LongNetEncoder.from_torchscale(weights, num_heads=4, segment_lengths=[16], dilation_rates=[1])


def test_longvit_by_its_names() -> None:
    """Only the names are checked: no outputs of the released model are at hand."""
    state = golden("torchscale_encoder")[1]
    layers = {f"module.backbone.encoder.{key}": x for key, x in state.items() if key.startswith("layers.")}
    other = {"module.backbone.pos_embed": torch.zeros(1, 1024, 32)}
    encoder, rest = longvit_encoder(layers | other, image_size=1024, num_heads=4)
    assert [*rest] == ["pos_embed"]
    assert encoder.layers[0].self_attn.pattern == DilatedPattern.torchscale([64, 128, 256, 512, 1024], [1, 2, 4, 8, 16])
    assert encoder(embeddings=torch.zeros(1, 50, 32)).shape == (1, 50, 32)
    with pytest.raises(ValueError, match="image_size must be"):
        longvit_encoder(layers, image_size=1000)
    with pytest.raises(ValueError, match="no embed_tokens"):
        encoder(torch.zeros(1, 3, dtype=torch.long))


# --- xPos -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_xpos_reaches_65536_tokens(backend: Any) -> None:
    """Products with future keys overflow there, in value and in gradient, and must not be seen."""
    tokens, pattern = 65536, DilatedPattern.torchscale([64, 65536], [1, 512])
    torch.manual_seed(0)
    x = [torch.randn(1, tokens, 1, 8, requires_grad=True) for _ in range(3)]
    q, k = XPos(8)(x[0], x[1])
    assert not torch.isfinite((q[:, :1] * k[:, -1:]).sum(-1)).all()
    out = dilated_attention(q, k, x[2], pattern, is_causal=True, backend=backend)
    out.square().sum().backward()
    assert all(torch.isfinite(y).all() for y in (out, *(leaf.grad for leaf in x)))
    q, k = XPos(8).double()(*(leaf.detach().double() for leaf in x[:2]))
    keys = torch.tensor(pattern.keys(65024, 0, num_tokens=tokens, num_heads=1, is_causal=True))
    weights = ((q[0, 65024, 0] * k[0, keys, 0]).sum(-1) / math.sqrt(8)).softmax(0)
    torch.testing.assert_close(out[0, 65024, 0].double(), weights @ x[2][0, keys, 0].double(), atol=1e-5, rtol=1e-5)


def test_xpos_says_where_it_ends() -> None:
    for x, error, says in (
        (torch.zeros(1, 1, 1, 8).expand(1, 65537, 1, 8), ValueError, r"at most 65536 tokens.*got 65537"),
        (torch.zeros(1, 4, 1, 8).half(), TypeError, "float16"),
    ):
        with pytest.raises(error, match=says):
            XPos(8)(x, x)
    with pytest.raises(ValueError, match="even"):
        XPos(7)
