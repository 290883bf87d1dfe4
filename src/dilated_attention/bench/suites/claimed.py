"""The suites that look into claims about dilated attention: profile, and optimisations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dilated_attention.bench import implementations as known
from dilated_attention.bench import probes
from dilated_attention.bench.runners import rank_milliseconds
from dilated_attention.bench.session import PATTERNS, Row, Session, Step, Table
from dilated_attention.bench.setting import BOTH, FORWARD, Build, Implementation, Setting
from dilated_attention.compat import RingDilatedAttentionProduction
from dilated_attention.nn import RingDilatedAttention
from dilated_attention.ranks import pool

PROJECTING = ("MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention")
BUFFERING = ("RingDilatedAttention, 2 ranks", "RingDilatedAttentionProduction, 2 ranks")

PROFILED = (
    "head_groups, auto", "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention",
    "RingDilatedAttentionV2Collective", "RingDilatedAttentionProduction", known.GATHER, known.SLICES,
    "longnet, auto", "torchscale, auto", known.RELEASED,
    "MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "RingMultiheadDilatedAttention",
)  # fmt: skip
PROFILED_AT, BACKENDS_AT = 8192, (256, 1024, 4096, 16384)
COPIES = ("copy", "clone", "contiguous", "index", "gather", "scatter", "cat", "pad", "memcpy")


def profile(session: Session) -> list[Step]:
    """Why one is faster than another: the operators of a call and its copies, checkpointing, backends by length."""
    setting, what = session.setting(PROFILED_AT, PATTERNS[0]), "kernels" if session.on_cuda else "operators"
    columns = ["implementation", "passes", what, "of these copies", "ms", "ms in copies", "the most"]
    note = f"{setting}; under the profiler, which makes everything slower. Copies: {', '.join(COPIES)} in the name."
    table = Table("profile", f"Where the time goes: {what}", note, columns)
    compared = [(checkpointing(), session.setting(PROFILED_AT, PATTERNS[1]))]
    functions = [one for one in known.everything() if one.kind == "function"]
    compared += [(functions, session.setting(tokens, PATTERNS[0])) for tokens in BACKENDS_AT]
    return [
        *(session.adding(table, f"{table.title}: {one.name}", kernels_of, session, setting, one)
          for one in known.named(*PROFILED)),
        *(session.comparing("profile", which, where) for which, where in compared),
    ]  # fmt: skip


def checkpointing() -> list[Implementation]:
    """Rows received travel again in the backward pass, or are kept."""
    ring = known.spread(known.named("RingDilatedAttention")[0], 2)
    builds = {
        words: partial(known.module, RingDilatedAttention, use_checkpointing=on)
        for on, words in ((True, "rows sent twice"), (False, "rows kept"))
    }
    return [
        replace(ring, name=f"{ring.name}, {words}", build=partial(known.sharded, build))
        for words, build in builds.items()
    ]


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


# --- optimisations ----------------------------------------------------------------------------------------------

REPEATS = 15


def optimisations(session: Session) -> list[Step]:
    """The optimisations that the reports claim, each without and with: buffers, cached plans, one projection of qkv."""
    unplanned = Implementation("longnet, sdpa, plans not cached", "function", "longnet", known.without_plans)
    plans = [*known.named("longnet, sdpa"), unplanned]
    table = Table(
        "optimisations",
        "The share of its time in which a rank waits for others",
        "RingDilatedAttentionProduction, 16,384 tokens, forward + backward; processes on this machine, over gloo.",
        ["ranks", "waiting %"],
    )
    compared = [
        *((known.named(*PROJECTING), session.setting(tokens, PATTERNS[0])) for tokens in (2048, 8192)),
        *((plans, session.setting(tokens, PATTERNS[0])) for tokens in (2048, 32768)),
        (known.named(*BUFFERING), session.setting(16384, PATTERNS[1])),
    ]
    steps = [session.comparing("optimisations", which, setting) for which, setting in compared]
    return [*steps, session.adding(table, table.title, waiting, session)]


def waiting(session: Session) -> Iterator[Row]:
    setting = session.setting(16384, PATTERNS[1])
    for one in known.named(*(f"RingDilatedAttentionProduction, {ranks} ranks" for ranks in known.RANKS)):
        if session.is_exact(one.name, setting):
            yield [one.ranks, 100 * max(pool(one.ranks).run(_share_waiting, one.build, setting, timeout=300.0))]


def _share_waiting(build: Build, setting: Setting) -> float:
    """In a rank."""
    subject = build(setting)
    module = subject.attention.func  # type: ignore[attr-defined]
    assert isinstance(module, RingDilatedAttentionProduction)
    call = subject.call(BOTH)
    rank_milliseconds(call)
    before = module.stats()["seconds_waited"]
    spent = sum(rank_milliseconds(call) for _ in range(REPEATS))
    return float(1000 * (module.stats()["seconds_waited"] - before) / spent)
