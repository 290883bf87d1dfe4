"""The modules without projections: exactly what the function gives, and what their constructors refuse."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dilated_attention as da
from dilated_attention import compat, testing
from dilated_attention import nn as modules
from dilated_attention.backends import eager, sdpa

DROPOUT = {da.DilatedAttention: "attention_dropout", da.ImprovedDilatedAttention: "dropout"}
BOTH = pytest.mark.parametrize("cls", DROPOUT)
LENGTHS, RATES = [4, 8], [1, 2]
PATTERN = da.DilatedPattern.head_groups(LENGTHS, RATES)


@BOTH
@pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager"])
def test_is_the_function(cls: Any, rule: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and on the backend asked for."""
    qkv, ran = testing.make_qkv(2, 13, 4, 8), set()
    for module in (eager, sdpa):
        monkeypatch.setattr(module, "forward", lambda *x, m=module, f=module.forward: ran.add(m) or f(*x))
    made = cls(LENGTHS, RATES, rule=rule, backend=backend, softmax_scale=0.7)
    got = testing.run(made, qkv, qkv[2])
    assert ran == {eager if backend == "eager" else sdpa}
    expected = testing.run(lambda *x: da.dilated_attention(*x, made.pattern, scale=0.7, backend=backend), qkv, qkv[2])
    assert same(got, expected)
    assert not made.state_dict()
    for part in (rule, "[4, 8]", "[1, 2]", "softmax_scale=0.7", "dropout=0.0", f"backend={backend!r}"):
        assert part in repr(made)


def same(got: testing.Results, expected: testing.Results) -> bool:
    return all(torch.equal(value, getattr(expected, name)) for name, value in got.items())


@BOTH
def test_dropout_is_for_training_and_all_compiles_as_one_graph(cls: Any) -> None:
    qkv, module = testing.make_qkv(2, 13, 4, 8), cls(LENGTHS, RATES)
    options = {"is_causal": True, "key_padding_mask": torch.arange(13).expand(2, -1) > 10}
    compiled, module.dropout = torch.compile(module, fullgraph=True, backend="aot_eager"), 0.4

    def run(attention: Any, **more: Any) -> testing.Results:
        torch.manual_seed(1)
        return testing.run(lambda *x: attention(*x, **options, **more), qkv, qkv[2])

    for dropout_p in (0.4, 0.0):
        expected = run(da.dilated_attention, pattern=PATTERN, dropout_p=dropout_p)
        assert same(run(module), expected)
        assert same(run(compiled), expected)
        module.eval()


@pytest.mark.parametrize("use_tf32", [True, False])
def test_use_tf32_leaves_the_process_alone_and_says_so(use_tf32: bool) -> None:
    restore = torch.get_float32_matmul_precision()
    before = "highest" if use_tf32 else "high"  # not what the module might want to set
    torch.set_float32_matmul_precision(before)
    with pytest.warns(da.DilatedAttentionWarning, match=f"use_tf32={use_tf32} sets nothing"):
        module = da.ImprovedDilatedAttention(LENGTHS, RATES, use_tf32=use_tf32)
    with pytest.raises(TypeError, match=r"use_tf32 must be True or False, got 0\.5"):
        da.ImprovedDilatedAttention(LENGTHS, RATES, 0.1, 0.5)  # type: ignore[arg-type]
    with warnings.catch_warnings(action="error"):  # nothing to say
        da.ImprovedDilatedAttention(LENGTHS, RATES, use_tf32=not use_tf32)
        da.ImprovedDilatedAttention(LENGTHS, RATES)
    after = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(restore)
    assert after == before
    assert f"use_tf32={use_tf32}" in repr(module)


@BOTH
def test_errors(cls: Any) -> None:
    """The rest is that of a pattern."""
    for lists, options, message in (
        (([4], [1, 2]), {}, "1 entries and dilation_rates 2"),
        ((LENGTHS, [True, 2]), {}, "every entry of dilation_rates must be a whole number, got True"),
        ((LENGTHS, RATES), {"rule": "fixed"}, "unknown rule 'fixed': use one of longnet"),
        ((LENGTHS, RATES), {"backend": "fast"}, "unknown backend 'fast': use one of auto"),
        ((LENGTHS, RATES, 0.5, None, "longnet"), {}, "positional arguments"),  # rule goes by keyword
        ((LENGTHS, RATES), {DROPOUT[cls]: 1.1}, r"dropout must be a number in \[0, 1\], got 1.1"),
        ((LENGTHS, RATES), {"softmax_scale": -1.0}, "^softmax_scale must be a finite number of 0 or more"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            cls(*lists, **options)
    few, qkv = testing.make_qkv(1, 8, 1, 4), testing.make_qkv(1, 8, 2, 4)
    for given, options, message in (
        (few, {}, r"head_groups needs .* got 2 branches and 1 key/value heads"),
        (qkv, {"key_padding_mask": torch.zeros(1, 8)}, "key_padding_mask must be bool"),
        ((*qkv, False, torch.zeros(1, 8, dtype=torch.bool)), {}, "positional arguments"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            cls(LENGTHS, RATES)(*given, **options)


@pytest.mark.parametrize(
    "name", sorted({*modules.__all__, *compat.__all__} - {"RingAdvancedDistributedDilatedAttention"})
)
def test_no_keyword_is_taken_in_silence(name: str) -> None:
    """Unknown ones are refused by name; tests/nn/test_mesh.py has the class on a mesh."""
    lists = () if name == "RingAttentionV2Simple" else (LENGTHS, RATES)
    shape, unknown = ((8, 2), ("softmax_scale",)) if "Multihead" in name else ((), ("embed_dim",))
    for word in ("nonsense", "backends", "Rule", "scale", *unknown):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{word}'"):
            getattr(da, name)(*shape, *lists, **{word: 0.5})
