"""Results made up in code, in the schema of results.json: a run cut short with all that can go wrong, and nothing."""

from __future__ import annotations

from itertools import product
from typing import Any

LENGTHS = [1024, 2048, 4096, 8192]
WRONG, NO_GRADIENTS = "index [by mask]", "gather-pad-scatter"
WHO = {  # kind, rule, ours, ranks, ms for 1024 tokens, growth when the length doubles
    "dense SDPA": ("baseline", "dense", False, 1, 1.0, 4.0),
    "longnet, auto": ("function", "longnet", True, 1, 0.9, 2.0),
    "longnet, eager": ("function", "longnet", True, 1, 3.0, 2.0),
    "torchscale, auto": ("function", "torchscale", True, 1, 0.8, 2.0),
    "head_groups, auto": ("function", "head_groups", True, 1, 0.5, 2.0),
    "head_groups, sdpa": ("function", "head_groups", True, 1, 0.51, 2.0),
    "DilatedAttention": ("module", "head_groups", True, 1, 0.502, 2.0),
    "MultiheadDilatedAttention": ("multihead", "head_groups", True, 1, 1.5, 2.0),
    "copy and gather, slicing": ("baseline", "head_groups", False, 1, 1.2, 2.0),
    NO_GRADIENTS: ("baseline", "torchscale", False, 1, 2.0, 2.0),
    "RingDilatedAttention, 4 ranks": ("ring", "head_groups", True, 4, 4.0, 1.5),
    WRONG: ("baseline", "longnet", False, 1, 0.1, 2.0),
}


def measurement(name: str, tokens: int, direction: str = "forward", **changes: Any) -> dict[str, Any]:
    """One that was measured, but for what cannot have a time."""
    kind, rule, ours, ranks, start, growth = WHO[name]
    backward = direction == "forward_backward"
    median = start * growth ** LENGTHS.index(tokens) * (3 if backward else 1)
    ms = {"median": median, "lower": 0.97 * median, "upper": 1.04 * median, "repeats": 1 if median > 100 else 9}
    found: dict[str, Any] = {
        "suite": "quick", "implementation": name, "kind": kind, "ours": ours, "rule": rule, "ranks": ranks,
        "samples": 1, "tokens": tokens, "heads": 8, "head_dim": 64, "lengths": [256, 1024], "rates": [1, 4],
        "dtype": "float32", "causal": False, "direction": direction, "status": "measured", "why": "", "ms": ms,
        "suggested": False, "flops": 10**9, "peak_bytes": tokens * 4096 * (2 if backward else 1),
    }  # fmt: skip
    without = {"ms": None, "peak_bytes": None}
    if name == WRONG or (name == NO_GRADIENTS and backward):
        found |= {"status": "wrong", "why": "out is off by 3.1e-01", **without}
    if name == "longnet, eager" and tokens == LENGTHS[-1]:
        found |= {"status": "out of memory", "why": "9 GiB wanted", **without}
    return {**found, **changes}


def check(name: str, dtype: str = "float32") -> dict[str, Any]:
    kind, rule, ours, ranks, *_ = WHO[name]
    errors: dict[str, Any] = {"out": 1e-6, "d q": 2e-6, "d k": 1e-6}
    verdict, why = "exact", ""
    if name == WRONG:
        verdict, why, errors = "wrong", "The mask is shifted.", {"out": 0.31, "d k": "inf"}
    if name == NO_GRADIENTS:
        verdict, errors = "wrong gradients", {**errors, "d q": 2.4e-2}
    return {
        "implementation": name, "kind": kind, "ours": ours, "rule": rule, "ranks": ranks, "dtype": dtype,
        "causal": False, "verdict": verdict, "errors": errors, "limits": dict.fromkeys(errors, 5e-6), "why": why,
    }  # fmt: skip


def sample() -> dict[str, Any]:
    """Every section is filled. In the suite "steps" only one length was measured, and only forward."""
    every = list(product(WHO, LENGTHS, ("forward", "forward_backward")))
    return {
        **empty(),
        "suites": ["quick", "steps"],
        "answer": "It is `fast`. All is right.",
        "checks": [check(name) for name in WHO],
        "measurements": [
            *(measurement(*one) for one in every),
            *(measurement(*one, causal=True) for one in every if one[0] in ("dense SDPA", "head_groups, auto")),
            measurement("head_groups, auto", 2048, suite="steps", samples=4),
        ],
        "tables": [
            {"suite": "steps", "title": "Splitting heads", "note": "By `reshape`.", "columns": ["way", "ms", "copies"],
             "rows": [["reshape", 0.0112345, False], ["einops", 1234.5678, True], ["none", None, False]]},
        ],
        "claims": [{"claim": "Time is linear", "claimed": "linear", "ours": "1.03", "holds": "yes", "how": "slope"}],
        "recommendations": [
            {"use_case": "training", "best": "head_groups, auto", "value": "1.2 ms", "factor": 2.4,
             "runner_up": "copy and gather, slicing", "ties": ["head_groups, sdpa"]},
        ],
    }  # fmt: skip


def empty() -> dict[str, Any]:
    """What a run leaves that was stopped before it measured anything."""
    lists = ("checks", "measurements", "tables", "claims", "recommendations")
    return {
        "schema": 1,
        "machine": {
            "date": "2026-03-14T09:26:53+00:00", "command": "dilated-attention bench", "commit": "64816d3f0c5e8a7b91d2",
            "dirty": True, "device": "Example CPU 9000", "cpu": "Example CPU 9000", "cores": 8, "threads": 8,
            "load": 0.42, "system": "Linux", "versions": {"python": "3.11.9", "torch": "2.13.0+cpu"},
        },
        "suites": ["quick"], "complete": False, "seconds": 0.4, "answer": "", **{name: [] for name in lists},
    }  # fmt: skip
