"""`plan`: what a call over many ranks will cost, and what to change where memory is short. Nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from dilated_attention.advice import Need, Speed, Workload, amount, in_words, what_fits
from dilated_attention.cli import arguments, options
from dilated_attention.cli.output import console, print_table
from dilated_attention.ring.cost import PlanCost, duration, size


def plan(
    tokens: options.Tokens,
    segment_lengths: options.Lengths,
    dilation_rates: options.Rates,
    ranks: options.Ranks = "1",
    rule: options.Rule = "longnet",
    heads: options.Heads = 12,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    batch: options.Batch = 1,
    dtype: options.Dtype = "bfloat16",
    causal: options.Causal = False,
    memory: options.Memory = None,
    latency: Annotated[
        str, typer.Option(metavar="TIME", help="Latency of a hop between ranks, such as 10us or 0.2ms.")
    ] = "10us",
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="Bandwidth into a rank, such as 50GB/s (bytes) or 400Gbit/s.")
    ] = "50GB/s",
    flops_per_second: Annotated[
        str, typer.Option(metavar="SPEED", help="Speed of a device, such as 400T or 4e14.")
    ] = "400T",
) -> None:
    """Count what a call on many devices will cost.

    It says what the call sends, holds and computes with each exchange, before there is a machine to run it. Bytes,
    hops and operations are exact. Times are a model: hops times latency plus bytes over bandwidth, and operations over
    speed. With --memory it also says what to change if training does not fit.

    Example: dilated-attention plan -n 1M -w 2k,16k,128k,1M -r 1,8,64,512 --ranks 8
    """
    with arguments.refusing():
        pattern = options.pattern(rule, segment_lengths, dilation_rates)
        room = None if memory is None else arguments.size("--memory", memory)
        number_of_ranks, kind = arguments.count("--ranks", ranks), arguments.dtype("--dtype", dtype)
        workload = Workload(
            arguments.count("-n", tokens), heads, head_dim, kv_heads, number_of_ranks, batch, kind, causal
        )
        speed = Speed(
            arguments.latency("--latency", latency),
            arguments.bandwidth("--bandwidth", bandwidth),
            arguments.speed("--flops-per-second", flops_per_second),
        )
        cost = workload.cost(pattern, speed)
    screen = console()
    columns = [*cost.exchanges, "naive ring"] if cost.ranks > 1 else ["one device"]
    print_table(screen, repr(pattern), ["busiest rank", *columns], _rows(cost, room))
    screen.print()
    for line in _notes(cost):
        screen.print(line, soft_wrap=True)
    if room is not None:
        changes = what_fits(pattern, workload, room, speed)
        for line in in_words(Need.of(cost, cost.best), room, changes):
            screen.print(line, soft_wrap=True)


def _rows(cost: PlanCost, room: int | None) -> Iterator[list[str]]:
    """One column an exchange; of the naive ring, which sends all of K and V round, less is known."""
    names = list(cost.exchanges) if cost.ranks > 1 else [cost.best]
    some, needs = [cost.exchanges[name] for name in names], [Need.of(cost, name) for name in names]
    naive = [""] if cost.ranks > 1 else []

    def both(there: Iterable[str], back: Iterable[str]) -> list[str]:
        return [f"{one} + {two}" for one, two in zip(there, back, strict=True)]

    if cost.ranks > 1:
        hops = both((f"{x.hops:,}" for x in some), (f"{x.backward_hops:,}" for x in some))
        yield ["hops", *hops, f"{cost.naive_ring_hops:,}"]
        received = both((size(x.bytes_received_max) for x in some), (size(x.backward_bytes_received_max) for x in some))
        yield ["received", *received, size(cost.naive_ring_bytes)]
        sending = both((duration(x.seconds) for x in some), (duration(x.backward_seconds) for x in some))
        yield ["time to send", *sending, duration(cost.naive_ring_seconds)]
        yield ["received by all ranks", *(size(x.bytes_total + x.backward_bytes_total) for x in some), *naive]
    flops = both((amount(x.flops) for x in some), (amount(x.backward_flops) for x in some))
    yield ["operations", *(f"{x}FLOP" for x in flops), *naive]
    yield ["time to compute", *(duration(x.compute_seconds) for x in some), *naive]
    if cost.ranks > 1:
        yield ["received and held", *(size(x.held) for x in some), *naive]
    yield ["memory to train", *(size(need.training) for need in needs), *naive]
    yield ["memory to infer", *(size(need.inference) for need in needs), *naive]
    if room is not None:
        yield [f"trains in {size(room)}", *("yes" if need.training <= room else "no" for need in needs), *naive]


def _notes(cost: PlanCost) -> Iterator[str]:
    memory = cost.memory
    shared = f" on {cost.ranks:,} ranks, at most {cost.tokens_per_rank:,} on one" if cost.ranks > 1 else ""
    yield f"{cost.tokens:,} tokens{shared}; two numbers are forward + backward"
    yield (
        f"kept for the backward pass: {size(memory.saved)} (q, k, v, out, lse); gradients: "
        f"{size(memory.dq + memory.dk + memory.dv)}"
    )
    yield "memory is of this call alone, with an allowance for what kernels take; weights and other layers come on top"
    if cost.ranks > 1:
        yield f"best exchange: {cost.best}"
