"""Where an implementation runs: in this process, or over ranks in processes of their own.

Legend: results are out and gradients of the whole sequence, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention.bench import probes
from dilated_attention.bench.run import Call, Measure, cpu_milliseconds, measure_of, results
from dilated_attention.bench.setting import BOTH, Build, Implementation, Setting, Subject
from dilated_attention.distributed.sequence import gather_sequence
from dilated_attention.ranks import pool

TIMEOUT = 300.0
# how torch and the system say that no memory is left; a rank that dies of signal 9 was ended by the system
SIGNS = (
    "out of memory", "not enough memory", "can't allocate memory", "bad_alloc", "Cannot allocate", "MemoryError",
    "died: the process ended with exit code -9",
)  # fmt: skip
Peaks = dict[str, int]  # bytes, by direction
_held: dict[tuple[str, str], Call] = {}  # in each process what is timed, by implementation and direction


def results_of(one: Implementation, setting: Setting) -> dict[str, Tensor]:
    """For the check: forward and backward once."""
    return _everywhere(one.ranks, _results, one.build, setting)[0]  # type: ignore[no-any-return]


def prepare(one: Implementation, setting: Setting, directions: Sequence[str]) -> tuple[dict[str, Measure], Peaks, str]:
    """What to time and peak memory, by direction, and how rows at full length are wrong ("" also if not checked)."""
    threads = max(1, torch.get_num_threads() // one.ranks)
    found = _everywhere(one.ranks, _hold, one.name, one.build, setting, directions, threads)
    peaks = {way: max(peaks[way] for _, peaks in found) for way in directions}

    def measure(way: str) -> Measure:
        if one.ranks == 1:
            return measure_of(_held[one.name, way], setting.device)
        return lambda: [max(_everywhere(one.ranks, _once, one.name, way))]  # a call is over when its last rank is

    return {way: measure(way) for way in directions}, peaks, found[0][0]


def release(ranks: Iterable[int]) -> None:
    """Let go of what the last setting held, here and in ranks."""
    for size in {1, *ranks}:
        _everywhere(size, _drop)


def _everywhere(ranks: int, function: Any, *args: Any) -> list[Any]:
    if ranks == 1:
        return [function(*args)]
    return pool(ranks).run(function, *args, timeout=TIMEOUT)


def ran_out(error: Exception) -> bool:
    return any(sign in str(error) for sign in SIGNS)


def _results(build: Build, setting: Setting) -> dict[str, Tensor]:
    subject = build(setting)
    return gathered(results(subject.attention, subject.inputs, subject.dout, **subject.parameters), subject)


def _hold(name: str, build: Build, setting: Setting, directions: Sequence[str], threads: int) -> tuple[str, Peaks]:
    torch.set_num_threads(threads)
    subject, wrong = build(setting), ""
    with torch.no_grad():
        out = gathered({"out": subject.attention(*subject.inputs)}, subject).get("out")
    if out is not None and not subject.parameters:  # with parameters, out is more than attention itself
        qkv = [x.to(out.device) for x in setting.inputs()[0]]
        worst, limit = probes.check_rows(out, qkv, subject.pattern, setting.causal)
        if worst > limit:
            wrong = f"rows at full length are off by {worst:.1e}, allowed {limit:.0e}"
    calls = {way: subject.call(way) for way in directions}
    if "compiled" in name and BOTH in calls:  # the forward that is differentiated is compiled separately
        calls[BOTH]()
    _held.update({(name, way): call for way, call in calls.items()})
    return wrong, {way: probes.peak_bytes(call, setting.device) for way, call in calls.items()}


def _once(name: str, direction: str) -> float:
    return rank_milliseconds(_held[name, direction])


def rank_milliseconds(call: Call) -> float:
    """In a rank: of one call that all ranks begin together."""
    dist.barrier()
    return cpu_milliseconds(call, torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))  # type: ignore[no-untyped-call]


def _drop() -> None:
    _held.clear()
    Setting.inputs.cache_clear()
    torch.cuda.empty_cache()  # does nothing where CUDA was not used


def gathered(results: dict[str, Tensor], subject: Subject) -> dict[str, Tensor]:
    """Of the whole sequence, on the first rank: rows from the rank that has them, gradients of parameters summed."""
    if subject.group is None:
        return results
    found = {}
    for name, value in results.items():
        if name.removeprefix("d ") in subject.parameters:
            total = value.double().cpu()
            dist.all_reduce(total)
            found[name] = total.to(value.dtype)
        else:
            found[name] = gather_sequence(value, subject.group).cpu()
    return found if dist.get_rank() == 0 else {}
