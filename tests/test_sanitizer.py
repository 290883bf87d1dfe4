"""Small calls of our kernels, forward and backward, under NVIDIA's compute-sanitizer, where it is installed.

This file is also the script that it runs: the numbers after it pick some of the cases. Without torch's caching of
memory every tensor has its own bounds, which memcheck then watches. Inputs are drawn on the CPU, so that few kernels
but ours run. Whether results are right is seen by the other tests.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.backends.triton import nesting

longnet, torchscale = DilatedPattern.longnet, DilatedPattern.torchscale

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROGRAM = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
SHARES = 5  # the sanitizer makes a program many times slower: several processes take some of the cases each

# pattern, tokens, (query heads, key/value heads), head_dim, dtype, options; together they have every flag both ways
CASES = [
    (longnet([64, 128], [1, 2]), 150, (2, 2), 64, BF16, {}),  # nested, with a tail
    (longnet([128, 256], [1, 2]), 256, (2, 2), 64, BF16, {"is_causal": True}),  # all tiles full
    (longnet([128], [1]), 256, (1, 1), 128, FP16, {"lse_gradient": False}),  # no tile is masked
    (longnet([32, 48, 100], [1, 3, 7]), 130, (2, 1), 72, BF16, {}),  # several launches, columns to spare
    (longnet([40], [3]), 101, (4, 4), 64, BF16, {}),  # rows without keys, filled by the kernels
    (longnet([64, 128], [2, 4]), 129, (2, 2), 64, FP16, {}),  # the same by a fill before them
    (longnet([4, 40], [9, 6]), 43, (3, 3), 16, FP32, {"is_causal": True}),  # rates beyond a segment
    (torchscale([32, 91], [1, 2]), 100, (2, 2), 64, BF16, {}),  # appended zero keys
    (torchscale([32, 91], [1, 3]), 75, (2, 2), 64, FP16, {"masked": True}),
    (DilatedPattern.head_groups([32, 64], [1, 3]), 99, (4, 2), 64, BF16, {"masked": True, "is_causal": True}),
    (DilatedPattern.head_groups([32, 128], [1, 2]), 77, (2, 2), 256, BF16, {"dropout_p": 0.3}),
    (longnet([64], [1]), 70, (2, 1), 64, FP32, {"dropout_p": 0.6, "masked": True, "is_causal": True}),
    (longnet([16], [1]), 1, (1, 1), 1, FP16, {"layout": "odd"}),  # a single row and column
    (longnet([64, 128], [1, 2]), 140, (2, 2), 64, BF16, {"far": True}),  # tiles that start over
    (torchscale([32, 91], [1, 2]), 150, (2, 2), 48, FP16, {"cu_seqlens": (0, 1, 60, 150)}),  # packed
]


def run(
    pattern: DilatedPattern, tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype,
    given: dict[str, Any],
) -> None:  # fmt: skip
    options = dict(given)
    masked, far = options.pop("masked", False), options.pop("far", False)
    layout, lse_gradient = options.pop("layout", "contiguous"), options.pop("lse_gradient", True)
    samples = 1 if "cu_seqlens" in options else 2
    q, k, v = testing.make_qkv(samples, tokens, heads[0], head_dim, kv_heads=heads[1], layout=layout, dtype=dtype)
    if far:  # keys that look away from their own query
        k = -30 * q
    if masked:
        mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.3
        options["key_padding_mask"] = mask.to(DEVICE)
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    attention = functools.partial(dilated_attention, pattern=pattern, backend="triton", enable_gqa=True, **options)
    out, lse = attention(*leaves, return_lse=True)
    sent = torch.ones(out.shape, dtype=dtype).to(DEVICE), torch.ones(lse.shape).to(DEVICE)
    results, gradients = ((out, lse), sent) if lse_gradient else (out, sent[0])
    for x in torch.autograd.grad(results, leaves, gradients):
        x.cpu()  # which waits for the kernels


@pytest.mark.gpu
@pytest.mark.skipif(PROGRAM is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str, share: int) -> None:
    """The script runs once without it: what it compiles is then read from Triton's cache."""
    script = [sys.executable, __file__, *map(str, range(share, len(CASES), SHARES))]
    environment = {**os.environ, "PYTHONPATH": "src", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for command in (script, [str(PROGRAM), "--tool", tool, "--error-exitcode", "1", *script]):
        done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


if __name__ == "__main__":
    nesting.TILE = 1  # branches share a table wherever they can: such short ones would not gain by it
    for number in sys.argv[1:]:
        run(*CASES[int(number)])
        print(f"case {number} ran", flush=True)
