"""No call copies numbers from the host: on CUDA the host would wait, and no graph could be captured.

test_gpu.py sees it on a GPU; here, on a CPU, nobody may make a tensor of a list. Nor does a call draw a random number
that nobody asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.backends.choose import Backend
from dilated_attention.pattern import RULES, Rule


@pytest.mark.parametrize("rows", [40, 3], ids=["whole", "few"])
@pytest.mark.parametrize(("backend", "masked", "p"), [("sdpa", True, 0.0), ("eager", True, 0.0), ("eager", False, 0.2)])
@pytest.mark.parametrize("rule", RULES)
def test_no_numbers_come_from_the_host(
    rule: Rule, backend: Backend, masked: bool, p: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = DilatedPattern.of(rule, [16, 32], [1, 3])
    q, k, v = testing.make_qkv(2, 40, 6, 8, kv_heads=3)
    leaves = [q[:, :rows].clone().requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    mask = torch.arange(40).expand(2, -1) >= 33 if masked else None

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.tensor copies from the host")

    monkeypatch.setattr(torch, "tensor", refused)
    before = torch.get_rng_state()
    out, lse = dilated_attention(
        *leaves, pattern, key_padding_mask=mask, enable_gqa=True, return_lse=True, backend=backend, dropout_p=p
    )
    torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), leaves)
    assert torch.equal(torch.get_rng_state(), before) == (p == 0.0)
