"""Count what a call on many devices will cost.

It compares three ways to send keys and values between devices (ring, allgather,
alltoall), and a naive ring that sends everything: what the call sends, holds
and computes. A hop is one step in which devices send and receive. Bytes, hops
and operations are exact. Times are a model: hops times latency plus bytes over
bandwidth, and operations over speed. With --memory it also says what to change
if training does not fit.

Example: dilated-attention plan -n 1M -w 2k,16k,128k,1M -r 1,8,64,512 --ranks 8
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dilated_attention.cli import options
from dilated_attention.cli.options import option
from dilated_attention.units import bytes_text, count_text, flops_text, seconds_text

if TYPE_CHECKING:
    from dilated_attention.advice import Workload
    from dilated_attention.ring.cost import PlanCost

OPTIONS = (
    options.SUGGESTION, options.TOKENS, *options.PATTERN, options.RULE, *options.SHAPE, *options.CALL,
    option("--latency", type=options.latency, default="10us", metavar="TIME",
           help="The latency of one hop between ranks, such as 10us or 0.2ms."),
    option("--bandwidth", type=options.bandwidth, default="50GB/s", metavar="RATE",
           help="The bandwidth into one rank: 50GB/s (bytes) or 400Gbit/s."),
    option("--flops-per-second", type=options.speed, default="400T", metavar="SPEED",
           help="The speed of one device, such as 400T or 4e14."),
    options.JSON,
)  # fmt: skip


def run(given: Namespace) -> None:
    from dilated_attention import advice
    from dilated_attention.cli.output import console, print_json, print_table

    with options.refusing():
        pattern, workload = options.pattern(given), options.workload(given)
        cost = workload.cost(pattern)
    verdict = [] if given.memory is None else [*advice.verdict(workload, cost, given.memory)]
    if given.json:
        needs = {name: workload.need(cost, name) for name in cost.exchanges}
        print_json({"workload": workload, "cost": cost, "memory": needs, "verdict": verdict})
        return
    screen = console()
    columns = [*cost.exchanges, "naive ring"] if given.ranks > 1 else ["one device"]
    print_table(screen, repr(pattern), ["busiest rank", *columns], _rows(cost, workload, given.memory))
    screen.print("", *_notes(cost), *advice.on_a_gpu(workload, cost), *verdict, sep="\n")


def _rows(cost: PlanCost, workload: Workload, room: int | None) -> Iterator[list[str]]:
    """One column per exchange. The naive ring, which sends all of K and V round, has fewer rows."""
    names = list(cost.exchanges) if cost.ranks > 1 else [cost.best]
    some, needs = [cost.exchanges[name] for name in names], [workload.need(cost, name) for name in names]

    def both(title: str, text: Callable[[Any], str], forward: str, backward: str, naive: str = "") -> list[str]:
        return [title, *(f"{text(getattr(x, forward))} + {text(getattr(x, backward))}" for x in some), naive]

    if cost.ranks > 1:
        yield both("hops", count_text, "hops", "backward_hops", count_text(cost.naive_ring_hops))
        naive = bytes_text(cost.naive_ring_bytes)
        yield both("received", bytes_text, "bytes_received_max", "backward_bytes_received_max", naive)
        naive = seconds_text(cost.naive_ring_seconds)
        yield both("time to send", seconds_text, "seconds", "backward_seconds", naive)
        yield ["received by all ranks", *(bytes_text(x.bytes_total + x.backward_bytes_total) for x in some)]
        yield ["received and held", *(bytes_text(x.held) for x in some)]
    yield both("operations", flops_text, "flops", "backward_flops")[: len(some) + 1]
    yield ["time to compute", *(seconds_text(x.compute_seconds) for x in some)]
    yield ["memory to train", *(bytes_text(need.training) for need in needs)]
    yield ["memory to infer", *(bytes_text(need.inference) for need in needs)]
    if room is not None:
        yield [f"trains in {bytes_text(room)}", *("yes" if need.training <= room else "no" for need in needs)]


def _notes(cost: PlanCost) -> Iterator[str]:
    memory = cost.memory
    shared = f" on {cost.ranks:,} ranks, at most {cost.tokens_per_rank:,} on one" if cost.ranks > 1 else ""
    yield f"{cost.tokens:,} tokens{shared}; two numbers are forward + backward"
    gradients = bytes_text(memory.dq + memory.dk + memory.dv)
    yield f"kept for the backward pass: {bytes_text(memory.saved)} (q, k, v, out, lse); gradients: {gradients}"
    yield "memory is that of this call and its kernels; weights and other layers come on top"
    if cost.ranks > 1:
        yield f"best exchange: {cost.best}"
