"""Against outputs of the released LongNet code, computed in float64 and stored as float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, reference, testing

safetensors = pytest.importorskip("safetensors")
FILE = Path(__file__).parent / "data" / "torchscale_attention.safetensors"

with safetensors.safe_open(FILE, "pt") as file:
    CASES = json.loads(file.metadata()["cases"])
    TENSORS = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{i}-n{CASES[i]['n']}-h{CASES[i]['heads']}")
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "reference"])
def test_released_code(index: int, implementation: str) -> None:
    case = CASES[index]
    pattern = DilatedPattern.torchscale(case["segment_lengths"], case["dilation_rates"])
    q, k, v, expected = (TENSORS[f"{index}.{name}"].double() for name in ("q", "k", "v", "out"))
    assert q.shape == (case["batch"], case["n"], case["heads"], case["head_dim"])
    if implementation == "reference":
        out, _ = reference.attention(q, k, v, pattern, is_causal=case["is_causal"])
    else:
        out = dilated_attention(q, k, v, pattern, is_causal=case["is_causal"], backend=implementation)
    assert testing.error(out, expected) < 5e-7


def test_the_cases_tell_the_rules_apart() -> None:
    """Were another rule as near, the data would show nothing."""
    for index, case in enumerate(CASES):
        q, k, v, expected = (TENSORS[f"{index}.{name}"].double() for name in ("q", "k", "v", "out"))
        pattern = DilatedPattern.longnet(case["segment_lengths"], case["dilation_rates"])
        out = dilated_attention(q, k, v, pattern, is_causal=case["is_causal"])
        differs = testing.error(out, expected) > 1e-2
        same_offsets = all(
            pattern.offset(i, h, case["heads"]) == h // -(-case["heads"] // rate)
            for i, rate in enumerate(case["dilation_rates"])
            for h in range(case["heads"])
        )
        assert differs or same_offsets, index
    assert torch.is_tensor(TENSORS["0.out"])
