"""Why one is faster than another: the operators of a call and its copies, and backends by length."""

from __future__ import annotations

from collections.abc import Iterator

from dilated_attention.bench import implementations as known
from dilated_attention.bench import probes
from dilated_attention.bench.session import PATTERNS, Row, Session, Step, new_table
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
    table = new_table("profile", f"Where the time goes: {what}", note, columns)
    functions = [one for one in known.everything() if one.kind == "function"]
    return [
        *(session.adding(table, f"{table['title']}: {one.name}", kernels_of, session, setting, one)
          for one in known.named(*PROFILED)),
        *(session.comparing("profile", functions, session.setting(tokens, PATTERNS[0])) for tokens in BACKENDS_AT),
    ]  # fmt: skip


def kernels_of(session: Session, setting: Setting, one: Implementation) -> Iterator[Row]:
    """What one forward and backward runs; only those that are right are looked at."""
    check = "it cannot run here" if one.why_not(setting) else session.check(one, setting)
    if isinstance(check, str) or not check.right("out"):
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
