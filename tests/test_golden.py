"""Against outputs of the released LongNet code, computed in float64 and stored as float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilated_attention import DilatedPattern, dilated_attention, reference, testing

safetensors = pytest.importorskip("safetensors")
FILE = Path(__file__).parent / "data" / "torchscale_attention.safetensors"

with safetensors.safe_open(FILE, "pt") as file:
    CASES = json.loads(file.metadata()["cases"])
    TENSORS = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{i}-n{CASES[i]['n']}-h{CASES[i]['heads']}")
def test_released_code(index: int) -> None:
    case = CASES[index]
    q, k, v, expected = (TENSORS[f"{index}.{name}"].double() for name in ("q", "k", "v", "out"))
    assert q.shape == (case["batch"], case["n"], case["heads"], case["head_dim"])
    pattern = DilatedPattern.torchscale(case["segment_lengths"], case["dilation_rates"])
    outs = [reference.attention(q, k, v, pattern, is_causal=case["is_causal"])[0]]
    outs += [dilated_attention(q, k, v, pattern, is_causal=case["is_causal"], backend=x) for x in ("sdpa", "eager")]
    assert all(testing.error(out, expected) < 5e-7 for out in outs)
