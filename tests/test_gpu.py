"""PyTorch's kernels on a CUDA device, where the table of cases leaves something out: traps, sizes, what is around.

A kernel is forced by switching the others off, as users do. The oracle, and plain PyTorch in the same dtype, run on
the device too, so lengths stay small except where size itself is the point. Our own kernels, tested in
test_triton_gpu, run here where "auto" picks them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends import aten, eager, sdpa
from dilated_attention.backends.problem import Masking
from dilated_attention.call import Call
from dilated_attention.dropout import Dropout, row_words
from dilated_attention.pattern import RULES

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ALL = (*KERNELS, "eager")


@contextlib.contextmanager
def only(kernel: str) -> Iterator[str]:
    """Switches the other kernels off; gives the name of the backend to ask for."""
    if kernel == "eager":
        yield "eager"
        return
    with sdpa_kernel([KERNELS[kernel]]):
        yield "sdpa"


def ask(kernel: str, backend: str, qkv: tuple[Tensor, ...], pattern: DilatedPattern, **options: Any) -> None:
    """Skips where torch has no such kernel for the call on this device; fails if another one would run."""
    try:
        told = explain(*qkv, pattern, enable_gqa=True, backend=backend, **options)
    except ValueError as reasons:
        pytest.skip(str(reasons))
    assert told.backend == backend
    assert backend == "eager" or told.kernel.startswith(kernel), told.kernel


def check(kernel: str, qkv: tuple[Tensor, ...], pattern: DilatedPattern, **options: Any) -> None:
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern, **{k: v for k, v in options.items() if k != "lse_gradient"})
        testing.check(qkv, pattern, backend=backend, **options)


def fitting(dtype: str, masked: bool) -> tuple[str, ...]:
    """The kernels that take such a call."""
    return ("efficient", "eager") if dtype == "fp32" or masked else ALL


def make_qkv(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return testing.make_qkv(*args, device=DEVICE, **kwargs)


def test_a_hopper_has_all_kernels() -> None:
    """Elsewhere a kernel may be missing and its tests skip; here that would hide a fault."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("not a Hopper")
    qkv = make_qkv(1, 64, 2, 64, dtype=torch.bfloat16)
    for kernel in KERNELS:
        with only(kernel):
            told = explain(*qkv, DilatedPattern.longnet([16], [1]), backend="sdpa")
            assert told.kernel.startswith(kernel)
            assert {"eager", *(f"sdpa/{other}" for other in KERNELS if other != kernel)} <= {
                name.split(" (")[0] for name in told.why_not
            }


def make_mask(kind: str, samples: int, tokens: int) -> Tensor | None:
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(tokens)
    if kind == "random":
        mask = torch.rand(samples, tokens, generator=generator) < 0.3
        mask[-1] |= samples > 1  # a sample with nothing to see
    else:
        mask = torch.arange(tokens) >= torch.randint(1, tokens + 1, (samples, 1), generator=generator)
    return mask.to(DEVICE)


def every_kernel(dtypes: tuple[str, ...] = ("bf16",)) -> list[Any]:
    return [
        pytest.param(kernel, DTYPES[dtype], id=f"{kernel}-{dtype}")
        for dtype in dtypes
        for kernel in fitting(dtype, masked=False)
    ]


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_kernels_do_not_mix_up_layouts_of_out(name: str) -> None:
    """torch caches cuDNN's plans by the strides of q, k, v alone: out and dout of other strides were misread."""
    kernel = {"cudnn": aten.cudnn(), "flash": aten.flash(None), "efficient": aten.efficient()}[name]
    q, k, v = testing.make_qkv(2, 40, 4, 32, dtype=torch.bfloat16, device="cuda")
    out, lse = eager.forward((), q, k, v, Masking(0.2))
    dout = torch.randn_like(q)
    dlse = torch.randn_like(lse)
    want = eager.backward((), dout, q, k, v, out, lse, dlse, Masking(0.2))

    def spread(x: Tensor, step: int) -> Tensor:
        wide = torch.full((2, 40 * step, 4, 32), torch.nan, dtype=torch.bfloat16, device="cuda")
        wide[:, ::step] = x
        return wide[:, ::step]

    for step in (1, 3, 2, 1):
        both = (spread(dout, step), spread(out, step))
        got = sdpa.backward((kernel,), both[0], q, k, v, both[1], lse, dlse, Masking(0.2))
        for found, expected in zip(got, want, strict=True):
            assert testing.error(found, expected) < 0.03


@pytest.mark.parametrize(("kernel", "dtype"), every_kernel(("bf16", "fp32")))
@pytest.mark.parametrize("is_causal", [False, True])
def test_out_alone_is_the_out_that_comes_with_lse(kernel: str, dtype: torch.dtype, is_causal: bool) -> None:
    """cuDNN asked for out alone gave a wrong one."""
    pattern = DilatedPattern.head_groups([64], [1])
    qkv = make_qkv(2, 128, 4, 64, dtype=dtype)
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern, is_causal=is_causal)
        alone = dilated_attention(*qkv, pattern, is_causal=is_causal, backend=backend)
        out, _ = dilated_attention(*qkv, pattern, is_causal=is_causal, backend=backend, return_lse=True)
    assert torch.equal(alone, out)
    expected = testing.oracle(qkv, pattern, out, is_causal=is_causal)
    assert testing.error(alone, expected.out) < 0.03


@pytest.mark.parametrize(("kernel", "dtype"), every_kernel())
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [2, 32, 64, 75, 96, 128, 160, 192, 256, 320])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_very_low_lse(kernel: str, dtype: torch.dtype, head_dim: int, tokens: int, is_causal: bool) -> None:
    """cuDNN 9.19 scores what fills its last tile of keys with 0: exp(0 - lse) is then inf, and dq NaN."""
    q, k, v = make_qkv(1, tokens, 2, head_dim, dtype=dtype)
    far = torch.zeros_like(q)
    far[..., 0] = 32.0
    qkv = (q + far, k - far, v)  # scores of -1024 / sqrt(head_dim) and a little
    pattern, dout = DilatedPattern.head_groups([tokens], [1]), torch.randn_like(q)
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern, is_causal=is_causal)
        attention = functools.partial(dilated_attention, pattern=pattern, is_causal=is_causal, backend=backend)
        got = testing.run(attention, qkv, dout)
    exact = testing.oracle(qkv, pattern, dout, is_causal=is_causal)
    for name, x in got.items():
        assert x.isfinite().all(), name
        columns = slice(1, None) if name in ("dq", "dk") else slice(None)  # of 32 times what cancels little is left
        assert testing.error(x[..., columns], getattr(exact, name)[..., columns]) < 0.05, name


@pytest.mark.parametrize("head_dim", [1, 3, 256, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_any_head_dim_finds_a_backend(head_dim: int, dtype: str, backend: str) -> None:
    pattern, qkv = DilatedPattern.longnet([16, 40], [1, 3]), make_qkv(1, 40, 4, head_dim, dtype=DTYPES[dtype])
    if backend == "sdpa":  # it need not take them all
        try:
            explain(*qkv, pattern, backend=backend)
        except ValueError as reasons:
            pytest.skip(str(reasons))
    testing.check(qkv, pattern, backend=backend)


@pytest.mark.parametrize("shape", [(0, 20), (2, 0)])
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    qkv = [x.requires_grad_() for x in make_qkv(*shape, 4, 64, dtype=torch.bfloat16)]
    out = dilated_attention(*qkv, DilatedPattern.longnet([8], [2]))
    out.sum().backward()
    assert out.shape == (*shape, 4, 64)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in qkv)


# --- masked, unwritten and dropped ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["efficient", "eager"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_anything_may_stand_in_masked_slots(kernel: str, rule: str, is_causal: bool) -> None:
    pattern = DilatedPattern(rule, (32, 64), (1, 3))
    q, k, v = make_qkv(2, 75, 4, 64, dtype=torch.bfloat16)
    mask = make_mask("random", 2, 75)
    bad = [x.masked_fill(mask[:, :, None, None], torch.nan) for x in (k, v)]
    dout = torch.ones_like(q)
    with only(kernel) as backend:
        clean, dirty = (
            testing.run(
                lambda *x: dilated_attention(
                    *x, pattern, key_padding_mask=mask, is_causal=is_causal, backend=backend, return_lse=True
                ),
                (q, *kv),
                dout,
            )
            for kv in ((k, v), bad)
        )
    for (name, x), (_, y) in zip(dirty.items(), clean.items(), strict=True):
        assert not x.isnan().any(), name
        assert testing.error(x, y) < 1e-2, name
    assert (dirty.dk[mask] == 0).all()
    assert (dirty.dv[mask] == 0).all()


@pytest.mark.parametrize("kernel", ALL)
def test_rows_in_no_branch(kernel: str) -> None:
    pattern = DilatedPattern.longnet([32, 64], [3, 5])
    covered = pattern.coverage(75, 4).to(DEVICE)
    qkv = make_qkv(2, 75, 4, 64, dtype=torch.bfloat16)
    qkv = tuple(x.masked_fill(~covered[None, :, :, None], torch.nan) for x in qkv)
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern)
        got = testing.run(
            lambda *x: dilated_attention(*x, pattern, backend=backend, return_lse=True),
            qkv,
            torch.ones_like(qkv[0]),
            torch.ones(2, 75, 4, device=DEVICE),
        )
    assert (got.lse[:, ~covered] == -torch.inf).all()
    for name, x in got.items():
        assert x[:, covered].isfinite().all(), name
        assert name == "lse" or (x[:, ~covered] == 0).all(), name


def test_both_devices_drop_the_same_pairs() -> None:
    masks = []
    for device in ("cpu", DEVICE):
        query = torch.arange(300, device=device).view(1, 300, 1)
        words = row_words(torch.tensor(-(2**61) + 12345, device=device), 3, query * 0 + 7, query * 0 + 2, query)
        masks.append(Dropout(0.4, *words, query).keep().cpu())
    assert torch.equal(*masks)


# --- size -------------------------------------------------------------------------------------------------------


def by_segments(attend: Callable[..., testing.Results], width: int, tensors: tuple[Tensor, ...]) -> testing.Results:
    """One dense branch, its whole segments as samples and its tail alone, put together again; tensors (1, N, ...)."""
    whole = tensors[0].shape[1] // width * width
    parts = [[x[:, :whole].reshape(whole // width, width, *x.shape[2:]) for x in tensors]]
    if whole < tensors[0].shape[1]:
        parts.append([x[:, whole:] for x in tensors])
    results = [[x for _, x in attend(*part).items()] for part in parts]
    return testing.Results(
        *(torch.cat([x.flatten(0, 1) for x in some]).unsqueeze(0) for some in zip(*results, strict=True))
    )


@pytest.mark.parametrize(("kernel", "dtype"), every_kernel())
@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("segments", [65535, 65536, 131071])
def test_more_segments_than_a_grid_takes(kernel: str, dtype: torch.dtype, width: int, segments: int) -> None:
    pattern, is_causal = DilatedPattern.longnet([width], [1]), segments % 2 == 0
    tokens = segments * width + width // 2  # a tail where the width leaves room for one
    qkv = make_qkv(1, tokens, 1, 16, dtype=dtype)
    dout = make_qkv(1, tokens, 1, 16, dtype=dtype, seed=1)[0]
    dlse = dout[..., 0].float()
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern, is_causal=is_causal)
        got = testing.run(
            lambda *x: dilated_attention(*x, pattern, is_causal=is_causal, backend=backend, return_lse=True),
            qkv,
            dout,
            dlse,
        )

    def attend(exact: torch.dtype | None) -> Callable[..., testing.Results]:
        return lambda *x: testing.oracle(x[:3], pattern, *x[3:], is_causal=is_causal, dtype=exact)

    expected, plain = (by_segments(attend(exact), width, (*qkv, dout, dlse)) for exact in (torch.float64, None))
    testing.assert_exact(got, expected, plain)


def one_row(q: Tensor, k: Tensor, v: Tensor, keys: list[int], head: int, query: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of one row in float64; tensors (1, N, H, D)."""
    scores = k[0, keys, head].double() @ q[0, query, head].double() / q.shape[-1] ** 0.5
    return scores.softmax(0) @ v[0, keys, head].double(), scores.logsumexp(0)


@pytest.mark.large
@pytest.mark.parametrize("kernel", ALL)
def test_more_elements_than_32_bits_count(kernel: str) -> None:
    tokens, heads, dim, width = 2**20, 17, 128, 1024
    assert tokens * heads * dim > 2**31
    if torch.cuda.mem_get_info()[0] < 90 * 2**30:
        pytest.skip("needs 90 GiB of free device memory")
    pattern = DilatedPattern.longnet([64, width], [1, 16])
    qkv = make_big(tokens, heads, dim)
    with only(kernel) as backend:
        ask(kernel, backend, qkv, pattern)
        leaves = [x.requires_grad_() for x in qkv]
        out, lse = dilated_attention(*leaves, pattern, backend=backend, return_lse=True)

        draw = random.Random(0)
        with torch.no_grad():
            for _ in range(64):
                query, head = draw.randrange(tokens), draw.randrange(heads)
                keys = list(pattern.keys(query, head, num_tokens=tokens, num_heads=heads))
                expected, expected_lse = one_row(*leaves, keys, head, query)
                # the values are of the order of 1: a wrong row is off by tenths, rounding by thousandths
                assert (out[0, query, head].double() - expected).abs().max() < 1e-2, (query, head)
                assert (lse[0, query, head].double() - expected_lse).abs() < 1e-3, (query, head)

        # only the last segment gets a gradient, and it comes strided
        dout = torch.zeros(1, heads, tokens, dim, dtype=out.dtype, device=DEVICE).transpose(1, 2)
        dout[:, -width:] = make_qkv(1, width, heads, dim, dtype=out.dtype, seed=9)[0]
        grads = torch.autograd.grad(out, leaves, dout)
    last = tuple(x.detach()[:, -width:].contiguous() for x in leaves)
    last_dout = dout[:, -width:].contiguous()
    got = testing.Results(out.detach()[:, -width:], lse.detach()[:, -width:], *(x[:, -width:] for x in grads))
    expected, plain = (testing.oracle(last, pattern, last_dout, dtype=exact) for exact in (torch.float64, None))
    testing.assert_exact(got, expected, plain)
    for x in grads:
        assert not any(piece.any().item() for piece in x[:, :-width].split(2**17, dim=1))


@pytest.mark.large
@pytest.mark.parametrize("kernel", ALL)
def test_one_segment_wider_than_a_call_counts(kernel: str) -> None:
    """More than 2 GiB from its first row to its last, so each head is copied out; the heads are plain attention."""
    tokens, heads, dim, rate = 2**20, 12, 128, 1024
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free device memory")
    pattern, alone = DilatedPattern.longnet([tokens], [rate]), DilatedPattern.longnet([tokens // rate], [1])
    *qkv, dout = make_big(tokens, heads, dim, count=4)
    with only(kernel) as backend:
        ask(kernel, backend, tuple(qkv), pattern)
        got = testing.run(lambda *x: dilated_attention(*x, pattern, backend=backend, return_lse=True), tuple(qkv), dout)
    for head in (0, 5, 11):
        rows = [x[:, head::rate, head : head + 1] for x in (*qkv, dout)]
        part = testing.Results(*(x[:, head::rate, head : head + 1] for _, x in got.items()))
        exact, plain = (testing.oracle(tuple(rows[:3]), alone, rows[3], dtype=d) for d in (torch.float64, None))
        testing.assert_exact(part, exact, plain)


@pytest.mark.parametrize("scale", [0.0, 1e-46])
@pytest.mark.parametrize("kernel", ALL)
def test_a_vanishing_scale_when_causal(kernel: str, scale: float) -> None:
    qkv = make_qkv(2, 75, 4, 64, dtype=torch.bfloat16)
    check(kernel, qkv, DilatedPattern.longnet([32, 64], [1, 2]), scale=scale, is_causal=True)


def make_big(tokens: int, heads: int, dim: int, count: int = 3) -> tuple[Tensor, ...]:
    """Drawn in half precision at once: by way of float32 it would take three times the memory."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return tuple(
        torch.randn(1, tokens, heads, dim, generator=generator, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(count)
    )


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**33:
        torch.cuda.empty_cache()


# --- around the function ----------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"masked": True},
    "dropout": {"dropout_p": 0.2},
}


def named(backend: str, name: str) -> str:
    """What to ask for; "library" stands for what runs such a call where our kernels do not."""
    if backend == "library":
        return "eager" if name == "dropout" else "sdpa"
    return backend


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Also fills every uninitialised tensor with NaN."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "eager"])
@pytest.mark.parametrize("rule", RULES)
def test_deterministic_algorithms_repeat_every_bit(kernel: str, rule: str) -> None:
    pattern = DilatedPattern(rule, (128, 1024), (1, 3))
    qkv = make_qkv(2, 1000, 6, 64, kv_heads=3, dtype=torch.bfloat16)
    dout, dlse = torch.randn_like(qkv[0]), torch.randn(2, 1000, 6, device=DEVICE)

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(*x, pattern, enable_gqa=True, backend=backend, return_lse=True)

    with only(kernel) as backend, deterministic_algorithms():
        ask(kernel, backend, qkv, pattern)
        one, two = (testing.run(attend, qkv, dout, dlse) for _ in range(2))
    for (name, x), (_, y) in zip(one.items(), two.items(), strict=True):
        assert torch.equal(x, y), name
    expected, plain = (testing.oracle(qkv, pattern, dout, dlse, dtype=exact) for exact in (torch.float64, None))
    testing.assert_exact(one, expected, plain)


def test_deterministic_algorithms_refuse_cudnn() -> None:
    qkv = make_qkv(1, 64, 2, 64, dtype=torch.bfloat16)
    with only("cudnn"), deterministic_algorithms(), pytest.raises(ValueError, match="deterministic"):
        dilated_attention(*qkv, DilatedPattern.longnet([16], [1]), backend="sdpa")


def test_all_kernels_switched_off_leaves_our_own() -> None:
    qkv = make_qkv(1, 64, 2, 64, dtype=torch.bfloat16)
    pattern = DilatedPattern.longnet([16], [1])
    with sdpa_kernel([SDPBackend.MATH]):
        assert explain(*qkv, pattern).backend == "triton"
        double = tuple(x.double() for x in qkv)
        assert explain(*double, pattern).backend == "eager"
        testing.check(qkv, pattern)
        with pytest.raises(ValueError, match="switched off"):
            dilated_attention(*qkv, pattern, backend="sdpa")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    qkv = [x.requires_grad_() for x in make_qkv(2, 75, 4, 64)]
    pattern = DilatedPattern.longnet([32, 64], [1, 3])
    with torch.autocast(DEVICE, dtype):
        out = dilated_attention(*qkv, pattern)
    assert out.dtype is dtype
    out.float().square().sum().backward()
    assert all(x.grad.dtype is torch.float32 for x in qkv)
    expected, _ = reference.attention(*(x.detach() for x in qkv), pattern)
    assert testing.error(out.detach(), expected) < 2e-2


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["auto", "library"])
def test_no_host_synchronisation(name: str, rule: str, backend: str) -> None:
    pattern = DilatedPattern(rule, (32, 64), (1, 3))
    options = {**OPTIONS[name], "backend": named(backend, name)}
    mask = make_mask("random", 2, 75) if options.pop("masked", False) else None
    qkv = [x.requires_grad_() for x in make_qkv(2, 75, 6, 64, kv_heads=3, dtype=torch.bfloat16)]
    dout, dlse = torch.ones_like(qkv[0]), torch.zeros(2, 75, 6, device=DEVICE)

    def step() -> None:
        out, lse = dilated_attention(*qkv, pattern, key_padding_mask=mask, enable_gqa=True, return_lse=True, **options)
        torch.autograd.grad((out, lse), qkv, (dout, dlse))

    for _ in range(2):  # plans, kernels and torch's own set-up
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["auto", "library"])
def test_captured_in_a_cuda_graph(name: str, rule: str, backend: str) -> None:
    pattern = DilatedPattern(rule, (32, 64), (1, 3))
    options = {**OPTIONS[name], "backend": named(backend, name)}
    masked = options.pop("masked", False)
    mask = make_mask("random", 2, 75) if masked else None
    static = make_qkv(2, 75, 4, 64, dtype=torch.bfloat16)

    def attend() -> tuple[Tensor, Tensor]:
        return dilated_attention(*static, pattern, key_padding_mask=mask, return_lse=True, **options)

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                attend()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attend()
        for x, new in zip(static, make_qkv(2, 75, 4, 64, dtype=torch.bfloat16, seed=8), strict=True):
            x.copy_(new)
        graph.replay()
        got, got_lse = out.clone(), lse.clone()
        if "dropout_p" in options:
            graph.replay()
            assert not torch.equal(out, got), "every replay drops the same pairs"
            assert torch.equal(lse, got_lse)
            return
        expected, expected_lse = attend()
    assert testing.error(got, expected) < 1e-2
    assert testing.error(got_lse, expected_lse) < 1e-3


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_compiled(dynamic: bool, backend: str) -> None:
    pattern = DilatedPattern.longnet([32, 64], [1, 3])

    def block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, lse = dilated_attention(q * 0.5, k, v, pattern, key_padding_mask=mask, return_lse=True, backend=backend)
        return out * lse.sigmoid().unsqueeze(-1).to(out.dtype)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for tokens in (96, 75) if dynamic else (96,):
        qkv = [x.requires_grad_() for x in make_qkv(2, tokens, 4, 64, dtype=torch.bfloat16)]
        mask = make_mask("right", 2, tokens)
        outs = [function(*qkv, mask) for function in (compiled, block)]
        grads = [torch.autograd.grad(out.float().square().sum(), qkv) for out in outs]
        assert testing.error(outs[0].detach(), outs[1].detach()) < 2e-2
        for x, y in zip(*grads, strict=True):
            assert testing.error(x, y) < 3e-2


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["triton", "library"])
def test_opcheck(name: str, backend: str) -> None:
    options = dict(OPTIONS[name])
    mask = make_mask("random", 2, 40) if options.get("masked") else None
    seed = torch.tensor(77, device=DEVICE) if "dropout_p" in options else None
    pattern = DilatedPattern.torchscale([16, 32], [1, 3])
    chosen = (options.get("is_causal", False), 0.3, options.get("dropout_p", 0.0), named(backend, name))
    qkv = [x.requires_grad_() for x in make_qkv(2, 40, 4, 16)]
    given = (*qkv, [mask, seed, None], *Call(pattern, *chosen).packed(0))  # no positions; the first query is at 0
    torch.library.opcheck(torch.ops.dilated_attention.forward.default, given)
