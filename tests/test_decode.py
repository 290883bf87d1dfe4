"""Fewer queries than keys: what the table of cases leaves out, what is read, and everything PyTorch does around it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends import run, sdpa, triton
from dilated_attention.backends.choose import choose
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call
from dilated_attention.functional import attend
from dilated_attention.pattern import RULES
from dilated_attention.ring.run import Ranks
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
    out, lse = reference.attention(q, k, v, pattern, **options)
    for offset in (None, 0, 5, torch.tensor([3, 26])):
        rows = [slice(at, at + 3) for at in firsts(offset, 2, 3, 29)]
        part = torch.stack([q[b, at] for b, at in enumerate(rows)])
        got, got_lse = reference.attention(part, k, v, pattern, query_offset=offset, **options)
        for b, at in enumerate(rows):
            assert torch.equal(got[b], out[b, at])
            assert torch.equal(got_lse[b], lse[b, at])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = testing.make_qkv(2, TOKENS, 4, 8, kv_heads=2, layout="fused", dtype=dtype)
    for offset, is_causal in ((None, True), (torch.tensor([9, 30]), False)):
        testing.check((q[:, :3], k, v), PAPER, is_causal=is_causal, query_offset=offset)


def test_no_queries_no_samples_and_all_queries() -> None:
    q, k, v = testing.make_qkv(2, TOKENS, 4, 8, dtype=torch.float64)
    for part in ((q[:, :0], k, v), (q[:0, :3], k[:0], v[:0])):
        for offset in (None, 7, torch.full((len(part[0]),), 7)):
            out, lse = dilated_attention(*part, PAPER, query_offset=offset, return_lse=True)
            assert (out.shape, lse.shape) == (part[0].shape, part[0].shape[:3])
    testing.check((q, k, v), PAPER, is_causal=True, query_offset=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("queries", [29, 3])
def test_some_of_the_heads(rule: str, queries: int) -> None:
    """Tensor parallelism: offsets follow the head's number among all."""
    q, k, v = testing.make_qkv(2, 29, 8, 8, kv_heads=4, dtype=torch.float64)
    attention = functools.partial(dilated_attention, pattern=DilatedPattern.of(rule, [8, 16], [1, 3]), enable_gqa=True)
    parts = [
        attention(q[:, :queries, 2 * at : 2 * at + 4], k[:, :, at : at + 2], v[:, :, at : at + 2], heads=(at, 4))
        for at in (0, 2)
    ]
    assert testing.error(torch.cat(parts, 2), attention(q[:, :queries], k, v)) < 1e-12


# --- what is read -----------------------------------------------------------------------------------------------


def seen_rows(pattern: DilatedPattern, starts: list[int], queries: int, heads: int, group: int, causal: bool) -> Tensor:
    """(B, N, Hk) bool: which rows of key some query sees, from the pattern's own lists."""
    seen = torch.zeros(len(starts), TOKENS, heads // group, dtype=torch.bool)
    shape: dict[str, Any] = {"num_tokens": TOKENS, "num_heads": heads, "num_kv_heads": heads // group}
    for (b, first), i, head in itertools.product(enumerate(starts), range(queries), range(heads)):
        seen[b, list(pattern.keys(first + i, head, is_causal=causal, **shape)), head // group] = True
    return seen


@pytest.mark.parametrize(
    ("rule", "name", "backend", "is_causal"),
    [
        (rule, name, BACKENDS[(i + j) % 2], (i + j // 2) % 2 == 0)
        for (i, rule), (j, name) in itertools.product(enumerate(RULES), enumerate(PATTERNS))
    ],
)
def test_other_rows_may_hold_anything(rule: str, name: str, backend: str, is_causal: bool) -> None:
    pattern = DilatedPattern.of(rule, *PATTERNS[name])
    for queries, offset, padding in ((1, 40, None), (3, torch.tensor([19, 58]), None), (3, 14, make_mask())):
        q, k, v = testing.make_qkv(2, TOKENS, 6, 8, kv_heads=3)
        unseen = ~seen_rows(pattern, firsts(offset, 2, queries), queries, 6, 2, is_causal)
        if padding is not None:
            unseen |= padding.unsqueeze(-1)
        assert unseen.any()
        options = {"query_offset": offset, "key_padding_mask": padding, "is_causal": is_causal, "backend": backend}
        attention = functools.partial(dilated_attention, pattern=pattern, enable_gqa=True, return_lse=True, **options)
        dirty = (x.masked_fill(unseen.unsqueeze(-1), math.nan) for x in (k, v))
        ones = torch.ones(2, queries, 6, 8), torch.ones(2, queries, 6)
        clean, got = (testing.run(attention, (q[:, :queries], *keys), *ones) for keys in ((k, v), dirty))
        for (which, x), (_, expected) in zip(got.items(), clean.items(), strict=True):
            assert torch.equal(x, expected), which
        assert (got.dk[unseen] == 0).all()
        assert (got.dv[unseen] == 0).all()


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


def bad_calls() -> Iterator[Any]:
    """(tokens of query, options, error, match)"""
    yield pytest.param(10, {}, ValueError, "query has 10 tokens and key 9: .* no more queries than keys", id="longer")
    for at in (-1, 7):
        match = f"is {at}, and must be from 0 to 6, so that 3 queries fit among 9 keys"
        yield pytest.param(3, {"query_offset": at}, ValueError, f"query_offset {match}", id=f"int{at}")
        places = torch.tensor([6, at])
        yield pytest.param(3, {"query_offset": places}, ValueError, rf"query_offset\[1\] {match}", id=f"tensor{at}")
    for at in (1.0, True, [1, 2]):
        yield pytest.param(3, {"query_offset": at}, TypeError, "query_offset must be an int or a tensor", id=str(at))
    for name, at in {"float": torch.ones(2), "scalar": torch.tensor(1), "three": torch.ones(3).long()}.items():
        match = r"query_offset must be an int, or an int32 or int64 tensor of shape \(batch,\) = \(2,\), got"
        yield pytest.param(3, {"query_offset": at}, ValueError, match, id=name)
    elsewhere = torch.ones(2, dtype=torch.int64, device="meta")
    yield pytest.param(3, {"query_offset": elsewhere}, ValueError, "is on meta and query on cpu: move it", id="device")
    short = torch.zeros(2, 3, dtype=torch.bool)
    yield pytest.param(3, {"key_padding_mask": short}, ValueError, r"= \(2, 9\), got \(2, 3\)", id="mask")
    match = "'sdpa' cannot run this call: .*dropout.*Use backend='auto'"
    yield pytest.param(3, {"backend": "sdpa", "dropout_p": 0.1}, ValueError, match, id="sdpa-dropout")
    yield pytest.param(3, {"backend": "triton"}, ValueError, "'triton' cannot run this call: it runs on CUDA", id="cpu")


@pytest.mark.parametrize(("queries", "options", "kind", "match"), [*bad_calls()])
def test_bad_calls_are_refused(queries: int, options: dict[str, Any], kind: type, match: str) -> None:
    x = torch.zeros(2, 9, 4, 8)
    state = torch.get_rng_state()
    with pytest.raises(kind, match=match):
        dilated_attention(torch.zeros(2, queries, 4, 8), x, x, PAPER, **options)
    assert torch.equal(torch.get_rng_state(), state), "a refused call has drawn a random number"
    if not isinstance(options.get("query_offset"), Tensor):  # positions on a device are read when it runs
        with pytest.raises(kind, match=match):
            explain(torch.zeros(2, queries, 4, 8), x, x, PAPER, **options)


def test_the_kernel_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 3, 2, 300, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cannot run this call: .*float64.*300.*dropout.*CUDA.*Use backend='auto'"):
        dilated_attention(x[:, :1], x, x, PAPER, dropout_p=0.1, backend="triton")


def test_where_only_the_backward_pass_is_missing_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INSTALLED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(1, 3, 2, 8, requires_grad=True)
    for ask in (dilated_attention, explain):
        with pytest.raises(ValueError, match=r"cannot run this call: its decoding has no backward pass. Use"):
            ask(x[:, :1], x, x, PAPER, backend="triton")
    choose.cache_clear()


def test_only_a_call_on_one_device_has_an_offset() -> None:
    x = torch.zeros(2, 9, 4, 8)
    given, alone = (PAPER, False, None, 0.0, None, False, "auto", None), Ranks(ContextParallel(), ring_size=1)
    with pytest.raises(ValueError, match="query_offset is for one device"):
        attend(x, x, x, *given, alone, query_offset=0)
    with pytest.raises(ValueError, match="needs equal lengths"):
        attend(x[:, :3], x, x, *given, alone)


@pytest.mark.parametrize(
    ("options", "backend", "why"),
    [
        ({}, "sdpa", "it runs on CUDA, not on cpu"),
        ({"query_offset": 2}, "sdpa", "it runs on CUDA"),
        ({"dropout_p": 0.5}, "eager", "its decoding has no dropout"),
        ({"backend": "eager"}, "eager", "it runs on CUDA"),
    ],
)
def test_explain_of_few_queries(options: dict[str, Any], backend: str, why: str) -> None:
    x = torch.randn(2, 9, 4, 8)
    told = explain(x[:, :3], x, x, PAPER, **options)
    assert told.backend == backend
    assert told.backward.startswith({"sdpa": "sdpa, kernel: flash on CPU", "eager": "eager, kernel: matmul"}[backend])
    assert why in "; ".join(told.why_not["triton"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dilated_attention(x[:, :3], x, x, PAPER, **options)
    assert any("flash_attention_for_cpu" in event.key for event in profile.key_averages()) == (backend == "sdpa")
