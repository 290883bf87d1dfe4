"""Why one is faster than another: the operators of a call and its copies, checkpointing, backends by length."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dilated_attention.bench import implementations as known
from dilated_attention.bench import over_ranks, probes
from dilated_attention.bench.session import PATTERNS, Session, Step
from dilated_attention.bench.subject import BOTH, FORWARD, Implementation
from dilated_attention.nn import RingDilatedAttention

TOKENS = 8192
SUBJECTS = (
    "head_groups, auto", "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention",
    "RingDilatedAttentionV2Collective", "RingDilatedAttentionProduction", known.GATHER, known.SLICES,
    "longnet, auto", "torchscale, auto", known.RELEASED,
    "MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "RingMultiheadDilatedAttention",
)  # fmt: skip
BACKENDS_AT = (256, 1024, 4096, 16384)
COPIES = ("copy", "clone", "contiguous", "index", "gather", "scatter", "cat", "pad", "memcpy")
TITLE = "Where the time goes"


def steps(session: Session) -> list[Step]:
    backends = [one for one in known.everything() if one.kind == "function"]
    return [
        Step(kernel_table, 2.0 * len(SUBJECTS)),
        session.comparing("profile", checkpointing(), session.setting(TOKENS, PATTERNS[1])),
        *(session.comparing("profile", backends, session.setting(tokens, PATTERNS[0])) for tokens in BACKENDS_AT),
    ]


def checkpointing() -> list[Implementation]:
    """Rows received travel again in the backward pass, or are kept."""
    ring = over_ranks.spread(known.named("RingDilatedAttention")[0], 2)
    found = []
    for on, words in ((True, "rows sent twice"), (False, "rows kept")):
        build = partial(known.module, RingDilatedAttention, use_checkpointing=on)
        found.append(replace(ring, name=f"{ring.name}, {words}", build=partial(over_ranks.sharded, build)))
    return found


def kernel_table(session: Session) -> None:
    """What one forward and backward runs; only those that are right are looked at."""
    setting = session.setting(TOKENS, PATTERNS[0])
    rows = []
    for one in known.named(*SUBJECTS):
        session.pace.step(f"{TITLE}: {one.name}", 2.0)
        check = "it cannot run here" if one.why_not(setting) else session.comparison.check(one, setting)
        if isinstance(check, str) or not check.right("out"):
            continue
        call = one.build(setting).call(BOTH if check.right() else FORWARD)
        call()
        kernels = probes.kernel_times(call, session.device)
        copies = [(count, ms) for name, count, ms in kernels if any(word in name.lower() for word in COPIES)]
        passes = "forward + backward" if check.right() else "forward, as its gradients are wrong"
        name, count, most = kernels[0]
        rows.append([
            one.name, passes, sum(count for _, count, _ in kernels), sum(count for count, _ in copies),
            sum(ms for *_, ms in kernels), sum(ms for _, ms in copies), f"{name[:60]}: {most:.2f} ms in {count}",
        ])  # fmt: skip
    what = "kernels" if session.on_cuda else "operators"
    columns = ["implementation", "passes", what, "of these copies", "ms", "ms in copies", "the most"]
    note = f"{setting}; under the profiler, which makes everything slower. Copies: {', '.join(COPIES)} in the name."
    session.table("profile", f"{TITLE}: {what}", note, columns, rows)
