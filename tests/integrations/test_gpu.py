"""Hugging Face models on a GPU: those that mix kinds of layers, as they are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention.integrations.transformers import DilatedCache
from dilated_attention.testing import error
from tests.integrations import hf, test_hybrid
from tests.on_gpu import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Llama4TextAttention does not pass")]
N = 300
CHANGES = {  # of experts all are asked: rounding may choose another one
    "gpt_oss": {"num_experts_per_tok": 2}, "llama4": {"num_local_experts": 1}, "chunks": {"num_local_experts": 1},
    "gpt2": {"n_positions": 512},
}  # fmt: skip


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    longer = {} if name == "gpt2" else {"max_position_embeddings": 512}
    return test_hybrid.made(test_hybrid.config_of(name, **longer, **CHANGES.get(name, {}))).to(DEVICE, dtype)


def batch(kind: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a call, and which of its tokens count."""
    ids = torch.randint(1, hf.VOCABULARY, (2, N), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    if kind == "none":
        return {"input_ids": ids}, mask.bool()
    mask[1, :100] = 0
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


def results(model: Any, attention: str, kind: str) -> Tensor:
    """Logits and gradients, one after the other."""
    given, mask = batch(kind)
    model.set_attn_implementation(attention)
    logits = model(**given).logits.float()
    draw = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    loss = (logits * draw)[mask].sum()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([logits[mask].flatten(), *(x.flatten().float() for x in found if x is not None)]).detach()


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", test_hybrid.CONFIGS)
def test_logits_and_gradients(name: str, kind: str) -> None:
    """In float32 those of "eager"; in bfloat16 no more than twice as far from these as "eager" is there."""
    expected = results(model_of(name), "eager", kind)
    assert error(results(model_of(name), "dilated", kind), expected) < 5 * test_hybrid.NEAR
    half = model_of(name, torch.bfloat16)
    ours, plain = ((results(half, x, kind) - expected).norm() for x in ("dilated", "eager"))
    assert ours <= 2 * plain


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo3", "modernbert"])
def test_compiled(name: str) -> None:
    torch.compiler.reset()
    model, (given, mask) = model_of(name), batch("left")
    model.set_attn_implementation("dilated")
    with torch.no_grad():
        expected = model(**given).logits[mask]
        found = torch.compile(model, fullgraph=True)(**given).logits[mask]
    assert error(found, expected) < test_hybrid.NEAR


@pytest.mark.parametrize("cache", ["dynamic", "static", "dilated"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4", "mistral"])
def test_generation(name: str, cache: str) -> None:
    """Of prompts that are padded on the left. transformers compiles steps with a static cache, into CUDA graphs."""
    torch.compiler.reset()
    model, (given, _) = model_of(name), batch("left")
    options: dict[str, Any] = {**given, "max_new_tokens": 30, "do_sample": False}
    model.set_attn_implementation("eager")
    expected = model.generate(**options)
    model.set_attn_implementation("dilated")
    more: dict[str, Any] = {"static": {"cache_implementation": "static"}}.get(cache, {})
    if cache == "dilated":
        more["past_key_values"] = DilatedCache(model.config)
    assert torch.equal(model.generate(**options, **more), expected)
