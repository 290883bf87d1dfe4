"""The optimisations that the reports claim, each on and off.

Legend: key and value as they travel, (n,) bytes; x (B, N, E).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dilated_attention import blocks
from dilated_attention.backends import choose
from dilated_attention.bench import implementations as known
from dilated_attention.bench import multihead, probes
from dilated_attention.bench.run import Timing
from dilated_attention.bench.runners import rank_milliseconds
from dilated_attention.bench.session import PATTERNS, Session, Step
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import BOTH, FORWARD, Build
from dilated_attention.compat import RingDilatedAttentionProduction
from dilated_attention.nn import MultiheadDilatedAttention
from dilated_attention.ranks import pool
from dilated_attention.ring import alltoall, circulate, packing, shards
from dilated_attention.units import bytes_text

SUITE, TITLE = "optimisations", "Claimed optimisations, off and on"
COLUMNS = ["optimisation", "where", "off", "on", "unit", "saved"]
BUFFERS, PLAN, PACKED, FUSED, BUCKETS, SHARE = (
    "buffers reused", "plan cached", "K/V in one message", "qkv fused", "DDP bucket size", "time in communication",
)  # fmt: skip
BUCKET_MB = (1, 25, 100)  # 25 is what DDP takes by itself
REPEATS = 15
USED = {
    "buffers": ("RingDilatedAttention, 2 ranks", "RingDilatedAttentionProduction, 2 ranks"),
    "plan_cache": ("longnet, sdpa",),
    "fused": ("MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention"),
    "buckets": ("MultiheadDilatedAttention",),
    "communication": tuple(f"RingDilatedAttentionProduction, {ranks} ranks" for ranks in known.RANKS),
}


def steps(session: Session) -> list[Step]:
    parts = (buffers, plan_cache, packed, fused, buckets, communication)
    return [Step(functools.partial(_add, part), 10.0) for part in parts]


def _add(part: Callable[[Session], list[list[Any]]], session: Session) -> None:
    """One optimisation's lines at the end of the table."""
    name = part.__name__.replace("_", " ")
    session.pace.step(f"{TITLE}: {name}", 10.0)
    setting = session.setting(16384, PATTERNS[0])
    wrong = [used for used in USED.get(part.__name__, ()) if not session.is_exact(used, setting)]
    if wrong:  # listed with its error among the checks, and not timed here either
        session.pace.say(f"{TITLE}: {name} is left out, because {', '.join(wrong)} is wrong")
        return
    before = [x for table in session.results["tables"] if table["suite"] == SUITE for x in table["rows"]]
    note = "Medians; saved is what is less when on. Ranks are processes on this machine, over gloo."
    session.table(SUITE, TITLE, note, COLUMNS, [*before, *part(session)])


def row(what: str, where: str, off: float | None, on: float | None, unit: str) -> list[Any]:
    saved = None if off is None or on is None or off == 0 else 1 - on / off
    return [what, where, off, on, unit, saved]


# --- in one process ---------------------------------------------------------------------------------------------


def plan_cache(session: Session) -> list[list[Any]]:
    """Every cache of plans emptied before each call, or left alone."""
    caches = [
        thing
        for module in (blocks, choose, shards, packing, circulate, alltoall)
        for _, thing in inspect.getmembers(module)
        if isinstance(thing, functools._lru_cache_wrapper)
    ]
    rows = []
    for tokens in (2048, 32768):
        call = known.named("longnet, sdpa")[0].build(session.setting(tokens, PATTERNS[0])).call(FORWARD)

        def forgetful(call: Callable[[], Any] = call) -> None:
            for cache in caches:
                cache.cache_clear()
            call()

        found = session.time({"off": forgetful, "on": call}, 2.0)
        rows.append(row(PLAN, f"longnet, {tokens:,} tokens, forward", found["off"].median, found["on"].median, "ms"))
    return rows


def fused(session: Session) -> list[list[Any]]:
    """Three projections, or one."""
    rows = []
    for tokens in (2048, 8192):
        setting = session.setting(tokens, PATTERNS[0])
        names = {"off": "MultiheadDilatedAttention", "on": "ImprovedMultiheadDilatedAttention"}
        for way in (FORWARD, BOTH):
            found = session.time(
                {key: known.named(name)[0].build(setting).call(way) for key, name in names.items()}, 4.0
            )
            where = f"{tokens:,} tokens, {way.replace('_', ' + ')}"
            rows.append(row(FUSED, where, found["off"].median, found["on"].median, "ms"))
    return rows


# --- over ranks -------------------------------------------------------------------------------------------------


def buffers(session: Session) -> list[list[Any]]:
    """Receive buffers made for each message, or kept from call to call."""
    setting = session.setting(16384, PATTERNS[1])
    names = {"off": "RingDilatedAttention, 2 ranks", "on": "RingDilatedAttentionProduction, 2 ranks"}
    builds = {key: known.named(name)[0].build for key, name in names.items()}
    found = {key: max(pool(2).run(_held_bytes, build, setting, timeout=300.0)) for key, build in builds.items()}
    off, on = (round(found[key] / (1 << 20), 2) for key in ("off", "on"))
    return [row(BUFFERS, "2 ranks, 16,384 tokens, forward + backward", off, on, "MiB")]


def packed(session: Session) -> list[list[Any]]:
    """K and V to a neighbour as two messages, or as one."""
    rows = []
    for size in (1 << 12, 1 << 16, 1 << 22):
        found = _on_two(_messages, size)
        where = f"2 ranks, {bytes_text(size)} each"
        rows.append(row(PACKED, where, found["off"].median, found["on"].median, "ms"))
    return rows


def buckets(session: Session) -> list[list[Any]]:
    """A training step of one layer under DDP: buckets of 25 MB against smaller and larger ones."""
    setting = session.setting(256, PATTERNS[0])
    found = _on_two(_ddp_steps, setting)
    usual = found[25].median
    return [
        row(BUCKETS, f"2 ranks, {megabytes} MB against 25 MB", usual, found[megabytes].median, "ms")
        for megabytes in BUCKET_MB
        if megabytes != 25
    ]


def communication(session: Session) -> list[list[Any]]:
    """Of the time of a call, the part that a rank spends waiting for others. There is no on and off: it is a share."""
    rows = []
    for ranks in known.RANKS:
        setting = session.setting(16384, PATTERNS[1])
        build = known.named(f"RingDilatedAttentionProduction, {ranks} ranks")[0].build
        share = max(pool(ranks).run(_share_waiting, build, setting, timeout=300.0))
        rows.append([SHARE, f"{ranks} ranks, 16,384 tokens, forward + backward", None, 100 * share, "%", None])
    return rows


def _on_two(function: Callable[..., dict[Any, list[float]]], *args: Any) -> dict[Any, Timing]:
    """Of every repeat the slower rank."""
    first, second = pool(2).run(function, *args, timeout=300.0)
    return {key: Timing.of([max(pair) for pair in zip(first[key], second[key], strict=True)]) for key in first}


# --- in the ranks -----------------------------------------------------------------------------------------------


def _repeat(calls: dict[Any, Callable[[], Any]]) -> dict[Any, list[float]]:
    found: dict[Any, list[float]] = {key: [] for key in calls}
    for round_ in range(REPEATS + 2):
        for key, call in calls.items():
            spent = rank_milliseconds(call)
            if round_ > 1:  # the first two are the warm-up
                found[key].append(spent)
    return found


def _held_bytes(build: Build, setting: Setting) -> int:
    """Of a module and two calls of it: what it keeps from call to call counts."""
    setting.qkv()  # inputs do not

    def calls() -> Any:
        call = build(setting).call(BOTH)
        call()
        return call()

    return probes.peak_bytes(calls, setting.device)


def _messages(size: int) -> dict[str, list[float]]:
    peer = 1 - dist.get_rank()
    pair = torch.zeros(2, size, dtype=torch.uint8)
    taken = torch.empty_like(pair)

    def exchange(sent: list[torch.Tensor], got: list[torch.Tensor]) -> None:
        steps = [dist.P2POp(dist.isend, x, peer) for x in sent] + [dist.P2POp(dist.irecv, x, peer) for x in got]
        for work in dist.batch_isend_irecv(steps):
            work.wait()

    return _repeat({
        "off": lambda: exchange(list(pair), list(taken)),
        "on": lambda: exchange([pair.flatten()], [taken.flatten()]),
    })  # fmt: skip


def _ddp_steps(setting: Setting) -> dict[int, list[float]]:
    width, heads = 1536, 24  # 38 MB of gradients
    layers = (MultiheadDilatedAttention(width, heads, setting.lengths, setting.rates) for _ in BUCKET_MB)
    x = torch.randn(1, setting.tokens, width, device=setting.device, dtype=setting.dtype)
    models = {
        size: DistributedDataParallel(multihead.filled(layer, setting), bucket_cap_mb=size)
        for size, layer in zip(BUCKET_MB, layers, strict=True)
    }
    return _repeat({size: lambda m=m: m(x)[0].sum().backward() for size, m in models.items()})  # type: ignore[misc]


def _share_waiting(build: Build, setting: Setting) -> float:
    subject = build(setting)
    module = subject.attention.func  # type: ignore[attr-defined]
    assert isinstance(module, RingDilatedAttentionProduction)
    call = subject.call(BOTH)
    call()
    before = module.stats()["seconds_waited"]
    spent = _repeat({"": call})[""]
    calls = REPEATS + 2
    waited = (module.stats()["seconds_waited"] - before) / calls
    return waited / (sum(spent) / len(spent) / 1000)
