"""The comparison gives no time to whatever is wrong, in whatever way it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import compat, dilated_attention
from dilated_attention.bench import implementations, runners
from dilated_attention.bench.implementations import RELEASED, everything, named
from dilated_attention.bench.session import FAILED, FAR, Session
from dilated_attention.bench.setting import BOTH, FORWARD, Implementation, Setting, Subject
from dilated_attention.nn import MultiheadDilatedAttention
from dilated_attention.pattern import RULES
from dilated_attention.ranks import Outcome, RanksFailed

CPU = torch.device("cpu")
SETTING = Setting(128, (32, 64, 128), (1, 2, 4), CPU, heads=4, head_dim=8)
Change = Callable[[Tensor], Tensor]


def build(change: Change, only_at: int | None, seen: list[int], setting: Setting) -> Subject:
    pattern = setting.pattern("longnet")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(query.shape[1])
        out = dilated_attention(query, key, value, pattern, is_causal=setting.causal)
        return change(out) if only_at in (None, query.shape[1]) else out

    return implementations.subject(attention, pattern, setting)


def changed(change: Change = lambda out: out, seen: list[int] | None = None, only_at: int | None = None) -> Any:
    return Implementation(
        "changed", "function", "longnet", partial(build, change, only_at, [] if seen is None else seen)
    )


def started() -> Session:
    return Session(CPU, (torch.float32,), seconds=0.0)


def compared(*which: Implementation, setting: Setting = SETTING) -> dict[str, Any]:
    made = started()
    made.compare("suite", which, setting)
    return made.results


def by_direction(found: dict[str, Any], name: str = "changed") -> dict[str, dict[str, Any]]:
    return {x["direction"]: x for x in found["measurements"] if x["implementation"] == name}


@pytest.mark.parametrize(
    ("change", "only_at", "verdict", "statuses", "why"),
    [
        (lambda out: out * 1.001, None, "wrong", ("wrong", "wrong"), "out off by"),
        (lambda out: out.roll(1, dims=1), None, "wrong", ("wrong", "wrong"), "out off by"),
        (lambda out: out / 0 * 0, None, "wrong", ("wrong", "wrong"), "out off by"),
        (lambda out: torch.cat([out[:, :-1], 0 * out[:, :1]], 1), None, "wrong", ("wrong", "wrong"), "out off by"),
        (lambda out: (out + out.detach()) / 2, None, "wrong gradients", ("measured", "wrong"), "d q off by"),
        (lambda out: out * 1.01, SETTING.tokens, FAR, ("wrong", "wrong"), "rows at full length"),
    ],
    ids=["scaled", "shifted", "nan", "short", "gradients", "far"],
)
def test_what_is_wrong_gets_no_time(change: Change, only_at: Any, verdict: str, statuses: Any, why: str) -> None:
    seen: list[int] = []
    found = compared(changed(change, seen, only_at))
    assert [x["verdict"] for x in found["checks"]] == [verdict]
    assert tuple(x["status"] for x in found["measurements"]) == statuses
    for record in (x for x in found["measurements"] if x["status"] == "wrong"):
        assert why in record["why"]
        assert record["ms"] is record["peak_bytes"] is None
    if verdict == FAR:
        assert found["checks"][0]["why"] == found["measurements"][0]["why"]
    if verdict == "wrong":
        assert SETTING.tokens not in seen  # it never even ran at the length that is timed


def test_wrong_gradients_of_parameters_are_caught() -> None:
    def with_fault(setting: Setting) -> Subject:
        subject = implementations.projecting(MultiheadDilatedAttention, setting)
        weight = subject.parameters["out_proj.weight"]
        return replace(subject, attention=lambda x: subject.attention(x) + weight.sum() - weight.sum().detach())

    (check,) = compared(Implementation("changed", "multihead", "head_groups", with_fault))["checks"]
    assert check["verdict"] == "wrong gradients"
    assert check["errors"]["d q_proj.weight"] <= check["limits"]["d q_proj.weight"]


def test_what_is_exact_gets_all_figures() -> None:
    found = compared(changed())
    assert [x["verdict"] for x in found["checks"]] == ["exact"]
    out = 128 * 4 * 8 * 4
    for way, record in by_direction(found).items():
        assert (record["status"], record["why"]) == ("measured", "")
        assert record["flops"] == (4 if way == FORWARD else 14) * SETTING.pattern("longnet").pairs(128, 4) * 8
        assert 0 < record["ms"]["lower"] <= record["ms"]["median"] <= record["ms"]["upper"]
        assert (1 if way == FORWARD else 3) * out <= record["peak_bytes"] < 30 * out


@pytest.mark.parametrize(
    ("message", "status"),
    [("the kernel says no\nwith details", "wrong"), ("DefaultCPUAllocator: can't allocate memory", "out of memory")],
)
@pytest.mark.parametrize(("calls", "verdict"), [(0, FAILED), (1, "exact"), (4, "exact")])
def test_an_error_in_one_does_not_stop_the_others(message: str, status: str, calls: int, verdict: str) -> None:
    """In the check, before the clock and under it."""
    seen: list[int] = []

    def broken(out: Tensor) -> Tensor:
        if calls == 0 or seen.count(SETTING.tokens) >= calls:
            raise RuntimeError(message)
        return out

    found = compared(changed(broken, seen), *named("head_groups, sdpa"))
    first = message.splitlines()[0]
    assert (found["checks"][0]["verdict"], found["checks"][0]["why"]) == (verdict, "" if calls else first)
    assert {(x["status"], x["why"], x["ms"]) for x in by_direction(found).values()} == {(status, first, None)}
    assert by_direction(found, "head_groups, sdpa")[BOTH]["status"] == "measured"


def test_what_would_take_too_long_is_skipped_with_a_reason() -> None:
    made = started()
    made.compare("suite", [changed()], SETTING)
    made.limit_ms = 1e-6
    made.compare("suite", [changed()], replace(SETTING, tokens=256))
    late = [x for x in made.results["measurements"] if x["tokens"] == 256]
    assert {x["status"] for x in late} == {"skipped"}
    assert all("is expected to take" in x["why"] for x in late)
    made.compare("suggested", [changed()], replace(SETTING, tokens=257))  # which takes its time
    assert [x["status"] for x in made.results["measurements"][-2:]] == ["measured"] * 2


def test_one_dtype_has_one_verdict_the_worst() -> None:
    made, wrong = started(), changed(lambda out: out * 2)
    given: list[tuple[Any, dict[str, Any]]] = [(changed(), {}), (wrong, {"samples": 2}), (changed(), {"heads": 2})]
    for one, more in (*given, (changed(), {"causal": True})):
        made.compare("suite", [one], replace(SETTING, **more))
    assert [(x["causal"], x["verdict"]) for x in made.results["checks"]] == [(False, "wrong"), (True, "exact")]


@pytest.mark.parametrize("causal", [False, True])
def test_all_on_one_device_but_two_are_exact(causal: bool) -> None:
    every = [one for one in everything() if one.ranks == 1 and "compiled" not in one.name]  # compiling takes long
    found = compared(*every, setting=replace(SETTING, causal=causal))
    checked = {x["implementation"]: x["verdict"] for x in found["checks"]}
    expected = {RELEASED: "wrong gradients", "attention over heads": "wrong"}
    assert {name: verdict for name, verdict in checked.items() if verdict != "exact"} == expected
    old = {*compat.__all__} - {"RingAdvancedDistributedDilatedAttention", "sequence_mean"}
    assert {"nn.MultiheadAttention", *old} < set(checked)
    skipped = {x["implementation"] for x in found["measurements"] if x["status"] == "skipped"}
    only_cuda = {"dense flash", "dense cuDNN", "dense memory-efficient", f"{RELEASED}, cuDNN", "FlexAttention"}
    only_cuda |= {f"{rule}, triton" for rule in RULES}
    assert skipped == only_cuda
    assert set(checked) | only_cuda == {one.name for one in every}


def test_a_compiled_one_is_exact() -> None:
    assert compared(*named("longnet, auto, compiled"))["checks"][0]["verdict"] == "exact"


@pytest.mark.parametrize("name", ["RingDilatedAttention", "RingMultiheadDilatedAttention"])
def test_over_ranks_too_a_wrong_one_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = named(f"{name}, 2 ranks")[0]
    right = runners.results_of
    found = compared(one)
    assert found["checks"][0]["verdict"] == "exact"
    assert by_direction(found, one.name)[BOTH]["peak_bytes"] > 3 * 128 * 4 * 8 * 4 / 2  # gradients of half the tokens
    monkeypatch.setattr(runners, "results_of", lambda *x: {key: value.roll(1) for key, value in right(*x).items()})
    found = compared(one)
    assert found["checks"][0]["verdict"] == "wrong"
    assert by_direction(found, one.name)[BOTH]["ms"] is None


@pytest.mark.parametrize(
    ("error_type", "error", "is_memory"),
    [
        ("ValueError", "no", False),
        ("hung", "the process ended with exit code -9 after 2.0 s", False),  # so that we killed it
        ("died", "the process ended with exit code -9 after 2 s", True),
        ("MemoryError", "", True),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", True),
    ],
)
def test_what_counts_as_out_of_memory_on_a_rank(error_type: str, error: str, is_memory: bool) -> None:
    outcomes = [Outcome(0), Outcome(1, error="no", error_type="ValueError"), Outcome(2, None, error, error_type)]
    assert runners.ran_out(RanksFailed("a call", outcomes)) == is_memory
