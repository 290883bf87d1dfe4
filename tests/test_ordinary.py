"""The short way of ordinary calls changes nothing: what was right before a call is wrong after it as well."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import dilated_attention as da
from dilated_attention import functional, ordinary, testing

PATTERN = da.DilatedPattern.longnet([8, 16], [1, 2])


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    ordinary.known_calls.clear()


def facts(*qkv: torch.Tensor, **given: Any) -> Any:
    return ordinary.facts_of(*qkv, PATTERN, False, given.get("scale"), 0.0, False)


def test_a_second_call_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = testing.make_qkv(1, 20, 4, 8)
    first = da.dilated_attention(*qkv, PATTERN)
    monkeypatch.setattr(functional, "_checked", lambda *_, **__: pytest.fail("it was checked"))
    assert torch.equal(da.dilated_attention(*qkv, PATTERN), first)


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
    for bad in (None, q.to_sparse(), torch.nested.nested_tensor([q[0]]), q[..., :7], q[:, :, :2], q.double(), q[0]):
        with pytest.raises((TypeError, ValueError)):
            da.dilated_attention(q, k, bad, PATTERN)  # type: ignore[arg-type]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        da.dilated_attention(forward_ad.make_dual(q, q), k, v, PATTERN)


def test_settings_of_torch_are_among_the_facts() -> None:
    qkv = testing.make_qkv(1, 20, 4, 8)
    before = facts(*qkv)
    with sdpa_kernel(SDPBackend.MATH):
        assert facts(*qkv) != before
    torch.use_deterministic_algorithms(True)
    try:
        assert facts(*qkv) != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert facts(*qkv) == before != facts(*qkv, scale=0.5)


def test_autocast_is_noticed() -> None:
    qkv = testing.make_qkv(1, 20, 4, 8)
    da.dilated_attention(*qkv, PATTERN)
    with torch.autocast("cpu", torch.bfloat16):
        assert da.dilated_attention(*qkv, PATTERN).dtype is torch.bfloat16
        mixed = (qkv[0].bfloat16(), *qkv[1:])
        assert facts(*mixed) is None, "a cast is to be made"


def test_a_warning_comes_each_time() -> None:
    qkv = testing.make_qkv(1, 4, 6, 8)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            da.dilated_attention(*qkv, PATTERN)
        assert len(found) == 1


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordinary, "MOST_KNOWN", 3)
    for tokens in range(20, 28):
        da.dilated_attention(*testing.make_qkv(1, tokens, 4, 8), PATTERN)
        assert 0 < len(ordinary.known_calls) <= 3


def test_gradients_are_wanted_or_not() -> None:
    """What is known of a call does not say whether it is differentiated."""
    qkv = testing.make_qkv(1, 20, 4, 8)
    da.dilated_attention(*qkv, PATTERN)
    leaves = [x.clone().requires_grad_() for x in qkv]
    assert da.dilated_attention(*leaves, PATTERN).requires_grad
    with torch.no_grad():
        assert not da.dilated_attention(*leaves, PATTERN).requires_grad


WRONG = {  # arguments of a compiled call, and what the error says
    "shapes": ({"value": torch.zeros(1, 20, 4, 7)}, "key and value must have one shape"),
    "heads": ({"query": torch.zeros(1, 20, 6, 8), "enable_gqa": False}, "set enable_gqa=True"),
    "a flag": ({"is_causal": 1}, "is_causal must be True or False"),
    "integers": ({name: torch.zeros(1, 20, 4, 8, dtype=torch.int64) for name in ("query", "key", "value")}, "float64"),
    "layouts": ({"key": torch.zeros(1, 20, 4, 8).to_sparse()}, "to_dense"),
    "a probability": ({"dropout_p": 2.0}, "dropout_p must be a number"),
}


@pytest.mark.parametrize("which", WRONG)
def test_no_wrong_call_is_right(which: str) -> None:
    """Asked of it directly: a compiler may leave such a call before it asks."""
    defaults = {"is_causal": False, "scale": None, "dropout_p": 0.0, "enable_gqa": False, "backend": "auto"}
    given = dict(zip(("query", "key", "value"), testing.make_qkv(1, 20, 4, 8), strict=True)) | defaults
    assert ordinary.is_right(pattern=PATTERN, **given)
    assert not ordinary.is_right(pattern=PATTERN, **{**given, **WRONG[which][0]})


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
    assert 0 < len(ours) <= 40, sorted(ours)
