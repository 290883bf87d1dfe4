"""Fewer queries than keys: what the table of cases leaves out, what is read, and everything PyTorch does around it."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends import run, sdpa, triton
from dilated_attention.backends.choose import choose
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call
from dilated_attention.pattern import RULES
from tests.cases import Recorder

TOKENS = 61
PATTERNS = {
    "paper": ([8, 16, 32], [1, 2, 4]),
    "odd": ([7, 20], [2, 5]),
    "rate_over_length": ([4, 40], [9, 6]),
    "long_and_twice": ([3, 1000, 3], [1, 7, 1]),
}
BACKENDS = ("sdpa", "eager")
PAPER = DilatedPattern.longnet(*PATTERNS["paper"])
Offset = int | Tensor | None


def make_mask(tokens: int = TOKENS) -> Tensor:
    """Holes in the first sample, and the second ends early."""
    mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[1, tokens * 2 // 3 :] = True
    return mask


def firsts(offset: Offset, samples: int, queries: int, tokens: int = TOKENS) -> list[int]:
    if isinstance(offset, Tensor):
        return offset.tolist()
    return [tokens - queries if offset is None else offset] * samples


# --- the oracle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_oracle_takes_rows_of_the_whole(rule: str, is_causal: bool) -> None:
    pattern = DilatedPattern.of(rule, [8, 16], [1, 3])
    q, k, v = testing.make_qkv(2, 29, 4, 8, dtype=torch.float64)
    options: dict[str, Any] = {"is_causal": is_causal, "key_padding_mask": make_mask(29)}
    whole = reference.attention(q, k, v, pattern, **options)
    for offset in (None, 0, 5, torch.tensor([3, 26])):
        rows = torch.tensor(firsts(offset, 2, 3, 29))[:, None] + torch.arange(3)
        part, *expected = (x[torch.arange(2)[:, None], rows] for x in (q, *whole))
        assert all(map(torch.equal, reference.attention(part, k, v, pattern, query_offset=offset, **options), expected))


@pytest.mark.parametrize(("samples", "queries"), [(2, 0), (0, 3), (2, TOKENS)])
def test_no_queries_no_samples_and_all_queries(samples: int, queries: int) -> None:
    q, k, v = testing.make_qkv(samples, TOKENS, 4, 8, dtype=torch.float64)
    testing.check((q[:, :queries], k, v), PAPER, is_causal=True, query_offset=torch.zeros(samples, dtype=torch.int64))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("queries", [29, 3])
def test_some_of_the_heads(rule: str, queries: int) -> None:
    """Tensor parallelism: offsets follow the head's number among all."""
    q, *kv = testing.make_qkv(2, 29, 8, 8, kv_heads=4, dtype=torch.float64)
    attention = functools.partial(dilated_attention, pattern=DilatedPattern.of(rule, [8, 16], [1, 3]), enable_gqa=True)
    parts = zip(q[:, :queries].split(4, 2), *(x.split(2, 2) for x in kv), strict=True)
    got = torch.cat([attention(*part, heads=(2 * i, 4)) for i, part in enumerate(parts)], 2)
    assert testing.error(got, attention(q[:, :queries], *kv)) < 1e-12


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rule", "name"), [*itertools.product(RULES, PATTERNS)])
def test_other_rows_may_hold_anything(rule: str, name: str, is_causal: bool) -> None:
    pattern, (q, k, v) = DilatedPattern.of(rule, *PATTERNS[name]), testing.make_qkv(2, TOKENS, 6, 8, kv_heads=3)
    backend = BACKENDS[(RULES.index(rule) + is_causal) % 2]
    for queries, offset, padding in ((1, 40, None), (3, torch.tensor([19, 58]), None), (3, 14, make_mask())):
        attention = functools.partial(
            dilated_attention, pattern=pattern, enable_gqa=True, return_lse=True, query_offset=offset,
            key_padding_mask=padding, is_causal=is_causal, backend=backend,
        )  # fmt: skip
        ones = torch.ones(2, queries, 6, 8), torch.ones(2, queries, 6)
        clean = testing.run(attention, (q[:, :queries], k, v), *ones)
        unseen = ~clean.dv.any(-1, keepdim=True)  # dv being the sum of a row's weights
        assert unseen.any()
        dirty = (x.masked_fill(unseen, math.nan) for x in (k, v))
        assert all(map(torch.equal, testing.run(attention, (q[:, :queries], *dirty), *ones), clean))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_no_operator_touches_the_whole_key(dtype: torch.dtype, backend: str, masked: bool) -> None:
    """Nothing converts, cleans or copies more than the rows that are seen."""
    tokens, pattern = 20_000, DilatedPattern.longnet([128, 1024], [1, 8])
    q, k, v = testing.make_qkv(1, tokens, 2, 8, dtype=dtype)
    mask = torch.zeros(1, tokens, dtype=torch.bool) if masked else None
    with torch.autocast("cpu", torch.bfloat16), Recorder() as around:
        dilated_attention(q[:, :1], k, v, pattern, key_padding_mask=mask, backend=backend, query_offset=15_000)
    with Recorder() as inside:  # which the mode above does not see
        call = Call(pattern, is_causal=True, backend=backend).of(q[:, :1], k, mask, 15_000)
        run.forward(call, Inputs(q[:, :1], k, v, mask))
    for recorder in (around, inside):
        sizes = [x.numel() for name, tensors in recorder.ran if name.startswith("aten::") for x in tensors]
        assert 0 < max(sizes) <= 128 * 2 * 8


# --- around it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_device", "gradients"), [(False, True), (True, False)])
def test_compiled_in_one_graph(on_device: bool, gradients: bool) -> None:
    """Step after step the same graph, once it is known that positions change."""
    torch._dynamo.reset()

    def attention(q: Tensor, k: Tensor, v: Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PAPER, is_causal=True, query_offset=offset, return_lse=True)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    qkv = [x.requires_grad_(gradients) for x in testing.make_qkv(2, TOKENS, 4, 8)]
    for at in (20, 33, 34, 35):
        offset = torch.tensor([at, at + 1]) if on_device else at
        results = [call(qkv[0][:, :2], *qkv[1:], offset) for call in (compiled, attention)]
        assert all(map(torch.equal, *results))
        if gradients:
            assert all(map(torch.equal, *(torch.autograd.grad(out.sum() + lse.sum(), qkv) for out, lse in results)))
    assert counter.frame_count <= 2


def test_explain_names_the_kernels_of_the_rows_that_blocks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 queries a dilated branch has few: a kernel that takes no single row does not run there."""
    monkeypatch.setattr(sdpa, "describe", lambda kernels, rows: f"for {sorted(rows)} rows")
    q, k, v = testing.make_qkv(1, 300, 2, 8)
    assert explain(q[:, :100], k, v, DilatedPattern.longnet([300], [128])).kernel == "for [1] rows"
    assert explain(q[:, :100], k, v, DilatedPattern.longnet([300], [10]), query_offset=7).kernel == "for [10] rows"


# --- errors -----------------------------------------------------------------------------------------------------

AT = "{} is {}, and must be from 0 to 6, so that 3 queries fit among 9 keys"
KIND = r"query_offset must be an int, or an int32 or int64 tensor of shape \(batch,\) = \(2,\), got"
CANNOT = "{!r} cannot run this call: .*{}.*"
REFUSED: list[tuple[type[Exception], str, int, dict[str, Any]]] = [  # what the error says, tokens of query, options
    (ValueError, "query has 10 tokens and key 9: .* no more queries than keys", 10, {}),
    *((ValueError, AT.format("query_offset", at), 3, {"query_offset": at}) for at in (-1, 7)),
    *((ValueError, AT.format(r"query_offset\[1\]", x), 3, {"query_offset": torch.tensor([6, x])}) for x in (-1, 7)),
    *((TypeError, "query_offset must be an int or a tensor", 3, {"query_offset": at}) for at in (1.0, True, [1, 2])),
    *((ValueError, KIND, 3, {"query_offset": x}) for x in (torch.ones(2), torch.tensor(1), torch.ones(3).long())),
    (ValueError, "is on meta and query on cpu: move it", 3, {"query_offset": torch.ones(2, device="meta").long()}),
    (ValueError, r"= \(2, 9\), got \(2, 3\)", 3, {"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}),
    (ValueError, CANNOT.format("sdpa", "dropout.*Use backend='auto'"), 3, {"backend": "sdpa", "dropout_p": 0.1}),
    (ValueError, CANNOT.format("triton", "dropout.*CUDA.*Use back"), 3, {"backend": "triton", "dropout_p": 0.1}),
]


@pytest.mark.parametrize(("kind", "match", "queries", "options"), REFUSED)
def test_bad_calls_are_refused(
    kind: type[Exception], match: str, queries: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, state = torch.zeros(2, 10, 4, 8), torch.get_rng_state()
    # positions on a device are read when it runs
    for function in (dilated_attention, explain)[: 1 if isinstance(options.get("query_offset"), Tensor) else 2]:
        with pytest.raises(kind, match=match):
            function(x[:, :queries], x[:, :9], x[:, :9], PAPER, **options)
    assert torch.equal(torch.get_rng_state(), state), "a refused call has drawn a random number"


def test_where_only_the_backward_pass_is_missing_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INSTALLED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(1, 3, 2, 8, requires_grad=True)
    for ask in (dilated_attention, explain):
        with pytest.raises(ValueError, match=r"cannot run this call: its decoding has no backward pass. Use"):
            ask(x[:, :1], x, x, PAPER, backend="triton")
    choose.cache_clear()
