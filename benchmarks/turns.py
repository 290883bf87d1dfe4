"""Two versions of the library by turns, on one GPU: python benchmarks/turns.py OLD NEW [--turns 3] [--out DIR].

OLD and NEW are checkouts. Each turn is a fresh process with an empty cache of compiled kernels, so that the time of a
first call is one that a user sees. Every case is checked against the oracle before it is timed. The results are written
after every turn, with the ratio of the medians of all turns.

Legend: N tokens, H heads, D head dim, w segment lengths, r dilation rates; q, k, v, out (1, N, H, D).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDE = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
CASES = {  # name: N, H, D, (w, r), rules and whether causal
    "A": (1 << 20, 12, 64, WIDE, [("longnet", False), ("longnet", True), ("head_groups", False)]),
    "B": (1 << 17, 16, 128, ((2048, 8192, 32768), (1, 4, 16)), [("longnet", False), ("head_groups", False)]),
    "C": (1 << 13, 8, 64, ((2048, 4096, 8192), (1, 2, 4)), [("head_groups", False), ("longnet", True)]),
    "slides": (45_681, 16, 48, ((1024, 5792, 32768, 185363, 1048576), WIDE[1]), [("torchscale", False)]),
    "step": (1 << 13, 12, 64, ((2048, 4096, 8192), (1, 2, 4)), [("longnet", True)]),
}
MODES = ("eager", "default", "reduce-overhead")
SIDES = ("old", "new")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--only", nargs="*", default=[*CASES, "block"], help="some of the cases")
    parser.add_argument("--commits", nargs=2, default=None, help="of trees that came without their .git")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.trees[0], options.seconds, options.only)))
        return
    sides = [*zip(SIDES, options.trees, strict=True)]
    found: dict[str, Any] = {"command": " ".join(sys.argv), "commits": options.commits, "turns": []}
    for number in range(options.turns):
        for name, tree in sides[:: -1 if number % 2 else 1]:
            print(f"turn {number + 1} of {options.turns}: {name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as cache:
                caches = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
                given = ["--worker", str(tree), "--seconds", str(options.seconds), "--only", *options.only]
                process = {"env": {**os.environ, **caches}, "stdout": subprocess.PIPE, "text": True, "check": True}
                done = subprocess.run([sys.executable, __file__, *given], **process)
            turn = {"version": name, **json.loads(done.stdout.splitlines()[-1])}
            if options.commits:  # a copied tree does not know its own
                turn["machine"]["commit"] = options.commits[name == "new"]
            found["turns"].append(turn)
            found["ratios"] = ratios(found["turns"])
            (options.out / "turns.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for case, ratio in found["ratios"].items():
        print(f"{case:60s} {ratio['old']:9.4f} {ratio['new']:9.4f}  x {ratio['ratio']:.3f}")


def ratios(turns: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each case the median over the turns of both versions, and new / old."""
    found = {}
    for case in turns[0]["ms"]:
        times = {x: [one["ms"][case][1] for one in turns if one["version"] == x and case in one["ms"]] for x in SIDES}
        if all(times.values()):
            both = {version: statistics.median(ms) for version, ms in times.items()}
            found[case] = {**both, "ratio": both["new"] / both["old"]}
    return found


def worker(tree: Path, seconds: float, only: list[str]) -> dict[str, Any]:
    sys.path.insert(0, str(tree.resolve() / "src"))
    import dilated_attention as da
    from dilated_attention.bench import machine
    from dilated_attention.testing import check, make_qkv

    assert Path(da.__file__).is_relative_to(tree.resolve()), da.__file__
    ms, first = dict[str, list[float]](), dict[str, float]()
    for name, (tokens, *shape, (lengths, rates), kinds) in CASES.items():
        for rule, causal in kinds if name in only else ():
            cut = [max(w // 16, 2 * r) for w, r in zip(lengths, rates, strict=True)]
            small, qkv = (make_qkv(1, n, *shape, dtype=torch.bfloat16, device="cuda") for n in (1061, tokens))
            check(small, da.DilatedPattern.of(rule, cut, rates), is_causal=causal)
            case = f"{name} {rule}{' causal' if causal else ''}"
            attend = attention(da.dilated_attention, da.DilatedPattern.of(rule, lengths, rates), causal)
            torch.cuda.synchronize()
            began = time.perf_counter()
            step_of(attend, qkv)()
            torch.cuda.synchronize()
            first[case] = time.perf_counter() - began  # kernels are compiled in it
            for mode in MODES if name == "step" else MODES[:1]:
                measure(ms, f"{case} {mode}", attend, qkv, mode, seconds)
            del qkv
    if "block" in only:
        pattern = da.DilatedPattern.longnet((2048, 4096, 8192), (1, 2, 4))
        blocks(ms, attention(da.dilated_attention, pattern, True), seconds)
    return {"machine": machine.describe(torch.device("cuda")), "ms": ms, "first_seconds": first}


def attention(function: Any, pattern: Any, causal: bool) -> Callable[..., Any]:
    return lambda q, k, v: function(q, k, v, pattern, is_causal=causal)


def step_of(call: Any, inputs: Iterable[Any], weights: Sequence[Any] = ()) -> Callable[[], None]:
    """A forward and backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> None:
        for x in (*leaves, *weights):
            x.grad = None
        out = call(*leaves)
        out.backward(out.detach())

    return step


def measure(ms: Any, case: str, attend: Any, qkv: Any, mode: str, seconds: float, few: int = 8) -> None:
    call = attend if mode == "eager" else torch.compile(attend, fullgraph=True, mode=mode)
    ms[f"{case}, forward"] = timed(torch.no_grad()(lambda: call(*qkv)), seconds, few)
    ms[f"{case}, forward + backward"] = timed(step_of(call, qkv), seconds, few)


def blocks(ms: dict[str, list[float]], ours: Any, seconds: float) -> None:
    """A transformer block of 768 columns at 8,192 tokens, with our attention, with dense attention, and with none."""

    def dense(*qkv: Any) -> Any:
        turned = (x.transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)

    class Block(nn.Module):
        def __init__(self, attention: Any) -> None:
            super().__init__()
            self.attention, self.norms = attention, nn.ModuleList(nn.LayerNorm(768) for _ in range(2))
            self.qkv, self.out = nn.Linear(768, 3 * 768), nn.Linear(768, 768)
            self.up, self.down = nn.Linear(768, 3072), nn.Linear(3072, 768)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 12, 64)).unbind(2)
            x = x + self.out(self.attention(q, k, v).flatten(2))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    for name, attend in (("ours", ours), ("dense", dense), ("none", lambda q, k, v: q + k + v)):
        for mode in MODES:
            torch._dynamo.reset()
            block = Block(attend).cuda().to(torch.bfloat16)
            call = block if mode == "eager" else torch.compile(block, fullgraph=True, mode=mode)
            x = torch.randn(1, 8192, 768, device="cuda", dtype=torch.bfloat16)
            ms[f"block {name} {mode}, forward + backward"] = timed(step_of(call, [x], [*block.parameters()]), seconds)


def timed(call: Callable[[], None], seconds: float, few: int = 8) -> list[float]:
    """The quartiles of the milliseconds of single calls, the device waited for after each."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    for _ in range(few):
        call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < few:
        wait()
        began = time.perf_counter()
        call()
        wait()
        found.append(1e3 * (time.perf_counter() - began))
    return [round(x, 4) for x in statistics.quantiles(found, n=4)]


if __name__ == "__main__":
    main()
