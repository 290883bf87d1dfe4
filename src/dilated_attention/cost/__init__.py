"""What a call over a group of ranks will cost, before there is a group: bytes, hops, memory, operations, and a time.

Every message is counted, those of the forward pass and those of the backward pass (in which K and V travel again), with
sums over vectors of all ranks at once: no tensor has the length of the sequence, and N = 2**40 on 65,536 ranks take
a few seconds. Bytes and hops of every rank are exact; the time is a model, hops x latency + bytes / bandwidth.

Legend of all files here: P ranks; a shard is one rank's tokens; a piece is what a rank holds of a segment, n pieces of
S segments (of each rank and branch the first segment and the last: those between lie inside its shard); heads are
key/value heads, and a kind is the heads with equally many rows in every piece, K of them. rows (K, n).

`call`: what is asked. `pieces`: the rows of every piece. `messages`: what travels, by rank. `count`: all of it, and
what is computed. `plan`: the answers, for programs and for people.
"""

from dilated_attention.cost.count import EXCHANGES
from dilated_attention.cost.plan import (
    LINKS,
    MOST_HELD,
    ExchangeCost,
    Memory,
    PlanCost,
    RankCost,
    duration,
    fastest_exchange,
    plan_cost,
    size,
)

__all__ = [
    "EXCHANGES",
    "LINKS",
    "MOST_HELD",
    "ExchangeCost",
    "Memory",
    "PlanCost",
    "RankCost",
    "duration",
    "fastest_exchange",
    "plan_cost",
    "size",
]
