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

from dilated_attention.cli import options
from dilated_attention.cli.options import option
from dilated_attention.units import bytes_text

OPTIONS = (
    options.SUGGESTION, options.TOKENS, *options.PATTERN, options.RULE, *options.SHAPE, *options.CALL,
    option("--latency", "TIME", "The latency of one hop between ranks, such as 10us or 0.2ms.", options.latency,
           "10us"),
    option("--bandwidth", "RATE", "The bandwidth into one rank: 50GB/s (bytes) or 400Gbit/s.", options.bandwidth,
           "50GB/s"),
    option("--flops-per-second", "SPEED", "The speed of one device, such as 400T or 4e14.", options.speed, "400T"),
    options.JSON,
)  # fmt: skip


def run(given: Namespace) -> None:
    from dilated_attention import advice
    from dilated_attention.cli.output import console, print_json, print_table

    with options.refusing():
        pattern, workload = options.pattern(given), options.workload(given)
        cost = workload.cost(pattern)
    verdict = advice.verdict(workload, cost, given.memory)
    needs = {name: workload.need(cost, name) for name in cost.exchanges}
    if given.json:
        print_json({"workload": workload, "cost": cost, "memory": needs, "verdict": verdict})
        return
    screen, room, (columns, *rows) = console(), given.memory, cost.rows()
    some = [*needs.values()][: len(columns) - 1]  # on one device all exchanges are the same
    rows.append(["memory to train", *(bytes_text(need.training) for need in some)])
    rows.append(["memory to infer", *(bytes_text(need.inference) for need in some)])
    if room is not None:
        rows.append([f"trains in {bytes_text(room)}", *("yes" if need.training <= room else "no" for need in some)])
    print_table(screen, repr(pattern), columns, rows)
    here = "memory is that of this call and its kernels; weights and other layers come on top"
    screen.print("", *cost.notes(), here, *verdict, sep="\n")
