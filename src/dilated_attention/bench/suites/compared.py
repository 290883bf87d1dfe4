"""The suites that compare implementations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention.bench import implementations as known
from dilated_attention.bench import probes
from dilated_attention.bench.conclude import TELLING
from dilated_attention.bench.session import ERRORS, PATTERNS, SUGGESTED, Row, Segments, Session, Step
from dilated_attention.bench.setting import BOTH, FORWARD, Implementation, Setting

Group = tuple[tuple[str, ...], tuple[int, ...], tuple[Segments, ...]]
SHORT, LONG = (PATTERNS[0],), (PATTERNS[1],)
QUICK = (
    known.DENSE, "head_groups, auto", "longnet, auto", "torchscale, auto", known.GATHER, known.SLICES, "FlexAttention",
    known.RELEASED,
)  # fmt: skip
RINGS = ("RingAttentionV2Simple", "RingDilatedAttentionV2Collective", "RingDilatedAttentionProduction")
WAYS = ("dense cuDNN", "head_groups, auto", "longnet, auto", known.GATHER, known.SLICES)
MULTIHEAD = ("MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "nn.MultiheadAttention")
# who is compared, at which lengths, with which patterns
PLAIN: dict[str, tuple[Group, ...]] = {
    # the most telling ones, and modules at one length
    "quick": ((QUICK, (2048,), (SUGGESTED,)), ((*QUICK, *MULTIHEAD[::2]), (4096,), (SUGGESTED,)),
              (QUICK, (8192,), (SUGGESTED,))),
    # why a ring with ring_size=1 was slower: what copies of rows cost
    "copies": ((("head_groups, auto", "DilatedAttention", "RingDilatedAttention", known.SLICES, known.GATHER),
                (2048, 8192, 32768, 262144), SHORT),),
    # is one faster or smaller?
    "improved": ((("DilatedAttention", "ImprovedDilatedAttention"), (4096, 8192, 32768, 1 << 20), PATTERNS),),
    # side by side: time, and memory by ranks
    "ring": (((*RINGS, *(f"{name}, {ranks} ranks" for ranks in known.RANKS for name in RINGS)),
              (4096, 8192, 16384), SHORT),),
    # published optimisations, each without and with: one projection of qkv, buffers
    "optimisations": ((MULTIHEAD[:2], (2048, 8192), SHORT),
                      (("RingDilatedAttention, 2 ranks", "RingDilatedAttentionProduction, 2 ranks"), (16384,), LONG)),
    # what docs/speed.md shows; FlexAttention compiles for minutes before its first call at 262,144 tokens
    "suggested": (((known.DENSE, *WAYS, "FlexAttention"), (8192,), (SUGGESTED,)),
                  ((known.DENSE, *WAYS), (32768, 131072), (SUGGESTED,)),
                  ((known.DENSE, "dense flash", *WAYS), (262144,), (SUGGESTED,)), (WAYS, (1 << 20,), (SUGGESTED,))),
}  # fmt: skip

LENGTHS = (2048, 4096, 8192, 16384, 32768, 131072, 262144, 524288, 1 << 20)
CAUSAL_AT = (2048, 8192, 32768, 131072, 1 << 20)
PRECISION_AT = (2048, 8192, 32768)


def plain(suite: str, session: Session) -> list[Step]:
    return [
        partial(session.compare, suite, known.named(*names), session.setting(tokens, pattern))
        for names, lengths, patterns in PLAIN[suite]
        for pattern, tokens in product(patterns, lengths)
    ]


def scaling(session: Session) -> list[Step]:
    """All implementations by length, batch size, heads and precision, causal and not."""
    short, long = PATTERNS
    every = known.everything()
    curve = [one for one in every if _in_curve(one, session)]
    few = [one for one in curve if one.name in (*TELLING, *MULTIHEAD)]
    asked = [(every if n in (2048, 8192) else curve, session.setting(n, short)) for n in LENGTHS]
    asked += [(curve, session.setting(n, short, causal=True)) for n in CAUSAL_AT]
    asked += [(few, session.setting(4096, short, samples=samples)) for samples in (2, 4, 8)]
    asked += [(few, session.setting(4096, short, heads=heads)) for heads in (4, 16)]
    asked += [(few, session.setting(n, short, dtype=dtype)) for dtype in session.dtypes[1:] for n in PRECISION_AT]
    asked += [(few, session.setting(n, long)) for n in PRECISION_AT[1:]]
    return [partial(session.compare, "scaling", which, setting) for which, setting in asked]


def _in_curve(one: Implementation, session: Session) -> bool:
    """At every length: on a CPU the most telling ones, on CUDA whatever runs in one process and is not compiled."""
    if one.name in (*TELLING, *MULTIHEAD, "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention"):
        return True
    slow = ("compiled", "FlexAttention", "eager", "RingAttentionV2Simple")  # the first two anew for each length
    return session.on_cuda and one.ranks == 1 and not any(word in one.name for word in slow)


# A has many tokens, B a wide head, and C is so short that Python matters: tokens, segments, heads, head dim
CASES: dict[str, tuple[int, Segments, int, int]] = {
    "A": (1 << 20, ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)), 12, 64),
    "B": (1 << 17, ((2048, 8192, 32768), (1, 4, 16)), 16, 128),
    "C": (1 << 13, ((2048, 4096, 8192), (1, 2, 4)), 8, 64),
}
KERNELS = ("head_groups, auto", "longnet, auto", known.GATHER, known.RELEASED, f"{known.RELEASED}, cuDNN")
ALSO_SHORT = ("head_groups, auto, compiled", "longnet, auto, compiled", known.DENSE)  # besides, in C
ROWS = 2048
# fastest first: what public SDPA, and with it copy and gather, chooses from; nothing is switched off
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def kernels(session: Session) -> list[Step]:
    """How near the kernels come to dense ones, in long and in short calls.

    Beside each case is the dense kernel on the same tokens cut into segments of 2048 rows: what a branch would cost if
    dilation cost nothing. On a CPU there is only the short case. It comes first: it is mostly Python, so nothing large
    may run before it.
    """
    found = []
    beside = known.named("dense cuDNN" if session.on_cuda else known.DENSE, "head_groups, auto")
    for case, causal in product("CAB" if session.on_cuda else "C", (False, True)):
        tokens, pattern, heads, dim = CASES[case]
        setting = session.setting(tokens, pattern, heads=heads, head_dim=dim, causal=causal)
        cut = replace(setting, tokens=ROWS, lengths=(ROWS,), rates=(1,), samples=tokens // ROWS)
        which = known.named(*KERNELS, *ALSO_SHORT * (case == "C"))
        found += [partial(session.compare, "kernels", which, setting), partial(session.compare, "kernels", beside, cut)]
    return [sdpa_kernel(FASTEST, set_priority=True)(step) for step in found]


PROFILED_AT, BACKENDS_AT = 8192, (256, 1024, 4096, 16384)
COPIES = ("copy", "clone", "contiguous", "index", "gather", "scatter", "cat", "pad", "memcpy")


def profile(session: Session) -> list[Step]:
    setting, what = session.setting(PROFILED_AT, PATTERNS[0]), "kernels" if session.on_cuda else "operators"
    columns = ["implementation", "passes", what, "of these copies", "ms", "ms in copies", "the most"]
    note = f"{setting}; under the profiler, which makes everything slower. Copies: {', '.join(COPIES)} in the name."
    every = [one for one in known.everything() if one.ranks == 1]
    functions = [one for one in every if one.kind == "function"]
    which = [one for one in every if one.name in TELLING or one.kind in ("module", "multihead")]
    rows = [partial(kernels_of, session, setting, one) for one in which]
    table = session.table("profile", f"Where the time goes: {what}", note, columns, rows)
    settings = [session.setting(tokens, PATTERNS[0]) for tokens in BACKENDS_AT]
    return [*table, *(partial(session.compare, "profile", functions, one) for one in settings)]


def kernels_of(session: Session, setting: Setting, one: Implementation) -> Iterator[Row]:
    """What one forward and backward runs; only those that are right are looked at."""
    if one.why_not(setting):
        return
    try:
        check = session.check(one, setting)
    except ERRORS:  # the page says that it failed
        return
    if check.right("out"):
        call = one.build(setting).call(BOTH if check.right() else FORWARD)
        call()
        kernels = probes.kernel_times(call, session.device)
        copied = [kernel for kernel in kernels if any(word in kernel[0].lower() for word in COPIES)]
        passes = "forward + backward" if check.right() else "forward, as its gradients are wrong"
        counts = [sum(count for _, count, _ in some) for some in (kernels, copied)]
        times = [sum(ms for *_, ms in some) for some in (kernels, copied)]
        name, count, most = kernels[0]
        yield [one.name, passes, *counts, *times, f"{name[:60]}: {most:.2f} ms in {count}"]
