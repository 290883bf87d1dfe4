"""What one call of a kernel takes: larger problems are cut; on a CPU, keys and values that lie far apart are packed.

The limits are made tiny so that both show.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, testing
from dilated_attention.backends import aten, eager, sdpa
from dilated_attention.backends.problem import Limits, Outputs, Problem
from dilated_attention.backends.tensors import span
from dilated_attention.call import Call
from dilated_attention.pattern import Rule

MASK = torch.arange(70) % 5 == torch.tensor([[1], [3]])


def spied(monkeypatch: pytest.MonkeyPatch, *given: Any, **options: Any) -> dict[str, list[list[Tensor]]]:
    """Checks a call; and what each call of sdpa's forward and backward is given: tensors of rows, no lse, no dlse."""
    seen: dict[str, list[list[Tensor]]] = {"forward": [], "backward": []}

    def recorded(name: str, function: Any, *given: Any) -> Any:
        _, problem, *results = given
        tensors = [problem.q, problem.k, problem.v, *(x for some in results for x in (some.out, some.dout))]
        seen[name].append(tensors)
        return function(*given)

    with monkeypatch.context() as patch:
        for name in seen:
            patch.setattr(sdpa, name, functools.partial(recorded, name, getattr(sdpa, name)))
        testing.check(*given, **options, backend="sdpa")
    return seen


@pytest.mark.parametrize(
    ("limits", "rule"),
    [(Limits(batch=3), "longnet"), (Limits(span=3000), "torchscale"), (Limits(span=800), "head_groups")],
)
@pytest.mark.parametrize(("kind", "kv_heads"), [("plain", 6), ("masked", 3), ("causal", 3), ("few", 6)])
def test_cutting_keeps_within_limits_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, rule: Rule, kind: str, kv_heads: int
) -> None:
    q, k, v = testing.make_qkv(2, 70, 6, 4, kv_heads=kv_heads)
    given = (q[:, :40] if kind == "few" else q, k, v), DilatedPattern.of(rule, (8, 33, 70), (1, 2, 3))
    options = {"is_causal": kind in ("causal", "few"), "key_padding_mask": MASK if kind == "masked" else None}
    uncut = spied(monkeypatch, *given, **options)
    monkeypatch.setattr(sdpa, "limits", lambda call: limits)
    cut = spied(monkeypatch, *given, **options)
    assert len(uncut["forward"]) < len(cut["forward"]) == len(cut["backward"])
    for x in [x for calls in cut.values() for tensors in calls for x in tensors]:
        assert limits.batch is None or x.shape[0] <= limits.batch
        assert limits.span is None or span(x) < limits.span


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_limits_of_a_device(device: str) -> None:
    call = Call(DilatedPattern.longnet([8], [1]), head_dim=64, dtype=torch.float32, device=torch.device(device))
    some_mebibytes = 32768 * torch.get_num_threads()
    expected = {"cpu": Limits(from_rows=384, rows=some_mebibytes), "cuda": Limits(8, batch=65535, span=2**31)}
    assert sdpa.limits(call) == expected.get(device, Limits())


@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "contiguous"), (torch.float64, "fused"), (torch.bfloat16, "expanded")]
)
@pytest.mark.parametrize(("rule", "masked"), [("longnet", False), ("torchscale", True), ("head_groups", False)])
def test_packing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str, rule: str, masked: bool
) -> None:
    qkv = testing.make_qkv(2, 70, 6, 4, kv_heads=3, layout=layout, dtype=dtype)
    mask = MASK if masked else None
    pattern = DilatedPattern(rule, (8, 33, 70), (1, 2, 3))
    monkeypatch.setattr(aten, "PACKED_ROWS", 9)
    monkeypatch.setattr(aten, "PACKED_SPAN", 1)
    monkeypatch.setattr(sdpa, "CALL_BYTES", 200)
    packed = []
    pack = aten._packed
    monkeypatch.setattr(aten, "_packed", lambda x: packed.append(pack(x) is not x) or pack(x))
    testing.check(qkv, pattern, key_padding_mask=mask, is_causal=not masked, backend="sdpa")
    assert any(packed)
    assert not all(packed)


@pytest.mark.parametrize(
    ("keys", "causal", "calls"),
    [(64, False, [32, 32]), (192, False, [96, 96]), (64, True, [64]), (128, False, [128])],
)
def test_keys_that_fill_half_a_tile_of_cudnn_are_two_calls(
    monkeypatch: pytest.MonkeyPatch, keys: int, causal: bool, calls: list[int]
) -> None:
    asked = []

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, *rest: Any, **_: Any
    ) -> Any:
        asked.append(k.shape[2])
        *qkv, out, lse, dout = (t.transpose(1, 2) for t in (q, k, v, out, stats.squeeze(-1), dout))
        grads = eager.backward((), Problem(*qkv, 0.3, rest[-1]), Outputs(out, lse, dout))
        return tuple(grad.transpose(1, 2) for grad in grads)

    monkeypatch.setattr(aten, "ops", SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward))
    q, k, v = testing.make_qkv(2, keys, 4, 8, kv_heads=2, dtype=torch.float64)
    problem = Problem(q, k, v, 0.3, causal)
    out, lse = eager.forward((), problem)
    results = Outputs(out, lse, torch.randn_like(out))
    got = sdpa.backward((aten.CUDNN,), problem, results)
    assert asked == calls
    for x, expected in zip(got, eager.backward((), problem, results), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-13)
