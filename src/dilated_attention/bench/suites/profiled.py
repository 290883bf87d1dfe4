"""Why one is faster than another: the operators of a call and its copies, and backends by length."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from dilated_attention.bench import implementations as known
from dilated_attention.bench import probes
from dilated_attention.bench.session import ERRORS, PATTERNS, Row, Session, Step
from dilated_attention.bench.setting import BOTH, FORWARD, Implementation, Setting

PROFILED = (
    "head_groups, auto", "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention",
    "RingDilatedAttentionV2Collective", "RingDilatedAttentionProduction", known.GATHER, known.SLICES,
    "longnet, auto", "torchscale, auto", known.RELEASED,
    "MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "RingMultiheadDilatedAttention",
)  # fmt: skip
PROFILED_AT, BACKENDS_AT = 8192, (256, 1024, 4096, 16384)
COPIES = ("copy", "clone", "contiguous", "index", "gather", "scatter", "cat", "pad", "memcpy")


def profile(session: Session) -> list[Step]:
    setting, what = session.setting(PROFILED_AT, PATTERNS[0]), "kernels" if session.on_cuda else "operators"
    columns = ["implementation", "passes", what, "of these copies", "ms", "ms in copies", "the most"]
    note = f"{setting}; under the profiler, which makes everything slower. Copies: {', '.join(COPIES)} in the name."
    title, functions = f"Where the time goes: {what}", [one for one in known.everything() if one.kind == "function"]
    rows = {f"{title}: {one.name}": partial(kernels_of, session, setting, one) for one in known.named(*PROFILED)}
    return [
        *session.table("profile", title, note, columns, rows),
        *(session.comparing("profile", functions, session.setting(tokens, PATTERNS[0])) for tokens in BACKENDS_AT),
    ]


def kernels_of(session: Session, setting: Setting, one: Implementation) -> Iterator[Row]:
    """What one forward and backward runs; only those that are right are looked at."""
    if one.why_not(setting):
        return
    try:
        check = session.check(one, setting)
    except ERRORS:  # the page says that it failed
        return
    if not check.right("out"):
        return
    call = one.build(setting).call(BOTH if check.right() else FORWARD)
    call()
    kernels = probes.kernel_times(call, session.device)
    copied = [kernel for kernel in kernels if any(word in kernel[0].lower() for word in COPIES)]
    passes = "forward + backward" if check.right() else "forward, as its gradients are wrong"
    counts = [sum(count for _, count, _ in some) for some in (kernels, copied)]
    times = [sum(ms for *_, ms in some) for some in (kernels, copied)]
    name, count, most = kernels[0]
    yield [one.name, passes, *counts, *times, f"{name[:60]}: {most:.2f} ms in {count}"]
