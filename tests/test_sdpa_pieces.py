"""A problem too large for one kernel call is cut into pieces; the limits are made tiny so that this shows on a CPU."""

import pytest
import torch

from dilated_attention import DilatedPattern, testing
from dilated_attention.backends import sdpa
from dilated_attention.pattern import RULES


@pytest.mark.parametrize("limits", [(3, 2**31), (65535, 3_000), (65535, 500)], ids=["batch", "span", "segment"])
@pytest.mark.parametrize("kv_heads", [6, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("masked", [False, True])
def test_pieces_change_nothing(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], kv_heads: int, rule: str, masked: bool
) -> None:
    qkv = testing.make_qkv(2, 70, 6, 4, kv_heads=kv_heads)
    mask = torch.arange(70) % 5 == torch.tensor([[1], [3]]) if masked else None
    monkeypatch.setitem(sdpa.LIMITS, "cpu", limits)
    counted = []
    cut = sdpa._pieces
    monkeypatch.setattr(sdpa, "_pieces", lambda *x: counted.append(len(cut(*x))) or cut(*x))
    testing.check(qkv, DilatedPattern(rule, (8, 33, 70), (1, 2, 3)), key_padding_mask=mask, backend="sdpa")
    assert max(counted) > 1


def test_pieces_keep_within_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sdpa.LIMITS, "cpu", (5, 4000))
    q = torch.randn(23, 8, 2, 4)  # 256 bytes a sample
    pieces = sdpa._pieces(q, q, q)
    assert [piece.queries(q).shape[0] for piece in pieces] == [5, 5, 5, 5, 3]
    wide = torch.randn(3, 8, 2, 400)  # 25,600 bytes a sample: one head at a time
    heads = [piece.keys(wide) for piece in sdpa._pieces(wide, wide, wide)]
    assert len(heads) == 6
    assert all(x.is_contiguous() for x in heads)


def test_one_call_on_a_device_without_limits() -> None:
    q = torch.randn(70_000, 2, 1, 1)
    assert sdpa._pieces(q, q, q) == [sdpa._Piece()]
