"""Tiles of the eager backend, what torch's kernels cannot do, and how a backend is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, explain, testing
from dilated_attention.backends import choose, eager, sdpa
from dilated_attention.backends.problem import Limits, Problem
from dilated_attention.call import Call

PATTERN = DilatedPattern.longnet([8, 16], [1, 3])
CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 50, 300, 5000])
def test_tiles_stay_small(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That they change nothing is tested with dropout."""
    monkeypatch.setattr(eager, "TILE_ELEMENTS", {"cpu": size})
    q = torch.zeros(5, 11, 2, 1)
    for rows, *_ in eager._tiles(Problem(q, q[:, :, :1], q[:, :, :1], 1.0), torch.float32):
        assert q[rows].numel() * 11 <= max(size, 2 * 11)


def test_what_kernels_do_not_take_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for on a CPU: head dims that are padded to multiples of 8; single rows, left to a few products."""
    monkeypatch.setattr(sdpa, "limits", lambda call: Limits(pad=8))
    monkeypatch.setattr(sdpa, "_kernel_for", lambda rows, kernels: kernels[0] if rows >= 2 else None)
    for tokens, head_dim in ((1, 8), (2, 1), (17, 3), (37, 20)):  # 17: a tail of one
        testing.check(testing.make_qkv(2, tokens, 4, head_dim, kv_heads=2), PATTERN, backend="sdpa")


# --- the choice -------------------------------------------------------------------------------------------------


def test_auto_takes_the_first_that_can_and_every_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Call(PATTERN).of(x := torch.zeros(1, 8, 2, 4), x, None, 0)
    drops, elsewhere = plain._replace(dropout_p=0.5), plain._replace(device=torch.device("meta"))
    assert [choose.choose(call).name for call in (plain, drops, elsewhere)] == ["sdpa", "eager", "eager"]
    assert "no such kernels for device 'meta'" in sdpa.unsupported(elsewhere, False)[0]

    choose.choose.cache_clear()
    monkeypatch.setattr(sdpa, "_reasons", lambda kernel, call: ["it is Sunday", "it is raining"])
    with pytest.raises(ValueError, match=r"'sdpa' cannot run this call: .*it is Sunday.*it is raining"):
        dilated_attention(x, x, x, PATTERN, backend="sdpa")
    assert explain(x, x, x, PATTERN).why_not["sdpa/flash on CPU"] == ["it is Sunday", "it is raining"]
    choose.choose.cache_clear()


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_torch_is_asked_as_for_training_wherever_it_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some GPUs a kernel has no backward pass for some head dims; torch tells that only with gradients enabled."""
    asked = []

    def check(params: Any) -> bool:
        asked.append(torch.is_grad_enabled() and params.query.requires_grad)
        return False

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(sdpa.cuda_backends, f"can_use_{name}_attention", check)
    with torch.no_grad():
        (why,) = sdpa._refusals(name, CPU, torch.bfloat16, 208, False)
    assert f"can_use_{name}_attention refuses torch.bfloat16 with head_dim 208" in why
    assert asked == [True]
