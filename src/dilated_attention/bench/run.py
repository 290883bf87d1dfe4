"""Check, then time. Whatever fails the check gets no time.

Legend: inputs are what the implementation takes, (B, N, H, D) each for attention; times in milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.benchmark import timer

from dilated_attention import reference, testing
from dilated_attention.bench.results import share_of_limit
from dilated_attention.pattern import DilatedPattern

Attention = Callable[..., Tensor]  # inputs -> out
Call = Callable[[], Any]
Measure = Callable[[], Sequence[float]]  # the milliseconds of one call or more
Key = TypeVar("Key")
FLUSH_BYTES = 256 << 20  # larger than any L2 cache
LEAD = 8  # times that these are written before a long call: half a millisecond in which Python runs ahead of the device
LONG_MS, MOST = 2.0, 1000  # of one call, and repeats


class Check(NamedTuple):
    """How far an implementation is from the oracle, and how far it may be."""

    errors: dict[str, float]
    limits: dict[str, float]

    def right(self, *names: str) -> bool:
        return all(self.errors[name] <= self.limits[name] for name in names or self.errors)

    @property
    def verdict(self) -> str:
        return "exact" if self.right() else "wrong gradients" if self.right("out") else "wrong"

    def worse(self, other: Check) -> Check:
        """Of two checks the larger errors for their limits, each with its limit."""

        def share(check: Check, name: str) -> float:
            return share_of_limit(check.errors[name], check.limits[name]) if name in check.errors else -1.0

        of = {name: max(self, other, key=lambda check: share(check, name)) for name in self.errors}
        return Check({x: of[x].errors[x] for x in of}, {x: of[x].limits[x] for x in of})


class Expected(NamedTuple):
    """The oracle's float64 results on some inputs, and the errors that `testing` allows in the inputs' dtype."""

    results: dict[str, Tensor]
    limits: dict[str, float]

    @staticmethod
    def of(exact: Attention, inputs: Sequence[Tensor], dout: Tensor, **parameters: Tensor) -> Expected:
        """``exact`` takes the inputs and then the parameters, in whatever dtype they come."""

        def computed(convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
            own = {name: convert(x).detach().requires_grad_() for name, x in parameters.items()}
            return results(lambda *x: exact(*x, *own.values()), [convert(x) for x in inputs], dout, **own)

        wanted = computed(Tensor.double)
        limits = testing.limits(wanted, computed(Tensor.detach), dout.dtype)
        return Expected(wanted, {name: limits[name] for name in wanted})

    def compare(self, found: Mapping[str, Tensor]) -> Check:
        """What someone else computed from the same inputs, by the names that `results` gives."""
        pairs = {name: (value, self.results[name]) for name, value in found.items()}
        return Check({name: testing.error(x.to(y.device), y) for name, (x, y) in pairs.items()}, self.limits)


def results(attention: Attention, inputs: Sequence[Tensor], dout: Tensor, **parameters: Tensor) -> dict[str, Tensor]:
    """Out and, by name, the gradients of the inputs and the parameters."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    grads = torch.autograd.grad(out, [*leaves, *parameters.values()], dout.to(out.dtype))
    names = (*("qkv" if len(inputs) == 3 else "x"), *parameters)
    return {"out": out.detach(), **{f"d {name}": grad for name, grad in zip(names, grads, strict=True)}}


@functools.cache
def oracle(pattern: DilatedPattern, is_causal: bool = False) -> Attention:
    """The reference as a function of q, k, v alone, in the dtype of its inputs."""
    return lambda q, k, v: reference.attention(q, k, v, pattern, is_causal=is_causal, dtype=None)[0]


class Timing(NamedTuple):
    """Median and quartiles of some repeats, in milliseconds."""

    median: float
    lower: float
    upper: float
    repeats: int

    @staticmethod
    def of(milliseconds: Sequence[float]) -> Timing:
        quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        lower, median, upper = torch.tensor(milliseconds, dtype=torch.float64).quantile(quarters).tolist()
        return Timing(median, lower, upper, len(milliseconds))


def forward(attention: Attention, inputs: Sequence[Tensor]) -> Call:
    return torch.no_grad()(lambda: attention(*inputs))


def forward_backward(attention: Attention, inputs: Sequence[Tensor], dout: Tensor, more: Iterable[Tensor] = ()) -> Call:
    """Of the inputs, and of ``more``."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    wanted = [*leaves, *more]
    return lambda: torch.autograd.grad(attention(*leaves), wanted, dout)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_of(call: Call, device: torch.device) -> Measure:
    """A call as something that can be timed whenever its turn comes.

    On a CPU by the clock of torch.utils.benchmark; on CUDA by triton.testing.do_bench, which runs a call eight times at
    least, so long ones only between its two events.
    """
    if device.type != "cuda":
        return lambda: [cpu_milliseconds(call, device)]
    first: list[float] = []  # decides for good: the two ways do not count alike what Python does

    def on_cuda() -> Sequence[float]:
        if first and first[0] < LONG_MS:
            from triton.testing import do_bench  # comes with the builds of torch that can use it

            return do_bench(call, warmup=1, rep=3, return_mode="all")  # type: ignore[no-any-return]
        first.append(_cuda_milliseconds(call))
        return first[-1:]

    return on_cuda


def time_calls(
    calls: Mapping[Key, Call], device: torch.device, *, seconds: float, warmups: int = 1, **options: Any
) -> dict[Key, Timing]:
    """`interleave` of calls on this device, after some that are not counted."""
    for call in calls.values():
        for _ in range(warmups):
            call()
    return interleave({key: measure_of(call, device) for key, call in calls.items()}, seconds=seconds, **options)


def interleave(
    measures: Mapping[Key, Measure], *, seconds: float, least: int = 5, slow_ms: float = 1000.0
) -> dict[Key, Timing]:
    """Time the calls in turn, round after round, so that a change of the machine meets them all alike.

    A call takes part until it has had ``least`` rounds and its share of ``seconds``, or MOST repeats; one slower than
    ``slow_ms`` is measured once where its share is spent. Every other round goes backwards: nobody always follows the
    same neighbour.
    """
    spent: dict[Key, list[float]] = {key: [] for key in measures}
    share, rounds = 1000 * seconds / max(1, len(measures)), 0

    def waits(had: Sequence[float]) -> bool:
        few = rounds < least and min(had, default=0) <= slow_ms
        return len(had) < MOST and (few or not had or sum(had) < share)

    while waiting := [key for key, had in spent.items() if waits(had)]:
        for key in waiting[:: -1 if rounds % 2 else 1]:
            spent[key].extend(measures[key]())
        rounds += 1
    return {key: Timing.of(had) for key, had in spent.items()}


def cpu_milliseconds(call: Call, device: torch.device) -> float:
    start = timer()
    call()
    synchronise(device)
    return 1000 * (timer() - start)


def _cuda_milliseconds(call: Call) -> float:
    """One call between two events, with nothing of it left in the L2 cache, queued while the device is at work."""
    other = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(LEAD):
        other.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def graphed(call: Call) -> Call:
    """The kernels without Python."""
    call()  # kernels are compiled before they are captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
