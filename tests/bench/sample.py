"""Results made up in code, in the schema of results.json: a full set, and one of a run that measured nothing.

The figures follow a simple model of time and memory, so that curves look like curves; a fixed seed makes them the same
each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

from dilated_attention import DilatedPattern

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
DTYPES = ["float32", "bfloat16"]
DIRECTIONS = ["forward", "forward_backward"]
HEADS, DIM = 8, 64
PEAK = {"float32": 0.152, "bfloat16": 0.221}  # TFLOP/s of matmul
COPY = {"float32": 9.1, "bfloat16": 8.7}  # GB/s
LIMIT = {"float32": 5e-6, "bfloat16": 1.6e-2}
MEMORY = 2 * 2**30
WRONG, NO_GRADIENTS = "index by mask", "gather-pad-scatter"


@dataclass(frozen=True)
class Made:
    """An implementation of the sample: its share of the matmul ceiling, fixed cost and tensors kept at once."""

    name: str
    kind: str
    rule: str
    share: float
    overhead_ms: float
    kept: float
    ours: bool = True
    ranks: tuple[int, ...] = (1,)


IMPLEMENTATIONS = [
    Made("dense SDPA", "baseline", "longnet", 0.52, 0.08, 1.3, ours=False),
    Made("longnet, auto", "function", "longnet", 0.47, 0.5, 1.6),
    Made("longnet, auto, compiled", "function", "longnet", 0.48, 0.4, 1.6),
    Made("longnet, eager", "function", "longnet", 0.21, 1.1, 9.0),
    Made("torchscale, auto", "function", "torchscale", 0.46, 0.55, 1.7),
    Made("head_groups, auto", "function", "head_groups", 0.49, 0.3, 1.4),
    Made("head_groups, auto, compiled", "function", "head_groups", 0.50, 0.26, 1.4),
    Made("DilatedAttention", "module", "head_groups", 0.485, 0.34, 1.4),
    Made("MultiheadDilatedAttention", "multihead", "head_groups", 0.30, 0.9, 3.1),
    Made("ImprovedMultiheadDilatedAttention", "multihead", "head_groups", 0.33, 0.8, 2.9),
    Made("RingDilatedAttention", "ring", "longnet", 0.40, 2.4, 1.9, ranks=(1, 2, 4)),
    Made("copy and gather", "baseline", "head_groups", 0.31, 0.4, 2.6, ours=False),
    Made(NO_GRADIENTS, "baseline", "torchscale", 0.17, 0.7, 6.5, ours=False),
    Made(WRONG, "baseline", "longnet", 0.11, 0.5, 4.0, ours=False),
]


def sample() -> dict[str, Any]:
    """About 14 implementations over 6 lengths, with all that can go wrong, and every section filled."""
    chance = random.Random(0)
    measurements = [
        _measurement(chance, made, tokens, dtype, causal, direction, ranks)
        for made in IMPLEMENTATIONS
        for dtype, causal, direction, tokens in product(DTYPES, (False, True), DIRECTIONS, LENGTHS)
        for ranks in made.ranks
    ]
    return {
        "schema": 1,
        "machine": _machine(dirty=True),
        "suites": ["full", "steps"],
        "complete": False,
        "seconds": 1843.2,
        "ceilings": [{"dtype": d, "matmul_tflops": PEAK[d], "copy_gb_per_s": COPY[d]} for d in DTYPES],
        "answer": (
            "At 32,768 tokens head_groups with torch's own kernels is 10.8 times as fast as dense attention and keeps "
            "half its memory; every implementation of ours is exact, gradients included. "
            "Below 2,048 tokens dense attention is the faster one: use that."
        ),
        "checks": _checks(),
        "measurements": measurements + _steps(),
        "tables": _tables(),
        "claims": _claims(),
        "recommendations": _recommendations(),
        "matrix": _matrix(),
    }


def empty() -> dict[str, Any]:
    """What a run leaves that was stopped before it measured anything."""
    nothing: dict[str, Any] = {name: [] for name in ("ceilings", "checks", "measurements", "tables", "claims")}
    return {
        "schema": 1,
        "machine": _machine(dirty=False),
        "suites": ["quick"],
        "complete": False,
        "seconds": 0.4,
        "answer": "",
        **nothing,
        "recommendations": [],
        "matrix": [],
    }


def _machine(dirty: bool) -> dict[str, Any]:
    return {
        "date": "2026-03-14T09:26:53+00:00",
        "command": "python -m dilated_attention.bench --suite full --out report",
        "commit": "64816d3f0c5e8a7b91d2e4c6a8b0d1f2e3a4b5c6",
        "dirty": dirty,
        "device": "Example CPU 9000 @ 3.10GHz",
        "cpu": "Example CPU 9000 @ 3.10GHz",
        "cores": 8,
        "threads": 8,
        "load": 0.42,
        "system": "Linux-6.1.0-x86_64-with-glibc2.36",
        "versions": {"dilated_attention": "0.1.0", "python": "3.11.9", "torch": "2.13.0+cpu"},
    }


def _measurement(
    chance: random.Random, made: Made, tokens: int, dtype: str, causal: bool, direction: str, ranks: int
) -> dict[str, Any]:
    backward = direction == "forward_backward"
    dense = made.name == "dense SDPA"
    lengths = [tokens] if dense else [tokens // 4, tokens // 2, tokens]
    rates = [1] if dense else [1, 2, 4]
    pattern = DilatedPattern.of(made.rule, lengths, rates)
    flops = pattern.flops(tokens, HEADS, DIM, is_causal=causal, backward=backward)
    size = 4 if dtype == "float32" else 2
    least = tokens * HEADS * DIM * size * (10 if backward else 4)
    peak = int(tokens * HEADS * DIM * size * made.kept * (2.2 if backward else 1) / ranks)
    if made.name == "longnet, eager":
        peak += HEADS * (tokens // 4) ** 2 * size * (2 if backward else 1)
    if dense and dtype == "bfloat16" and backward:
        peak += HEADS * tokens**2 * size
    found: dict[str, Any] = {
        "suite": "full", "implementation": made.name, "kind": made.kind, "ours": made.ours, "rule": made.rule,
        "ranks": ranks, "samples": 1, "tokens": tokens, "heads": HEADS, "head_dim": DIM, "lengths": lengths,
        "rates": rates, "dtype": dtype, "causal": causal, "direction": direction, "status": "measured", "why": "",
        "flops": flops, "bytes": least,
        **dict.fromkeys(("ms", "tokens_per_s", "tflops", "of_matmul", "gb_per_s", "of_copy", "peak_bytes")),
    }  # fmt: skip
    if made.name == WRONG or (made.name == NO_GRADIENTS and backward):
        what = "out is off by 3.1e-01" if made.name == WRONG else "d q is off by 2.4e-02"
        return {**found, "status": "wrong", "why": f"{what}: it gets no time."}
    if "compiled" in made.name and dtype == "bfloat16" and causal:
        return {**found, "status": "skipped", "why": "Its share of the time was used up."}
    if peak > MEMORY:
        return {**found, "status": "out of memory", "why": f"{peak / 2**30:.1f} GiB wanted beyond the inputs."}
    return {**found, **_figures(chance, made, found, peak)}


def _figures(chance: random.Random, made: Made, found: dict[str, Any], peak: int) -> dict[str, Any]:
    dtype, tokens = found["dtype"], found["tokens"]
    rate = PEAK[dtype] * made.share * found["ranks"] ** 0.8 * 1e12
    half = 0.7 if found["causal"] else 1.0  # causal kernels reach a smaller share of the ceiling
    seconds = found["flops"] / (rate * half) + made.overhead_ms / 1e3 * found["ranks"]
    seconds *= chance.uniform(0.97, 1.04)
    median = seconds * 1e3
    repeats = 1 if median > 2500 else 2 if median > 1200 else max(5, min(200, int(1500 / median)))
    spread = 0.0 if repeats == 1 else chance.uniform(0.01, 0.12)
    rates = {"tflops": found["flops"] / seconds / 1e12, "gb_per_s": found["bytes"] / seconds / 1e9}
    return {
        "ms": {
            "median": median,
            "lower": median * (1 - spread / 2),
            "upper": median * (1 + spread),
            "repeats": repeats,
        },
        "tokens_per_s": tokens / seconds,
        **rates,
        "of_matmul": rates["tflops"] / PEAK[dtype],
        "of_copy": rates["gb_per_s"] / COPY[dtype],
        "peak_bytes": peak,
    }


def _steps() -> list[dict[str, Any]]:
    """A suite of single steps, at one length only and with nothing to count as memory."""
    made = Made("head_groups, auto", "function", "head_groups", 0.5, 0.3, 1.4)
    base = _measurement(random.Random(1), made, 8192, "float32", False, "forward", 1)
    common = {"suite": "steps", "kind": "step", "rule": "none", "lengths": [], "rates": [], "flops": 0, "tflops": 0.0}
    return [
        {
            **base,
            **common,
            "implementation": name,
            "of_matmul": 0.0,
            "peak_bytes": 0,
            "ms": {"median": ms, "lower": ms * 0.98, "upper": ms * 1.05, "repeats": 200},
        }
        for name, ms in (("split heads: reshape", 0.011), ("split heads: einops", 0.024))
    ]


def _checks() -> list[dict[str, Any]]:
    chance = random.Random(2)
    found = []
    for made, dtype, causal in product(IMPLEMENTATIONS, DTYPES, (False, True)):
        names = ["out", "d x", "d q_proj.weight"] if made.kind == "multihead" else ["out", "d q", "d k", "d v"]
        limits = {name: LIMIT[dtype] * (1 if name == "out" else 1.5) for name in names}
        errors: dict[str, Any] = {name: limits[name] * chance.uniform(0.02, 0.6) for name in names}
        verdict, why = "exact", ""
        if made.name == WRONG:
            errors = dict.fromkeys(names, 0.31)
            errors["d k"] = "inf"
            verdict, why = "wrong", "The mask is shifted by one token in the last segment."
        if made.name == NO_GRADIENTS:
            errors["d q"], errors["d k"] = 2.4e-2, 3.9e-2
            verdict, why = "wrong gradients", "The mixing weights carry no gradient."
        for ranks in made.ranks:
            found.append(
                {"implementation": made.name, "kind": made.kind, "ours": made.ours, "rule": made.rule, "ranks": ranks,
                 "dtype": dtype, "causal": causal, "verdict": verdict, "errors": errors, "limits": limits, "why": why}
            )  # fmt: skip
    return found


def _tables() -> list[dict[str, Any]]:
    return [
        {
            "suite": "full",
            "title": "Exchanges over 4 ranks",
            "note": "32,768 tokens, float32, forward. Bytes are what a rank received.",
            "columns": ["exchange", "ms", "received", "hops"],
            "rows": [["ring", 412.73, 6291456, 3], ["allgather", 405.1, 6291456, 1], ["alltoall", 398.2, 3932160, 2]],
        },
        {
            "suite": "full",
            "title": "Compile time",
            "note": "",
            "columns": ["implementation", "first call s", "graphs"],
            "rows": [["longnet, auto, compiled", 6.1, 1], ["head_groups, auto, compiled", 5.4, 1], ["eager", None, 0]],
        },
        {
            "suite": "steps",
            "title": "Splitting heads",
            "note": "A step is timed alone; neither way copies.",
            "columns": ["way", "µs"],
            "rows": [["reshape", 11.0], ["einops", 24.0]],
        },
    ]


def _claims() -> list[dict[str, Any]]:
    keys = ("claim", "claimed", "ours", "holds", "how")
    rows = [
        ("Time grows linearly with length at fixed segments", "linear", "exponent 1.03", "yes",
         "slope of log time against log length, 4k to 32k tokens"),
        ("Gathering through einops is as fast as reshape", "same", "2.2 times slower", "no", "suite steps"),
        ("A ring halves memory with two ranks", "0.50", "0.52", "yes", "peak of the busiest rank, 32,768 tokens"),
        ("A billion tokens on 1,024 GPUs", "fits", "–", "not measured", "needs 1,024 GPUs"),
    ]  # fmt: skip
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _recommendations() -> list[dict[str, Any]]:
    keys = ("use_case", "best", "value", "runner_up", "factor", "ties")
    rows = [
        ("Training, long sequences", "head_groups, auto, compiled", "1,160 ms at 32,768 tokens", "copy and gather", 1.6,
         ["head_groups, auto", "DilatedAttention"]),
        ("Inference, long sequences", "head_groups, auto, compiled", "330 ms at 32,768 tokens", "copy and gather", 1.58,
         []),
        ("LongNet checkpoints", "torchscale, auto", "the only exact one", None, None, []),
        ("Least memory", "dense SDPA", "83 MiB at 32,768 tokens", "head_groups, auto", 1.08, []),
        ("Below 2,048 tokens", "dense SDPA", "6.1 ms at 1,024 tokens", "head_groups, auto", 1.4, []),
    ]  # fmt: skip
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _matrix() -> list[dict[str, Any]]:
    best = {rec["best"]: [] for rec in _recommendations()}
    for rec in _recommendations():
        best[rec["best"]].append(rec["use_case"])
    verdicts = {WRONG: "wrong", NO_GRADIENTS: "wrong gradients"}
    notes = {WRONG: "Shown as a warning only.", "dense SDPA": "Another operation: every token sees every token."}
    return [
        {
            "implementation": made.name,
            "ours": made.ours,
            "verdict": verdicts.get(made.name, "exact"),
            "best_for": best.get(made.name, []),
            "slower": None if made.name == WRONG else round(0.52 / made.share, 2),
            "note": notes.get(made.name, ""),
        }
        for made in IMPLEMENTATIONS
    ]
