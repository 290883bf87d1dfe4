"""What only a GPU can show of `fuse`: sizes beyond 32 bits, CUDA graphs, another stream, threads that race.

The cases of every shape are in triton_kernels/fuse_cases.py, which test_triton runs on the GPU too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import merge
from tests.on_gpu import captured, without_waiting

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def fuse() -> Any:
    from dilated_attention.backends.triton import fuse

    return fuse


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape))).to(dtype)


def case(
    batch: int, rows: int, heads: int, dtype: torch.dtype = torch.float32, part_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and lse of every second row and head, a part with rows side by side."""
    out, lse = randn(batch, 2 * rows, 2 * heads, 64, dtype=dtype), 3 * randn(batch, 2 * rows, 2 * heads)
    part, part_lse = randn(batch, heads, rows, 64, dtype=part_dtype), 3 * randn(batch, heads, rows)
    return out[:, 1::2, ::2], lse[:, 1::2, ::2], part.transpose(1, 2), part_lse.transpose(1, 2)


@pytest.mark.parametrize("part_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(fuse: Any, dtype: torch.dtype, part_dtype: torch.dtype) -> None:
    """As many programs as fill the device many times; the same bits again, whatever the threads do."""
    out, lse, part, part_lse = case(3, 5000, 6, dtype, part_dtype)
    part_lse[:, ::7] = lse[:, ::5] = -torch.inf
    exact, exact_lse = out.double(), lse.double()
    exact[:, ::5] = 0
    clean = part.double().masked_fill(part_lse.unsqueeze(-1) == -torch.inf, 0)
    merge.merge_(exact, exact_lse, clean, part_lse.double())
    some = exact_lse != -torch.inf
    results = []
    for _ in range(20):
        got, got_lse = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in (out, lse))
        got.copy_(out)
        got_lse.copy_(lse)
        fuse.merge_(got, got_lse, part, part_lse, first=False)
        results.append((got, got_lse))
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(results[0][0].double()[some], exact[some], rtol=1.01 * unit, atol=2e-6)
    torch.testing.assert_close(results[0][1].double(), exact_lse, rtol=1e-6, atol=2e-6)
    for got, got_lse in results[1:]:
        assert torch.equal(got, results[0][0])
        assert torch.equal(got_lse, results[0][1])


@pytest.mark.parametrize("rows", [3, 40_000])
def test_offsets_of_64_bits(fuse: Any, rows: int) -> None:
    """Few rows far apart, where the offsets within a block pass 2^31, and many, where only those between blocks do."""
    step = (5 * 2**29 // (rows - 1) // 64 + 1) * 64  # 5 GiB in all
    storage = torch.zeros((rows - 1) * step + 64, dtype=torch.bfloat16, device="cuda")
    target = storage.as_strided((1, rows, 1, 64), (0, step, 64, 1))
    lse = randn((rows - 1) * step // 64 + 1).as_strided((1, rows, 1), (0, step // 64, 1))
    part = randn(1, rows, 1, 64, dtype=torch.bfloat16)
    fuse.put_(target, part, add=True)
    assert torch.equal(target, part)
    exact, exact_lse, part_lse = part.float(), lse.clone(), lse.flip(1)
    merge.merge_(exact, exact_lse, part.flip(1).float(), part_lse)
    fuse.merge_(target, lse, part.flip(1), part_lse, first=False)
    torch.testing.assert_close(target.float(), exact, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=1e-6)
    target.zero_()
    assert not storage.any()  # nothing was written anywhere else


def test_many_batches(fuse: Any) -> None:
    """More than a second grid dimension could count, of one row each."""
    out, lse, part, part_lse = case(70_000, 1, 2)
    exact, exact_lse = out.clone(), lse.clone()
    merge.merge_(exact, exact_lse, part, part_lse)
    fuse.merge_(out, lse, part, part_lse, first=False)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=2e-6)


def test_in_a_cuda_graph_and_on_the_current_stream(fuse: Any) -> None:
    """Without waiting for the device."""
    out, lse, part, part_lse = case(2, 100, 3)
    zeros = randn(2, 1, 3)

    def work() -> None:
        fuse.merge_(out, lse, part, part_lse, zeros, first=True)
        fuse.merge_(out, lse, part.flip(1), part_lse, 0.5, first=False)
        fuse.put_(out, part, add=True)

    work()
    expected = out.clone(), lse.clone()
    graph, _ = captured(work)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def late() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            work()

    for again in (graph.replay, lambda: without_waiting(late)):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        again()
        torch.cuda.synchronize()
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
