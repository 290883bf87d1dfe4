"""torchtitan's own attention and model with dilated attention inside: `make test-integrations` installs and runs it.

Not part of `make test`: torchtitan is young, and its dependencies are many.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.llama3 import llama3_configs

from dilated_attention import DilatedPattern, reference
from dilated_attention.integrations.torchtitan import DilatedAttention
from dilated_attention.testing import error

PATTERN = DilatedPattern.longnet([8, 16], [1, 4])
DILATED = DilatedAttention.Config(segment_lengths=(8, 16), dilation_rates=(1, 4))
DOCUMENTS = [13, 27, 24]  # one row of 64


class Oracle(DilatedAttention):
    """Each document by the oracle."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: Any = None, **_: Any) -> Tensor:
        ends = attention_masks.cu_seq_q.tolist()
        rows = [x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v)]
        outs = [
            reference.attention(*(x[:, a:b] for x in rows), self.pattern, is_causal=True, scale=scale)[0]
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(outs, 1).view(q.shape)


def positions(rows: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(rows, -1).contiguous()


def made(kind: type[DilatedAttention]) -> Any:
    """torchtitan's debug model, smaller."""
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"]
    config = copy.deepcopy(config(attn_backend="varlen") if callable(config) else config)
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = DILATED
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, DilatedAttention):
            module.__class__ = kind
    return model.double()


def test_torchtitans_model() -> None:
    """The model asks for the borders of documents, and gives them to our module: logits and gradients of weights."""
    tokens, results = torch.randint(2048, (2, 64)), []
    for model in (made(DilatedAttention), made(Oracle)):
        masks = model.get_attention_masks(positions(2))
        logits = model(tokens, attention_masks=masks, positions=positions(2))
        results.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    assert max(error(a, b) for a, b in zip(*results, strict=True)) < 1e-6  # the rotary positions are float32
    place, one = positions(2)[:, 13:40], made(DilatedAttention)
    alone = one(tokens[:, 13:40], positions=place, attention_masks=one.get_attention_masks(place))
    assert error(results[0][0][:, 13:40], alone) < 1e-6


def test_what_is_refused() -> None:
    module = DILATED.build()
    assert isinstance(module, VarlenAttention)
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(TypeError, match="must be VarlenMetadata, got NoneType"):
        module(x, x, x, attention_masks=None)
    with pytest.raises(ValueError, match="no window_size"):
        DilatedAttention.Config(segment_lengths=(8,), dilation_rates=(1,), window_size=(4, 0)).build()
    with pytest.raises(ValueError, match="leave these out"):
        DilatedAttention.Config(segment_lengths=(8,), dilation_rates=(1,), pattern=PATTERN).build()
    assert DilatedAttention.Config(pattern=PATTERN).build().pattern == module.pattern
