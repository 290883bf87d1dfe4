"""How near a CPU comes to its dense rate: python benchmarks/cpu.py [--out DIR]. Runs from the source tree.

Head groups are timed beside F.scaled_dot_product_attention on contiguous dense blocks, as many and as large as those of
the pattern: the same FLOPs without dilation. Both are held against the float64 oracle first, in a small problem with
gradients and at full length on rows drawn at random. Then they are timed in turn, round after round.

Legend: N tokens, H heads, D head dim; b segments of a branch, h its heads, L rows of a segment; q, k, v, out
(1, N, H, D), of dense blocks (b, L, h, D), stored as (b, h, L, D).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dilated_attention import DilatedPattern, dilated_attention, explain
from dilated_attention.bench import baselines, machine, probes, run
from dilated_attention.testing import make_qkv

TOKENS, HEADS, DIM = 32768, 8, 64
CHECK_TOKENS, CHECK_CUT = 2048, 4  # the check with gradients: so many tokens and some, segments cut by this factor
TARGET = 0.9  # of the dense rate: case "long", forward, not causal
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    rates: tuple[int, ...]

    def pattern(self, cut: int = 1) -> DilatedPattern:
        """With segments shorter by a factor, though never too short for their rate."""
        lengths = (max(w // cut, 2 * r) for w, r in zip(self.lengths, self.rates, strict=True))
        return DilatedPattern("head_groups", tuple(lengths), self.rates)


CASES = (Case("long", (2048, 4096, 8192), (1, 2, 4)), Case("short", (16, 32, 64), (1, 2, 4)))


@dataclass(frozen=True)
class Problem:
    """One call: its inputs, and the pattern whose oracle it is held against."""

    attention: run.Attention
    qkv: tuple[Tensor, ...]
    pattern: DilatedPattern
    is_causal: bool

    def check(self) -> run.Check:
        oracle = run.oracle(self.pattern, self.is_causal)
        return run.Expected.of(oracle, self.qkv, _normal_like(self.qkv[0])).check(self.attention)

    def check_rows(self) -> dict[str, Any]:
        return probes.check_rows(self.attention(*self.qkv), self.qkv, self.pattern, self.is_causal)

    def forward(self) -> run.Call:
        return run.forward(self.attention, self.qkv)

    def forward_backward(self) -> run.Call:
        return run.forward_backward(self.attention, self.qkv, _normal_like(self.qkv[0]))


def dilated(pattern: DilatedPattern, tokens: int, is_causal: bool) -> Problem:
    attention = functools.partial(dilated_attention, pattern=pattern, is_causal=is_causal)
    return Problem(attention, make_qkv(1, tokens, HEADS, DIM), pattern, is_causal)


def dense(pattern: DilatedPattern, tokens: int, is_causal: bool) -> list[Problem]:
    """For each branch of a pattern dense blocks, as many and as large as its own."""
    found = []
    for branch, (length, rate) in enumerate(pattern.branches):
        segments, rows, heads = tokens // length, length // rate, len(pattern.heads(branch, HEADS))
        qkv = make_qkv(segments, rows, heads, DIM, layout="transposed", seed=branch)
        attention = functools.partial(baselines.dense, is_causal=is_causal)
        found.append(Problem(attention, qkv, baselines.dense_pattern(rows), is_causal))
    return found


class Bench:
    """One run: its settings, its results so far and the file they are in."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.scale, self.seconds = options.scale, options.seconds
        self.tokens = TOKENS // self.scale
        self.file = Path(options.out) / "cpu.json"
        self.wrong = False
        self.results: dict[str, Any] = {
            "machine": machine.describe(CPU, options.commit),
            "tokens": self.tokens,
            "heads": HEADS,
            "head_dim": DIM,
            "dtype": "float32",
            "scale": self.scale,
            "target": TARGET,
            "cases": [],
        }

    def case(self, case: Case, is_causal: bool) -> None:
        pattern = case.pattern(self.scale)
        ours, blocks = dilated(pattern, self.tokens, is_causal), dense(pattern, self.tokens, is_causal)
        record: dict[str, Any] = {"case": case.name, "causal": is_causal, "pattern": repr(pattern)}
        record |= self.check(case, ours, blocks)
        if all(record[name]["verdict"] == "exact" for name in ("ours", "dense")):
            record |= self.measure(ours, blocks)
        else:
            self.wrong = True
        self.results["cases"].append(record)
        machine.write_json(self.file, self.results)
        print(row(record), flush=True)

    def check(self, case: Case, ours: Problem, blocks: Sequence[Problem]) -> dict[str, Any]:
        """Of both sides the worst errors, small and at full length."""
        # an odd length: every branch ends in a shorter segment
        small = dilated(case.pattern(CHECK_CUT * self.scale), CHECK_TOKENS // self.scale + 37, ours.is_causal)
        few = [Problem(x.attention, _first(x.qkv), x.pattern, x.is_causal) for x in blocks]
        return {"ours": _verdict([small], [ours]), "dense": _verdict(few, blocks)}

    def measure(self, ours: Problem, blocks: Sequence[Problem]) -> dict[str, Any]:
        q, k, v = ours.qkv
        flops = functools.partial(ours.pattern.flops, self.tokens, HEADS, DIM, is_causal=ours.is_causal)
        calls = {"ours": ours.forward(), "dense": _all(x.forward() for x in blocks)}
        both = {"ours": ours.forward_backward(), "dense": _all(x.forward_backward() for x in blocks)}
        return {
            "kernel": explain(q, k, v, ours.pattern, is_causal=ours.is_causal).kernel,
            "kernel_calls": {name: kernel_calls(call) for name, call in calls.items()},
            "forward": self.compare(calls, flops()),
            "forward_backward": self.compare(both, flops(backward=True)),
        }

    def compare(self, calls: dict[str, run.Call], flops: int) -> dict[str, Any]:
        """Times and rates of both, and the ratio of the rates round by round, which a busy moment changes least."""
        spent: dict[str, list[float]] = {}
        found = run.time_calls(calls, CPU, seconds=self.seconds, spent=spent)
        ratios = [dense / ours for ours, dense in zip(spent["ours"], spent["dense"], strict=False)]
        rates = {name: {**timing.as_dict(), "gflops": flops / timing.median / 1e6} for name, timing in found.items()}
        return {**rates, "ratio": run.Timing.of(ratios).as_dict()}


def _verdict(small: Sequence[Problem], full: Sequence[Problem]) -> dict[str, Any]:
    check = functools.reduce(run.Check.worse, (problem.check() for problem in small))
    rows = max((problem.check_rows() for problem in full), key=lambda found: (not found["right"], found["worst"]))
    verdict = "wrong rows" if check.right() and not rows["right"] else check.verdict
    return {**check.as_dict(), "verdict": verdict, "rows": rows}


def _first(qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One segment and one head, which the oracle has the memory for."""
    return tuple(x[:1, :, :1] for x in qkv)


def _all(calls: Iterable[run.Call]) -> run.Call:
    listed = list(calls)
    return lambda: [call() for call in listed]


def _normal_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def kernel_calls(call: run.Call) -> int:
    """How often an attention kernel runs in a call."""
    return sum(count for name, count, _ in probes.kernel_times(call, CPU) if name.endswith("attention_for_cpu"))


# --- for people -------------------------------------------------------------------------------------------------

HEADER = (
    f"{'case':6} {'causal':6} {'pass':18} {'ours ms':>9} {'GFLOP/s':>8} {'dense ms':>9} {'GFLOP/s':>8}  "
    "ratio of rates (quartiles)"
)


def row(record: dict[str, Any]) -> str:
    name = f"{record['case']:6} {record['causal']!s:6}"
    if "forward" not in record:
        return f"{name} no times: ours is {record['ours']['verdict']}, dense is {record['dense']['verdict']}"
    lines = []
    for part in ("forward", "forward_backward"):
        ours, dense, ratio = (record[part][key] for key in ("ours", "dense", "ratio"))
        lines.append(
            f"{name} {part.replace('_', ' + '):18} {ours['median']:9.1f} {ours['gflops']:8.1f} {dense['median']:9.1f} "
            f"{dense['gflops']:8.1f}  {ratio['median']:.3f} ({ratio['lower']:.3f} to {ratio['upper']:.3f})"
        )
    return "\n".join(lines)


def conclusion(results: dict[str, Any]) -> str:
    asked = next(one for one in results["cases"] if one["case"] == "long" and not one["causal"])
    if results["scale"] != 1 or "forward" not in asked:
        return "no verdict: not the full length, or wrong"
    ratio = asked["forward"]["ratio"]["median"]
    return f"long, forward: {ratio:.3f} of the dense rate, {TARGET} {'met' if ratio >= TARGET else 'missed'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and time head groups on a CPU beside dense blocks.")
    parser.add_argument("--out", default="report", metavar="DIR", help="folder of cpu.json (default: report)")
    parser.add_argument("--commit", help="the commit, where the tree has no .git")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured per line (default: 20)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths, to try the script")
    options = parser.parse_args(arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        bench = Bench(options)
        print(machine.one_line(bench.results["machine"]))
        print(f"{bench.results['machine']['command']} | {bench.results['machine']['date']}\n\n{HEADER}", flush=True)
        for case in CASES:
            for is_causal in (False, True):
                bench.case(case, is_causal)
    finally:
        torch.set_num_threads(before)
    print(f"\n{conclusion(bench.results)}")
    print(f"written: {bench.file}" + ("; something is wrong" if bench.wrong else ""))
    return int(bench.wrong)


if __name__ == "__main__":
    sys.exit(main())
