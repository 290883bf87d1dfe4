"""Where an implementation runs: in this process, or over ranks in processes of their own.

Legend: results are out and gradients of the whole sequence, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention.bench import probes
from dilated_attention.bench.run import Call, Measure, measure_of, results
from dilated_attention.bench.setting import Setting, forget_inputs
from dilated_attention.bench.subject import BOTH, Build, Implementation, Subject
from dilated_attention.distributed.sequence import gather_sequence
from dilated_attention.ranks import Outcome, pool

TIMEOUT = 300.0
SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "bad_alloc", "Cannot allocate")


class OutOfMemory(RuntimeError):  # noqa: N818 - it says what happened
    """A call needs more memory than there is."""


class Prepared(NamedTuple):
    """What was found before the clock starts: figures by direction."""

    measures: dict[str, Measure]
    peaks: dict[str, int]
    rows: dict[str, Any] | None  # None: single rows cannot be checked


def results_of(one: Implementation, setting: Setting) -> dict[str, Tensor]:
    """For the check: forward and backward once."""
    if one.ranks == 1:
        subject = one.build(setting)
        return results(subject.attention, subject.inputs, subject.dout, subject.parameters)
    found: dict[str, Tensor] = _on_ranks(one.ranks, _results, one.build, setting)[0]
    return found


def prepare(one: Implementation, setting: Setting, directions: Sequence[str]) -> Prepared:
    """Single rows at full length, memory, and what to time."""
    if one.ranks > 1:
        threads = max(1, torch.get_num_threads() // one.ranks)
        found = _on_ranks(one.ranks, _hold, one.name, one.build, setting, tuple(directions), threads)
        measures: dict[str, Measure] = {way: partial(_slowest, one, way) for way in directions}
        return Prepared(measures, {way: max(peaks[way] for _, peaks in found) for way in directions}, found[0][0])
    subject = one.build(setting)
    with torch.no_grad():
        rows = _rows(subject.attention(*subject.inputs), subject, setting)
    calls = {way: subject.call(way) for way in directions}
    if subject.compiled and BOTH in directions:  # the forward that is differentiated is compiled separately
        calls[BOTH]()
    peaks = {way: probes.peak_bytes(call, setting.device) for way, call in calls.items()}
    return Prepared({way: measure_of(call, setting.device) for way, call in calls.items()}, peaks, rows)


def release(device: torch.device, ranks: Sequence[int]) -> None:
    """Let go of what the last setting held."""
    forget_inputs()
    for size in ranks:
        pool(size).run(_drop, timeout=TIMEOUT)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _rows(out: Tensor, subject: Subject, setting: Setting) -> dict[str, Any] | None:
    """Single rows at full length, the one check there that needs no quadratic oracle."""
    if subject.projects:
        return None
    qkv = tuple(x.to(out.device) for x in setting.qkv())
    return probes.check_rows(out, qkv, subject.pattern, setting.causal)


# --- over ranks -------------------------------------------------------------------------------------------------


def _on_ranks(ranks: int, function: Any, *args: Any) -> list[Any]:
    outcomes = pool(ranks).run(function, *args, check=False, timeout=TIMEOUT)
    raise_if_failed(outcomes)
    return [x.value for x in outcomes]


def raise_if_failed(outcomes: Sequence[Outcome]) -> None:
    failed = [x for x in outcomes if x.error_type is not None]
    for x in failed:
        killed = x.error_type == "died" and x.exitcode == -9  # by the system: a rank that hung was killed by us
        if ran_out(x.error or "") or x.error_type == "MemoryError" or killed:
            raise OutOfMemory(x.error or "the process was killed")
    for x in failed:
        raise RuntimeError(f"rank {x.rank}: {x.error_type}: {x.error}")


def ran_out(message: str) -> bool:
    """Whether an error is torch's or the system's way of saying that there is no memory left."""
    return any(sign in message for sign in SIGNS)


def _slowest(one: Implementation, direction: str) -> list[float]:
    """A call is over when its last rank is."""
    return [max(_on_ranks(one.ranks, _once, one.name, direction))]


_held: dict[tuple[str, str], Call] = {}  # in a rank: what is timed, by implementation and direction


def _results(build: Build, setting: Setting) -> dict[str, Tensor]:
    subject = build(setting)
    found = results(subject.attention, subject.inputs, subject.dout, subject.parameters)
    whole = gathered(found, subject)
    return whole if dist.get_rank() == 0 else {}


def _hold(
    name: str, build: Build, setting: Setting, directions: tuple[str, ...], threads: int
) -> tuple[dict[str, Any] | None, dict[str, int]]:
    torch.set_num_threads(threads)
    subject = build(setting)
    calls = {way: subject.call(way) for way in directions}
    with torch.no_grad():
        out = gathered({"out": subject.attention(*subject.inputs)}, subject)["out"]
    rows = None if dist.get_rank() else _rows(out, subject, setting)
    peaks = {way: probes.peak_bytes(call, setting.device) for way, call in calls.items()}
    _held.update({(name, way): call for way, call in calls.items()})
    return rows, peaks


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


def gathered(results: Mapping[str, Tensor], subject: Subject) -> dict[str, Tensor]:
    """Of the whole sequence: rows from the rank that has them, gradients of parameters summed over ranks."""
    return {name: _whole(value, name.removeprefix("d ") in subject.parameters, subject.group)
            for name, value in results.items()}  # fmt: skip


def _whole(value: Tensor, of_parameter: bool, group: dist.ProcessGroup | None) -> Tensor:
    whole = getattr(value, "full_tensor", lambda: value)()  # a DTensor over the heads axis
    if group is None:
        return whole.cpu()
    if not of_parameter:
        return gather_sequence(whole, group).cpu()
    total: Tensor = whole.double().cpu()
    dist.all_reduce(total, group=group)
    return total.to(value.dtype)
