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

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends import sdpa
from dilated_attention.call import Call, unpacked
from dilated_attention.pattern import RULES

PATTERN = DilatedPattern.longnet([8, 16], [1, 3])
SPARSE = DilatedPattern.longnet([8, 16], [2, 3])  # leaves rows uncovered
BACKENDS = ("sdpa", "eager")


class Recorder(TorchDispatchMode):
    """The names of all operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def filled(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def leaves(*args: Any, **kwargs: Any) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in testing.make_qkv(*args, **kwargs)]


# --- errors: before any work, saying what was got ---------------------------------------------------------------

SHAPE = (2, 20, 4, 8)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def bad_calls() -> Iterator[Any]:
    """(name, tensors, pattern, options, error, match)"""
    x = torch.zeros(SHAPE)

    def shapes(name: str, q: tuple, k: tuple, v: tuple, match: str, **options: Any) -> Any:
        return pytest.param(tensors(q, k, v), PATTERN, options, ValueError, match, id=name)

    yield shapes("3d-query", (20, 4, 8), SHAPE, SHAPE, r"query must be \(batch, tokens, heads, head_dim\), got .*20")
    yield shapes("3d-key", SHAPE, (20, 4, 8), SHAPE, r"key must be \(batch, tokens, heads, head_dim\), got")
    yield shapes("5d-value", SHAPE, SHAPE, (1, *SHAPE), r"value must be \(batch, tokens, heads, head_dim\), got")
    yield shapes("tokens", (2, 21, 4, 8), SHAPE, SHAPE, "query has 21 tokens and key 20")
    yield shapes("key-value-tokens", SHAPE, SHAPE, (2, 21, 4, 8), r"key and value must have one shape, got .*20.*21")
    yield shapes("key-value-heads", SHAPE, SHAPE, (2, 20, 2, 8), r"key and value must have one shape", enable_gqa=True)
    yield shapes("key-value-dim", SHAPE, SHAPE, (2, 20, 4, 16), r"key and value must have one shape")
    yield shapes("batch", SHAPE, (1, 20, 4, 8), (1, 20, 4, 8), r"agree in batch and head_dim, got \(2, 20, 4, 8\)")
    yield shapes("head-dim", SHAPE, (2, 20, 4, 4), (2, 20, 4, 4), r"agree in batch and head_dim")
    yield shapes("no-head-dim", (2, 20, 4, 0), (2, 20, 4, 0), (2, 20, 4, 0), "head_dim must be 1 or more")
    yield shapes("no-heads", (2, 20, 0, 8), (2, 20, 0, 8), (2, 20, 0, 8), "0 query heads")
    few = (2, 20, 2, 8)
    yield shapes("heads-differ", SHAPE, few, few, "query has 4 heads and key 2.*enable_gqa=True")
    three = (2, 20, 3, 8)
    yield shapes("heads-not-shared", SHAPE, three, three, "4 query heads.*3 key/value heads", enable_gqa=True)
    yield shapes("more-kv-heads", few, SHAPE, SHAPE, "2 query heads.*4 key/value heads", enable_gqa=True)

    def value(name: str, match: str, kind: type = ValueError, qkv: Any = (x, x, x), pattern: Any = PATTERN, **o: Any):
        return pytest.param(qkv, pattern, o, kind, match, id=name)

    double, whole, meta = x.double(), x.long(), x.to("meta")
    yield value("key-dtype", "key is torch.float64 on cpu and query torch.float32", qkv=(x, double, double))
    yield value("value-dtype", "value is torch.float64 on cpu and query torch.float32", qkv=(x, x, double))
    yield value("integers", "query must be float64, .*got torch.int64", TypeError, qkv=(whole, whole, whole))
    yield value("bools", "value must be float64, .*got torch.bool", TypeError, qkv=(x, x, x.bool()))
    yield value("complex", "query must be float64, .*got torch.complex64", TypeError, qkv=(x.cfloat(),) * 3)
    yield value("key-device", "key is torch.float32 on meta and query torch.float32 on cpu", qkv=(x, meta, meta))
    yield value("value-device", "value is torch.float32 on meta", qkv=(x, x, meta))

    nested = torch.nested.as_nested_tensor([torch.zeros(20, 4, 8), torch.zeros(10, 4, 8)], layout=torch.jagged)
    yield value("nested", "query is a nested tensor: pad it, and pass key_padding_mask", qkv=(nested,) * 3)

    flags = torch.zeros(2, 20, dtype=torch.bool)
    yield value("mask-shape", r"key_padding_mask must be .*\(2, 20\), got \(2, 21\)",
                key_padding_mask=torch.zeros(2, 21, dtype=torch.bool))  # fmt: skip
    yield value("mask-4d", "key_padding_mask must be", key_padding_mask=flags[:, None, None])
    yield value("mask-1d", "key_padding_mask must be", key_padding_mask=flags[0])
    yield value("mask-float", "key_padding_mask must be bool .*got torch.float32", TypeError,
                key_padding_mask=flags.float())  # fmt: skip
    yield value("mask-int", "True = ignore", TypeError, key_padding_mask=flags.long())
    yield value("mask-device", "key_padding_mask is on meta and query on cpu", key_padding_mask=flags.to("meta"))

    for p in (-0.1, 1.1, math.nan, math.inf, -math.inf, "half", None, True):
        yield value(f"dropout-{p}", rf"dropout_p must .*\[0, 1\], got .?{p}", dropout_p=p)
    for scale in (-1.0, math.nan, math.inf, -math.inf, "half", True):
        yield value(f"scale-{scale}", f"scale must be .* 0 or more, got .?{scale}", scale=scale)
    yield value("scale-long", "scale must be .* got one beyond the range of float", scale=10**400)
    yield value("gqa-text", "enable_gqa must be True or False, got 'no'", TypeError, enable_gqa="no")
    yield value("causal-number", "is_causal must be True or False, got 1", TypeError, is_causal=1)
    sparse = torch.zeros(SHAPE).to_sparse()
    yield value("sparse", r"query has the layout torch.sparse_coo: pass query.to_dense\(\)", qkv=(sparse,) * 3)
    for backend in ("flash", "", "SDPA", None):
        yield value(f"backend-{backend}", "unknown backend .*use one of auto, triton, sdpa, eager", backend=backend)
    yield value("sdpa-dropout", "'sdpa' cannot run this call: .*dropout.*Use backend='auto'",
                backend="sdpa", dropout_p=0.1)  # fmt: skip
    for pattern in (None, "longnet", ((8, 16), (1, 2)), {"segment_lengths": [8]}):
        yield value(f"pattern-{type(pattern).__name__}", "pattern must be a DilatedPattern, got", TypeError,
                    pattern=pattern)  # fmt: skip
    groups = DilatedPattern.head_groups([2, 4, 8, 16, 32], [1] * 5)
    yield value("too-few-heads", "5 branches to 4 key/value heads", pattern=groups)
    shared = tensors((2, 20, 10, 8), few, few)
    yield value("too-few-kv-heads", "5 branches to 2 key/value heads", qkv=shared, pattern=groups, enable_gqa=True)


@pytest.mark.parametrize("function", [dilated_attention, explain], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("qkv", "pattern", "options", "kind", "match"), [*bad_calls()])
def test_bad_input_is_refused(function, qkv, pattern, options, kind, match) -> None:
    with pytest.raises(kind, match=match):
        function(*qkv, pattern, **options)


@pytest.mark.parametrize(("qkv", "pattern", "options", "kind", "match"), [*bad_calls()])
def test_bad_input_is_refused_before_any_work(qkv, pattern, options, kind, match) -> None:
    before = torch.get_rng_state()
    for function in (dilated_attention, explain):
        with Recorder() as recorder, pytest.raises(kind, match=match):
            function(*qkv, pattern, **options)
        assert recorder.ran == []
    assert torch.equal(torch.get_rng_state(), before), "a refused call has drawn a random number"


@pytest.mark.parametrize("heads", [5, (), (0.5, 8), (True, 8), "ab", (0, 4, 8)], ids=str)
def test_heads_are_two_whole_numbers(heads: Any) -> None:
    x = torch.zeros(SHAPE)
    with pytest.raises(
        TypeError, match=r"heads must be two whole numbers, \(first, total\) of the key/value heads, got"
    ):
        dilated_attention(x, x, x, PATTERN, heads=heads)
    for outside in ((-1, 8), (5, 8), (0, 3)):
        with pytest.raises(ValueError, match=r"heads must be \(first, total\) with the 4 key heads given inside"):
            dilated_attention(x, x, x, PATTERN, heads=outside)


# --- explain ----------------------------------------------------------------------------------------------------


def test_explain_names_what_runs_and_why_nothing_else() -> None:
    qkv = testing.make_qkv(2, 20, 4, 8)
    told = explain(*qkv, PATTERN)
    assert (told.backend, told.kernel) == ("sdpa", "flash on CPU")
    assert set(told.why_not) == {"triton", "eager"}
    assert "could run, but sdpa (flash on CPU)" in told.why_not["eager"][0]

    told = explain(*qkv, PATTERN, dropout_p=0.1)
    assert told.backend == "eager"
    assert "matmul" in told.kernel
    assert set(told.why_not) == {"triton", "sdpa/flash on CPU"}
    assert "dropout cannot follow the seeded mask" in told.why_not["sdpa/flash on CPU"][0]

    told = explain(*qkv, PATTERN, backend="eager")
    assert told.backend == "eager"
    assert set(told.why_not) == {"triton", "sdpa/flash on CPU"}


def test_explain_reads_well() -> None:
    text = str(explain(*testing.make_qkv(2, 20, 4, 8), PATTERN, dropout_p=0.1))
    lines = text.splitlines()
    assert lines[0].startswith("runs: eager, kernel: ")
    assert lines[1].startswith("backward: eager, kernel: ")
    assert lines[2].startswith("not triton: ")
    assert lines[3].startswith("not sdpa/flash on CPU: its dropout")


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"backend": "eager"}, {"is_causal": True}], ids=str)
def test_explain_computes_nothing(options: dict[str, Any]) -> None:
    qkv = testing.make_qkv(2, 20, 4, 8)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    before = torch.get_rng_state()
    with Recorder() as recorder:
        explain(*qkv, PATTERN, key_padding_mask=mask, **options)
    assert recorder.ran == []
    assert torch.equal(torch.get_rng_state(), before)


def test_what_explain_names_is_what_runs() -> None:
    qkv = testing.make_qkv(2, 20, 4, 8)
    for backend, runs in (("sdpa", True), ("eager", False), ("auto", True)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dilated_attention(*qkv, PATTERN, backend=backend)
        assert any("flash_attention_for_cpu" in event.key for event in profile.key_averages()) == runs
        assert (explain(*qkv, PATTERN, backend=backend).kernel == "flash on CPU") == runs


# --- layouts and sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_is_not_modified_and_may_be_expanded(backend: str) -> None:
    qkv = testing.make_qkv(3, 20, 4, 8, dtype=torch.float64)
    mask = (torch.arange(20) > 14).expand(3, -1)
    testing.check(qkv, PATTERN, key_padding_mask=mask, backend=backend)
    assert mask[0].tolist() == [i > 14 for i in range(20)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [2, 3, 20, 300])
def test_any_head_dim(backend: str, head_dim: int) -> None:
    qkv = testing.make_qkv(2, 21, 4, head_dim, dtype=torch.float32 if head_dim == 20 else torch.float64)
    testing.check(qkv, PATTERN, backend=backend)


@pytest.mark.parametrize(
    ("backend", "masked", "dropout_p"),
    [("sdpa", False, 0.0), ("sdpa", True, 0.0), ("eager", False, 0.5), ("auto", True, 0.5)],
)
@pytest.mark.parametrize(
    ("rule", "samples", "tokens"), [("longnet", 0, 20), ("torchscale", 2, 0), ("head_groups", 0, 0)]
)
def test_nothing_in_nothing_out(backend, rule, samples, tokens, masked, dropout_p) -> None:
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    qkv = leaves(samples, tokens, 4, 8, kv_heads=2)
    mask = torch.zeros(samples, tokens, dtype=torch.bool) if masked else None
    out, lse = dilated_attention(
        *qkv, pattern, enable_gqa=True, return_lse=True, backend=backend, key_padding_mask=mask, dropout_p=dropout_p
    )
    assert out.shape == (samples, tokens, 4, 8)
    assert lse.shape == (samples, tokens, 4)
    (out.sum() + lse.sum()).backward()
    for x in qkv:
        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_shapes_of_the_results(dtype: torch.dtype) -> None:
    qkv = leaves(1, 9, 2, 4, dtype=dtype)
    out, lse = dilated_attention(*qkv, PATTERN, return_lse=True)
    assert (out.dtype, out.shape) == (dtype, (1, 9, 2, 4))
    assert (lse.dtype, lse.shape) == (torch.float64 if dtype is torch.float64 else torch.float32, (1, 9, 2))
    (out.float().sum() + lse.sum()).backward()
    assert all(x.grad is not None and x.grad.dtype is dtype for x in qkv)
    assert isinstance(dilated_attention(*qkv, PATTERN), Tensor)


@pytest.mark.parametrize(("backend", "dtype"), [("sdpa", torch.bfloat16), ("eager", torch.float16)])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_on_cpu(backend: str, dtype: torch.dtype, rule: str) -> None:
    qkv = testing.make_qkv(2, 21, 4, 8, dtype=dtype)
    testing.check(qkv, DilatedPattern(rule, (8, 16), (1, 3)), backend=backend)


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
    qkv = testing.make_qkv(2, 45, 4, 8)
    dout = torch.randn(2, 45, 4, 8)

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(*x, PATTERN, backend=backend, return_lse=True)

    one, two = (testing.run(attend, qkv, dout, dout[..., 0]) for _ in range(2))
    for (name, x), (_, y) in zip(one.items(), two.items(), strict=True):
        assert torch.equal(x, y), name


# --- autograd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("branches", [1, 2, 4])
def test_one_node_and_five_saved_tensors(dtype: torch.dtype, branches: int) -> None:
    pattern = DilatedPattern.longnet([4, 8, 16, 32][:branches], [1, 2, 3, 4][:branches])
    qkv = leaves(3, 20, 4, 8, kv_heads=2, dtype=dtype)
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


def test_a_mask_and_a_seed_are_all_that_is_saved_besides() -> None:
    qkv = leaves(3, 20, 4, 8)
    mask = torch.zeros(3, 20, dtype=torch.bool)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        dilated_attention(*qkv, PATTERN, key_padding_mask=mask, dropout_p=0.1)
    assert [(x.dtype, x.numel()) for x in saved if not x.is_floating_point()] == [(torch.bool, 60), (torch.int64, 1)]
    assert len(saved) == 5 + 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(context) -> None:
    qkv = leaves(2, 20, 4, 8)
    with context():
        out, lse = dilated_attention(*qkv, PATTERN, return_lse=True)
    assert out.grad_fn is None
    assert lse.grad_fn is None
    assert not out.requires_grad
    with_grad, _ = dilated_attention(*qkv, PATTERN, return_lse=True)
    assert torch.equal(out, with_grad)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_only_some_inputs(wanted: tuple[int, ...]) -> None:
    qkv = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64)
    dout = torch.randn(2, 20, 4, 8, dtype=torch.float64)
    expected = testing.oracle(qkv, PATTERN, dout)
    inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(qkv)]
    dilated_attention(*inputs, PATTERN).backward(dout)
    for i, (x, wants) in enumerate(zip(inputs, (expected.dq, expected.dk, expected.dv), strict=True)):
        if i in wanted:
            assert testing.error(x.grad, wants) < 1e-12
        else:
            assert x.grad is None


def test_one_tensor_as_query_key_and_value() -> None:
    x = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64)[0].requires_grad_()
    dout = torch.randn(2, 20, 4, 8, dtype=torch.float64)
    (grad,) = torch.autograd.grad(dilated_attention(x, x, x, PATTERN), x, dout)
    expected = testing.oracle((x, x, x), PATTERN, dout)
    assert testing.error(grad, expected.dq + expected.dk + expected.dv) < 1e-12


def test_backward_twice_through_a_kept_graph() -> None:
    qkv = leaves(2, 20, 4, 8)
    out = dilated_attention(*qkv, PATTERN)
    dout = torch.randn_like(out)
    one = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    two = torch.autograd.grad(out, qkv, dout)
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_changing_a_saved_input_is_noticed() -> None:
    q, k, v = (x * 1.0 for x in leaves(2, 20, 4, 8))
    out = dilated_attention(q, k, v, PATTERN)
    k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("only_value", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_says_what_to_do(backend: str, linear: bool, only_value: bool) -> None:
    """Also where the gradient that comes in needs none itself: what comes out depends on q, k and v all the same."""
    qkv = leaves(2, 20, 4, 8)
    if only_value:
        qkv[:2] = [x.detach() for x in qkv[:2]]
    out = dilated_attention(*qkv, PATTERN, backend=backend)
    loss = out.sum() if linear else out.square().sum()
    (grad,) = torch.autograd.grad(loss, qkv[2], create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*create_graph.*reference\.attention"):
        (loss + grad.square().sum()).backward()


def test_create_graph_costs_nothing_but_the_second_derivative() -> None:
    qkv = leaves(2, 20, 4, 8)
    out = dilated_attention(*qkv, PATTERN)
    plain, graph = (torch.autograd.grad(out.sum(), qkv, create_graph=x, retain_graph=True) for x in (False, True))
    assert all(map(torch.equal, plain, graph))


# --- kernels that the user switched off -------------------------------------------------------------------------


def refuse(*_: Any) -> None:
    raise AssertionError("this kernel is switched off")


def test_a_kernel_switched_off_for_a_call_is_so_in_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own attention does: what runs backward is decided where the call is made."""
    qkv = leaves(2, 20, 4, 8)
    plain = dilated_attention(*qkv, PATTERN)
    with sdpa_kernel(SDPBackend.MATH):
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
    qkv = leaves(2, 29, 4, 8)

    def block(*x: Tensor) -> Tensor:
        out, lse = dilated_attention(*x, pattern, dropout_p=dropout_p, return_lse=True)
        return out.square().sum() + filled(lse).sum()

    torch.manual_seed(1)
    expected = torch.autograd.grad(block(*qkv), qkv)
    torch.manual_seed(1)
    loss = checkpoint(block, *qkv, use_reentrant=use_reentrant)
    torch.rand(3)  # the generator moves on before the recomputation
    loss.backward()
    for x, grad in zip(qkv, expected, strict=True):
        assert torch.equal(x.grad, grad)


# --- autocast ---------------------------------------------------------------------------------------------------


def test_autocast_computes_in_bfloat16() -> None:
    qkv = leaves(2, 20, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = dilated_attention(*qkv, PATTERN, return_lse=True)
        assert explain(*qkv, PATTERN).backend == "sdpa"
    assert out.dtype is torch.bfloat16
    assert lse.dtype is torch.float32
    dout = torch.randn(2, 20, 4, 8)
    out.backward(dout.bfloat16())
    expected = testing.oracle(tuple(x.detach() for x in qkv), PATTERN, dout)
    assert testing.error(out.detach(), expected.out) < 2e-2
    for x, grad in zip(qkv, (expected.dq, expected.dk, expected.dv), strict=True):
        assert x.grad.dtype is torch.float32
        assert testing.error(x.grad, grad) < 3e-2


def test_autocast_is_the_cast_and_nothing_else() -> None:
    qkv = testing.make_qkv(2, 20, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = dilated_attention(*qkv, PATTERN, backend="eager")
    assert torch.equal(out, dilated_attention(*(x.bfloat16() for x in qkv), PATTERN, backend="eager"))


def test_autocast_leaves_float64_alone_and_takes_mixed_inputs() -> None:
    qkv = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        testing.check(qkv, PATTERN)
        q, k, v = (x.to(dtype) for x, dtype in zip(qkv, (torch.float32, torch.bfloat16, torch.float16), strict=True))
        assert dilated_attention(q, k, v, PATTERN).dtype is torch.bfloat16


# --- torch.compile, torch.export, fake tensors ------------------------------------------------------------------

COMPILED = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"masked": True},
    "dropout": {"dropout_p": 0.4},
    "all": {"is_causal": True, "masked": True, "dropout_p": 0.4, "scale": 0.3},
}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_and_grads(function: Any, qkv: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    out, lse = function(*qkv, mask)
    return out, lse, *torch.autograd.grad(out.square().sum() + filled(lse).sum(), qkv)


@pytest.mark.parametrize(("name", "rule"), list(zip(COMPILED, itertools.cycle(RULES))))
def test_lengths_that_vary_are_compiled_once(fresh_compiler: None, name: str, rule: str) -> None:
    """In one graph, and bit for bit what is not compiled. The table of cases has more kinds of calls."""
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    options = dict(COMPILED[name])
    masked = options.pop("masked", False)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, pattern, key_padding_mask=mask, enable_gqa=True, return_lse=True, **options)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for tokens in (24, 29, 40, 7):
        qkv = leaves(2, tokens, 4, 8, kv_heads=2)
        mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.3 if masked else None
        got, expected = (loss_and_grads(function, qkv, mask) for function in (compiled, attend))
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x, y)
        first = counter.frame_count if first is None else first
        assert counter.frame_count == first, f"compiled again for {tokens} tokens"
    assert first


@pytest.mark.parametrize("dynamic", [None, True])
def test_new_numbers_are_a_new_graph(fresh_compiler: None, dynamic: bool | None) -> None:
    """Numbers that torch.compile would make symbols of: those of the pattern, and which heads these are."""

    def attend(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, heads: tuple[int, int] | None) -> Tensor:
        return dilated_attention(q, k, v, pattern, heads=heads)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    qkv = testing.make_qkv(2, 24, 4, 8)
    for pattern in (PATTERN, SPARSE, DilatedPattern.torchscale([8, 16], [1, 3]), PATTERN):
        assert torch.equal(compiled(*qkv, pattern, None), attend(*qkv, pattern, None))
    for heads in ((2, 12), (4, 12), (5, 13)):
        assert torch.equal(compiled(*qkv, PATTERN, heads), attend(*qkv, PATTERN, heads))


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(fresh_compiler: None) -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = dilated_attention(q * 2, k + 1, v, PATTERN, return_lse=True)
        return (out * lse.sigmoid().unsqueeze(-1)).tanh()

    qkv = leaves(2, 24, 4, 8, dtype=torch.float64)
    got, expected = (
        (out, *torch.autograd.grad(out.sum(), qkv)) for out in (torch.compile(block, fullgraph=True)(*qkv), block(*qkv))
    )
    for x, y in zip(got, expected, strict=True):
        assert testing.error(x, y) < 1e-12


class Attend(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PATTERN, key_padding_mask=mask, return_lse=True, **self.options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_exported_with_any_length(is_causal: bool) -> None:
    module = Attend(is_causal=is_causal)

    def example(samples: int, tokens: int) -> tuple[Tensor, ...]:
        mask = torch.arange(tokens).expand(samples, -1) >= tokens - 2
        return (*testing.make_qkv(samples, tokens, 4, 8), mask)

    samples, tokens = torch.export.Dim("samples", min=1), torch.export.Dim("tokens", min=2)
    shapes = ({0: samples, 1: tokens},) * 4
    program = torch.export.export(module, example(2, 24), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("dilated_attention.forward.default") == 1
    for shape in ((2, 24), (3, 29), (1, 50)):
        args = example(*shape)
        for x, y in zip(program.module()(*args), module(*args), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_tensors_know_shapes_and_dtypes(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 10**6, 12, 64, dtype=dtype, requires_grad=True)
        k, v = (torch.empty(2, 10**6, 4, 64, dtype=dtype, requires_grad=True) for _ in range(2))
        out, lse = dilated_attention(q, k, v, PATTERN, enable_gqa=True, return_lse=True, dropout_p=0.1)
        (out.sum().float() + lse.sum()).backward()
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float64 if dtype is torch.float64 else torch.float32)
    for x in (q, k, v):
        assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)


def test_meta_tensors_know_shapes() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in testing.make_qkv(2, 20, 4, 8))
    out, lse = dilated_attention(q, k, v, PATTERN, return_lse=True)
    assert (out.shape, out.device.type) == (q.shape, "meta")
    assert lse.shape == q.shape[:3]
    out.sum().backward()
    assert q.grad.shape == q.shape


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
}


def op_arguments(name: str, layout: str = "contiguous") -> tuple[Any, ...]:
    """What the forward op takes."""
    call = OP_CASES[name]
    q, k, v = testing.make_qkv(2, 21, 4, 8, kv_heads=2, layout=layout)
    mask = torch.arange(21).expand(2, -1) > 17 if call.pattern is TORCHSCALE else None
    seed = torch.tensor(1234567890123) if call.drops else None
    if not name.startswith("few"):
        return q, k, v, [mask, seed, None], *call.packed(0)
    on_device = name == "few_on_device"
    positions, start = (torch.tensor([2, 9]), -1) if on_device else (None, 5)
    return q[:, :3], k, v, [mask, seed, positions], *call.packed(start)


@pytest.mark.parametrize("name", OP_CASES)
def test_a_call_is_read_as_it_was_written(name: str) -> None:
    assert unpacked(*OP_CASES[name].packed(5)) == (OP_CASES[name], 5)


@pytest.mark.parametrize(("name", "layout"), list(zip(OP_CASES, itertools.cycle(("transposed", "contiguous")))))
def test_opcheck_forward(name: str, layout: str) -> None:
    q, k, v, *rest = op_arguments(name, layout)
    torch.library.opcheck(OPS.forward.default, (*(x.detach().requires_grad_() for x in (q, k, v)), *rest))


@pytest.mark.parametrize(
    ("name", "which"), list(zip(OP_CASES, itertools.cycle(((True, True), (True, False), (False, True)))))
)
def test_opcheck_backward(name: str, which: tuple[bool, bool]) -> None:
    q, k, v, others, *packed = op_arguments(name)
    out, lse = OPS.forward(q, k, v, others, *packed)
    dout = torch.randn_like(out) if which[0] else None
    dlse = torch.randn_like(lse) if which[1] else None
    torch.library.opcheck(OPS.backward.default, (dout, dlse, [q, k, v, *others, out, lse], *packed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_op_takes_any_strides(backend: str) -> None:
    """Hooks on saved tensors, and compilers, may hand out and lse back in another layout."""
    qkv, others = testing.make_qkv(3, 16, 4, 8, dtype=torch.float64), [None] * 3
    packed = Call(DilatedPattern.longnet([4, 8], [1, 3]), backend=backend).packed(0)
    out, lse = OPS.forward(*qkv, others, *packed)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = OPS.backward(dout, dlse, [*qkv, *others, out, lse], *packed)
    dout, dlse, out, lse = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (dout, dlse, out, lse))
    for x, y in zip(OPS.backward(dout, dlse, [*qkv, *others, out, lse], *packed), expected, strict=True):
        assert testing.error(x, y) < 1e-12


def test_gradients_have_the_dtypes_of_the_inputs() -> None:
    """Autograd would convert them, and a compiler would not. Few queries may be of another dtype than the keys."""
    q, k, v = testing.make_qkv(1, 9, 4, 8, dtype=torch.bfloat16)
    for keys in ((k, v), (k.float(), v.float())):
        qkv, others, packed = (q[:, :2], *keys), [None] * 3, Call(TORCHSCALE).packed(5)
        out, lse = OPS.forward(*qkv, others, *packed)
        grads = OPS.backward(out, lse, [*qkv, *others, out, lse], *packed)
        assert [x.dtype for x in (out, *grads)] == [torch.bfloat16, *(x.dtype for x in qkv)]


def test_threads_do_not_disturb_each_other() -> None:
    """Plans are cached for the process: two threads that ask for different ones get their own."""
    qkv = testing.make_qkv(2, 33, 4, 8)
    patterns = [DilatedPattern(rule, (8, 16), rates) for rule, rates in itertools.product(RULES, ((1, 3), (2, 1)))]
    expected = [dilated_attention(*qkv, pattern) for pattern in patterns]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pattern: dilated_attention(*qkv, pattern), patterns * 10))
    for i, out in enumerate(got):
        assert torch.equal(out, expected[i % len(patterns)])
