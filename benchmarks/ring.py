"""Memory and time of one call with the sequence over several ranks. One process per rank, started by torchrun:

    torchrun --nproc-per-node 8 benchmarks/ring.py --backend nccl --tokens 1048576 --out report

The suite `ring` starts ranks on one machine by itself; this script is for NCCL, and for several machines. With
--backend gloo the ranks may share one GPU: messages then go through host memory, so memory can be measured, and time is
not that of a cluster. Nothing is measured before the same ranks have matched the oracle.

Legend: N tokens in all, P ranks, n = N / P; q, k, v, out (1, n, H, D).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, plan_cost
from dilated_attention.backends.problem import Inputs
from dilated_attention.bench import machine, probes, run
from dilated_attention.bench.runners import rank_milliseconds
from dilated_attention.distributed.sequence import gather_sequence, shard_sequence
from dilated_attention.functional import attend
from dilated_attention.resolve import Options
from dilated_attention.ring.run import Ranks
from dilated_attention.testing import make_qkv

MIB = 1 << 20
SHORTEST = 2048  # segments double from here to the whole sequence, each with 2048 rows


def pattern(tokens: int, shortest: int = SHORTEST) -> DilatedPattern:
    rates = [1 << i for i in range((tokens // shortest).bit_length())]
    return DilatedPattern.longnet([shortest * rate for rate in rates], rates)


def check(options: argparse.Namespace, device: torch.device) -> None:
    """This group, exchange and dtype against the oracle, on a short sequence with the same kinds of segments."""
    tokens, group, over = 512 + 7, dist.group.WORLD, ContextParallel(dist.group.WORLD, exchange=options.exchange)
    short = pattern(tokens, 32)
    qkv = make_qkv(1, tokens, options.heads, options.dim, dtype=options.torch_dtype, device=device)
    dout = make_qkv(1, tokens, options.heads, options.dim, dtype=options.torch_dtype, device=device, seed=1)[0]

    def attention(*shards: torch.Tensor) -> Any:
        return dilated_attention(*shards, short, is_causal=options.causal, group=over)

    found = run.results(attention, [shard_sequence(x, group) for x in qkv], shard_sequence(dout, group))
    whole = {name: gather_sequence(value, group) for name, value in found.items()}
    verdict = run.Expected.of(run.oracle(short, options.causal), qkv, dout).compare(whole)
    if not verdict.right():
        raise SystemExit(f"{verdict.verdict}: nothing is measured; errors {verdict.errors}, allowed {verdict.limits}")


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Of this rank: peak memory beyond its q, k, v (and dout), the median time of a call, and what it received."""
    rank, whole = dist.get_rank(), pattern(options.tokens)
    size = (1, len(range(options.tokens)[rank :: dist.get_world_size()]), options.heads, options.dim)
    generator = torch.Generator(device).manual_seed(rank)
    q, k, v, dout = (torch.randn(size, generator=generator, device=device, dtype=options.torch_dtype) for _ in range(4))
    ranks = Ranks(ContextParallel(dist.group.WORLD, exchange=options.exchange))

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        return attend(Inputs(*qkv), Options(whole, options.causal), ranks)[0]

    calls = {"forward": run.forward(attention, (q, k, v))}
    calls["forward + backward"] = run.forward_backward(attention, (q, k, v), dout)
    calls["forward"]()
    row = {"inputs_mib": 3 * q.nbytes / MIB, "hops": ranks.stats.hops, "received_mib": ranks.stats.bytes_received / MIB}
    for name, call in calls.items():
        row[f"{name}/peak_mib"] = probes.peak_bytes(call, device) / MIB
        row[f"{name}/ms"] = statistics.median(rank_milliseconds(call) for _ in range(options.repeats))
    return row


def busiest(row: dict[str, float]) -> dict[str, float]:
    """The largest of every figure over the ranks."""
    values = torch.tensor(list(row.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(row, (round(x, 3) for x in values.tolist()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="in all")
    parser.add_argument("--per-rank", action="store_true", help="--tokens is per rank")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--exchange", choices=["ring", "allgather", "alltoall"], default="ring")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="for a tree without its .git")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder; ring.json there is added to")
    options = parser.parse_args()
    options.torch_dtype = getattr(torch, options.dtype)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend if options.backend == "gloo" else "cpu:gloo,cuda:nccl")
    ranks = dist.get_world_size()
    options.tokens *= ranks if options.per_rank else 1
    check(options, device)
    row = busiest(measure(options, device))
    cost = plan_cost(
        pattern(options.tokens), options.tokens, ranks, num_heads=options.heads, head_dim=options.dim,
        dtype=options.torch_dtype, is_causal=options.causal,
    )  # fmt: skip
    if dist.get_rank() == 0:
        shown = ("backend", "tokens", "heads", "dim", "dtype", "exchange", "causal")
        planned = cost.exchanges[options.exchange].forward.bytes_received / MIB if ranks > 1 else 0
        result = {"ranks": ranks, **{name: getattr(options, name) for name in shown}, **row}
        result["planned_received_mib"] = planned
        file = options.out / "ring.json"
        before = json.loads(file.read_text("utf-8"))["runs"] if file.exists() else []
        found = {**result, "machine": machine.describe(device, options.commit)}
        machine.write_json(file, {"runs": [*before, found]})
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
