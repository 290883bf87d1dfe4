"""A problem too large for one kernel call is cut into pieces; on a CPU, keys and values that lie far apart are packed.

The limits are made tiny so that both show.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, testing
from dilated_attention.backends import aten, eager, sdpa
from dilated_attention.backends.problem import Limits, Masking
from dilated_attention.call import Call
from dilated_attention.pattern import RULES


@pytest.mark.parametrize(
    "limits", [Limits(batch=3), Limits(span=3_000), Limits(span=500)], ids=["batch", "span", "segment"]
)
@pytest.mark.parametrize("kv_heads", [6, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("masked", [False, True])
def test_pieces_change_nothing(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, kv_heads: int, rule: str, masked: bool
) -> None:
    """And keep within their limits: those of CUDA, made tiny and asked for on a CPU."""
    qkv = testing.make_qkv(2, 70, 6, 4, kv_heads=kv_heads)
    mask = torch.arange(70) % 5 == torch.tensor([[1], [3]]) if masked else None
    monkeypatch.setattr(sdpa, "limits", lambda call: limits)
    given: list[Tensor] = []
    forward = sdpa.forward

    def watched(kernels: Any, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Any:
        given.extend((q, k, v))
        return forward(kernels, q, k, v, masking)

    monkeypatch.setattr(sdpa, "forward", watched)
    testing.check(qkv, DilatedPattern(rule, (8, 33, 70), (1, 2, 3)), key_padding_mask=mask, backend="sdpa")
    assert max(x.shape[0] for x in given) <= (limits.batch or 100)
    apart = [x for x in given if span(x) >= (limits.span or 10**9)]
    assert all(x.shape[0] == 1 and x.shape[2] <= 6 // kv_heads and x.is_contiguous() for x in apart)


def span(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    return x.itemsize * sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "fused", "expanded"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("masked", [False, True])
def test_packing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str, rule: str, masked: bool
) -> None:
    qkv = testing.make_qkv(2, 70, 6, 4, kv_heads=3, layout=layout, dtype=dtype)
    mask = torch.arange(70) % 5 == torch.tensor([[1], [3]]) if masked else None
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


def test_only_rows_far_apart_that_are_read_often_are_packed() -> None:
    def packs(queries: int, rows: int, row_bytes: int, heads: int = 2) -> bool:
        q = torch.zeros(1, queries, heads, 16)
        k = torch.zeros(1, rows, row_bytes // 64, 16)[:, :, :heads]
        problem = aten.Dense(q, k, k, None, False, 1.0)
        found = aten._packed(problem)
        assert torch.equal(found.k, k)
        assert (found is problem) == (found.k is k)
        assert found is problem or all(x.transpose(1, 2).is_contiguous() for x in (found.k, found.v))
        return found is not problem

    assert packs(384, 384, 4096)
    assert packs(768, 768, 2048)
    assert not packs(384, 767, 2048)
    assert not packs(383, 400, 8192)
    assert not packs(400, 383, 8192)
    assert not packs(1, 5000, 4096)  # a step of decoding reads every key once
    wide = torch.zeros(1, 400, 1, 2048)  # packed as it is
    assert aten._packed(aten.Dense(wide, wide, wide, None, False, 1.0)).k is wide


def test_a_part_of_the_work_is_some_mebibytes_a_thread() -> None:
    q = torch.zeros(1, 8, 2, 64)
    call = Call(DilatedPattern.longnet([8], [1])).of(q, q, None, 0)
    limits = sdpa.limits(call)
    assert (limits.from_rows, limits.rows) == (384, 32768 * torch.get_num_threads())
    assert sdpa.limits(call._replace(device=torch.device("meta"))) == Limits()
    assert sdpa.limits(call._replace(device=torch.device("cuda"))) == Limits(8, batch=65535, span=2**31)


@pytest.mark.parametrize(
    ("keys", "causal", "calls"),
    [(64, False, [32, 32]), (192, False, [96, 96]), (64, True, [64]), (128, False, [128]), (75, False, [75])],
)
def test_keys_that_fill_half_a_tile_of_cudnn_are_two_calls(
    monkeypatch: pytest.MonkeyPatch, keys: int, causal: bool, calls: list[int]
) -> None:
    asked = []

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, *rest: Any, **_: Any
    ) -> Any:
        asked.append(k.shape[2])
        x = (t.transpose(1, 2) for t in (dout, q, k, v, out, stats.squeeze(-1)))
        return tuple(grad.transpose(1, 2) for grad in eager.backward((), *x, None, Masking(0.3, rest[-1])))

    monkeypatch.setattr(aten, "ops", SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward))
    q, k, v = testing.make_qkv(2, keys, 4, 8, kv_heads=2, dtype=torch.float64)
    out, lse = eager.forward((), q, k, v, Masking(0.3, causal))
    dout = torch.randn_like(out)
    got = aten.cudnn().backward(aten.Dense(q, k, v, None, causal, 0.3), out, lse, dout)
    assert asked == calls
    for x, expected in zip(got, eager.backward((), dout, q, k, v, out, lse, None, Masking(0.3, causal)), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-13)
