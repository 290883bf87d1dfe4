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
from torchtitan.models.common.attention import GQAttention, VarlenAttention, create_varlen_metadata_for_document
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


def with_inner(config: Any, inner: Any) -> Any:
    config = copy.deepcopy(config)
    for layer in config.layers:
        layer.attention.inner_attention = inner
    return config


def llama() -> Any:
    """torchtitan's debug model, smaller."""
    config = llama3_configs["debugmodel"]
    config = config(attn_backend="varlen") if callable(config) else config
    config.layers = config.layers[:2]
    return config


def made(config: Any, kind: type[DilatedAttention]) -> Any:
    torch.manual_seed(0)
    model = with_inner(config, DILATED).build()
    model.init_states(buffer_device=torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, DilatedAttention):
            module.__class__ = kind
    return model.double()


def test_torchtitans_attention() -> None:
    """GQAttention as its llama3 configures it: output and the gradients of inputs and weights, as by the oracle."""
    config = with_inner(llama(), DILATED).layers[0].attention
    assert isinstance(config, GQAttention.Config)
    masks = create_varlen_metadata_for_document(positions(2))
    x = torch.randn(2, 64, config.dim, dtype=torch.float64)
    found = []
    for kind in (DilatedAttention, Oracle):
        torch.manual_seed(0)
        module: Any = config.build()
        module.init_states(buffer_device=torch.device("cpu"))
        module.inner_attention.__class__ = kind
        module, leaf = module.double(), x.clone().requires_grad_()
        out = module(leaf, masks, positions(2))
        found.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])])
    assert max(error(a, b) for a, b in zip(*found, strict=True)) < 1e-6  # torchtitan's rotary positions are float32


def test_torchtitans_model() -> None:
    """The model asks for the borders of documents, and gives them to our module."""
    tokens = torch.randint(2048, (2, 64))
    models = [made(llama(), kind) for kind in (DilatedAttention, Oracle)]
    masks = models[0].get_attention_masks(positions(2))
    logits = [model(tokens, attention_masks=masks, positions=positions(2)) for model in models]
    assert error(logits[0], logits[1]) < 1e-6
    alone = models[0](
        tokens[:, 13:40], positions=positions(2)[:, 13:40],
        attention_masks=models[0].get_attention_masks(positions(2)[:, 13:40]),
    )  # fmt: skip
    assert error(logits[0][:, 13:40], alone) < 1e-6


def test_what_is_refused() -> None:
    module = DILATED.build()
    assert isinstance(module, VarlenAttention)
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(TypeError, match="must be VarlenMetadata, got NoneType"):
        module(x, x, x, attention_masks=None)
    with pytest.raises(ValueError, match="no window_size"):
        DilatedAttention.Config(segment_lengths=(8,), dilation_rates=(1,), window_size=(4, 0)).build()
