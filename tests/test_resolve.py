"""One door: what passed the checks is not checked again, and what is wrong is refused however it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import dilated_attention as da
from dilated_attention import resolve, testing
from tests.on_gpu import poisoned

PATTERN = da.DilatedPattern.longnet([8, 16], [1, 2])


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    resolve._known.cache_clear()


def test_an_equal_call_is_not_checked_again_and_another_is(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, checked = testing.make_qkv(1, 20, 4, 8), mock.Mock(wraps=resolve._checked)
    monkeypatch.setattr(resolve, "_checked", checked)
    mask, offset = torch.zeros(1, 20, dtype=torch.bool), torch.tensor([3])
    calls: list[Callable[..., Any]] = [
        da.dilated_attention,
        partial(da.dilated_attention, scale=0.5),
        partial(da.dilated_attention, key_padding_mask=mask),
        partial(da.dilated_attention, cu_seqlens=[0, 5, 20]),
        partial(da.dilated_attention, cu_seqlens=[0, 6, 20]),
        lambda q, k, v, pattern: da.dilated_attention(q[:, :2], k, v, pattern, query_offset=4),
        lambda q, k, v, pattern: da.dilated_attention(q[:, :2], k, v, pattern, query_offset=offset),
        lambda *given: _under(sdpa_kernel(SDPBackend.MATH), *given),
        lambda *given: _under(torch.autocast("cpu", torch.bfloat16), *given),
        lambda *given: _under(poisoned(), *given),
    ]
    first, again = ([call(*qkv, PATTERN) for call in calls] for _ in range(2))
    assert checked.call_count == len(calls)
    assert all(map(torch.equal, first, again))
    assert first[8].dtype is torch.bfloat16


def _under(context: Any, *given: Any) -> torch.Tensor:
    with context:
        return da.dilated_attention(*given)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"scale": 1.0}, {"scale": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"is_causal": True}, {"is_causal": 1}),
        ({"enable_gqa": False}, {"enable_gqa": 0.0}),
        ({}, {"scale": [1.0]}),
        ({}, {"pattern": [8, 16]}),
    ],
)
def test_equal_is_not_the_same(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    qkv = testing.make_qkv(1, 20, 4, 8)
    da.dilated_attention(*qkv, **{"pattern": PATTERN, **right})
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        da.dilated_attention(*qkv, **{"pattern": PATTERN, **wrong})


def test_other_tensors_are_checked() -> None:
    q, k, v = testing.make_qkv(1, 20, 4, 8)
    da.dilated_attention(q, k, v, PATTERN)
    for bad in (None, q.to_sparse(), torch.nested.nested_tensor([q[0]]), q[..., :7], q.double()):
        with pytest.raises((TypeError, ValueError)):
            da.dilated_attention(q, k, bad, PATTERN)  # type: ignore[arg-type]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        da.dilated_attention(forward_ad.make_dual(q, q), k, v, PATTERN)


WRONG = {  # arguments of a compiled call, and what the error says
    "shapes": ({"value": torch.zeros(1, 20, 4, 7)}, "key and value must have one shape"),
    "a flag": ({"is_causal": 1}, "is_causal must be True or False"),
    "integers": ({name: torch.zeros(1, 20, 4, 8, dtype=torch.int64) for name in ("query", "key", "value")}, "float64"),
    "layouts": ({"key": torch.zeros(1, 20, 4, 8).to_sparse()}, "to_dense"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_compiled_call_says_what_is_wrong(which: str) -> None:
    torch._dynamo.reset()
    given, message = WRONG[which]
    qkv = dict(zip(("query", "key", "value"), testing.make_qkv(1, 20, 4, 8), strict=True))
    compiled = torch.compile(da.dilated_attention, backend="eager")
    with pytest.raises((TypeError, ValueError), match=message):
        compiled(pattern=PATTERN, **{**qkv, **given})


def test_a_compiler_sees_little() -> None:
    """All that it sees is checked again at every call."""
    seen: list[Any] = []
    attend = torch.compile(
        lambda *qkv: da.dilated_attention(*qkv, PATTERN, is_causal=True), backend="eager", fullgraph=True,
        options={"guard_filter_fn": lambda guards: (seen.extend(guards), [True] * len(guards))[1]},
    )  # fmt: skip
    attend(*testing.make_qkv(1, 20, 4, 8))
    ours = {guard.name for guard in seen if "dilated_attention" in guard.name or "PATTERN" in guard.name}
    assert 0 < len(ours) <= 90, sorted(ours)  # torch 2.13: 80, 2.15: 84
