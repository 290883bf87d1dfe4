"""The public function at its edges: errors, layouts, sizes, precision, and everything PyTorch does around a function.

The numbers themselves are checked against the oracle in test_cases.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends import run, sdpa
from dilated_attention.blocks import plan
from dilated_attention.call import Call, unpacked
from dilated_attention.pattern import RULES
from tests.cases import Recorder, finite, leaves

PATTERN = DilatedPattern.longnet([8, 16], [1, 3])
SPARSE = DilatedPattern.longnet([8, 16], [2, 3])  # leaves rows uncovered
BACKENDS = ("sdpa", "eager")
SHAPE = (2, 20, 4, 8)


# --- errors: before any work, saying what was got ---------------------------------------------------------------


def bad_calls() -> Iterator[Any]:
    """(tensors, pattern, options, error, match)"""
    x, few, three = torch.zeros(SHAPE), torch.zeros(2, 20, 2, 8), torch.zeros(2, 20, 3, 8)
    narrow, none, one = torch.zeros(2, 20, 4, 4), torch.zeros(2, 20, 4, 0), torch.zeros(1, 20, 4, 8)
    longer, headless = torch.zeros(2, 21, 4, 8), torch.zeros(2, 20, 0, 8)

    def bad(name: str, match: str, kind: type = ValueError, qkv: Any = (x, x, x), pattern: Any = PATTERN, **o: Any):
        return pytest.param(qkv, pattern, o, kind, match, id=name)

    yield bad("3d", r"query must be \(batch, tokens, heads, head_dim\), got .*20", qkv=(x[0], x, x))
    yield bad("5d", r"value must be \(batch, tokens, heads, head_dim\), got", qkv=(x, x, x[None]))
    yield bad("tokens", "query has 21 tokens and key 20", qkv=(longer, x, x))
    yield bad("key-and-value", r"key and value must have one shape, got .*20.*21", qkv=(x, x, longer))
    yield bad("batch", r"agree in batch and head_dim, got \(2, 20, 4, 8\)", qkv=(x, one, one))
    yield bad("head-dim", "agree in batch and head_dim", qkv=(x, narrow, narrow))
    yield bad("no-head-dim", "head_dim must be 1 or more", qkv=(none,) * 3)
    yield bad("no-heads", "0 query heads", qkv=(headless,) * 3)
    yield bad("heads-differ", "query has 4 heads and key 2.*enable_gqa=True", qkv=(x, few, few))
    yield bad("not-shared", "4 query heads.*3 key/value heads", qkv=(x, three, three), enable_gqa=True)

    double, meta, sparse = x.double(), x.to("meta"), x.to_sparse()
    yield bad("dtypes", "value is torch.float64 on cpu and query torch.float32", qkv=(x, x, double))
    yield bad("devices", "key is torch.float32 on meta and query torch.float32 on cpu", qkv=(x, meta, meta))
    yield bad("integers", "query must be float64, .*got torch.int64", TypeError, qkv=(x.long(),) * 3)
    yield bad("no-tensor", "query must be a tensor, got ndarray", TypeError, qkv=(x.numpy(), x, x))
    yield bad("sparse", r"query has the layout torch.sparse_coo: pass query.to_dense\(\)", qkv=(sparse,) * 3)
    packed = (one,) * 3
    yield bad("packed-batch", "cu_seqlens is for one row.*got a batch of 2", cu_seqlens=[0, 20])
    yield bad("packed-few", "got 3 queries and 20 keys", qkv=(one[:, :3], one, one), cu_seqlens=[0, 20])
    mask = torch.zeros(1, 20, dtype=torch.bool)
    yield bad("packed-mask", "leave ignored tokens out", qkv=packed, key_padding_mask=mask, cu_seqlens=[0, 20])
    for number, borders in enumerate(([], [0], [1, 20], [0, 21], [0, 9, 4, 20], list(range(0, 19)))):
        match = "cu_seqlens must begin with 0, never fall, and end with 20, the number of tokens, got "
        yield bad(f"packed-{number}", match, qkv=packed, cu_seqlens=borders)
    for number, borders in enumerate((20, [0.0, 20.0], torch.tensor([0.0, 20.0]), torch.tensor([[0, 20]]), [True, 20])):
        yield bad(
            f"packed-kind-{number}", "cu_seqlens must be .* whole numbers", TypeError, qkv=packed, cu_seqlens=borders
        )
    nested = torch.nested.as_nested_tensor([torch.zeros(20, 4, 8), torch.zeros(10, 4, 8)], layout=torch.jagged)
    yield bad(
        "nested",
        r"query is a nested tensor: pass query\.values\(\)\.unsqueeze\(0\), and cu_seqlens=query\.offsets\(\)",
        qkv=(nested,) * 3,
    )
    strided = torch.nested.as_nested_tensor([torch.zeros(20, 4, 8), torch.zeros(10, 4, 8)])
    match = r"query is a nested tensor: pass torch\.cat\(query\.unbind\(\)\)\.unsqueeze\(0\), and cu_seqlens=\[0, "
    yield bad("nested-strided", match, qkv=(strided,) * 3)

    flags = torch.zeros(2, 20, dtype=torch.bool)
    for name, mask, kind, match in (
        ("shape", flags[:, 1:], ValueError, r"must be .*\(2, 20\), got \(2, 19\)"),
        ("float", flags.float(), TypeError, "must be bool with True = ignore.*got torch.float32"),
        ("bool", False, TypeError, "must be a tensor, got bool"),
        ("device", flags.to("meta"), ValueError, "is on meta and query on cpu"),
    ):
        yield bad(f"mask-{name}", f"key_padding_mask {match}", kind, key_padding_mask=mask)

    for p in (-0.1, 1.1, math.nan, "half", True):
        yield bad(f"dropout-{p}", rf"dropout_p must .*\[0, 1\], got .?{p}", dropout_p=p)
    for scale in (-1.0, math.nan, math.inf, "half", True):
        yield bad(f"scale-{scale}", f"scale must be .* 0 or more, got .?{scale}", scale=scale)
    yield bad("scale-long", "scale must be .* got one beyond the range of float", scale=10**400)
    yield bad("gqa-text", "enable_gqa must be True or False, got 'no'", TypeError, enable_gqa="no")
    yield bad("causal-number", "is_causal must be True or False, got 1", TypeError, is_causal=1)
    for backend in ("flash", None):
        yield bad(f"backend-{backend}", "unknown backend .*use one of auto, triton, sdpa, eager", backend=backend)
    cannot = "'sdpa' cannot run this call: .*dropout.*Use backend='auto'"
    yield bad("sdpa-dropout", cannot, backend="sdpa", dropout_p=0.1)
    yield bad("pattern", "pattern must be a DilatedPattern, got str", TypeError, pattern="longnet")
    groups, shared = DilatedPattern.head_groups([2, 4, 8], [1] * 3), (x, few, few)
    yield bad("too-few-heads", "3 branches and 2 key/value heads", qkv=shared, pattern=groups, enable_gqa=True)


@pytest.mark.parametrize(("qkv", "pattern", "options", "kind", "match"), [*bad_calls()])
def test_bad_input_is_refused_before_any_work(qkv, pattern, options, kind, match) -> None:
    before = torch.get_rng_state()
    for function in (dilated_attention, explain):
        with Recorder() as recorder, pytest.raises(kind, match=match):
            function(*qkv, pattern, **options)
        assert recorder.names == []
    assert torch.equal(torch.get_rng_state(), before), "a refused call has drawn a random number"


def test_heads_are_two_whole_numbers() -> None:
    x = torch.zeros(SHAPE)
    for heads in (5, (), (0.5, 8), (True, 8), (0, 4, 8)):
        with pytest.raises(TypeError, match=r"heads must be two whole numbers, \(first, total\) of the key/value"):
            dilated_attention(x, x, x, PATTERN, heads=heads)
    for outside in ((-1, 8), (5, 8), (0, 3)):
        with pytest.raises(ValueError, match=r"heads must be \(first, total\) with 0 <= first <= total - 4"):
            dilated_attention(x, x, x, PATTERN, heads=outside)


def test_numbers_of_numpy_are_numbers() -> None:
    qkv = testing.make_qkv(1, 9, 2, 4)
    pattern = DilatedPattern.longnet(np.array([8, 16]), np.array([1, 3]))
    assert pattern == PATTERN
    got = dilated_attention(*qkv, pattern, scale=np.float32(0.5), dropout_p=np.float64(0.0))
    assert torch.equal(got, dilated_attention(*qkv, PATTERN, scale=0.5))


# --- explain ----------------------------------------------------------------------------------------------------


def test_explain_names_what_runs_and_why_nothing_else() -> None:
    qkv = testing.make_qkv(2, 20, 4, 8)
    told = explain(*qkv, PATTERN)
    assert (told.backend, told.kernel) == ("sdpa", "flash on CPU")
    assert set(told.why_not) == {"triton", "eager"}
    assert "could run, but sdpa (flash on CPU)" in told.why_not["eager"][0]
    assert set(explain(*qkv, PATTERN, backend="eager").why_not) == {"triton", "sdpa/flash on CPU"}

    told = explain(*qkv, PATTERN, dropout_p=0.1)
    assert told.backend == "eager"
    assert "matmul" in told.kernel
    assert "dropout cannot follow the seeded mask" in told.why_not["sdpa/flash on CPU"][0]
    begins = ("runs: eager, kernel: ", "backward: eager, kernel: ", "not triton: ", "not sdpa/flash on CPU: its drop")
    assert all(map(str.startswith, str(told).splitlines(), begins))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"backend": "eager"}, {"is_causal": True}], ids=str)
def test_explain_computes_nothing_and_names_what_runs(options: dict[str, Any]) -> None:
    qkv, mask = testing.make_qkv(2, 20, 4, 8), torch.zeros(2, 20, dtype=torch.bool)
    before = torch.get_rng_state()
    with Recorder() as recorder:
        told = explain(*qkv, PATTERN, key_padding_mask=mask, **options)
    assert recorder.names == []
    assert torch.equal(torch.get_rng_state(), before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dilated_attention(*qkv, PATTERN, key_padding_mask=mask, **options)
    ran = any("flash_attention_for_cpu" in event.key for event in profile.key_averages())
    assert ran == (told.kernel == "flash on CPU") == (options in ({}, {"is_causal": True}))


# --- layouts and sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_may_be_expanded(backend: str) -> None:
    qkv, mask = testing.make_qkv(3, 20, 4, 8, dtype=torch.float64), (torch.arange(20) > 14).expand(3, -1)
    testing.check(qkv, PATTERN, key_padding_mask=mask, backend=backend)
    assert mask[0].tolist() == [i > 14 for i in range(20)]


@pytest.mark.parametrize(
    ("backend", "masked", "dropout_p"),
    [("sdpa", False, 0.0), ("sdpa", True, 0.0), ("eager", False, 0.5), ("auto", True, 0.5)],
)
@pytest.mark.parametrize(
    ("rule", "samples", "tokens"), [("longnet", 0, 20), ("torchscale", 2, 0), ("head_groups", 0, 0)]
)
def test_nothing_in_nothing_out(backend, rule, samples, tokens, masked, dropout_p) -> None:
    qkv = leaves(*testing.make_qkv(samples, tokens, 4, 8, kv_heads=2))
    out, lse = dilated_attention(
        *qkv, DilatedPattern(rule, (8, 16), (1, 3)), enable_gqa=True, return_lse=True, backend=backend,
        key_padding_mask=torch.zeros(samples, tokens, dtype=torch.bool) if masked else None, dropout_p=dropout_p,
    )  # fmt: skip
    assert out.shape == (samples, tokens, 4, 8)
    assert lse.shape == (samples, tokens, 4)
    (out.sum() + lse.sum()).backward()
    assert [x.grad.shape for x in qkv] == [x.shape for x in qkv]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_shapes_of_the_results(dtype: torch.dtype) -> None:
    qkv = leaves(*testing.make_qkv(1, 9, 2, 4, dtype=dtype))
    out, lse = dilated_attention(*qkv, PATTERN, return_lse=True)
    assert (out.dtype, out.shape) == (dtype, (1, 9, 2, 4))
    assert (lse.dtype, lse.shape) == (torch.float64 if dtype is torch.float64 else torch.float32, (1, 9, 2))
    (out.float().sum() + lse.sum()).backward()
    assert all(x.grad is not None and x.grad.dtype is dtype for x in qkv)
    assert isinstance(dilated_attention(*qkv, PATTERN), Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Not at every merge of branches."""
    pattern = DilatedPattern.longnet([4, 8, 16, 32, 64], [1, 1, 1, 1, 1])
    qkv = testing.make_qkv(1, 64, 2, 16, dtype=dtype)
    out = dilated_attention(*qkv, pattern, backend="eager").double()
    expected = reference.attention(*qkv, pattern)[0]
    step = torch.finfo(dtype).eps * expected.abs()
    assert ((out - expected).abs() <= 0.51 * step + 1e-6).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_call_twice_is_equal_to_the_bit(backend: str) -> None:
    """The second backward pass is through the same graph, with create_graph=True."""
    qkv = leaves(*testing.make_qkv(2, 45, 4, 8))
    calls = [dilated_attention(*qkv, PATTERN, backend=backend, return_lse=True) for _ in range(2)]
    assert all(map(torch.equal, *calls))
    dout = torch.randn(2, 45, 4, 8)
    grads = [
        torch.autograd.grad(call, qkv, (dout, dout[..., 0]), retain_graph=True, create_graph=again)
        for call, again in ((calls[0], False), (calls[1], False), (calls[0], True))
    ]
    for others in grads[1:]:
        assert all(map(torch.equal, grads[0], others))


# --- autograd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("branches", "dtype"), [(1, torch.float64), (2, torch.float32), (4, torch.float32)])
def test_one_node_and_five_saved_tensors(dtype: torch.dtype, branches: int) -> None:
    pattern = DilatedPattern.longnet([4, 8, 16, 32][:branches], [1, 2, 3, 4][:branches])
    qkv = leaves(*testing.make_qkv(3, 20, 4, 8, kv_heads=2, dtype=dtype))
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = dilated_attention(*qkv, pattern, enable_gqa=True, return_lse=True)
    assert out.grad_fn is not None
    assert lse.grad_fn is out.grad_fn
    nodes = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert [node.name().split("::")[-1] for node in nodes] == ["AccumulateGrad"] * 3
    assert {id(node.variable) for node in nodes} == {id(x) for x in qkv}

    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    assert set(storages) == {x.untyped_storage().data_ptr() for x in (*qkv, out, lse)}
    assert sum(storages.values()) == 3 * pattern.saved_bytes(20, 4, 8, num_kv_heads=2, dtype=dtype)

    saved.clear()
    mask = torch.zeros(3, 20, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        dilated_attention(*qkv, pattern, enable_gqa=True, key_padding_mask=mask, dropout_p=0.1)
    assert [(x.dtype, x.numel()) for x in saved if not x.is_floating_point()] == [(torch.bool, 60), (torch.int64, 1)]
    assert len(saved) == 5 + 2, "a mask and a seed are all that is saved besides"


def test_without_gradients_nothing_is_recorded() -> None:
    qkv = leaves(*testing.make_qkv(2, 20, 4, 8))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out, lse = dilated_attention(*qkv, PATTERN, return_lse=True)
        assert out.grad_fn is lse.grad_fn is None
        assert not out.requires_grad
        assert torch.equal(out, dilated_attention(*qkv, PATTERN))


def test_gradients_of_only_some_inputs_and_of_one_given_three_times() -> None:
    qkv = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64)
    dout = torch.randn(2, 20, 4, 8, dtype=torch.float64)
    expected = testing.oracle(qkv, PATTERN, dout)
    for wanted in ((0,), (1,), (2,), (0, 2)):
        inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(qkv)]
        dilated_attention(*inputs, PATTERN).backward(dout)
        for i, (x, grad) in enumerate(zip(inputs, (expected.dq, expected.dk, expected.dv), strict=True)):
            assert testing.error(x.grad, grad) < 1e-12 if i in wanted else x.grad is None
    (x,) = leaves(qkv[0])
    (grad,) = torch.autograd.grad(dilated_attention(x, x, x, PATTERN), x, dout)
    expected = testing.oracle((x, x, x), PATTERN, dout)
    assert testing.error(grad, expected.dq + expected.dk + expected.dv) < 1e-12


def test_changing_a_saved_input_is_noticed() -> None:
    q, k, v = (x * 1.0 for x in leaves(*testing.make_qkv(2, 20, 4, 8)))
    out = dilated_attention(q, k, v, PATTERN)
    k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("only_value", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("backend", "queries"), [("sdpa", 20), ("eager", 20), ("auto", 3)])
def test_double_backward_says_what_to_do(backend: str, queries: int, linear: bool, only_value: bool) -> None:
    """Also where the gradient that comes in needs none itself: what comes out depends on q, k and v all the same."""
    q, k, v = testing.make_qkv(2, 20, 4, 8)
    qkv = [x.requires_grad_(x is v or not only_value) for x in (q[:, :queries].clone(), k, v)]
    out = dilated_attention(*qkv, PATTERN, backend=backend)
    loss = out.sum() if linear else out.square().sum()
    (grad,) = torch.autograd.grad(loss, qkv[2], create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*create_graph.*reference\.attention"):
        (loss + grad.square().sum()).backward()


def test_double_backward_of_the_op_says_what_to_do() -> None:
    q, k, v = (x.requires_grad_() for x in testing.make_qkv(2, 20, 4, 8))
    out, _ = torch.ops.dilated_attention.forward(q, k, v, [None] * 4, *Call(PATTERN).packed())
    (grad,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.square().sum().backward()


# --- kernels that the user switched off -------------------------------------------------------------------------


def refuse(*_: Any) -> None:
    raise AssertionError("this kernel is switched off")


def test_a_kernel_switched_off_for_a_call_is_so_in_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own attention does: what runs backward is decided where the call is made."""
    qkv = leaves(*testing.make_qkv(2, 20, 4, 8))
    plain = dilated_attention(*qkv, PATTERN)
    with sdpa_kernel(SDPBackend.MATH):
        told = explain(*qkv, PATTERN)
        assert told.backend == "eager"
        assert "switched off" in str(told)
        with pytest.raises(ValueError, match="switched off"):
            dilated_attention(*qkv, PATTERN, backend="sdpa")
        out = dilated_attention(*qkv, PATTERN)
        wanted = torch.autograd.grad(plain.sum(), qkv)  # by the kernel that made it
    monkeypatch.setattr(sdpa, "backward", refuse)
    for grad, exact in zip(torch.autograd.grad(out.sum(), qkv), wanted, strict=True):
        assert testing.error(grad, exact) < 1e-5
    with pytest.raises(AssertionError, match="switched off"):
        dilated_attention(*qkv, PATTERN).sum().backward()


# --- activation checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use_reentrant", "dropout_p", "rule"),
    [(False, 0.5, "longnet"), (True, 0.5, "torchscale"), (False, 0.0, "head_groups"), (True, 0.0, "longnet")],
)
def test_checkpointing_gives_the_same_gradients(use_reentrant: bool, dropout_p: float, rule: str) -> None:
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    qkv = leaves(*testing.make_qkv(2, 29, 4, 8))

    def block(*x: Tensor) -> Tensor:
        out, lse = dilated_attention(*x, pattern, dropout_p=dropout_p, return_lse=True)
        return out.square().sum() + finite(lse).sum()

    torch.manual_seed(1)
    expected = torch.autograd.grad(block(*qkv), qkv)
    torch.manual_seed(1)
    loss = checkpoint(block, *qkv, use_reentrant=use_reentrant)
    torch.rand(3)  # the generator moves on before the recomputation
    loss.backward()
    for x, grad in zip(qkv, expected, strict=True):
        assert torch.equal(x.grad, grad)


# --- autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "queries"), [("auto", 20), ("eager", 20), ("auto", 3)])
def test_autocast_is_the_cast_and_nothing_else(backend: str, queries: int) -> None:
    """Forward, and gradients in the dtype of the inputs. Of few queries the cache is not converted as a whole."""
    q, k, v = testing.make_qkv(2, 20, 4, 8)
    given, low = (
        leaves(q[:, :queries].to(dtype), k.to(dtype), v.to(dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = dilated_attention(*given, PATTERN, backend=backend, return_lse=True)
        assert explain(*given, PATTERN).backend == "sdpa"
    expected = dilated_attention(*low, PATTERN, backend=backend)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    for x, y in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(expected, low, dout), strict=True):
        assert x.dtype is torch.float32
        assert testing.error(x, y.float()) < 2e-2


def test_autocast_leaves_float64_alone_and_takes_mixed_inputs() -> None:
    qkv = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        testing.check(qkv, PATTERN)
        q, k, v = (x.to(dtype) for x, dtype in zip(qkv, (torch.float32, torch.bfloat16, torch.float16), strict=True))
        assert dilated_attention(q, k, v, PATTERN).dtype is torch.bfloat16


# --- torch.compile, torch.export, fake tensors ------------------------------------------------------------------

COMPILED: dict[str, dict[str, Any]] = {  # by rule
    "longnet": {},
    "torchscale": {"is_causal": True, "masked": True},
    "head_groups": {"is_causal": True, "masked": True, "dropout_p": 0.4, "scale": 0.3},
}


def loss_and_grads(function: Any, qkv: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    out, lse = function(*qkv, mask)
    return out, lse, *torch.autograd.grad(out.square().sum() + finite(lse).sum(), qkv)


@pytest.mark.parametrize("rule", RULES)
def test_lengths_that_vary_are_compiled_once(rule: str) -> None:
    """In one graph, and bit for bit what is not compiled. The table of cases has more kinds of calls."""
    torch._dynamo.reset()
    pattern, options = DilatedPattern(rule, (8, 16), (1, 3)), dict(COMPILED[rule])
    masked = options.pop("masked", False)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, pattern, key_padding_mask=mask, enable_gqa=True, return_lse=True, **options)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for tokens in (24, 29, 40, 7):
        qkv = leaves(*testing.make_qkv(2, tokens, 4, 8, kv_heads=2))
        mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.3 if masked else None
        assert all(map(torch.equal, *(loss_and_grads(function, qkv, mask) for function in (compiled, attend))))
        frames.append(counter.frame_count)
    assert 0 < frames[0] == frames[-1], "compiled again for another length"


def test_another_packing_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return dilated_attention(q, k, v, PATTERN, cu_seqlens=cu_seqlens).square().sum()

    compiled, qkv = torch.compile(attend, fullgraph=True, backend=counter), leaves(*testing.make_qkv(1, 24, 4, 8))
    for borders in ([0, 5, 24], [0, 11, 24], [0, 23, 24]):
        found = [torch.autograd.grad(f(*qkv, torch.tensor(borders)), qkv) for f in (compiled, attend)]
        assert all(map(torch.equal, *found))
        assert counter.frame_count == 1
    with pytest.raises(ValueError, match="cu_seqlens must begin with 0"):
        compiled(*qkv, torch.tensor([0, 25, 24]))


def test_one_sequence_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan and its kernels are found again; and a row of nothing stays one."""
    seen: list[tuple[int, ...]] = []
    forward = run.forward
    monkeypatch.setattr(run, "forward", lambda call, inputs: seen.append(call.sequences) or forward(call, inputs))
    q = testing.make_qkv(1, 24, 4, 8)[0]
    for borders in ([0, 24], [0, 0, 24, 24], torch.tensor([0, 24], dtype=torch.int32), (0, 4, 24)):
        dilated_attention(q, q, q, PATTERN, cu_seqlens=borders)
    assert seen == [(), (), (), (0, 4, 24)]
    none = q[:, :0]
    assert dilated_attention(none, none, none, PATTERN, cu_seqlens=[0, 0]).shape == none.shape


def test_equal_sequences_share_blocks() -> None:
    """As many as for one sequence, not as many as sequences."""
    call = Call(PATTERN).of(*testing.make_qkv(1, 24 * 50, 4, 8)[:2], None, 0)
    alone = plan(call._replace(queries=24, keys=24, total=24))
    assert len(plan(call._replace(sequences=tuple(range(0, 1201, 24)))).blocks) == len(alone.blocks)


def test_vmap_over_packed_rows() -> None:
    q, k, v = testing.make_qkv(3, 24, 4, 8, dtype=torch.float64)

    def attend(*qkv: Tensor) -> Tensor:
        return dilated_attention(*(x.unsqueeze(0) for x in qkv), PATTERN, cu_seqlens=[0, 7, 24])[0]

    assert testing.error(torch.func.vmap(attend)(q, k, v), torch.stack(list(map(attend, q, k, v)))) < 1e-12


@pytest.mark.parametrize("dynamic", [None, True])
def test_new_numbers_are_a_new_graph(dynamic: bool | None) -> None:
    """Numbers that torch.compile would make symbols of: those of the pattern, and which heads these are."""
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, heads: tuple[int, int] | None) -> Tensor:
        return dilated_attention(q, k, v, pattern, heads=heads)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    qkv = testing.make_qkv(2, 24, 4, 8)
    for pattern in (PATTERN, SPARSE, DilatedPattern.torchscale([8, 16], [1, 3]), PATTERN):
        assert torch.equal(compiled(*qkv, pattern, None), attend(*qkv, pattern, None))
    for heads in ((2, 12), (4, 12), (5, 13)):
        assert torch.equal(compiled(*qkv, PATTERN, heads), attend(*qkv, PATTERN, heads))


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor cannot link where PyTorch's own path has a space")
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = dilated_attention(q * 2, k + 1, v, PATTERN, return_lse=True)
        return (out * lse.sigmoid().unsqueeze(-1)).tanh()

    qkv = leaves(*testing.make_qkv(2, 24, 4, 8, dtype=torch.float64))
    outs = torch.compile(block, fullgraph=True)(*qkv), block(*qkv)
    got, expected = ((out, *torch.autograd.grad(out.sum(), qkv)) for out in outs)
    for x, y in zip(got, expected, strict=True):
        assert testing.error(x, y) < 1e-12


class Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PATTERN, key_padding_mask=mask, is_causal=True, return_lse=True)


def test_exported_with_any_length() -> None:
    def example(samples: int, tokens: int) -> tuple[Tensor, ...]:
        mask = torch.arange(tokens).expand(samples, -1) >= tokens - 2
        return (*testing.make_qkv(samples, tokens, 4, 8), mask)

    samples, tokens = torch.export.Dim("samples", min=1), torch.export.Dim("tokens", min=2)
    shapes = ({0: samples, 1: tokens},) * 4
    program = torch.export.export(Attend(), example(2, 24), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("dilated_attention.forward.default") == 1
    for shape in ((2, 24), (3, 29), (1, 50)):
        assert all(map(torch.equal, program.module()(*example(*shape)), Attend()(*example(*shape))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("queries", "dropout_p"), [(10**6, 0.1), (3, 0.0)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_tensors_know_shapes_and_dtypes(device: str, queries: int, dropout_p: float, dtype: torch.dtype) -> None:
    with FakeTensorMode() if device == "cpu" else nullcontext():
        shapes = (2, queries, 12, 64), *[(2, 10**6, 4, 64)] * 2
        qkv = [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
        offset = torch.zeros(2, dtype=torch.int64, device=device) if queries == 3 else None
        options = {"enable_gqa": True, "return_lse": True, "dropout_p": dropout_p, "query_offset": offset}
        out, lse = dilated_attention(*qkv, PATTERN, **options)
        (out.sum().float() + lse.sum()).backward()
    assert (out.shape, out.dtype, out.device.type) == (qkv[0].shape, dtype, device)
    assert (lse.shape, lse.dtype) == (qkv[0].shape[:3], torch.float64 if dtype is torch.float64 else torch.float32)
    for x in qkv:
        assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)


@pytest.mark.parametrize("kind", ["plain", "meta", "fake", "func"])
def test_a_backend_asked_for_by_name_refuses_whatever_the_tensors_are(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else nullcontext():
        qkv = torch.empty(3, 2, 20, 4, 8, device="meta" if kind == "meta" else "cpu").unbind(0)

        def call(query: Tensor) -> Tensor:
            return dilated_attention(query, *qkv[1:], PATTERN, backend="triton").sum()

        with pytest.raises(ValueError, match="backend 'triton' cannot run this call"):
            torch.func.grad(call)(qkv[0]) if kind == "func" else call(qkv[0])


# --- the registered ops -----------------------------------------------------------------------------------------

OPS = torch.ops.dilated_attention
TORCHSCALE = DilatedPattern.torchscale([8, 16], [1, 3])
OP_CASES = {
    "longnet": Call(PATTERN),
    "uncovered": Call(SPARSE, is_causal=True, backend="sdpa"),
    "head_groups": Call(DilatedPattern.head_groups([8, 16], [1, 3]), scale=0.3, backend="eager"),
    "some_heads": Call(PATTERN, first_head=3, total_heads=7),
    "masked": Call(TORCHSCALE),
    "dropout": Call(TORCHSCALE, is_causal=True, scale=0.3, dropout_p=0.5),
    "few": Call(TORCHSCALE, scale=0.3),
    "few_on_device": Call(TORCHSCALE, scale=0.3, dropout_p=0.5),
    "packed": Call(DilatedPattern.torchscale([8, 20], [1, 3])),
}


def op_arguments(name: str, layout: str = "contiguous") -> tuple[Any, ...]:
    """What the forward op takes."""
    call = OP_CASES[name]
    q, k, v = testing.make_qkv(2, 21, 4, 8, kv_heads=2, layout=layout)
    mask = torch.arange(21).expand(2, -1) > 17 if call.pattern is TORCHSCALE else None
    seed = torch.tensor(1234567890123) if call.drops else None
    positions = torch.tensor([2, 9]) if name == "few_on_device" else None
    packed = torch.tensor([0, 7, 9, 21]) if name == "packed" else None
    start = {"few": 5, "few_on_device": -1}.get(name, 0)
    return (
        q[:, :3] if name.startswith("few") else q,
        k,
        v,
        [mask, seed, positions, packed],
        *call._replace(start=start).packed(),
    )


@pytest.mark.parametrize(("name", "layout"), list(zip(OP_CASES, itertools.cycle(("transposed", "contiguous")))))
def test_opcheck_forward(name: str, layout: str) -> None:
    assert unpacked(*OP_CASES[name]._replace(start=5).packed()) == OP_CASES[name]._replace(start=5), (
        "a call is read as it was written"
    )
    q, k, v, *rest = op_arguments(name, layout)
    torch.library.opcheck(OPS.forward.default, (*leaves(q, k, v), *rest))


@pytest.mark.parametrize(
    ("name", "which"), list(zip(OP_CASES, itertools.cycle(((True, True), (True, False), (False, True)))))
)
def test_opcheck_backward(name: str, which: tuple[bool, bool]) -> None:
    q, k, v, others, *packed = op_arguments(name)
    out, lse = OPS.forward(q, k, v, others, *packed)
    dout = torch.randn_like(out) if which[0] else None
    dlse = torch.randn_like(lse) if which[1] else None
    torch.library.opcheck(OPS.backward.default, (dout, dlse, [q, k, v, out, lse, *others], *packed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_op_takes_any_strides(backend: str) -> None:
    """Hooks on saved tensors, and compilers, may hand out and lse back in another layout."""
    qkv, others = testing.make_qkv(3, 16, 4, 8, dtype=torch.float64), [None] * 4
    packed = Call(DilatedPattern.longnet([4, 8], [1, 3]), backend=backend).packed()
    out, lse = OPS.forward(*qkv, others, *packed)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = OPS.backward(dout, dlse, [*qkv, out, lse, *others], *packed)
    dout, dlse, out, lse = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (dout, dlse, out, lse))
    for x, y in zip(OPS.backward(dout, dlse, [*qkv, out, lse, *others], *packed), expected, strict=True):
        assert testing.error(x, y) < 1e-12


def test_gradients_have_the_dtypes_of_the_inputs() -> None:
    """Autograd would convert them, and a compiler would not. Few queries may be of another dtype than the keys."""
    q, k, v = testing.make_qkv(1, 9, 4, 8, dtype=torch.bfloat16)
    for keys in ((k, v), (k.float(), v.float())):
        qkv, others, packed = (q[:, :2], *keys), [None] * 4, Call(TORCHSCALE, start=5).packed()
        out, lse = OPS.forward(*qkv, others, *packed)
        grads = OPS.backward(out, lse, [*qkv, out, lse, *others], *packed)
        assert [x.dtype for x in (out, *grads)] == [torch.bfloat16, *(x.dtype for x in qkv)]


def test_threads_do_not_disturb_each_other() -> None:
    """Plans are cached for the process: two threads that ask for different ones get their own."""
    qkv = testing.make_qkv(2, 33, 4, 8)
    patterns = [DilatedPattern(rule, (8, 16), rates) for rule, rates in itertools.product(RULES, ((1, 3), (2, 1)))]
    expected = [dilated_attention(*qkv, pattern) for pattern in patterns]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pattern: dilated_attention(*qkv, pattern), patterns * 10))
    assert all(map(torch.equal, got, expected * 10))
