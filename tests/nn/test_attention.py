"""The modules without parameters: the oracle's results, and exactly what the function gives."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilated_attention import (
    DilatedAttention,
    DilatedPattern,
    ImprovedDilatedAttention,
    dilated_attention,
    testing,
)
from dilated_attention.backends import eager, sdpa

BOTH = pytest.mark.parametrize("cls", [DilatedAttention, ImprovedDilatedAttention])
RULES = pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
LENGTHS, RATES = [4, 8], [1, 2]


def pattern(rule: str = "head_groups") -> DilatedPattern:
    return DilatedPattern(rule, tuple(LENGTHS), tuple(RATES))


def padding(samples: int, tokens: int) -> Tensor:
    mask = torch.zeros(samples, tokens, dtype=torch.bool)
    mask[0, -2:] = True
    mask[-1, 1] = True
    return mask


@BOTH
@RULES
@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager"])
def test_is_the_function(cls: Any, rule: str, backend: str) -> None:
    qkv = testing.make_qkv(2, 13, 4, 8)
    dout = torch.randn(2, 13, 4, 8)
    module = cls(LENGTHS, RATES, rule=rule, backend=backend)
    got = testing.run(module, qkv, dout)
    expected = testing.run(lambda *x: dilated_attention(*x, pattern(rule), backend=backend), qkv, dout)
    for name, value in expected.items():
        assert torch.equal(getattr(got, name), value), name


@BOTH
def test_runs_on_the_backend_asked_for(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = testing.make_qkv(1, 8, 2, 4)
    ran = []
    for backend in (eager, sdpa):
        original = backend.forward
        monkeypatch.setattr(
            backend, "forward", lambda *args, b=backend, f=original: ran.append(b.__name__.split(".")[-1]) or f(*args)
        )
    cls(LENGTHS, RATES, backend="eager")(*qkv)
    assert set(ran) == {"eager"}
    ran.clear()
    cls(LENGTHS, RATES)(*qkv)
    assert set(ran) == {"sdpa"}, "the fastest one for this call"


def test_both_are_one_function() -> None:
    qkv = testing.make_qkv(2, 13, 4, 8)
    a = DilatedAttention(LENGTHS, RATES)(*qkv)
    assert torch.equal(a, ImprovedDilatedAttention(LENGTHS, RATES)(*qkv))


@pytest.mark.parametrize("scale", [0.0, 0.7, 2])
def test_softmax_scale(scale: float) -> None:
    qkv = testing.make_qkv(2, 9, 4, 4, dtype=torch.float64)
    dout = torch.randn(2, 9, 4, 4, dtype=torch.float64)
    got = testing.run(DilatedAttention(LENGTHS, RATES, scale), qkv, dout)
    testing.assert_exact(got, testing.oracle(qkv, pattern(), dout, scale=scale))


@pytest.mark.parametrize(
    "module",
    [DilatedAttention(LENGTHS, RATES, attention_dropout=0.4), ImprovedDilatedAttention(LENGTHS, RATES, 0.4)],
    ids=lambda module: type(module).__name__,
)
def test_dropout_is_for_training(module: nn.Module) -> None:
    qkv = testing.make_qkv(2, 13, 4, 8)

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return module(*qkv)

    module.train()
    torch.manual_seed(1)
    expected = dilated_attention(*qkv, pattern(), dropout_p=0.4)
    assert torch.equal(seeded(1), expected)
    assert torch.equal(seeded(1), expected)
    assert not torch.equal(seeded(2), expected)
    module.eval()
    assert torch.equal(seeded(1), dilated_attention(*qkv, pattern()))


def test_everything_dropped_is_zero() -> None:
    qkv = testing.make_qkv(1, 8, 2, 4)
    assert not DilatedAttention(LENGTHS, RATES, attention_dropout=1.0)(*qkv).any()


@pytest.mark.parametrize("use_tf32", [True, False])
def test_use_tf32_leaves_the_process_alone(use_tf32: bool) -> None:
    def settings() -> tuple[Any, ...]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return (
            torch.get_float32_matmul_precision(),
            matmul.fp32_precision,
            cudnn.fp32_precision,
            cudnn.conv.fp32_precision,
            cudnn.rnn.fp32_precision,
            torch.backends.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
        )

    restore = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if use_tf32 else "high")  # not what the module might want to set
    before = settings()
    module = ImprovedDilatedAttention(LENGTHS, RATES, use_tf32=use_tf32)
    qkv = testing.make_qkv(1, 8, 2, 4)
    out = module(*qkv)
    after = settings()
    torch.set_float32_matmul_precision(restore)
    assert after == before
    assert module.use_tf32 is use_tf32
    assert torch.equal(out, dilated_attention(*qkv, pattern()))


@BOTH
def test_autocast(cls: Any) -> None:
    qkv = testing.make_qkv(2, 13, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = cls(LENGTHS, RATES)(*qkv)
    assert torch.equal(out, cls(LENGTHS, RATES)(*(x.bfloat16() for x in qkv)))


@BOTH
def test_copies_and_pickles(cls: Any) -> None:
    module = cls(LENGTHS, RATES, rule="longnet", backend="eager").eval()
    qkv = testing.make_qkv(2, 13, 4, 8)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert type(other) is cls
        assert not other.training
        assert repr(other) == repr(module)
        assert torch.equal(other(*qkv), module(*qkv))
    assert module.state_dict() == {}


@BOTH
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiles_as_one_graph(cls: Any, dropout: float) -> None:
    module = cls(LENGTHS, RATES)
    module.dropout = dropout
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    qkv = testing.make_qkv(2, 13, 4, 8)
    dout = torch.randn(2, 13, 4, 8)
    mask = padding(2, 13)

    def run(attention: Any) -> testing.Results:
        torch.manual_seed(0)
        return testing.run(lambda *x: attention(*x, True, key_padding_mask=mask), qkv, dout)

    expected, got = run(module), run(compiled)
    for name, value in expected.items():
        assert torch.equal(getattr(got, name), value), name


def test_repr() -> None:
    shown = repr(DilatedAttention(LENGTHS, RATES, 0.5, 0.1, rule="longnet", backend="eager"))
    for part in ("longnet", "[4, 8]", "[1, 2]", "softmax_scale=0.5", "dropout=0.1", "backend='eager'"):
        assert part in shown
    assert "use_tf32=False" in repr(ImprovedDilatedAttention(LENGTHS, RATES, use_tf32=False))


@BOTH
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([], []), {}, ValueError, "segment_lengths is empty"),
        (([4], [1, 2]), {}, ValueError, "1 entries and dilation_rates 2"),
        (([4, 0], RATES), {}, ValueError, "segment_lengths must be 1 or more, got 0"),
        ((LENGTHS, [1, -2]), {}, ValueError, "dilation_rates must be 1 or more, got -2"),
        (([4, 8.0], RATES), {}, TypeError, "every entry of segment_lengths must be a whole number, got 8.0"),
        ((LENGTHS, [True, 2]), {}, TypeError, "every entry of dilation_rates must be a whole number, got True"),
        ((range(1, 66), range(1, 66)), {}, ValueError, "at most 64 branches, got 65"),
        ((LENGTHS, RATES), {"rule": "fixed"}, ValueError, "unknown rule 'fixed': use one of longnet"),
        ((LENGTHS, RATES), {"backend": "fast"}, ValueError, "unknown backend 'fast': use one of auto"),
    ],
)
def test_constructor_errors(
    cls: Any, arguments: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cls(*arguments, **options)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_dropout_errors(value: float) -> None:
    with pytest.raises(ValueError, match=r"must be a number in \[0, 1\], got"):
        DilatedAttention(LENGTHS, RATES, attention_dropout=value)
    with pytest.raises(ValueError, match=r"must be a number in \[0, 1\], got"):
        ImprovedDilatedAttention(LENGTHS, RATES, dropout=value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_scale_errors(value: float) -> None:
    with pytest.raises(ValueError, match="scale must be a finite number of 0 or more, got"):
        DilatedAttention(LENGTHS, RATES, softmax_scale=value)


def test_use_tf32_errors() -> None:
    with pytest.raises(TypeError, match=r"use_tf32 must be True or False, got 0\.5"):
        ImprovedDilatedAttention(LENGTHS, RATES, 0.1, 0.5)  # type: ignore[arg-type]


@BOTH
def test_rule_and_backend_go_by_keyword(cls: Any) -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        cls(LENGTHS, RATES, 0.5, True, "longnet")


@BOTH
def test_errors_of_the_call(cls: Any) -> None:
    module = cls(LENGTHS, RATES)
    with pytest.raises(ValueError, match="head_groups deals 2 branches to 1 key/value heads"):
        module(*testing.make_qkv(1, 8, 1, 4))
    query, key, value = testing.make_qkv(1, 8, 2, 4)
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        module(query, key, value, key_padding_mask=torch.zeros(1, 8))
    with pytest.raises(TypeError, match="positional arguments"):
        module(query, key, value, False, torch.zeros(1, 8, dtype=torch.bool))
