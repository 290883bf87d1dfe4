"""`plan`: what a call over many ranks will cost, and what to change where memory is short. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilated_attention.cli import arguments, options
from dilated_attention.cli.output import console, print_table
from dilated_attention.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from dilated_attention.advice import Workload
    from dilated_attention.ring.cost import PlanCost


def plan(
    tokens: options.Tokens,
    segment_lengths: options.Lengths,
    dilation_rates: options.Rates,
    ranks: options.Ranks = 1,
    rule: options.Rule = "longnet",
    heads: options.Heads = 12,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    batch: options.Batch = 1,
    dtype: options.Dtype = "bfloat16",
    causal: options.Causal = False,
    memory: options.Memory = None,
    latency: Annotated[
        Any,
        typer.Option(
            parser=options.latency, metavar="TIME", help="The latency of one hop between ranks, such as 10us or 0.2ms."
        ),
    ] = "10us",
    bandwidth: Annotated[
        Any,
        typer.Option(
            parser=options.bandwidth, metavar="RATE", help="The bandwidth into one rank: 50GB/s (bytes) or 400Gbit/s."
        ),
    ] = "50GB/s",
    flops_per_second: Annotated[
        Any, typer.Option(parser=options.speed, metavar="SPEED", help="The speed of one device, such as 400T or 4e14.")
    ] = "400T",
) -> None:
    """Count what a call on many devices will cost.

    It compares three ways to send keys and values between devices (ring, allgather, alltoall), and a naive ring that
    sends everything: what the call sends, holds and computes. A hop is one step in which devices send and receive.
    Bytes, hops and operations are exact. Times are a model: hops times latency plus bytes over bandwidth, and
    operations over speed. With --memory it also says what to change if training does not fit.

    Example: dilated-attention plan -n 1M -w 2k,16k,128k,1M -r 1,8,64,512 --ranks 8
    """
    from dilated_attention import advice

    with arguments.refusing():
        pattern = options.pattern(rule, segment_lengths, dilation_rates)
        kind = arguments.dtype("--dtype", dtype)
        workload = advice.Workload(
            tokens, heads, head_dim, kv_heads, ranks, batch, kind, causal, latency, bandwidth, flops_per_second
        )
        cost = workload.cost(pattern)
    screen = console()
    columns = [*cost.exchanges, "naive ring"] if ranks > 1 else ["one device"]
    print_table(screen, repr(pattern), ["busiest rank", *columns], _rows(cost, workload, memory))
    screen.print()
    lines = [*_notes(cost), *advice.on_a_gpu(workload, cost)]
    if memory is not None:
        lines += advice.verdict(workload.need(cost), memory, advice.what_fits(pattern, workload, memory))
    for line in lines:
        screen.print(line, soft_wrap=True)


def _rows(cost: PlanCost, workload: Workload, room: int | None) -> Iterator[list[str]]:
    """One column per exchange. The naive ring, which sends all of K and V round, has fewer rows."""
    from dilated_attention.advice import flops_text

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
