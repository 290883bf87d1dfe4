"""Every case of the table, by every way to run it, against the float64 oracle: out, lse and all gradients.

Tolerances are those of `dilated_attention.testing`. Memory that nobody wrote holds NaN: torch fills it so for
deterministic algorithms. Paths of a GPU run where there is one; those of our kernels also in Triton's interpreter,
which test_triton starts.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention import DilatedAttention, DilatedPattern, ImprovedDilatedAttention, explain, stream, testing
from dilated_attention.ranks import RanksFailed, pool
from dilated_attention.testing import Results
from tests.cases import INTERPRETED, Case, run_in_rank
from tests.table import PATHS, cover, tuples, wanted
from tests.threads import joined

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms want it on a GPU
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BACKENDS = {
    **dict.fromkeys(("triton", "packed_triton", "union_triton"), "triton"), "cuda_eager": "eager",
    **dict.fromkeys(KERNELS, "sdpa"),
}  # fmt: skip


# --- the ways to run a case -------------------------------------------------------------------------------------


def run_function(case: Case) -> Results:
    """No input is changed, and no result shares memory with one."""
    qkv, *gradients, padding = case.inputs()
    given = [x for x in (*qkv, *gradients, padding) if x is not None]
    copies = [x.clone() for x in given]
    case.seed()
    attention = case.attention(key_padding_mask=padding, backend=BACKENDS.get(case.path, case.backend))
    got = testing.run(attention, qkv, *gradients)
    for x, copy in zip(given, copies, strict=True):
        assert torch.equal(x.nan_to_num(7.0), copy.nan_to_num(7.0)), "an input has changed"
    storages = {x.untyped_storage().data_ptr() for x in given}
    for name, x in got.items():
        assert x.is_contiguous() or case.device != "cpu", name
        assert not x.numel() or x.untyped_storage().data_ptr() not in storages, f"{name} shares memory with an input"
    return got


def run_module(case: Case) -> Results:
    cls = (DilatedAttention, ImprovedDilatedAttention)[case.number % 2]
    pattern = case.the_pattern()
    if isinstance(pattern, DilatedPattern):
        module = cls(pattern.segment_lengths, pattern.dilation_rates, rule=case.rule, backend=case.backend)
    else:
        module = cls(pattern=pattern, backend=case.backend)
    return case.on_one_device(lambda *qkv: module(*qkv, case.is_causal, key_padding_mask=case.padding()))


def run_compiled(case: Case) -> Results:
    """In one graph."""
    torch._dynamo.reset()
    attention = case.attention()

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attention(query, key, value)

    try:
        return case.on_one_device(torch.compile(call, fullgraph=True, backend="aot_eager"))
    finally:
        torch._dynamo.reset()


def run_stream(case: Case) -> Results:
    lengths = case.chunks()
    parts = [x.split(lengths, 1) for x in case.qkv()]
    given = {"is_causal": case.is_causal, "scale": case.scale, "backend": case.backend}
    far = {"num_tokens": case.tokens} if case.pattern == "far" else {}  # such a segment fits in no memory
    outputs = list(stream(zip(*parts, strict=True), case.the_pattern(), enable_gqa=True, **given, **far))
    assert [x.shape for x in outputs] == [x.shape for x in parts[0]]
    none: Any = None
    return Results(torch.cat(outputs, 1), none, none, none, none)


def run_threads(case: Case) -> Results:
    return case.on_threads()[0]


@functools.cache
def all_in_ranks(path: str, size: int) -> dict[Case, Results]:
    """All cases of the path for so many ranks, in one call."""
    cases = [case for case in cover(path) if case.ranks == size]
    shards = pool(size).run(run_in_rank, cases, timeout=300)
    return {case: joined(parts) for case, parts in zip(cases, zip(*shards, strict=True), strict=True)}


def run_ranks(case: Case) -> Results:
    """Where some case of the same size fails, each runs alone: then only that one fails."""
    try:
        got = all_in_ranks(case.path, case.ranks)[case]
    except RanksFailed:
        got = joined([one for (one,) in pool(case.ranks).run(run_in_rank, [case])])
    return Results(*(x.to(case.device) for _, x in got.items()))


def run_kernel(case: Case) -> Results:
    """One of torch's kernels on a GPU, by switching the others off; skips where torch has none for the call."""
    kernel = case.path.removeprefix("packed_")
    with sdpa_kernel([KERNELS[kernel]]):
        try:
            given = {**case.options(), "enable_gqa": True, "backend": "sdpa"}
            told = explain(*case.qkv(), case.the_pattern(), **given)
        except ValueError as reasons:
            pytest.skip(str(reasons))
        assert told.kernel.startswith(kernel), told
        return run_function(case)


def run_few_on_triton(case: Case) -> Results:
    """By name our kernel has no backward pass; "auto" takes it forward, and torch's kernels backward."""
    told = explain(*case.qkv(), case.the_pattern(), enable_gqa=True, **case.options())
    assert told.backend == "triton", told
    return run_function(case)


RUN: dict[str, Callable[[Case], Results]] = {  # by the path without packed_ and cuda_; else run_function
    "module": run_module,
    "compiled": run_compiled,
    **dict.fromkeys(("stream", "causal_stream"), run_stream),
    "threads": run_threads,
    "ranks": run_ranks,
    "triton_few": run_few_on_triton,
    **dict.fromkeys(KERNELS, run_kernel),
}


# --- the cases --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    torch.set_deterministic_debug_mode("error")
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def marked(name: str) -> list[Any]:
    """The cases of a path; of one that this machine cannot run one stands for all, since drawing them takes long."""
    path = PATHS[name]
    marks = [pytest.mark.gpu] if path.on_gpu else []
    if path.on_gpu and not (torch.cuda.is_available() or INTERPRETED):
        return [pytest.param(None, id=name, marks=marks)]
    return [pytest.param(case, id=case.id, marks=marks) for case in cover(name)]


HERE = [name for name in PATHS if "triton" in name or not INTERPRETED]


@pytest.mark.filterwarnings("ignore:key_padding_mask ignores every key")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's in the interpreter, of -inf - -inf and 0 * inf
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # torch's, of its own first backward
@pytest.mark.usefixtures("always_nested")
@pytest.mark.parametrize("case", [case for name in HERE for case in marked(name)])
def test_against_the_oracle(case: Case) -> None:
    path = case.path.removeprefix("union_").removeprefix("packed_").removeprefix("cuda_")
    with contextlib.nullcontext() if path in KERNELS else poisoned_memory():  # deterministic algorithms refuse cuDNN
        got = RUN.get(path, run_function)(case)
    case.check(got)


@pytest.mark.parametrize("name", PATHS)
def test_the_cases_cover_their_path(name: str) -> None:
    path, cases = PATHS[name], cover(name)
    assert len({case.id for case in cases}) == len(cases)
    covered = {some for case in cases for some in tuples(path, {axis: getattr(case, axis) for axis in path.axes})}
    assert covered == set(wanted(path))
