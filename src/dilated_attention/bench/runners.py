"""Where an implementation runs: in this process, or over ranks in processes of their own.

Legend: results are out and gradients of the whole sequence, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention.bench import memory, over_ranks, probes
from dilated_attention.bench.memory import Build, call_of
from dilated_attention.bench.run import Call, Measure, measure_of, results
from dilated_attention.bench.setting import Setting, forget_inputs
from dilated_attention.bench.subject import BOTH, Implementation, Subject
from dilated_attention.ranks import pool

TIMEOUT = 300.0


def results_of(one: Implementation, setting: Setting) -> dict[str, Tensor]:
    """For the check: forward and backward once."""
    if one.ranks == 1:
        subject = one.build(setting)
        return results(subject.attention, subject.inputs, subject.dout, subject.parameters)
    found: dict[str, Tensor] = _on_ranks(one, _results, one.build, setting)[0]
    return found


def prepare(one: Implementation, setting: Setting, directions: Sequence[str]) -> tuple[dict[str, Measure], Any]:
    """What to time, by direction, and how single rows at full length compare (None: they cannot be)."""
    if one.ranks > 1:
        threads = max(1, torch.get_num_threads() // one.ranks)
        rows = _on_ranks(one, _hold, one.name, one.build, setting, tuple(directions), threads)[0]
        return {way: partial(_slowest, one, way) for way in directions}, rows
    subject = one.build(setting)
    rows = _rows(subject, setting)
    calls: dict[str, Call] = {way: call_of(subject, way) for way in directions}
    if subject.compiled and BOTH in directions:  # what is compiled for a forward that is differentiated is other code
        calls[BOTH]()
    if setting.device.type == "cuda":
        for call in calls.values():
            for _ in range(2):
                call()
    return {way: measure_of(call, setting.device) for way, call in calls.items()}, rows


def release(device: torch.device, ranks: Sequence[int]) -> None:
    """Let go of what the last setting held."""
    forget_inputs()
    for size in ranks:
        pool(size).run(_drop, timeout=TIMEOUT)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@torch.no_grad()
def _rows(subject: Subject, setting: Setting) -> dict[str, Any] | None:
    """Single rows at full length, the one thing there that needs no quadratic oracle."""
    out = subject.attention(*subject.inputs)
    if subject.projects:
        return None
    return probes.check_rows(out, setting.qkv(), subject.pattern, setting.causal)


# --- over ranks -------------------------------------------------------------------------------------------------


def _on_ranks(one: Implementation, function: Any, *args: Any) -> list[Any]:
    outcomes = pool(one.ranks).run(function, *args, check=False, timeout=TIMEOUT)
    memory.raise_if_failed(outcomes)
    return [x.value for x in outcomes]


def _slowest(one: Implementation, direction: str) -> list[float]:
    """A call is over when its last rank is."""
    return [max(_on_ranks(one, _once, one.name, direction))]


_held: dict[tuple[str, str], Call] = {}  # in a rank: what is timed, by implementation and direction


def _results(build: Build, setting: Setting) -> dict[str, Tensor]:
    subject = build(setting)
    found = results(subject.attention, subject.inputs, subject.dout, subject.parameters)
    whole = over_ranks.gathered(found, subject)
    return whole if dist.get_rank() == 0 else {}


def _hold(
    name: str, build: Build, setting: Setting, directions: tuple[str, ...], threads: int
) -> dict[str, Any] | None:
    torch.set_num_threads(threads)
    subject = build(setting)
    _held.update({(name, way): call_of(subject, way) for way in directions})
    with torch.no_grad():
        out = over_ranks.gathered({"out": subject.attention(*subject.inputs)}, subject)["out"]
    if subject.projects or dist.get_rank():
        return None
    qkv = tuple(x.cpu() for x in setting.qkv())
    return probes.check_rows(out, qkv, subject.pattern, setting.causal)


def _once(name: str, direction: str) -> float:
    return rank_milliseconds(_held[name, direction])


def rank_milliseconds(call: Call) -> float:
    """In a rank: of one call that all ranks begin together."""
    dist.barrier()
    start = torch.utils.benchmark.timer()
    call()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return 1000 * float(torch.utils.benchmark.timer() - start)


def _drop() -> None:
    _held.clear()
    forget_inputs()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
