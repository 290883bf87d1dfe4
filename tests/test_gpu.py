"""Any kernel on a CUDA device, where the table of cases leaves something out: traps, sizes, what is around a call.

The oracle, and plain PyTorch in the same dtype, run on the device too, so lengths stay small except where size itself
is the point. What is particular to our own kernels is in test_triton_gpu.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention import DilatedPattern, Pattern, Window, dilated_attention, explain, testing
from dilated_attention.backends import aten, eager, sdpa
from dilated_attention.backends.problem import Outputs, Problem
from dilated_attention.backends.triton import table
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.dropout import Dropout, row_words
from dilated_attention.pattern import RULES
from dilated_attention.testing import Results
from tests.on_gpu import (
    BF16,
    DEVICE,
    DTYPES,
    attend,
    captured,
    free_memory,  # noqa: F401
    gradients,
    hold,
    make_mask,
    make_qkv,
    normal,
    poisoned,
    same_bits,
)

longnet, head_groups = DilatedPattern.longnet, DilatedPattern.head_groups

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("always_nested")]
pytest.importorskip("triton")

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ALL = (*KERNELS, "eager")  # that are not ours


@contextlib.contextmanager
def only(kernel: str) -> Iterator[str]:
    """Switches torch's other kernels off, as users do; gives the name of the backend to ask for."""
    with sdpa_kernel([KERNELS[kernel]]) if kernel in KERNELS else contextlib.nullcontext():
        yield "sdpa" if kernel in KERNELS else kernel


def ask(kernel: str, backend: str, qkv: tuple[Tensor, ...], pattern: DilatedPattern, **options: Any) -> None:
    """Skips where torch has no such kernel for the call on this device; fails if another one would run."""
    try:
        told = explain(*qkv, pattern, enable_gqa=True, backend=backend, **options)
    except ValueError as reasons:
        pytest.skip(str(reasons))
    assert told.backend == backend
    assert backend != "sdpa" or told.kernel.startswith(kernel), told.kernel


def needs(gib: int) -> None:
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free device memory")


def hold_parts(
    got: Results, qkv: tuple[Tensor, ...], pattern: DilatedPattern, dout: Tensor, dlse: Tensor | None
) -> None:
    """The first period, one in the middle, and the last whole one with the tail: each is the same call on its own."""
    tokens, period = dout.shape[1], max(pattern.segment_lengths)
    last = tokens // period - 1
    for first, end in ((0, period), (last // 3 * period, (last // 3 + 1) * period), (last * period, tokens)):
        q, k, v, some_dout = (x[:, first:end].contiguous() for x in (*qkv, dout))
        some_dlse = None if dlse is None else dlse[:, first:end].contiguous()
        hold(Results(*(x[:, first:end] for _, x in got.items())), (q, k, v), pattern, some_dout, some_dlse)


def without_waiting(work: Callable[[], Any]) -> None:
    """It runs twice before: plans, kernels, tables and torch's own set-up."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- traps ------------------------------------------------------------------------------------------------------


def test_a_hopper_has_all_kernels() -> None:
    """Elsewhere a kernel may be missing and its tests skip; here that would hide a fault."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("not a Hopper")
    qkv = make_qkv(1, 64, 2, 64, dtype=BF16)
    for kernel in KERNELS:
        with only(kernel):
            assert explain(*qkv, longnet([16], [1]), backend="sdpa").kernel.startswith(kernel)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_not_mix_up_layouts_of_out(name: str) -> None:
    """torch caches cuDNN's plans by the strides of q, k, v alone: out and dout of other strides were misread."""
    kernel = {"cudnn": aten.CUDNN, "flash": aten.FLASH, "efficient": aten.EFFICIENT}[name]
    q, k, v = make_qkv(2, 40, 4, 32, dtype=BF16)
    out, lse = eager.forward((), Problem(q, k, v, 0.2))
    dout, dlse = gradients(q)
    want = eager.backward((), Problem(q, k, v, 0.2), Outputs(out, lse, dout, dlse))

    def spread(x: Tensor, step: int) -> Tensor:
        wide = torch.full((2, 40 * step, 4, 32), torch.nan, dtype=BF16, device=DEVICE)
        wide[:, ::step] = x
        return wide[:, ::step]

    for step in (1, 3, 2, 1):
        results = Outputs(spread(out, step), lse, spread(dout, step), dlse)
        got = sdpa.backward((kernel,), Problem(q, k, v, 0.2), results)
        for found, expected in zip(got, want, strict=True):
            assert testing.error(found, expected) < 0.03


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("is_causal", [False, True])
def test_out_alone_is_the_out_that_comes_with_lse(kernel: str, is_causal: bool) -> None:
    """cuDNN asked for out alone gave a wrong one."""
    pattern = head_groups([64], [1])
    qkv = make_qkv(2, 128, 4, 64, dtype=BF16)
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern, is_causal=is_causal)
        alone = dilated_attention(*qkv, pattern, is_causal=is_causal, backend=backend)
        out, _ = dilated_attention(*qkv, pattern, is_causal=is_causal, backend=backend, return_lse=True)
    assert torch.equal(alone, out)
    expected = testing.oracle(qkv, pattern, out, is_causal=is_causal)
    assert testing.error(alone, expected.out) < 0.03


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [2, 32, 64, 75, 128, 160, 192, 320])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_very_low_lse(kernel: str, head_dim: int, tokens: int, is_causal: bool) -> None:
    """cuDNN 9.19 scores what fills its last tile of keys with 0: exp(0 - lse) is then inf, and dq NaN."""
    q, k, v = make_qkv(1, tokens, 2, head_dim, dtype=BF16)
    far = torch.zeros_like(q)
    far[..., 0] = 32.0
    qkv = (q + far, k - far, v)  # scores of -1024 / sqrt(head_dim) and a little
    pattern, dout = head_groups([tokens], [1]), torch.randn_like(q)
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern, is_causal=is_causal)
        got = testing.run(attend(pattern, is_causal=is_causal, backend=backend, return_lse=False), qkv, dout)
    exact = testing.oracle(qkv, pattern, dout, is_causal=is_causal)
    for name, x in got.items():
        assert x.isfinite().all(), name
        columns = slice(1, None) if name in ("dq", "dk") else slice(None)  # of 32 times what cancels little is left
        assert testing.error(x[..., columns], getattr(exact, name)[..., columns]) < 0.05, name


@pytest.mark.parametrize("head_dim", [1, 3, 256, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_head_dim_finds_a_backend(head_dim: int, dtype: str) -> None:
    testing.check(make_qkv(1, 40, 4, head_dim, dtype=DTYPES[dtype]), longnet([16, 40], [1, 3]))


def test_both_devices_drop_the_same_pairs() -> None:
    masks = []
    for device in ("cpu", DEVICE):
        query = torch.arange(300, device=device).view(1, 300, 1)
        words = row_words(torch.tensor(-(2**61) + 12345, device=device), 3, query * 0 + 7, query * 0 + 2, query)
        masks.append(Dropout(0.4, *words, query).keep().cpu())
    assert torch.equal(*masks)


# --- size -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("segments", [65535, 65536, 131071])
def test_more_segments_than_a_grid_takes(kernel: str, width: int, segments: int) -> None:
    """The oracle has them as samples."""
    pattern, is_causal = longnet([width], [1]), segments % 2 == 0
    qkv = make_qkv(1, segments * width, 1, 16, dtype=BF16)
    dout, dlse = gradients(qkv[0])
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern, is_causal=is_causal)
        got = testing.run(attend(pattern, is_causal=is_causal, backend=backend), qkv, dout, dlse)
    found, given = (
        [x.reshape(segments, width, *x.shape[2:]) for x in tensors]
        for tensors in ([x for _, x in got.items()], [*qkv, dout, dlse])
    )
    hold(Results(*found), tuple(given[:3]), pattern, *given[3:], is_causal=is_causal)


@pytest.mark.large
@pytest.mark.parametrize("kernel", [*ALL, "triton"])
def test_more_elements_than_32_bits_count(kernel: str) -> None:
    tokens, heads, dim = 2**20 + 600, 17, 128
    assert tokens * heads * dim > 2**31
    needs(90)
    pattern = longnet([64, 1024], [1, 16])
    qkv = tuple(normal(1, tokens, heads, dim, seed=seed, dtype=BF16) for seed in (1, 2, 3))
    dout = normal(1, heads, tokens, dim, seed=4, dtype=BF16).transpose(1, 2)  # strided
    dlse = normal(1, tokens, heads, seed=5) if kernel == "triton" else None
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern)
        got = testing.run(attend(pattern, backend=backend), qkv, dout, dlse)
    hold_parts(got, qkv, pattern, dout, dlse)


@pytest.mark.large
def test_a_window_over_more_elements_than_32_bits_count() -> None:
    """Its first and last rows are what they are alone, but where what was cut off matters."""
    tokens, heads, dim, cut, near = 2**20 + 600, 17, 128, 600, 64
    needs(90)
    pattern = Pattern([Window(near - 1)])
    qkv = tuple(normal(1, tokens, heads, dim, seed=seed, dtype=BF16) for seed in (1, 2, 3))
    dout = normal(1, tokens, heads, dim, seed=4, dtype=BF16)
    got = testing.run(attend(pattern, is_causal=True, backend="triton"), qkv, dout, None)
    for some, rows in ((slice(0, cut), slice(0, cut - near)), (slice(tokens - cut, tokens), slice(2 * near, cut))):
        alone, sent = tuple(x[:, some] for x in qkv), dout[:, some]
        exact, plain = (
            testing.oracle(alone, pattern, sent, None, is_causal=True, dtype=dtype) for dtype in (torch.float64, None)
        )
        found = Results(*(x[:, some] for _, x in got.items()))
        testing.assert_exact(*(Results(*(x[:, rows] for _, x in part.items())) for part in (found, exact, plain)))


@pytest.mark.large
@pytest.mark.parametrize("kernel", [*ALL, "triton"])
def test_rows_of_a_segment_further_apart_than_a_call_counts(kernel: str) -> None:
    """Each of the two heads is plain attention among its 64 rows; all other rows have nothing to see.

    The library's kernels count less than 2 GiB from the first row to the last: each head is copied out.
    """
    tokens, rate, dim = 2**20, 2**14, 128
    needs(40)
    fused = normal(1, tokens, 3, 8, dim, dtype=BF16)
    qkv = tuple(x[:, :, :2] for x in fused.unbind(2))
    assert 63 * rate * qkv[0].stride(1) > 2**31
    dout, dlse = gradients(qkv[0], 4)
    pattern, alone = longnet([tokens], [rate]), longnet([tokens // rate], [1])
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern)
        got = testing.run(attend(pattern, backend=backend), qkv, dout, dlse)
    seen = torch.zeros(1, tokens, 2, dtype=torch.bool, device=DEVICE)
    for head in (0, 1):
        rows = [x[:, head::rate, head : head + 1].contiguous() for x in (*qkv, dout, dlse)]
        part = Results(*(x[:, head::rate, head : head + 1] for _, x in got.items()))
        hold(part, tuple(rows[:3]), alone, rows[3], rows[4])
        seen[:, head::rate, head] = True
    assert got.lse is not None
    assert (got.lse[~seen] == -torch.inf).all()
    for name in ("out", "dq", "dk", "dv"):
        assert not getattr(got, name)[~seen].any(), name


# --- around the function ----------------------------------------------------------------------------------------

CALLS = {
    "nested": (longnet([32, 64], [1, 2]), {}),
    "causal": (longnet([32, 48], [1, 3]), {"is_causal": True}),
    "head groups": (head_groups([32, 64], [1, 3]), {}),
    "masked": (DilatedPattern.torchscale([32, 64], [1, 3]), {"masked": True}),
    "dropout": (longnet([32, 64], [1, 2]), {"dropout_p": 0.2}),
}
each_call = pytest.mark.parametrize("name", CALLS)
ROW = 40


def make_call(name: str, backend: str = "triton") -> tuple[Callable[..., Any], list[Tensor], Tensor, Tensor]:
    """The call, its inputs, and gradients for its results. "library": what runs where our kernels do not."""
    pattern, given = CALLS[name]
    if backend == "library":
        backend = "eager" if name == "dropout" else "sdpa"
    options = {"backend": backend, **given}
    mask = make_mask(2, 75) if options.pop("masked", False) else None
    leaves = list(make_qkv(2, 75, 4, 64, kv_heads=2, dtype=BF16))
    dout, dlse = gradients(leaves[0])
    if name == "dropout":  # see same_pairs_kept
        leaves[2].fill_(1.0)
        dlse.zero_()
        dout.zero_()[:, ROW] = 1.0
    return attend(pattern, key_padding_mask=mask, **options), [x.requires_grad_() for x in leaves], dout, dlse


def same_pairs_kept(out: Tensor, dv: Tensor) -> None:
    """With values of 1, and a gradient for one row alone, dv is that row's weights: they add up to its out."""
    samples, _, kv_heads, dim = dv.shape
    kept = out[:, ROW].float().view(samples, kv_heads, -1, dim).sum(2)
    torch.testing.assert_close(dv.float().sum(1), kept, rtol=0.015, atol=0.0)


@each_call
@pytest.mark.parametrize("backend", ["auto", "triton", "library"])
def test_no_host_synchronisation(name: str, backend: str) -> None:
    attention, leaves, dout, dlse = make_call(name, backend)
    without_waiting(lambda: torch.autograd.grad(attention(*leaves), leaves, (dout, dlse)))


@each_call
@pytest.mark.parametrize("backend", ["triton", "library"])
def test_captured_in_a_cuda_graph(name: str, backend: str) -> None:
    """Ours with the backward pass."""
    attention, leaves, dout, dlse = make_call(name, backend)

    def work() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(backend == "triton"):
            results = attention(*leaves)
        return (*results, *torch.autograd.grad(results, leaves, (dout, dlse))) if backend == "triton" else results

    graph, results = captured(work)
    for seed in (8, 9):
        with torch.no_grad():  # of dropout's values all are 1
            for x, new in zip(leaves[:2], make_qkv(2, 75, 4, 64, kv_heads=2, dtype=BF16, seed=seed), strict=False):
                x.copy_(new)
        graph.replay()
        got = [x.detach().clone() for x in results]
        if name == "dropout":
            graph.replay()
            assert not torch.equal(results[0], got[0]), "every replay drops the same pairs"
            assert torch.equal(results[1], got[1])
            if backend == "triton":
                same_pairs_kept(results[0], results[-1])
        elif backend == "triton":
            same_bits(got, work())
        else:
            for x, y, most in zip(got, work(), (1e-2, 1e-3), strict=True):
                assert testing.error(x, y) < most


def test_a_cuda_graph_outlives_other_calls() -> None:
    """A graph reads the tables of its capture: calls of many other shapes must not drop them."""
    attention, leaves, _, _ = make_call("nested")
    with torch.no_grad():
        expected = attention(*leaves)
        graph, results = captured(lambda: attention(*leaves))
        for tokens in range(1, 20):
            x = leaves[0][:1, :1, :2].expand(1, tokens, 2, 64)
            attend(longnet([tokens], [1]))(x, x, x)
        for _ in range(2):  # as where tables of other calls take too much room: dropped, and then free
            CACHE.forget(leaves[0].device)
        gc.collect()
        with torch.cuda.stream(table.stream_of_tables(leaves[0].device)):
            held = [torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in [64] * 2000 + [1000] * 1000]
        torch.cuda.synchronize()
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
    same_bits(results, expected)
    del held


@each_call
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(name: str, mode: str) -> None:
    """A table that is made in the compiler's first run must not lie in the memory of its graphs."""
    attention, leaves, dout, dlse = make_call(name)
    torch._dynamo.reset()
    CACHE.forget(leaves[0].device)
    before = len(CACHE.pinned)
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    found = []
    for function in (*[compiled] * 4, attention):
        torch.compiler.cudagraph_mark_step_begin()
        results = function(*leaves)
        grads = torch.autograd.grad(results, leaves, (dout, dlse))
        found.append([x.detach().clone() for x in (*results, *grads)])
    assert mode == "default" or len(CACHE.pinned) > before, "no graph was made"
    if name == "dropout":  # compiled code draws other numbers
        same_bits(found[3][1:2], found[4][1:2])
        for results in found:
            same_pairs_kept(results[0], results[-1])
    else:
        same_bits(found[3], found[4])


@pytest.mark.parametrize("kernel", ["flash", "efficient", "eager", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_deterministic_algorithms_repeat_every_bit(kernel: str, rule: str) -> None:
    pattern = DilatedPattern.of(rule, [128, 1024], [1, 4])
    qkv = make_qkv(2, 1000, 6, 64, kv_heads=3, dtype=BF16)
    dout, dlse = gradients(qkv[0])
    with only(kernel) as backend, poisoned():
        ask(kernel, backend, qkv, pattern)
        one, two = (testing.run(attend(pattern, backend=backend), qkv, dout, dlse) for _ in range(2))
    same_bits(*([x for _, x in found.items()] for found in (one, two)))
    hold(one, qkv, pattern, dout, dlse)


def test_deterministic_algorithms_refuse_cudnn() -> None:
    qkv = make_qkv(1, 64, 2, 64, dtype=BF16)
    with only("cudnn"), poisoned(), pytest.raises(ValueError, match="deterministic"):
        dilated_attention(*qkv, longnet([16], [1]), backend="sdpa")


def test_all_kernels_switched_off_leaves_our_own() -> None:
    qkv = make_qkv(1, 64, 2, 64, dtype=BF16)
    pattern = longnet([16], [1])
    with sdpa_kernel([SDPBackend.MATH]):
        assert explain(*qkv, pattern).backend == "triton"
        assert explain(*(x.double() for x in qkv), pattern).backend == "eager"
        testing.check(qkv, pattern)
        with pytest.raises(ValueError, match="switched off"):
            dilated_attention(*qkv, pattern, backend="sdpa")
