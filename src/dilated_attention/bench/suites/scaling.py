"""All implementations by length, batch size, heads and precision, causal and not."""

from __future__ import annotations

from dilated_attention.bench.implementations import everything
from dilated_attention.bench.series import TELLING
from dilated_attention.bench.steps import Session, Step, compare_step
from dilated_attention.bench.subject import Implementation
from dilated_attention.bench.suites.common import MULTIHEAD, PATTERNS

SUITE = "scaling"
EVERYTHING_AT = (2048, 8192)
LENGTHS = (2048, 4096, 8192, 16384, 32768, 131072, 262144, 524288, 1 << 20)
CAUSAL_AT = (2048, 8192, 32768, 131072, 1 << 20)
BATCHES, HEADS, TOKENS = (2, 4, 8), (4, 16), 4096
PRECISION_AT = (2048, 8192, 32768)


def steps(session: Session) -> list[Step]:
    short, long = PATTERNS
    every = [one for one in everything() if one.timed]
    curve = [one for one in every if _in_curve(one, session)]
    few = [one for one in curve if one.name in (*TELLING, *MULTIHEAD)]
    found = []
    for causal in (False, True):
        for tokens in CAUSAL_AT if causal else LENGTHS:
            which = curve if causal or tokens not in EVERYTHING_AT else every
            found.append(compare_step(SUITE, which, session.setting(tokens, short, causal=causal)))
    for samples in BATCHES:
        found.append(compare_step(SUITE, few, session.setting(TOKENS, short, samples=samples)))
    for heads in HEADS:
        found.append(compare_step(SUITE, few, session.setting(TOKENS, short, heads=heads)))
    for dtype in session.dtypes[1:]:
        for tokens in PRECISION_AT:
            found.append(compare_step(SUITE, few, session.setting(tokens, short, dtype=dtype)))
    found.extend(compare_step(SUITE, few, session.setting(tokens, long)) for tokens in PRECISION_AT[1:])
    return found


def _in_curve(one: Implementation, session: Session) -> bool:
    """At every length: on a CPU the most telling ones, on CUDA whatever runs in one process and is not compiled."""
    if one.name in (*TELLING, *MULTIHEAD, "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention"):
        return True
    compiled = "compiled" in one.name or one.name == "FlexAttention"  # anew for each length
    eager = "eager" in one.name or one.name == "RingAttentionV2Simple"
    return session.on_cuda and one.ranks == 1 and not compiled and not eager
