"""The public function at its edges: errors, layouts, sizes, precision, and everything PyTorch does around a function.

The numbers themselves are checked against the oracle in test_cases.
"""

from __future__ import annotations

import functools
import math
import shutil
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

from dilated_attention import DilatedPattern, autograd, dilated_attention, explain, reference, testing
from dilated_attention.backends import sdpa
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call, checked_cu_seqlens
from dilated_attention.pattern import RULES
from tests.cases import Recorder, finite, leaves

PATTERN = DilatedPattern.longnet([8, 16], [1, 3])
SPARSE = DilatedPattern.longnet([8, 16], [2, 3])  # leaves rows uncovered
BY_RULE = [DilatedPattern(rule, (8, 16), (1, 3)) for rule in RULES]
BACKENDS = ("sdpa", "eager")
CLOSE = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
QKV = testing.make_qkv(2, 20, 4, 8)
QKV64 = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64)


# --- errors: before any work, saying what was got ---------------------------------------------------------------

X = torch.zeros(2, 20, 4, 8)
ONE, FEW, LONGER, FLAGS = X[:1], X[:, :, :2], torch.zeros(2, 21, 4, 8), torch.zeros(2, 20, dtype=torch.bool)
NESTED = [torch.nested.as_nested_tensor([X[0], X[0, :9]], layout=x) for x in (torch.jagged, torch.strided)]
BORDERS = "cu_seqlens must begin with 0, never fall, and end with 20, the number of tokens, got "
GROUPS = DilatedPattern.head_groups([2, 4, 8], [1] * 3)
DETACHED = DilatedPattern.torchscale([8, 16], [1, 3], mixing_gradient="detached")


def every(x: Any, **options: Any) -> dict[str, Any]:
    return {"query": x, "key": x, "value": x, **options}


Refused = list[tuple[str, dict[str, Any]]]  # what the error says; the arguments that differ from a right call's
VALUES: Refused = [
    (r"query must be \(batch, tokens, heads, head_dim\), got .*20", {"query": X[0]}),
    (r"value must be \(batch, tokens, heads, head_dim\), got", {"value": X[None]}),
    ("query has 21 tokens and key 20", {"query": LONGER}),
    (r"key and value must have one shape, got .*20.*21", {"value": LONGER}),
    (r"agree in batch and head_dim, got \(2, 20, 4, 8\)", every(ONE, query=X)),
    ("agree in batch and head_dim", every(X[..., :4], query=X)),
    ("head_dim must be 1 or more", every(X[..., :0])),
    ("0 query heads", every(X[:, :, :0])),
    ("query has 4 heads and key 2.*enable_gqa=True", every(FEW, query=X)),
    ("4 query heads.*3 key/value heads", every(X[:, :, :3], query=X, enable_gqa=True)),
    ("3 branches and 2 key/value heads", every(FEW, query=X, enable_gqa=True, pattern=GROUPS)),
    ("value is torch.float64 on cpu and query torch.float32", {"value": X.double()}),
    ("key is torch.float32 on meta and query torch.float32 on cpu", every(X.to("meta"), query=X)),
    (r"query has the layout torch.sparse_coo: pass query.to_dense\(\)", every(X.to_sparse())),
    *((r"query is a nested tensor: pass torch\.cat\(query\.unbind.* as cu_seqlens", every(x)) for x in NESTED),
    ("cu_seqlens is for one row.*got a batch of 2", {"cu_seqlens": [0, 20]}),
    ("got 3 queries and 20 keys", every(ONE, query=ONE[:, :3], cu_seqlens=[0, 20])),
    ("leave ignored tokens out", every(ONE, key_padding_mask=FLAGS[:1], cu_seqlens=[0, 20])),
    *((BORDERS, every(ONE, cu_seqlens=x)) for x in ([], [0], [1, 20], [0, 21], [0, 9, 4, 20], [*range(19)])),
    (r"key_padding_mask must be .*\(2, 20\), got \(2, 19\)", {"key_padding_mask": FLAGS[:, 1:]}),
    ("key_padding_mask is on meta and query on cpu", {"key_padding_mask": FLAGS.to("meta")}),
    *((rf"dropout_p must .*\[0, 1\], got .?{p}", {"dropout_p": p}) for p in (-0.1, 1.1, math.nan, "half", True)),
    *((f"scale must be .* 0 or more, got .?{x}", {"scale": x}) for x in (-1.0, math.nan, math.inf, "half", True)),
    ("scale must be a finite number", {"scale": 10**400}),
    *(("unknown backend .*use one of auto, triton, sdpa, eager", {"backend": x}) for x in ("flash", None)),
    ("works only on one device and without dropout", {"pattern": DETACHED, "dropout_p": 0.1}),
    ("'sdpa' cannot run this call: .*dropout.*Use backend='auto'", {"backend": "sdpa", "dropout_p": 0.1}),
]
PACKED = (20, [0.0, 20.0], torch.tensor([0.0, 20.0]), torch.tensor([[0, 20]]), [True, 20])
TYPES: Refused = [
    ("query must be float64, .*got torch.int64", every(X.long())),
    ("query must be a tensor, got ndarray", {"query": X.numpy()}),
    *(("cu_seqlens must be .* whole numbers", every(ONE, cu_seqlens=x)) for x in PACKED),
    ("key_padding_mask must be bool with True = ignore.*got torch.float32", {"key_padding_mask": FLAGS.float()}),
    ("key_padding_mask must be a tensor, got bool", {"key_padding_mask": False}),
    ("enable_gqa must be True or False, got 'no'", {"enable_gqa": "no"}),
    ("is_causal must be True or False, got 1", {"is_causal": 1}),
    ("pattern must be a Pattern or a DilatedPattern, got str", {"pattern": "longnet"}),
]


@pytest.mark.parametrize(
    ("kind", "match", "given"), [(k, *bad) for k, some in ((ValueError, VALUES), (TypeError, TYPES)) for bad in some]
)
def test_bad_input_is_refused_before_any_work(kind: type[Exception], match: str, given: dict[str, Any]) -> None:
    """And explain() says the same."""
    before, said = torch.get_rng_state(), set()
    for function in (dilated_attention, explain):
        with Recorder() as recorder, pytest.raises(kind, match=match) as raised:
            function(**{**every(X), "pattern": PATTERN, **given})
        assert recorder.names == []
        said.add(str(raised.value))
    assert len(said) == 1
    assert torch.equal(torch.get_rng_state(), before), "a refused call has drawn a random number"


@pytest.mark.parametrize(
    ("heads", "kind", "match"),
    [
        *((x, TypeError, r"two whole numbers, \(first, total\)") for x in (5, (), (0.5, 8), (True, 8), (0, 4, 8))),
        *((x, ValueError, r"\(first, total\) with 0 <= first <= total - 4") for x in ((-1, 8), (5, 8), (0, 3))),
    ],
)
def test_heads_are_two_whole_numbers(heads: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=f"heads must be {match}"):
        dilated_attention(X, X, X, PATTERN, heads=heads)


def test_numbers_of_numpy_are_numbers() -> None:
    pattern = DilatedPattern.longnet(np.array([8, 16]), np.array([1, 3]))
    got = dilated_attention(*QKV, pattern, scale=np.float32(0.5), dropout_p=np.float64(0.0))
    assert torch.equal(got, dilated_attention(*QKV, PATTERN, scale=0.5))


# --- explain ----------------------------------------------------------------------------------------------------


FLASH = "sdpa/flash on CPU"


@pytest.mark.parametrize(
    ("options", "why_not"),
    [
        ({"is_causal": True}, {"eager": "could run, but sdpa (flash on CPU)"}),
        ({"dropout_p": 0.5}, {FLASH: "its dropout cannot follow the seeded mask"}),
        ({"backend": "eager"}, {FLASH: ""}),
    ],
    ids=str,
)
def test_explain_computes_nothing_and_names_what_runs(options: dict[str, Any], why_not: dict[str, str]) -> None:
    before = torch.get_rng_state()
    with Recorder() as recorder:
        told = explain(*QKV, PATTERN, key_padding_mask=FLAGS, **options)
    assert recorder.names == []
    assert torch.equal(torch.get_rng_state(), before)
    assert told.why_not.keys() == {"triton", *why_not}
    assert all(reason in told.why_not[name][0] for name, reason in why_not.items())
    assert str(told).startswith(f"runs: {told.backend}, kernel: {told.kernel}\nbackward: {told.backend}, kernel: ")
    assert (told.kernel == "flash on CPU") == (FLASH not in why_not) == (told.backend == "sdpa")


# --- layouts and sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"backend": "sdpa"}, {"backend": "eager"}, {"dropout_p": 0.5}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("samples", "tokens"), [(0, 20), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(samples: int, tokens: int, masked: bool, options: dict[str, Any]) -> None:
    qkv = leaves(*testing.make_qkv(samples, tokens, 4, 8, kv_heads=2))
    mask = torch.zeros(samples, tokens, dtype=torch.bool) if masked else None
    for pattern in BY_RULE:
        out, lse = dilated_attention(*qkv, pattern, enable_gqa=True, return_lse=True, key_padding_mask=mask, **options)
        assert (out.shape, lse.shape) == ((samples, tokens, 4, 8), (samples, tokens, 4))
        grads = torch.autograd.grad(out.sum() + lse.sum(), qkv)
        assert [x.shape for x in grads] == [x.shape for x in qkv]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Not at every merge of branches."""
    pattern = DilatedPattern.longnet([4, 8, 16, 32, 64], [1] * 5)
    qkv = testing.make_qkv(1, 64, 2, 16, dtype=dtype)
    out = dilated_attention(*qkv, pattern, backend="eager").double()
    expected = reference.attention(*qkv, pattern)[0]
    step = torch.finfo(dtype).eps * expected.abs()
    assert ((out - expected).abs() <= 0.51 * step + 1e-6).all()


# --- autograd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("branches", "dtype"), [(1, torch.float64), (2, torch.float32), (4, torch.float32)])
def test_one_node_and_five_saved_tensors(dtype: torch.dtype, branches: int) -> None:
    """And besides, where there are such, a mask and a seed."""
    pattern = DilatedPattern.longnet([4, 8, 16, 32][:branches], [1, 2, 3, 4][:branches])
    qkv, saved = leaves(*testing.make_qkv(3, 20, 4, 8, kv_heads=2, dtype=dtype)), []
    options = {"key_padding_mask": torch.zeros(3, 20, dtype=torch.bool), "dropout_p": 0.1} if branches == 4 else {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        out, lse = dilated_attention(*qkv, pattern, enable_gqa=True, return_lse=True, **options)
    assert lse.grad_fn is out.grad_fn is not None
    floats, others = ([x for x in saved if x.is_floating_point() == is_float] for is_float in (True, False))
    assert [x.data_ptr() for x in floats] == [x.data_ptr() for x in (*qkv, out, lse)]
    assert sum(x.untyped_storage().nbytes() for x in floats) == 3 * pattern.saved_bytes(
        20, 4, 8, num_kv_heads=2, dtype=dtype
    )
    assert [(x.dtype, x.numel()) for x in others] == ([(torch.bool, 60), (torch.int64, 1)] if options else [])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_only_some_inputs(wanted: tuple[int, ...]) -> None:
    dout = torch.randn(X.shape, dtype=torch.float64)
    inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(QKV64)]
    dilated_attention(*inputs, PATTERN).backward(dout)
    expected = testing.oracle(QKV64, PATTERN, dout)[2:]
    CLOSE([x.grad for x in inputs if x.requires_grad], [expected[i] for i in wanted])
    assert all(x.requires_grad or x.grad is None for x in inputs)


def through_the_op(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, backend: str) -> Tensor:
    return torch.ops.dilated_attention.forward_2(q, k, v, [None] * 4, *Call(pattern).packed())[0]


@pytest.mark.parametrize("only_value", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(
    ("attention", "backend", "queries"),
    [(dilated_attention, *x) for x in (("sdpa", 20), ("eager", 20), ("auto", 3))] + [(through_the_op, "auto", 20)],
)
def test_double_backward_says_what_to_do(
    attention: Any, backend: str, queries: int, linear: bool, only_value: bool
) -> None:
    """Also where the gradient that comes in needs none itself: what comes out depends on q, k and v all the same."""
    qkv = [x.clone().requires_grad_(i == 2 or not only_value) for i, x in enumerate((QKV[0][:, :queries], *QKV[1:]))]
    out = attention(*qkv, PATTERN, backend=backend)
    loss = out.sum() if linear else out.square().sum()
    (grad,) = torch.autograd.grad(loss, qkv[2], create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*create_graph.*reference\.attention"):
        (loss + grad.square().sum()).backward()


# --- kernels that the user switched off -------------------------------------------------------------------------


def test_a_kernel_switched_off_for_a_call_is_so_in_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own attention does: what runs backward is decided where the call is made."""
    qkv = leaves(*QKV)
    plain = dilated_attention(*qkv, PATTERN)
    with sdpa_kernel(SDPBackend.MATH):
        told = explain(*qkv, PATTERN)
        assert told.backend == "eager"
        assert "switched off" in str(told)
        with pytest.raises(ValueError, match="switched off"):
            dilated_attention(*qkv, PATTERN, backend="sdpa")
        out = dilated_attention(*qkv, PATTERN)
        wanted = torch.autograd.grad(plain.sum(), qkv, retain_graph=True)  # by the kernel that made it
    monkeypatch.delattr(sdpa, "backward")
    torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv), wanted, rtol=0, atol=1e-5)
    with pytest.raises(AttributeError, match="backward"):
        plain.sum().backward()


# --- activation checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpointing_gives_the_same_gradients(use_reentrant: bool, dropout_p: float) -> None:
    qkv = leaves(*testing.make_qkv(2, 29, 4, 8))

    def block(*x: Tensor) -> Tensor:
        out, lse = dilated_attention(*x, BY_RULE[1], dropout_p=dropout_p, return_lse=True)
        return out.square().sum() + lse.sum()

    torch.manual_seed(1)
    expected = torch.autograd.grad(block(*qkv), qkv)
    torch.manual_seed(1)
    loss = checkpoint(block, *qkv, use_reentrant=use_reentrant)
    torch.rand(3)  # the generator moves on before the recomputation
    loss.backward()
    assert all(map(torch.equal, [x.grad for x in qkv], expected))


# --- autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "queries"), [("auto", 20), ("eager", 20), ("auto", 3)])
def test_autocast_is_the_cast_and_nothing_else(backend: str, queries: int) -> None:
    """Forward, and gradients in the dtype of the inputs. Of few queries the cache is not converted as a whole."""
    qkv = leaves(QKV[0][:, :queries], *QKV[1:])
    low = leaves(*(x.bfloat16() for x in qkv))
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = dilated_attention(*qkv, PATTERN, backend=backend, return_lse=True)
        assert explain(*qkv, PATTERN).backend == "sdpa"
    expected = dilated_attention(*low, PATTERN, backend=backend)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    grads, exact = torch.autograd.grad(out, qkv, dout), torch.autograd.grad(expected, low, dout)
    torch.testing.assert_close(grads, tuple(x.float() for x in exact), rtol=2e-2, atol=2e-2)


def test_autocast_leaves_float64_alone_and_takes_mixed_inputs() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        testing.check(QKV64, PATTERN)
        assert dilated_attention(QKV[0], QKV[1].bfloat16(), QKV[2].half(), PATTERN).dtype is torch.bfloat16


# --- torch.compile, torch.export, fake tensors ------------------------------------------------------------------


def compiled_once(attend: Any, **options: Any) -> tuple[Any, Any]:
    """In one graph; and what counts how often it was compiled."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(attend, fullgraph=True, backend=counter, **options), counter


def loss_and_grads(function: Any, *given: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    out, lse = function(*given)
    return out, lse, *torch.autograd.grad(out.square().sum() + finite(lse).sum(), given[:3])


@pytest.mark.parametrize(
    ("pattern", "masked", "options"),
    [(BY_RULE[0], False, {}), (BY_RULE[2], True, {"is_causal": True, "dropout_p": 0.4, "scale": 0.3})],
)
def test_lengths_that_vary_are_compiled_once(pattern: DilatedPattern, masked: bool, options: dict[str, Any]) -> None:
    """In one graph, and bit for bit what is not compiled. The table of cases has more kinds of calls."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, pattern, key_padding_mask=mask, enable_gqa=True, return_lse=True, **options)

    compiled, counter = compiled_once(attend, dynamic=True)
    frames = []
    for tokens in (24, 29, 40, 7):
        qkv = leaves(*testing.make_qkv(2, tokens, 4, 8, kv_heads=2))
        mask = torch.arange(tokens).expand(2, -1) % 4 == 1 if masked else None
        assert all(map(torch.equal, *(loss_and_grads(function, *qkv, mask) for function in (compiled, attend))))
        frames.append(counter.frame_count)
    assert 0 < frames[0] == frames[-1], "compiled again for another length"


def test_another_packing_is_not_compiled_again() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PATTERN, cu_seqlens=cu_seqlens, return_lse=True)

    (compiled, counter), qkv = compiled_once(attend), leaves(*testing.make_qkv(1, 24, 4, 8))
    for borders in ([0, 5, 24], [0, 11, 24], [0, 23, 24]):
        assert all(map(torch.equal, *(loss_and_grads(f, *qkv, torch.tensor(borders)) for f in (compiled, attend))))
        assert counter.frame_count == 1
    with pytest.raises(ValueError, match="cu_seqlens must begin with 0"):
        compiled(*qkv, torch.tensor([0, 25, 24]))


def test_one_sequence_is_a_plain_call() -> None:
    """Its plan and its kernels are found again; and a row of nothing stays one."""
    for borders in ([0, 24], [0, 0, 24, 24], torch.tensor([0, 24], dtype=torch.int32)):
        assert checked_cu_seqlens(borders, 24) == ()
    assert dilated_attention(*[ONE[:, :0]] * 3, PATTERN, cu_seqlens=[0, 0]).shape == (1, 0, 4, 8)


@pytest.mark.parametrize("dynamic", [None, True])
def test_new_numbers_are_a_new_graph(dynamic: bool | None) -> None:
    """Numbers that torch.compile would make symbols of: those of the pattern, and which heads these are."""
    compiled, _ = compiled_once(dilated_attention, dynamic=dynamic)
    patterns, heads = (PATTERN, SPARSE, BY_RULE[1], *[PATTERN] * 4), (*[None] * 4, (2, 12), (4, 12), (5, 13))
    for pattern, some in zip(patterns, heads, strict=True):
        assert torch.equal(*(attend(*QKV, pattern, heads=some) for attend in (compiled, dilated_attention)))


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor cannot link where PyTorch's own path has a space")
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = dilated_attention(q * 2, k + 1, v, PATTERN, return_lse=True)
        return (out * lse.sigmoid().unsqueeze(-1)).tanh()

    qkv = leaves(*QKV64)
    outs = torch.compile(block, fullgraph=True)(*qkv), block(*qkv)
    CLOSE(*((out, *torch.autograd.grad(out.sum(), qkv)) for out in outs))


class Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return dilated_attention(q, k, v, PATTERN, key_padding_mask=mask, is_causal=True)


def test_exported_with_any_length() -> None:
    def example(samples: int, tokens: int) -> tuple[Tensor, ...]:
        mask = torch.arange(tokens).expand(samples, -1) >= tokens - 2
        return (*testing.make_qkv(samples, tokens, 4, 8), mask)

    samples, tokens = torch.export.Dim("samples", min=1), torch.export.Dim("tokens", min=2)
    program = torch.export.export(Attend(), example(2, 24), dynamic_shapes=({0: samples, 1: tokens},) * 4)
    for shape in ((3, 29), (1, 50)):
        assert torch.equal(program.module()(*example(*shape)), Attend()(*example(*shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("queries", "options"), [(10**6, {"dropout_p": 0.1}), (3, {"query_offset": 7})])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_tensors_know_shapes_and_dtypes(device: str, queries: int, options: Any, dtype: torch.dtype) -> None:
    with FakeTensorMode() if device == "cpu" else nullcontext():
        qkv = [
            torch.empty(2, n, 12, 64, dtype=dtype, device=device, requires_grad=True) for n in (queries, *[10**6] * 2)
        ]
        out, lse = dilated_attention(*qkv, PATTERN, return_lse=True, **options)
        (out.sum().float() + lse.sum()).backward()
    assert (out.shape, out.dtype, out.device.type) == (qkv[0].shape, dtype, device)
    assert (lse.shape, lse.dtype) == (qkv[0].shape[:3], torch.promote_types(dtype, torch.float32))
    assert [(x.grad.shape, x.grad.dtype) for x in qkv] == [(x.shape, dtype) for x in qkv]


# --- the registered ops -----------------------------------------------------------------------------------------

OPS = torch.ops.dilated_attention
TORCHSCALE = BY_RULE[1]
OP_CASES = {
    "longnet": Call(PATTERN),
    "uncovered": Call(SPARSE, is_causal=True, backend="sdpa"),
    "head_groups": Call(BY_RULE[2], scale=0.3, backend="eager"),
    "some_heads": Call(PATTERN, first_head=3, total_heads=7),
    "masked": Call(TORCHSCALE),
    "dropout": Call(TORCHSCALE, is_causal=True, scale=0.3, dropout_p=0.5),
    "few": Call(TORCHSCALE, scale=0.3, start=5),
    "few_on_device": Call(TORCHSCALE, scale=0.3, dropout_p=0.5, start=-1),
    "packed": Call(DilatedPattern.torchscale([8, 20], [1, 3])),
}


@pytest.mark.parametrize(("number", "name"), [*enumerate(OP_CASES)])
def test_opcheck(number: int, name: str) -> None:
    call, layout = OP_CASES[name], ("transposed", "contiguous")[number % 2]
    q, k, v = testing.make_qkv(2, 21, 4, 8, kv_heads=2, layout=layout)
    others = [
        torch.arange(21).expand(2, -1) > 17 if call.pattern is TORCHSCALE else None,
        torch.tensor(1234567890123) if call.drops else None,
        torch.tensor([2, 9]) if name == "few_on_device" else None,
        torch.tensor([0, 7, 9, 21]) if name == "packed" else None,
    ]
    qkv, packed = leaves(q[:, :3] if name.startswith("few") else q, k, v), call.packed()
    given = call.of(*qkv[:2], others[0], call.start)
    assert autograd._read(Inputs(*qkv, *others[:3]), packed) == given, "a call is read as it was written"
    torch.library.opcheck(OPS.forward_2.default, (*qkv, others, *packed))
    out, lse = (x.detach() for x in OPS.forward_2(*qkv, others, *packed))
    sent = out if number % 3 < 2 else None, lse if number % 3 != 1 else None
    torch.library.opcheck(OPS.backward_2.default, (*sent, [*(x.detach() for x in qkv), *others, out, lse], *packed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_op_takes_any_strides(backend: str) -> None:
    """Hooks on saved tensors, and compilers, may hand out and lse back in another layout."""
    others, packed = [None] * 4, Call(DilatedPattern.longnet([4, 8], [1, 3]), backend=backend).packed()
    results = OPS.forward_2(*QKV64, others, *packed)
    given = [*map(torch.randn_like, results), *results]
    CLOSE(*(
        OPS.backward_2(dout, dlse, [*QKV64, *others, *saved], *packed)
        for dout, dlse, *saved in (given, [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given])
    ))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_have_the_dtypes_of_the_inputs(dtype: torch.dtype) -> None:
    """Autograd would convert them, and a compiler would not. Few queries may be of another dtype than the keys."""
    q, *keys = testing.make_qkv(1, 9, 4, 8, dtype=dtype)
    qkv, others, packed = (q[:, :2].bfloat16(), *keys), [None] * 4, Call(TORCHSCALE, start=5).packed()
    out, lse = OPS.forward_2(*qkv, others, *packed)
    grads = OPS.backward_2(out, lse, [*qkv, *others, out, lse], *packed)
    assert [x.dtype for x in (out, *grads)] == [torch.bfloat16, torch.bfloat16, dtype, dtype]
