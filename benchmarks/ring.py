"""Memory and time of one call with the sequence over several ranks. One process per rank, started by torchrun:

    torchrun --nproc-per-node 8 benchmarks/ring.py --backend nccl --tokens 1048576 --out report

The suite `ring` starts ranks on one machine by itself; this script is for NCCL, and for several machines. With
--backend gloo the ranks may share one GPU: messages then go through host memory, so memory can be measured, and time is
not that of a cluster. Nothing is measured before the same ranks have matched the oracle.

Legend: N tokens in all, P ranks, n = N / P; q, k, v, out (1, n, H, D).
"""

import json
import os
import statistics
from typing import Any

import common
import torch
import torch.distributed as dist

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


def pattern(tokens: int, shortest: int = 2048) -> DilatedPattern:
    """Segments double from the shortest to the whole sequence; each has as many rows."""
    rates = [1 << i for i in range((tokens // shortest).bit_length())]
    return DilatedPattern.longnet([shortest * rate for rate in rates], rates)


def check(options: Any, over: ContextParallel, device: torch.device) -> None:
    """This group, exchange and dtype against the oracle, on a short sequence with the same kinds of segments."""
    group, short, size = over.group, pattern(512 + 7, 32), (1, 512 + 7, options.heads, options.dim)
    qkv, (dout, *_) = (make_qkv(*size, dtype=options.torch_dtype, device=device, seed=seed) for seed in (0, 1))
    shards, given = [shard_sequence(x, group) for x in qkv], {"is_causal": options.causal, "group": over}
    found = run.results(lambda *x: dilated_attention(*x, short, **given), shards, shard_sequence(dout, group))
    whole = {name: gather_sequence(value, group) for name, value in found.items()}
    verdict = run.Expected.of(run.oracle(short, options.causal), qkv, dout).compare(whole)
    if not verdict.right():
        raise SystemExit(f"{verdict.verdict}: nothing is measured; errors {verdict.errors}, allowed {verdict.limits}")


def measure(options: Any, over: ContextParallel, device: torch.device) -> dict[str, float]:
    """Of this rank: peak memory beyond its q, k, v (and dout), the median time of a call, and what it received."""
    rank, ranks = dist.get_rank(), Ranks(over)
    size = (1, len(range(options.tokens)[rank :: dist.get_world_size()]), options.heads, options.dim)
    generator = torch.Generator(device).manual_seed(rank)
    drawn = {"generator": generator, "device": device, "dtype": options.torch_dtype}
    *qkv, dout = (torch.randn(size, **drawn) for _ in range(4))
    given = Options(pattern(options.tokens), options.causal)

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        return attend(Inputs(*qkv), given, ranks)[0]

    calls = {"forward": run.forward(attention, qkv), "forward + backward": run.forward_backward(attention, qkv, dout)}
    calls["forward"]()
    stats = ranks.stats
    row = {"inputs_mib": 3 * dout.nbytes / MIB, "hops": stats.hops, "received_mib": stats.bytes_received / MIB}
    for name, call in calls.items():
        row[f"{name}/peak_mib"] = probes.peak_bytes(call, device) / MIB
        row[f"{name}/ms"] = statistics.median(rank_milliseconds(call) for _ in range(options.repeats))
    return row


def main() -> None:
    parser = common.parser(__doc__, "report", "folder; ring.json there is added to")
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
    options = parser.parse_args()
    options.torch_dtype = getattr(torch, options.dtype)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend if options.backend == "gloo" else "cpu:gloo,cuda:nccl")
    ranks, over = dist.get_world_size(), ContextParallel(dist.group.WORLD, exchange=options.exchange)
    options.tokens *= ranks if options.per_rank else 1
    check(options, over, device)
    row = measure(options, over, device)
    largest = torch.tensor([*row.values()], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    shape = {"num_heads": options.heads, "head_dim": options.dim, "dtype": options.torch_dtype}
    cost = plan_cost(pattern(options.tokens), options.tokens, ranks, **shape, is_causal=options.causal)
    if dist.get_rank() == 0:
        shown = ("backend", "tokens", "heads", "dim", "dtype", "exchange", "causal")
        result = {"ranks": ranks, **{name: getattr(options, name) for name in shown}}
        result |= {name: round(most, 3) for name, most in zip(row, largest.tolist(), strict=True)}
        planned = cost.exchanges[options.exchange].forward.bytes_received if ranks > 1 else 0
        result["planned_received_mib"] = planned / MIB
        found = {**result, "machine": machine.describe(device, options.commit)}
        before = common.read(file := options.out / "ring.json").get("runs", [])
        machine.write_json(file, {"runs": [*before, found]})
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
