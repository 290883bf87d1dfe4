"""The figures of one GPU: python benchmarks/h200.py [--out DIR]. Runs from the source tree with torch alone.

Each implementation is held against the float64 oracle at a short length of the same shape, and at full length on rows
drawn at random; only then is it timed. The results are written after every measurement.

Legend: N tokens, H heads, D head dim, w segment lengths, r dilation rates; q, k, v, out (1, N, H, D), lse (1, N, H).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dilated_attention import DilatedPattern, dilated_attention, explain
from dilated_attention.backends import aten
from dilated_attention.bench import baselines, machine, probes, run
from dilated_attention.bench.clocks import Clocks
from dilated_attention.testing import make_qkv

# (case, rule, causal): what was aimed for, forward and forward + backward
TARGETS_MS = {
    ("A", "longnet", False): (27.0, 100.0),
    ("A", "longnet", True): (16.0, 64.0),
    ("A", "head_groups", False): (7.0, 26.0),
    ("B", "longnet", False): (4.9, 18.5),
    ("C", "head_groups", False): (0.10, 0.35),
}
CHECK_TOKENS, CHECK_CUT = 4096, 16  # the check runs on this many tokens and some, with segments cut by this factor
MIB = 1 << 20
# fastest first here: what public SDPA, and with it copy and gather, is to choose from; nothing is switched off
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
COPIES = ("index", "gather", "scatter", "copy", "memcpy", "elementwise")


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    heads: int
    dim: int
    lengths: tuple[int, ...]
    rates: tuple[int, ...]

    def pattern(self, rule: str, cut: int = 1) -> DilatedPattern:
        """With segments shorter by a factor, though never too short for their rate."""
        lengths = (max(w // cut, 2 * r) for w, r in zip(self.lengths, self.rates, strict=True))
        return DilatedPattern(rule, tuple(lengths), self.rates)


CASES = (
    Case("A", 1 << 20, 12, 64, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    Case("B", 1 << 17, 16, 128, (2048, 8192, 32768), (1, 4, 16)),
    Case("C", 1 << 13, 8, 64, (2048, 4096, 8192), (1, 2, 4)),
)


@dataclass(frozen=True)
class Implementation:
    name: str
    rule: str
    function: Any  # (q, k, v, pattern, is_causal=...) -> out
    ours: bool = False

    def attention(self, pattern: DilatedPattern, is_causal: bool) -> run.Attention:
        return lambda *qkv: self.function(*qkv, pattern, is_causal=is_causal)


def implementations(backend: str, device: torch.device) -> list[Implementation]:
    ours = partial(dilated_attention, backend=backend)
    scatter = baselines.gather_pad_scatter
    kernels = ("flash", "cudnn") if device.type == "cuda" else ("flash",)
    return [
        Implementation("dilated_attention", "head_groups", ours, ours=True),
        Implementation("dilated_attention", "longnet", ours, ours=True),
        Implementation("copy and gather", "head_groups", baselines.copy_and_gather),
        *(Implementation(f"gather-pad-scatter {k}", "torchscale", partial(scatter, kernel=k)) for k in kernels),
    ]


class Bench:
    """One run: its settings, its results so far and the file they are in."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.scale, self.seconds, self.backend = options.scale, options.seconds, options.backend
        self.file = Path(options.out) / "h200.json"
        self.wrong = False
        self.clocks = Clocks(self.device)
        self.results: dict[str, Any] = {
            "machine": machine.describe(self.device, options.commit),
            "dtype": str(self.dtype),
            "scale": self.scale,
            "targets_ms": [[*key, *target] for key, target in TARGETS_MS.items()],
            **{kind: [] for kind in ("ceilings", "dense", "cases", "extras", "profiles")},
        }

    def add(self, kind: str, record: dict[str, Any]) -> None:
        self.results[kind].append(record)
        machine.write_json(self.file, self.results)

    def attempt(self, kind: str, record: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Fill a record and write it; what does not fit into memory is recorded as such, and the run goes on."""
        try:
            record |= measure()
        except torch.OutOfMemoryError as problem:
            record["out_of_memory"] = str(problem)
        self.release()
        self.add(kind, record)
        return record

    def time(self, call: run.Call) -> run.Timing:
        warmups = 5 if self.device.type == "cuda" else 1
        return run.time_calls({"": call}, self.device, seconds=self.seconds, warmups=warmups)[""]

    # --- right ---

    def expected(self, case: Case, rule: str, is_causal: bool) -> run.Expected:
        """The oracle at the short length: odd, so that every branch ends in a shorter segment."""
        tokens = CHECK_TOKENS // self.scale + 37
        qkv = make_qkv(1, tokens, case.heads, case.dim, dtype=self.dtype, device=self.device)
        dout = _normal_like(qkv[0], seed=1)
        return run.Expected.of(run.oracle(case.pattern(rule, CHECK_CUT * self.scale), is_causal), qkv, dout)

    # --- fast ---

    def measure(self, case: Case, one: Implementation, is_causal: bool, qkv: tuple[Tensor, ...]) -> dict[str, Any]:
        """All figures of one implementation; one that is wrong gets no time, wrong gradients no backward time."""
        expected = self.expected(case, one.rule, is_causal)
        check = expected.check(one.attention(case.pattern(one.rule, CHECK_CUT * self.scale), is_causal))
        pattern = case.pattern(one.rule, self.scale)
        attention = one.attention(pattern, is_causal)
        del expected
        self.release()
        record: dict[str, Any] = {"check": check.as_dict()}
        if not check.right("out"):
            return record
        record["rows"] = probes.check_rows(attention(*qkv), qkv, pattern, is_causal)
        if not record["rows"]["right"]:
            return record
        if one.ours:
            record["kernel"] = explain(*qkv, pattern, is_causal=is_causal, backend=self.backend).kernel
        flops = partial(pattern.flops, qkv[0].shape[1], case.heads, case.dim, is_causal=is_causal)
        record["forward"] = self.figures(run.forward(attention, qkv), flops())
        if check.right():
            dout = _normal_like(qkv[0], seed=2)
            call = run.forward_backward(attention, qkv, dout)
            record["forward_backward"] = self.figures(call, flops(backward=True))
            record["saved_bytes"] = probes.saved_bytes(attention, qkv)
            if one.ours:
                record["saved_bytes_expected"] = pattern.saved_bytes(*qkv[0].shape[1:], dtype=self.dtype)
        return record

    def figures(self, call: run.Call, flops: int) -> dict[str, Any]:
        peak = probes.peak_bytes(call, self.device)
        start = time.monotonic()
        timing = self.time(call)
        figures = {**timing.as_dict(), "tflops": flops / timing.median / 1e9, "peak_bytes": peak}
        return figures | self.clocks.since(start)

    def release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    # --- the parts of a run ---

    def case(self, case: Case) -> None:
        qkv = make_qkv(1, case.tokens // self.scale, case.heads, case.dim, dtype=self.dtype, device=self.device)
        for is_causal in (False, True):
            for one in implementations(self.backend, self.device):
                record = {"case": case.name, "implementation": one.name, "rule": one.rule, "causal": is_causal}
                record["shape"] = qkv[0].shape
                record["pattern"] = repr(case.pattern(one.rule, self.scale))
                self.attempt("cases", record, partial(self.measure, case, one, is_causal, qkv))
                self.wrong |= one.ours and "forward_backward" not in record
                print(row(record), flush=True)

    def dense(self, case: Case) -> None:
        rows, name = 2048 // self.scale, "dense cuDNN" if self.device.type == "cuda" else "dense"
        for is_causal in (False, True):
            record = {"case": case.name, "implementation": f"{name} on {rows} rows", "causal": is_causal}
            record |= {"rule": "dense", "shape": (case.tokens // self.scale // rows, rows, case.heads, case.dim)}
            self.attempt("dense", record, partial(self.measure_dense, *record["shape"], is_causal))
            print(row(record), flush=True)

    def measure_dense(self, segments: int, rows: int, heads: int, dim: int, is_causal: bool) -> dict[str, Any]:
        """One dense kernel on contiguous segments: what each branch would cost if dilation cost nothing."""
        pattern, attention = baselines.dense_pattern(rows), partial(baselines.dense, is_causal=is_causal)
        make = partial(make_qkv, tokens=rows, heads=heads, head_dim=dim, dtype=self.dtype, device=self.device)
        few = make(2)
        check = run.Expected.of(run.oracle(pattern, is_causal), few, _normal_like(few[0], seed=1)).check(attention)
        record: dict[str, Any] = {"check": check.as_dict()}
        if check.right():
            qkv = make(segments)
            flops = partial(pattern.flops, rows, heads, dim, is_causal=is_causal)
            record["forward"] = self.figures(run.forward(attention, qkv), segments * flops())
            call = run.forward_backward(attention, qkv, _normal_like(qkv[0], seed=2))
            record["forward_backward"] = self.figures(call, segments * flops(backward=True))
        return record

    def extra(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        record = self.attempt("extras", {"name": name}, measure)
        figures = {key: value for key, value in record.items() if isinstance(value, float)}
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)

    def repeatable(self, case: Case, rule: str) -> dict[str, Any]:
        """A call under torch.use_deterministic_algorithms, which only repeatable kernels run."""
        qkv = make_qkv(1, case.tokens // self.scale, case.heads, case.dim, dtype=self.dtype, device=self.device)
        attention = partial(dilated_attention, pattern=case.pattern(rule, self.scale), backend=self.backend)
        dout = _normal_like(qkv[0], seed=2)
        torch.use_deterministic_algorithms(True)
        try:
            forward, both = run.forward(attention, qkv), run.forward_backward(attention, qkv, dout)
            return {"forward_ms": self.time(forward).median, "forward_backward_ms": self.time(both).median}
        finally:
            torch.use_deterministic_algorithms(False)

    def one_branch(self, case: Case) -> dict[str, Any]:
        """Head groups with a single branch of rate 1, beside the dense kernel called directly on the same segments."""
        rows, shape = 2048 // self.scale, (case.heads, case.dim)
        qkv = make_qkv(1, case.tokens // self.scale, *shape, dtype=self.dtype, device=self.device)
        segments = tuple(x.view(-1, rows, *shape) for x in qkv)
        ours = partial(dilated_attention, pattern=DilatedPattern.head_groups([rows], [1]), backend=self.backend)
        dense = partial(baselines.dense, kernel=SDPBackend.CUDNN_ATTENTION if self.device.type == "cuda" else None)
        forward = {"": run.forward(ours, qkv), "dense_": run.forward(dense, segments)}
        if self.device.type == "cuda":  # what it costs to give lse too, which a call of SDPA without gradients does not
            forward["dense_with_lse_"] = run.forward(_cudnn_with_lse, segments)
        both = {
            "": run.forward_backward(ours, qkv, _normal_like(qkv[0], seed=2)),
            "dense_": run.forward_backward(dense, segments, _normal_like(segments[0], seed=2)),
        }
        found: dict[str, Any] = {}
        for part, calls in (("forward", forward), ("forward_backward", both)):
            # one after the other, there and back: a kernel that draws less power may run at a higher clock
            windows = [(name, self.time(calls[name]).median) for name in (*calls, *reversed(calls))]
            alone = {name: statistics.mean(ms for other, ms in windows if other == name) for name in calls}
            found |= {f"{part}_{name}ms": ms for name, ms in alone.items()}
            found[f"{part}_ratio"] = alone[""] / alone["dense_"]
            turns = run.time_calls(calls, self.device, seconds=len(calls) * self.seconds, warmups=3)
            found[f"{part}_ratio_by_turns"] = turns[""].median / turns["dense_"].median
        return found

    def workspace(self, case: Case, is_causal: bool) -> dict[str, Any]:
        """What a call holds beyond inputs and results, as a share of the results."""
        qkv = make_qkv(1, case.tokens // self.scale, case.heads, case.dim, dtype=self.dtype, device=self.device)
        leaves = [x.requires_grad_() for x in qkv]
        out, lse = dilated_attention(
            *leaves, case.pattern("longnet", self.scale), is_causal=is_causal, backend=self.backend, return_lse=True
        )
        dout = _normal_like(out, seed=2)
        backward = probes.peak_bytes(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), self.device)
        call = partial(
            dilated_attention, *qkv, case.pattern("longnet", self.scale), is_causal=is_causal, backend=self.backend
        )
        with torch.no_grad():
            forward = probes.peak_bytes(lambda: call(return_lse=True), self.device)
        if forward is None or backward is None:
            return {}
        return {
            "forward_share": (forward - out.nbytes - lse.nbytes) / out.nbytes,
            "backward_share": (backward - 3 * out.nbytes) / (3 * out.nbytes),
        }

    def passes(self, case: Case, attention: run.Attention | None = None) -> dict[str, run.Call]:
        """Head groups, or another attention on the same tensors: forward, and forward + backward."""
        qkv = make_qkv(1, case.tokens // self.scale, case.heads, case.dim, dtype=self.dtype, device=self.device)
        pattern = case.pattern("head_groups", self.scale)
        attention = attention or partial(dilated_attention, pattern=pattern, backend=self.backend)
        both = run.forward_backward(attention, qkv, _normal_like(qkv[0], seed=2))
        return {"forward": run.forward(attention, qkv), "forward_backward": both}

    def graph(self, case: Case) -> dict[str, Any]:
        """As CUDA graphs: the kernels without Python."""
        found: dict[str, Any] = {}
        for part, call in self.passes(case).items():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # autograd's thread warms up on the stream that it will be captured on
                call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                kept = call()
            found[f"{part}_ms"] = self.time(graph.replay).median
            del kept
        return found

    def single_calls(self, case: Case, attention: run.Attention | None = None) -> dict[str, Any]:
        return {f"{part}_ms": self.time(call).median for part, call in self.passes(case, attention).items()}

    def in_a_row(self, case: Case, attention: run.Attention | None, calls: int = 200) -> dict[str, Any]:
        """Eager calls one after another, as a model makes them, by the clock: kernels and Python overlap."""
        found: dict[str, Any] = {}
        for part, call in self.passes(case, attention).items():
            took = []
            for _ in range(5):  # the first warms up
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                torch.cuda.synchronize()
                took.append(1000 * (time.perf_counter() - start) / calls)
            found[f"{part}_ms"] = statistics.median(took[1:])
        return found

    def extras(self, cases: list[Case]) -> None:
        for case in cases:
            if case.name == "A":
                self.extra("one branch of rate 1 beside dense", partial(self.one_branch, case))
                for rule in ("head_groups", "longnet"):
                    self.extra(f"deterministic, A {rule}", partial(self.repeatable, case, rule))
                for is_causal in (False, True):
                    name = f"workspace as a share of the results, A longnet{' causal' if is_causal else ''}"
                    self.extra(name, partial(self.workspace, case, is_causal))
            if case.name == "C" and self.device.type == "cuda":
                self.extra("CUDA graph, C head_groups", partial(self.graph, case))
                for name, attention in (("head_groups", None), ("nothing but autograd", Nothing.apply)):
                    self.extra(f"single calls, C {name}", partial(self.single_calls, case, attention))
                    self.extra(f"calls in a row, C {name}", partial(self.in_a_row, case, attention))
                with torch.autograd.set_multithreading_enabled(False):
                    name = "single calls, C head_groups, autograd without its thread"
                    self.extra(name, partial(self.single_calls, case))

    def ceilings(self) -> None:
        """What the device can do at most: a large matrix product and a large copy."""
        size, count = 16384 // self.scale, (4 << 30) // self.scale
        left, right = torch.randn(2, size, size, device=self.device).to(self.dtype)
        start = time.monotonic()
        matmul = self.time(lambda: left @ right)
        clocks = self.clocks.since(start)
        source = torch.ones(count, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        copy = self.time(lambda: target.copy_(source))
        found = {"matmul_tflops": 2 * size**3 / matmul.median / 1e9, "copy_tb_per_s": 2 * count / copy.median / 1e9}
        self.add("ceilings", {**found, "matmul": matmul.as_dict() | clocks, "copy": copy.as_dict(), "size": size})
        said = f" at {clocks['sm_mhz']:.0f} MHz" if clocks else ""
        print(f"ceilings: matmul {found['matmul_tflops']:.0f} TFLOP/s{said}, copy {found['copy_tb_per_s']:.2f} TB/s")

    def profile(self, case: Case) -> None:
        """Where one forward + backward spends its time, by kernel."""
        qkv = make_qkv(1, case.tokens // self.scale, case.heads, case.dim, dtype=self.dtype, device=self.device)
        plain = [r for r in self.results["cases"] if r["case"] == case.name and not r["causal"]]
        timed = [r["rule"] for r in plain if "forward_backward" in r]
        for one in (one for one in implementations(self.backend, self.device) if one.ours and one.rule in timed):
            attention = one.attention(case.pattern(one.rule, self.scale), False)
            call = run.forward_backward(attention, qkv, _normal_like(qkv[0], seed=2))
            record = self.attempt("profiles", {"case": case.name, "rule": one.rule}, partial(self.kernels, call))
            print(f"\nprofile of {case.name} {one.rule}, forward + backward: ", end="")
            if "out_of_memory" in record:
                print("out of memory")
                continue
            print(f"{record['all_ms']:.2f} ms in kernels, {record['copies_ms']:.2f} ms of it copying or elementwise")
            for name, calls, ms in record["kernels"][:15]:
                print(f"  {ms:9.3f} ms {calls:5d} x  {name[:110]}")

    def kernels(self, call: run.Call) -> dict[str, Any]:
        call()
        kernels = probes.kernel_times(call, self.device)
        copies = sum(ms for name, _, ms in kernels if any(word in name.lower() for word in COPIES))
        return {"all_ms": sum(ms for *_, ms in kernels), "copies_ms": copies, "kernels": kernels}


def _cudnn_with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten.cudnn().forward(aten.Dense(q, k, v, None, False, q.shape[-1] ** -0.5))[0]


class Nothing(torch.autograd.Function):
    """What autograd itself costs: no kernel runs, forward or backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor, ...]:
        return douts * 3


def _normal_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


# --- for people -------------------------------------------------------------------------------------------------

HEADER = (
    f"{'case':4} {'implementation':27} {'rule':11} {'causal':6} {'verdict':15} {'out':>7} {'grads':>7} {'rows':>7} "
    f"{'forward ms':>10} {'TFLOP/s':>7} {'fwd+bwd ms':>10} {'TFLOP/s':>7} {'peak MiB':>17} {'saved MiB':>16}"
)


def row(record: dict[str, Any]) -> str:
    return " ".join(_cells(record))


def _cells(record: dict[str, Any]) -> Iterator[str]:
    yield f"{record['case']:4} {record['implementation']:27} {record['rule']:11} {record['causal']!s:6}"
    if "out_of_memory" in record:
        yield "out of memory"
        return
    errors = record["check"]["errors"]
    verdict = record["check"]["verdict"] if record.get("rows", {}).get("right", True) else "wrong rows"
    yield f"{verdict:15} {errors['out']:7.1e} {max(errors[name] for name in errors if name != 'out'):7.1e}"
    yield f"{record['rows']['worst']:7.1e}" if "rows" in record else f"{'':7}"
    for part in ("forward", "forward_backward"):
        figures = record.get(part)
        yield f"{figures['median']:10.3f} {figures['tflops']:7.1f}" if figures else f"{'-':>10} {'-':>7}"
    peaks = [record.get(part, {}).get("peak_bytes") for part in ("forward", "forward_backward")]
    yield f"{', '.join('-' if peak is None else f'{peak / MIB:.0f}' for peak in peaks):>17}"
    if "saved_bytes" in record:
        expected = record.get("saved_bytes_expected")
        sign = "" if expected is None else " =" if record["saved_bytes"] == expected else f" not {expected / MIB:.1f}"
        yield f"{record['saved_bytes'] / MIB:9.1f}{sign}"


def print_targets(records: list[dict[str, Any]]) -> None:
    print("\naimed for, ms forward and forward + backward:")
    for record in records:
        target = TARGETS_MS.get((record["case"], record["rule"], record["causal"]))
        if record["implementation"] != "dilated_attention" or not target:
            continue
        name = f"{record['case']} {record['rule']}{' causal' if record['causal'] else ''}"
        found = [record.get(part, {}).get("median") for part in ("forward", "forward_backward")]
        verdicts = [
            "not measured" if ms is None else f"{ms:.3f} of {aim:g} {'met' if ms <= aim else 'missed'}"
            for ms, aim in zip(found, target, strict=True)
        ]
        print(f"  {name:22} {verdicts[0]:28} {verdicts[1]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and time dilated attention on one GPU.")
    parser.add_argument("--out", default="report", metavar="DIR", help="folder of h200.json (default: report)")
    parser.add_argument("--commit", help="the commit, where the tree has no .git")
    parser.add_argument("--backend", default="auto", help="of dilated_attention (default: auto)")
    parser.add_argument("--cases", default="ABC", help="which cases, such as AC (default: ABC)")
    parser.add_argument("--seconds", type=float, default=0.7, help="measured per timing (default: 0.7)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script (default: cuda)")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths, to try the script")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    measure_all(bench, options.cases)
    if bench.scale == 1:
        print_targets(bench.results["cases"])
    print(f"\nwritten: {bench.file}" + ("; one of ours is wrong or did not fit" if bench.wrong else ""))
    return int(bench.wrong)


def measure_all(bench: Bench, cases: str) -> None:
    print(machine.one_line(bench.results["machine"]))
    print(f"{bench.results['machine']['command']} | {bench.results['machine']['date']}", flush=True)
    chosen = [case for case in CASES if case.name in cases]
    only_cudnn = SDPBackend.CUDNN_ATTENTION if bench.device.type == "cuda" else KERNELS
    short, long = ([case for case in chosen if (case.name == "C") is wanted] for wanted in (True, False))
    with bench.clocks:
        bench.ceilings()
    print(f"\n{HEADER}")
    for case in short:  # mostly Python: with nothing beside it, and before what is large
        with sdpa_kernel(KERNELS, set_priority=True):
            bench.case(case)
    with bench.clocks:
        for case in long:
            with sdpa_kernel(KERNELS, set_priority=True):
                bench.case(case)
            with sdpa_kernel(only_cudnn):
                bench.dense(case)
    print()
    bench.extras(chosen)
    for case in chosen:
        bench.profile(case)


if __name__ == "__main__":
    sys.exit(main())
