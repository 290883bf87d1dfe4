"""Why one is faster than another: path and operators of each call, copies, checkpointing, backends by length."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

from dilated_attention.bench import implementations as known
from dilated_attention.bench import over_ranks, probes
from dilated_attention.bench.memory import call_of
from dilated_attention.bench.run import Call
from dilated_attention.bench.steps import Session, Step, compare_step
from dilated_attention.bench.subject import BOTH, FORWARD, Implementation
from dilated_attention.bench.suites.common import PATTERNS

SUITE = "profile"
TOKENS = 8192
SUBJECTS = (
    "head_groups, auto", "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention",
    "RingDilatedAttentionV2Collective", "RingDilatedAttentionProduction", known.GATHER, known.SLICES,
    "longnet, auto", "torchscale, auto", known.RELEASED,
    "MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "RingMultiheadDilatedAttention",
)  # fmt: skip
BACKENDS_AT = (256, 1024, 4096, 16384)
COPIES = ("copy", "clone", "contiguous", "index", "gather", "scatter", "cat", "pad", "memcpy")
KERNELS, PATHS = "Where the time goes", "The path of a call"
PACKAGE = "dilated_attention"
ABOVE = ("bench", "cli", "__main__")  # who calls what is looked at


def steps(session: Session) -> list[Step]:
    backends = [one for one in known.everything() if one.kind == "function" and one.timed]
    return [
        Step(KERNELS, len(SUBJECTS), kernel_table),
        Step(PATHS, 1, path_table),
        compare_step(SUITE, checkpointing(), session.setting(TOKENS, PATTERNS[1])),
        *(compare_step(SUITE, backends, session.setting(tokens, PATTERNS[0])) for tokens in BACKENDS_AT),
    ]


def checkpointing() -> list[Implementation]:
    """Rows received travel again in the backward pass, or are kept."""
    name = "RingDilatedAttention"
    return [
        Implementation(
            f"{name}, 2 ranks, {'rows sent twice' if on else 'rows kept'}", "ring", "head_groups",
            partial(over_ranks.build, name, use_checkpointing=on), ranks=2,
        )
        for on in (True, False)
    ]  # fmt: skip


def kernel_table(session: Session) -> None:
    """What one forward and backward runs; only those that are right are looked at."""
    setting = session.setting(TOKENS, PATTERNS[0])
    rows = []
    for one in known.named(*SUBJECTS):
        session.watch.step(f"{KERNELS}: {one.name}")
        if one.why_not(setting) is not None:
            continue
        check = session.comparison.check(one, setting)
        if isinstance(check, str) or not check.right("out"):
            continue
        call = call_of(one.build(setting), BOTH if check.right() else FORWARD)
        call()
        kernels = probes.kernel_times(call, session.device)
        total = sum(ms for *_, ms in kernels)
        copies = [(count, ms) for name, count, ms in kernels if any(word in name.lower() for word in COPIES)]
        passes = "forward + backward" if check.right() else "forward, as its gradients are wrong"
        rows.append([
            one.name, passes, sum(count for _, count, _ in kernels), sum(count for count, _ in copies), total,
            sum(ms for _, ms in copies), f"{kernels[0][0][:60]}: {kernels[0][2]:.2f} ms in {kernels[0][1]}",
        ])  # fmt: skip
    what = "kernels" if session.on_cuda else "operators"
    columns = ["implementation", "passes", what, "of these copies", "ms", "ms in copies", "the most"]
    note = f"{setting}; under the profiler, which makes everything slower. Copies: {', '.join(COPIES)} in the name."
    session.table(SUITE, f"{KERNELS}: {what}", note, columns, rows)


def path_table(session: Session) -> None:
    """The deepest chain of calls within the package, from the call to the kernel."""
    session.watch.step(PATHS)
    setting = session.setting(256, PATTERNS[0])
    names = [name for name in SUBJECTS if known.named(name)[0].ours]
    paths = [[name, " → ".join(path(call_of(known.named(name)[0].build(setting), FORWARD)))] for name in names]
    session.table(SUITE, PATHS, "Functions of this package, by module.", ["implementation", "path"], paths)


def path(call: Call) -> list[str]:
    """The functions of this package on the stack where it was deepest in the forward of a backend."""
    deepest: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        in_backend = _module(frame).startswith(f"{PACKAGE}.backends")
        kernel = "forward" in frame.f_code.co_name or _module(frame).endswith(".triton.launch")
        if event != "call" or not in_backend or not kernel:
            return
        chain = _chain(frame)
        if len(chain) > len(deepest):
            deepest = chain

    call()  # what is done once, as planning, is not part of the path
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return deepest


def _chain(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        module = _module(frame).removeprefix(f"{PACKAGE}.")
        if _module(frame).startswith(PACKAGE) and not module.startswith(ABOVE):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            if "<" not in name:  # neither lambdas nor comprehensions
                found.append(f"{module}.{name}")
        frame = frame.f_back
    return found[::-1]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
