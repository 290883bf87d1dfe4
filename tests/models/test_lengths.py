"""Slides of every length around the borders of segments: each layer's rows from its inputs, in float64.

Rows are sampled, as all of them would need every pair of tiles: those at borders of segments, and some by chance.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.models import SlideEncoder
from dilated_attention.models.layers import Layer
from tests.over_ranks import changed

BORDERS = (0, 1, 2, 1022, 1023, 1024, 1025, 4868, 4869, 4870, 4871, 5790, 5791, 5792, 5793, 23170, 32768)


def rows_of_layer(layer: Layer, x: Tensor, rows: list[int]) -> Tensor:
    """These rows of what the layer gives for x (N, C): one softmax over all keys that a row sees."""
    attn, ffn, found = layer.self_attn, layer.ffn, []
    normed = layer.self_attn_layer_norm(x)
    q, k, v = (f(normed).unflatten(-1, (attn.num_heads, -1)) for f in (attn.q_proj, attn.k_proj, attn.v_proj))
    where = {"num_tokens": len(x), "num_heads": attn.num_heads}
    for row in rows:
        out = []
        for head in range(attn.num_heads):
            keys = torch.tensor(attn.pattern.keys(row, head, **where), dtype=torch.long)
            scores = k[keys, head] @ q[row, head] / math.sqrt(q.shape[-1])
            zeros = scores.new_zeros(attn.pattern.zero_keys(row, head, **where))
            weights = torch.cat([scores, zeros]).softmax(0)[: len(keys)]
            out.append(weights @ v[keys, head])
        found.append(torch.cat(out))
    y = x[rows] + attn.out_proj(attn.inner_attn_ln(torch.stack(found)))
    z: Tensor = y + ffn.fc2(ffn.ffn_layernorm(F.gelu(ffn.fc1(layer.final_layer_norm(y)))))
    return z


LENGTHS = (1, 2, 37, 1023, 1024, 1025, 4869, 4870, 4871, 5791, 5792, 5793, 40000)


def is_quick(length: int, max_wsi_size: int) -> bool:
    """Whether `make test` takes it: with the class token, it fills a segment or is one too long for it."""
    return length in ((1, 1024, 4870) if max_wsi_size == 250000 else (1, 2, 37, 1023, 5792))


@pytest.mark.parametrize(
    ("length", "max_wsi_size"),
    [
        pytest.param(n, size, marks=() if is_quick(n, size) else pytest.mark.slow)
        for n in LENGTHS
        for size in (262144, 250000)
    ],
)
@torch.no_grad()
def test_every_length(length: int, max_wsi_size: int) -> None:
    torch.manual_seed(length)
    model = SlideEncoder(8, 32, 2, 16, max_wsi_size=max_wsi_size, global_pool=False).double().eval()
    changed(model)
    seen: list[tuple[Tensor, Tensor]] = []
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda _, given, out: seen.append((given[0][0], out[0])))
    tiles, coords = torch.randn(1, length, 8).double(), torch.randint(0, 256000, (1, length, 2))
    [embedding] = model(tiles, coords)
    rows = [row for row in (*BORDERS, length - 1, length) if row <= length]
    rows += torch.randint(0, length + 1, (4,)).tolist()
    for layer, (x, out) in zip(model.encoder.layers, seen, strict=True):
        torch.testing.assert_close(out[rows], rows_of_layer(layer, x, rows), atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(seen[1][0], seen[0][1], atol=0.0, rtol=0.0)
    torch.testing.assert_close(embedding[0], model.norm(model.encoder.layer_norm(seen[1][1][0])))
