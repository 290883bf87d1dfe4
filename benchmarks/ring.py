"""Memory and time of one call with the sequence over several ranks. One process a rank, started by torchrun:

    torchrun --nproc-per-node 8 benchmarks/ring.py --backend nccl --tokens 1048576 --out report

With --backend gloo the ranks may share one GPU: messages then go through pinned host memory, so that memory is what can
be measured, and time is not that of a cluster. Nothing is measured before the same ranks have matched the oracle.

Legend: N tokens in all, P ranks, n = N / P; q, k, v, out (1, n, H, D), lse (1, n, H).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, plan_cost
from dilated_attention.bench import machine
from dilated_attention.distributed.sequence import gather_sequence, shard_sequence
from dilated_attention.functional import attend
from dilated_attention.ring.run import Link
from dilated_attention.testing import Results, assert_exact, make_qkv, oracle, run

MIB = 1 << 20
SHORTEST = 2048  # segments double from here to the whole sequence, each with 2048 rows


def pattern(tokens: int, shortest: int = SHORTEST) -> DilatedPattern:
    lengths = [shortest]
    while lengths[-1] * 2 <= tokens:
        lengths.append(lengths[-1] * 2)
    return DilatedPattern.longnet(lengths, [length // shortest for length in lengths])


def check(options: argparse.Namespace, device: torch.device, causal: bool) -> None:
    """This group, exchange and dtype against the oracle, on a short sequence with the same kinds of segments."""
    tokens, group = 512 + 7, dist.group.WORLD
    short = pattern(tokens, 32)
    qkv = make_qkv(1, tokens, options.heads, options.dim, dtype=options.torch_dtype, device=device)
    dout = make_qkv(1, tokens, options.heads, options.dim, dtype=options.torch_dtype, device=device, seed=1)[0]

    def attention(*shards: torch.Tensor) -> Any:
        over = ContextParallel(group, exchange=options.exchange)
        return dilated_attention(*shards, short, is_causal=causal, group=over, return_lse=True)

    got = run(attention, tuple(shard_sequence(x, group) for x in qkv), shard_sequence(dout, group))
    whole = Results(*(gather_sequence(value, group) for _, value in got.items()))
    plain = None
    if options.torch_dtype not in (torch.float32, torch.float64):
        plain = oracle(qkv, short, dout, dtype=None, is_causal=causal)
    assert_exact(whole, oracle(qkv, short, dout, is_causal=causal), plain)


def measure(options: argparse.Namespace, device: torch.device, causal: bool) -> dict[str, Any]:
    """Peak bytes of this rank beyond its q, k, v (and dout), and the median time of a step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lengths = [len(part) for part in torch.empty(options.tokens, device="meta").tensor_split(ranks)]
    whole = pattern(options.tokens)
    size = (1, lengths[rank], options.heads, options.dim)
    generator = torch.Generator(device).manual_seed(rank)
    q, k, v, dout = (torch.randn(size, generator=generator, device=device, dtype=options.torch_dtype) for _ in range(4))
    link = Link(dist.group.WORLD, options.exchange)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> torch.Tensor:
        out, _ = attend(*leaves, whole, causal, None, 0.0, None, False, "auto", None, link)
        return out

    with torch.no_grad():
        row = {"forward": one(forward, device, options.repeats)}
    before = (link.stats.hops, link.stats.bytes_received)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, dout)

    row["forward + backward"] = one(both, device, options.repeats)
    calls = options.repeats + 1
    row["inputs_mib"] = sum(x.nbytes for x in leaves) / MIB
    row["hops"], row["received_mib"] = before[0] // calls, before[1] / calls / MIB
    return row


def one(step: Any, device: torch.device, repeats: int) -> dict[str, float]:
    """Peak memory beyond what was there before, and seconds, of a warm step."""
    step()
    synchronise(device)
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    found = {"ms": 1000 * statistics.median(seconds)}
    if device.type == "cuda":  # on a CPU torch does not count, and a figure of 0 would be none
        found["peak_mib"] = (torch.cuda.max_memory_allocated(device) - base) / MIB
    return found


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busiest(row: dict[str, Any]) -> dict[str, Any]:
    """The largest of every figure over the ranks."""
    flat = {f"{name}/{key}": x for name, part in row.items() if isinstance(part, dict) for key, x in part.items()}
    flat |= {name: x for name, x in row.items() if not isinstance(x, dict)}
    values = torch.tensor(list(flat.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(flat, (round(x, 3) for x in values.tolist()), strict=True))


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
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--commit", help="for a tree without its .git")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder; ring.json there is added to")
    options = parser.parse_args()
    options.torch_dtype = getattr(torch, options.dtype)
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend if options.backend == "gloo" else "cpu:gloo,cuda:nccl")
    ranks = dist.get_world_size()
    if options.per_rank:
        options.tokens *= ranks
    check(options, device, options.causal)
    row = busiest(measure(options, device, options.causal))
    cost = plan_cost(
        pattern(options.tokens), options.tokens, ranks, num_heads=options.heads, head_dim=options.dim,
        dtype=options.torch_dtype, is_causal=options.causal,
    )  # fmt: skip
    if dist.get_rank() == 0:
        shown = ("backend", "tokens", "heads", "dim", "dtype", "exchange", "causal")
        result = {"ranks": ranks, **{name: getattr(options, name) for name in shown}, **row}
        result["planned_received_mib"] = cost.exchanges[options.exchange].bytes_received_max / MIB if ranks > 1 else 0
        save(options.out / "ring.json", result, machine.describe(device, options.commit))
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def save(file: Path, result: dict[str, Any], where: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(file.read_text()) if file.exists() else {"runs": []}
    found["runs"].append({**result, "machine": where})
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
