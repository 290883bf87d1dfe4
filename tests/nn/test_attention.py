"""The modules without parameters: the oracle's results, and exactly what the function gives."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dilated_attention as da
from dilated_attention import (
    DilatedAttention,
    DilatedAttentionWarning,
    DilatedPattern,
    ImprovedDilatedAttention,
    compat,
    dilated_attention,
    testing,
)
from dilated_attention import nn as modules
from dilated_attention.backends import eager, sdpa

ON_A_MESH = "RingAdvancedDistributedDilatedAttention"
BOTH = pytest.mark.parametrize("cls", [DilatedAttention, ImprovedDilatedAttention])
RULES = pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
LENGTHS, RATES = [4, 8], [1, 2]


def pattern(rule: str = "head_groups") -> DilatedPattern:
    return DilatedPattern(rule, tuple(LENGTHS), tuple(RATES))


@BOTH
@RULES
@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager"])
def test_is_the_function(cls: Any, rule: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and on the backend asked for."""
    qkv = testing.make_qkv(2, 13, 4, 8)
    dout = torch.randn(2, 13, 4, 8)
    ran = set()
    for module in (eager, sdpa):
        monkeypatch.setattr(module, "forward", lambda *x, m=module, f=module.forward: ran.add(m) or f(*x))
    got = testing.run(cls(LENGTHS, RATES, rule=rule, backend=backend), qkv, dout)
    assert ran == {eager if backend == "eager" else sdpa}
    expected = testing.run(lambda *x: dilated_attention(*x, pattern(rule), backend=backend), qkv, dout)
    for name, value in expected.items():
        assert torch.equal(getattr(got, name), value), name


def test_softmax_scale() -> None:
    qkv = testing.make_qkv(2, 9, 4, 4, dtype=torch.float64)
    for scale in (0.0, 0.7, 2):
        got = DilatedAttention(LENGTHS, RATES, scale)(*qkv)
        assert torch.equal(got, dilated_attention(*qkv, pattern(), scale=scale))


@pytest.mark.parametrize(
    "module",
    [DilatedAttention(LENGTHS, RATES, attention_dropout=0.4), ImprovedDilatedAttention(LENGTHS, RATES, 0.4)],
    ids=lambda module: type(module).__name__,
)
def test_dropout_is_for_training(module: nn.Module) -> None:
    qkv = testing.make_qkv(2, 13, 4, 8)

    def seeded(seed: int, attention: Any = module) -> Tensor:
        torch.manual_seed(seed)
        return attention(*qkv)

    expected = seeded(1, lambda *x: dilated_attention(*x, pattern(), dropout_p=0.4))
    assert torch.equal(seeded(1), expected)
    assert not torch.equal(seeded(2), expected)
    module.eval()
    assert torch.equal(seeded(1), dilated_attention(*qkv, pattern()))


@pytest.mark.parametrize("use_tf32", [True, False])
def test_use_tf32_leaves_the_process_alone_and_says_so(use_tf32: bool) -> None:
    def settings() -> list[str]:
        every, cudnn = torch.backends, torch.backends.cudnn
        places = (every, every.cuda.matmul, every.mkldnn.matmul, cudnn, cudnn.conv, cudnn.rnn)
        return [torch.get_float32_matmul_precision(), *(place.fp32_precision for place in places)]

    restore = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if use_tf32 else "high")  # not what the module might want to set
    before = settings()
    with pytest.warns(DilatedAttentionWarning, match=f"use_tf32={use_tf32} sets nothing"):
        module = ImprovedDilatedAttention(LENGTHS, RATES, use_tf32=use_tf32)
    with warnings.catch_warnings(action="error"):  # nothing to say
        ImprovedDilatedAttention(LENGTHS, RATES, use_tf32=not use_tf32)
        ImprovedDilatedAttention(LENGTHS, RATES)
    qkv = testing.make_qkv(1, 8, 2, 4)
    out = module(*qkv)
    after = settings()
    torch.set_float32_matmul_precision(restore)
    assert after == before
    assert module.use_tf32 is use_tf32
    assert torch.equal(out, dilated_attention(*qkv, pattern()))


@BOTH
def test_copies_and_pickles(cls: Any) -> None:
    module = cls(LENGTHS, RATES, rule="longnet", backend="eager").eval()
    qkv = testing.make_qkv(2, 13, 4, 8)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is cls
        assert not other.training
        assert repr(other) == repr(module)
        assert torch.equal(other(*qkv), module(*qkv))
    assert module.state_dict() == {}


@pytest.mark.parametrize(("cls", "dropout"), [(DilatedAttention, 0.0), (ImprovedDilatedAttention, 0.5)])
def test_compiles_as_one_graph(cls: Any, dropout: float) -> None:
    module = cls(LENGTHS, RATES)
    module.dropout = dropout
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    qkv, mask = testing.make_qkv(2, 13, 4, 8), torch.arange(13).expand(2, -1) > 10

    def run(attention: Any) -> testing.Results:
        torch.manual_seed(0)
        return testing.run(lambda *x: attention(*x, True, key_padding_mask=mask), qkv, qkv[2])

    for (name, value), (_, expected) in zip(run(compiled).items(), run(module).items(), strict=True):
        assert torch.equal(value, expected), name


def test_repr() -> None:
    shown = repr(DilatedAttention(LENGTHS, RATES, 0.5, 0.1, rule="longnet", backend="eager"))
    for part in ("longnet", "[4, 8]", "[1, 2]", "softmax_scale=0.5", "dropout=0.1", "backend='eager'"):
        assert part in shown
    assert "use_tf32=False" in repr(ImprovedDilatedAttention(LENGTHS, RATES, use_tf32=False))


@BOTH
def test_errors(cls: Any) -> None:
    """Those of both; the rest is that of a pattern."""
    for lists, options, kind, message in (
        (([4], [1, 2]), {}, ValueError, "1 entries and dilation_rates 2"),
        ((LENGTHS, [True, 2]), {}, TypeError, "every entry of dilation_rates must be a whole number, got True"),
        ((LENGTHS, RATES), {"rule": "fixed"}, ValueError, "unknown rule 'fixed': use one of longnet"),
        ((LENGTHS, RATES), {"backend": "fast"}, ValueError, "unknown backend 'fast': use one of auto"),
        ((LENGTHS, RATES, 0.5, True, "longnet"), {}, TypeError, "positional arguments"),  # rule goes by keyword
    ):
        with pytest.raises(kind, match=message):
            cls(*lists, **options)
    module, (query, key, value) = cls(LENGTHS, RATES), testing.make_qkv(1, 8, 2, 4)
    with pytest.raises(ValueError, match=r"head_groups needs .* got 2 branches and 1 key/value heads"):
        module(*testing.make_qkv(1, 8, 1, 4))
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        module(query, key, value, key_padding_mask=torch.zeros(1, 8))
    with pytest.raises(TypeError, match="positional arguments"):
        module(query, key, value, False, torch.zeros(1, 8, dtype=torch.bool))


@pytest.mark.parametrize("name", sorted({*modules.__all__, *compat.__all__} - {ON_A_MESH}))
def test_no_keyword_is_taken_in_silence(name: str) -> None:
    """Unknown ones are refused by name; tests/nn/test_mesh.py has the class on a mesh."""
    lists = () if name == "RingAttentionV2Simple" else (LENGTHS, RATES)
    shape, unknown = ((8, 2), ("softmax_scale",)) if "Multihead" in name else ((), ("embed_dim",))
    for word in ("nonsense", "backends", "Rule", "scale", *unknown):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{word}'"):
            getattr(da, name)(*shape, *lists, **{word: 0.5})


@pytest.mark.parametrize(
    "cls",
    [
        DilatedAttention,
        ImprovedDilatedAttention,
        modules.RingDilatedAttention,
        compat.RingDilatedAttentionV2Collective,
        compat.RingDilatedAttentionProduction,
    ],
)
def test_modules_without_projections_honour_a_scale(cls: Any) -> None:
    qkv = testing.make_qkv(1, 13, 4, 8)
    module = cls(LENGTHS, RATES, softmax_scale=0.7)
    assert torch.equal(module(*qkv), dilated_attention(*qkv, pattern(), scale=0.7))


def test_messages_name_what_the_caller_wrote() -> None:
    with pytest.raises(ValueError, match=r"attention_dropout must be a number in \[0, 1\], got 1.1"):
        DilatedAttention(LENGTHS, RATES, attention_dropout=1.1)
    with pytest.raises(ValueError, match=r"dropout must be a number in \[0, 1\], got nan"):
        ImprovedDilatedAttention(LENGTHS, RATES, dropout=float("nan"))
    with pytest.raises(ValueError, match="scale must be a finite number of 0 or more, got -1"):
        DilatedAttention(LENGTHS, RATES, softmax_scale=-1.0)
    with pytest.raises(TypeError, match=r"use_tf32 must be True or False, got 0\.5"):
        ImprovedDilatedAttention(LENGTHS, RATES, 0.1, 0.5)  # type: ignore[arg-type]
