"""Tile sizes and the choice of backend, measured on the GPU at hand: python benchmarks/tune.py [--write]

Every candidate is compiled, in several processes at once, and checked against PyTorch's kernels on a short sequence;
what does not compile or is off is reported and never picked. The others are timed in turn at full length, and those
near the best again, each alone. With the tiles found, our kernels are then timed against PyTorch's through the public
function. Results are written after every measurement and join those that the file has, so a run can be had in pieces:

    python benchmarks/tune.py --only "forward 64" --only "library 128"
    python benchmarks/tune.py --merge one.json another.json --write    # measures nothing

Legend: q, k, v, dout, out (1, N, H, D); lse (1, N, H); stats (1, H, N, 2).
"""

import functools
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby, product, starmap, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, Pattern, Window, dilated_attention
from dilated_attention.backends.triton import dispatch
from dilated_attention.backends.triton.dispatch import DEFAULTS, KERNELS, TileConfig
from dilated_attention.bench import machine, run
from dilated_attention.call import Call
from dilated_attention.show import charts
from dilated_attention.testing import Results, error, limits, make_qkv
from dilated_attention.testing import run as results_of

MEASURED = Path(dispatch.__file__).with_name("measured.json")
LOG2E = 1.4426950408889634
CHECK_TOKENS, SHORT_TOKENS, SHORT_HEADS = 1 << 15, 1 << 13, 8  # short: as case C of the suite kernels
NEAR = 1.04  # times the best
EQUAL = 1.02  # times the library's: less is not told from noise
LENGTHS = (1 << 13, 1 << 15, 1 << 17, 1 << 20)
# that have patterns of these forms
RULES = {"": "head_groups", "nested": "longnet", "apart": "torchscale", "apart thin": "torchscale"}
RESULTS = {"forward": ("out", "lse"), "dq": ("dq",), "dkdv": ("dk", "dv")}

# by kernel and head dim: queries, keys, warps, stages and at most so many registers; the default is tried as well
CANDIDATES = common.read(Path(__file__).with_name("tiles.json"))


class Shape(NamedTuple):  # what the tiles of a head dim are timed on
    tokens: int
    heads: int
    lengths: tuple[int, ...]
    rates: tuple[int, ...]


SLIDES = Shape(1 << 20, 16, (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))  # those of the slide encoders
THIN = Shape(1 << 20, 8, (1024, 2048, 4096), (1, 2, 4))
SHAPES = {
    **dict.fromkeys((32, 48), SLIDES),
    64: Shape(1 << 20, 12, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    **dict.fromkeys((96, 128), Shape(1 << 17, 16, (2048, 8192, 32768), (1, 4, 16))),
    256: Shape(1 << 17, 8, (2048, 8192, 32768), (1, 4, 16)),
}


class Place(NamedTuple):
    """Where, and how much smaller than in earnest."""

    device: str
    scale: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def time(self, calls: dict[Any, run.Call], seconds: float) -> dict[Any, float]:
        """Median milliseconds, all calls in turn."""
        few = {"warmups": 2, "least": 5} if self.device == "cuda" else {"warmups": 0, "least": 1}
        timed = run.time_calls(calls, torch.device(self.device), seconds=seconds, **few)
        return {key: timing.median for key, timing in timed.items()}


class Setting(NamedTuple):
    """A kind of call that has its own tiles, or its own choice of backend, or both."""

    size: int  # head dim
    causal: bool
    form: str  # as of `dispatch.measured_as`
    short: bool = False

    def key(self, kernel: str) -> str:
        """As `dispatch` names a kernel or a direction of this setting."""
        return dispatch.key(kernel, *self)

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.size]
        if self.form.startswith("apart"):
            shape = THIN if self.form == "apart thin" else SLIDES if self.size <= 64 else shape
        if self.form == "nested" and (self.causal or self.size < 64):
            # rates of 1, 4, 16 share nothing when causal, and lengths of slides never
            shape = shape._replace(lengths=SHAPES[64].lengths, rates=SHAPES[64].rates)
        return shape._replace(tokens=SHORT_TOKENS, heads=SHORT_HEADS) if self.short else shape

    def pattern(self, tokens: int, scale: int, one_launch: bool = False) -> Pattern:
        """The branches that such a length has room for; made smaller, two of them.

        ``one_launch``: with heads divided among branches that otherwise have a launch each.
        """
        _, _, lengths, rates = self.shape
        length = max(lengths[0] // scale, 256)
        if self.form == "band":  # with as many pairs as segments of twice its width, when causal
            return Pattern([Window(length // 2 - 1)])
        if self.form == "dense":  # segments as long as the shortest of the others
            return DilatedPattern.head_groups([length], [1])
        rule = "head_groups" if one_launch and self.form == "apart" else RULES[self.form]
        branches = [(max(w // scale, 256), r) for w, r in zip(lengths, rates, strict=True) if w <= tokens]
        branches = branches[: 2 if scale > 1 else None]
        return DilatedPattern(rule, *zip(*branches, strict=True))

    def inputs(self, tokens: int, place: Place) -> tuple[Tensor, ...]:
        """q, k, v and dout."""
        tokens, heads = max(tokens // place.scale, 64), max(self.shape.heads // place.scale, 2)
        make = functools.partial(make_qkv, 1, tokens, heads, self.size, dtype=place.dtype, device=place.device)
        return *make(), make(seed=1)[0]

    def attention(self, pattern: Pattern, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
        options = {"is_causal": self.causal, "backend": backend, "return_lse": True}
        return lambda q, k, v: dilated_attention(q, k, v, pattern, **options)


class Problem:
    """The tensors of one setting, with room for the results of every kernel."""

    def __init__(self, setting: Setting, tokens: int, place: Place) -> None:
        q, k, v, dout = self.inputs = setting.inputs(tokens, place)
        pattern = setting.pattern(tokens, place.scale, one_launch=True)
        self.attention = setting.attention(pattern, "sdpa")
        with torch.no_grad():
            out, lse = self.attention(q, k, v)
        slope = (out.float() * dout.float()).sum(-1)
        stats = torch.stack([lse * LOG2E, slope], -1).transpose(1, 2).contiguous()  # as the kernel of dq leaves it
        self.call = Call(pattern, setting.causal, backend="triton").of(q, k, None, 0)
        like = {"out": q, "lse": lse, "dq": q, "stats": stats, "dk": k, "dv": v}
        found = self.results = {name: torch.full_like(x, torch.nan) for name, x in like.items()}
        self.tensors = {
            "forward": (q, k, v, found["out"], found["lse"], q, q, q),
            "dq": (q, k, v, dout, out, lse, q, found["dq"], found["stats"], q, q),
            "dkdv": (q, k, v, dout, stats, found["dk"], found["dv"], q, q),
        }

    def launch(self, kernel: str, config: TileConfig) -> Callable[[], dict[str, Tensor]]:
        """One launch of a kernel, which gives its results."""
        from dilated_attention.backends.triton import launch, strips

        (todo,), tensors = strips.launches(self.call, kernel), self.tensors[kernel]
        strides = tuple(x.stride() for x in tensors[: 3 if kernel == "forward" else 4])
        made = launch.prepare(kernel, self.call, strides, todo, config, tensors[0].dtype)

        def start() -> dict[str, Tensor]:
            made(*tensors)
            return {name: self.results[name] for name in RESULTS[kernel]}

        return start


@functools.lru_cache(maxsize=1)
def expected(setting: Setting, place: Place) -> tuple[Problem, Results, dict[str, float]]:
    """A short problem, its results in higher precision, and how far off a kernel may be by the rule of `testing`."""
    problem = Problem(setting, min(CHECK_TOKENS, setting.shape.tokens), place)
    *qkv, dout = problem.inputs
    higher = torch.float64 if place.dtype is torch.float32 else torch.float32
    exact, plain = (results_of(problem.attention, tuple(x.to(to) for x in qkv), dout) for to in (higher, place.dtype))
    return problem, exact, limits(exact, plain, place.dtype)


def check(setting: Setting, place: Place, kernel: str, config: TileConfig) -> str | None:
    """Why a candidate is no good; None if it is."""
    from triton.errors import TritonError

    problem, exact, limit = expected(setting, place)
    for x in problem.results.values():
        x.fill_(torch.nan)  # what was not written is wrong
    try:
        found = problem.launch(kernel, config)()
        errors = {name: error(x, getattr(exact, name)) for name, x in found.items()}
    except (TritonError, RuntimeError) as problem_of_it:  # too much shared memory, or the compiler gives up
        return f"fails: {type(problem_of_it).__name__}: {' '.join(str(problem_of_it).split())[:160]}"
    off = [f"{name} by {e:.1e}, allowed {limit[name]:.1e}" for name, e in errors.items() if not e <= limit[name]]
    return f"off: {', '.join(off)}" if off else None


def candidates(kernel: str, size: int) -> list[TileConfig]:
    return list(dict.fromkeys(TileConfig(*tile) for tile in (*CANDIDATES[f"{kernel} {size}"], DEFAULTS[kernel, size])))


def compare(setting: Setting, direction: str, tokens: int, place: Place, seconds: float) -> dict[str, float]:
    """Milliseconds of both backends, each alone, through the public function; one out of memory has none."""
    *qkv, dout = setting.inputs(tokens, place)
    found, pattern = {}, setting.pattern(tokens, place.scale)
    for backend in ("triton", "sdpa"):
        attention = setting.attention(pattern, backend)
        try:
            call = run.forward(attention, qkv)
            if direction == "backward":
                leaves = [x.detach().requires_grad_() for x in qkv]
                call = functools.partial(torch.autograd.grad, attention(*leaves)[0], leaves, dout, retain_graph=True)
            found[backend] = round(place.time({backend: call}, seconds)[backend], 4)
        except torch.OutOfMemoryError:
            print(f"  {backend} runs out of memory at {tokens} tokens", flush=True)
    return found


def library_from(times: dict[int, dict[str, float]]) -> int | None:
    """The fewest rows from which on the library was faster wherever it was measured; None: there are none.

    Where both are as fast, ours are taken: they need no workspace, and repeat every bit.
    """

    slower = {rows: ms.get("triton", math.inf) > EQUAL * ms.get("sdpa", math.inf) for rows, ms in times.items()}
    return min(takewhile(slower.__getitem__, sorted(times, reverse=True)), default=None)


def merge(into: Any, found: Any) -> Any:
    """What both hold, records and values by their names; where both have one, the second's."""
    if not isinstance(into, dict) or not isinstance(found, dict) or "run" in found:
        return found
    return into | {name: merge(into.get(name), x) for name, x in found.items()}


def write(file: Path, results: dict[str, Any]) -> None:
    """A line for each key. Runs that nothing is left of go."""
    for entry in results.values():
        about = entry["measured"]
        used = {record["run"] for part in ("tiles", "library_from") for record in about.get(part, {}).values()}
        about["runs"] = {date: one for date, one in about["runs"].items() if date in used}
    charts.write(file, f"{as_text(results)}\n".encode())


def as_text(value: Any, indent: str = "") -> str:
    if not isinstance(value, dict) or not value or len(indent) == 8:  # a record
        return json.dumps(value)
    inner = indent + "  "
    named = sorted(value.items()) if indent else value.items()
    lines = [f"{inner}{json.dumps(name)}: {as_text(item, inner)}" for name, item in named]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


class Tuning:
    """One run: what to measure, what was found and the file it is in."""

    def __init__(self, options: Any) -> None:
        self.place, self.failed = Place(options.device, options.scale), list[str]()
        self.name = dispatch.device_class(torch.device(options.device))
        self.seconds, self.file, self.only = options.seconds, options.out, options.only
        about = machine.describe(torch.device(options.device), options.commit)
        self.date, about = about["date"], about | about["versions"]
        self.about = {name: about.get(name) for name in ("device", "commit", "command", "torch", "triton")}
        sizes, flags, forms = options.head_dims, (False, True), ("", "nested", "apart", "dense", "band")
        self.library = [*starmap(Setting, product(sizes, flags, (*RULES, "dense")))]
        every = [x for x in starmap(Setting, product(sizes, flags, forms, flags)) if not x.short or x.form in forms[:2]]
        self.settings = [x for x in every if x.form != "apart" or x.size <= 64]

    def wants(self, part: str, key: str) -> bool:
        words = {part, *key.split()}
        named = [wanted.split() for wanted in self.only]
        return not named or any(all((w.lstrip("-") in words) != w.startswith("-") for w in some) for some in named)

    def add(self, part: str, key: str, value: Any, ms: Any) -> None:
        about = {"runs": {self.date: self.about}, part: {key: {"ms": ms, "run": self.date}}}
        found = {self.name: {part: {key: value}, "measured": about}}
        write(self.file, merge(common.read(self.file), found))

    def tiles(self, jobs: int) -> int:
        """The fastest tile of every kernel and setting asked for; how many these were."""
        asked = [(x, k) for x in self.settings for k in KERNELS if self.wants("tiles", x.key(k))]
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(jobs) if jobs > 1 and asked else nullcontext(itertools) as processes:
            for setting, some in groupby(asked, key=itemgetter(0)):
                tried = [(setting, self.place, k, c) for _, k in some for c in candidates(k, setting.size)]
                found, problem = [*processes.starmap(check, tried)], Problem(setting, setting.shape.tokens, self.place)
                for kernel in dict.fromkeys(kernel for *_, kernel, _ in tried):
                    why = {tile: why for (*_, k, tile), why in zip(tried, found, strict=True) if k == kernel}
                    self.race(problem, setting.key(kernel), kernel, why)
        return len(asked)

    def race(self, problem: Problem, key: str, kernel: str, reasons: dict[TileConfig, str | None]) -> None:
        """All that are right in turn, and those near the fastest of them each alone.

        A card at its power limit lowers its clock: in turn with others a call that draws more slows them too.
        """
        for tile, why in reasons.items():
            if why:
                print(f"  {key} {tile.numbers()} {why}", flush=True)
        calls = {tile: problem.launch(kernel, tile) for tile, why in reasons.items() if not why}
        if not calls:
            self.failed.append(key)
            print(f"{key}: no candidate is right; nothing is written", flush=True)
            return
        in_turn = self.place.time(calls, self.seconds)
        near = [tile for tile, ms in in_turn.items() if ms <= NEAR * min(in_turn.values())]
        alone = {tile: self.place.time({tile: calls[tile]}, self.seconds)[tile] for tile in near}
        ranked = [sorted(found.items(), key=itemgetter(1)) for found in (alone, in_turn)]
        best, ms = ranked[0][0]
        self.add("tiles", key, list(best.numbers()), round(ms, 4))
        told = [", ".join(f"{tile.numbers()} {ms:.3f}" for tile, ms in some) for some in ranked]
        print(f"{key}, ms: {told[0]}; in turn: {told[1]}", flush=True)

    def libraries(self) -> int:
        """From how many rows on the library is faster, for every direction and setting asked for."""
        asked = [
            (x, way) for x, way in product(self.library, ("forward", "backward")) if self.wants("library", x.key(way))
        ]
        # the public function runs here with the tiles found so far, as it will once they are written
        found = common.read(self.file).get(self.name, {}).get("tiles", {})
        dispatch.measured().setdefault(self.name, {}).setdefault("tiles", {}).update(found)
        for setting, way in asked:
            ms = {n * setting.shape.heads: compare(setting, way, n, self.place, self.seconds) for n in LENGTHS}
            ms = {rows: both for rows, both in ms.items() if both}
            first = library_from(ms)
            self.add("library_from", setting.key(way), first, ms)
            told = "never" if first is None else f"from {first} rows"
            print(f"library {setting.key(way)}: {told}; ms {ms}", flush=True)
        return len(asked)


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__, "tune.json", "joins what is there (default: tune.json)")
    parser.add_argument("--write", action="store_true", help="take the results, those there before too, into the code")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], metavar="FILE", help="join these; measure nothing")
    words = 'keys with all these words, and with none after a -: "tiles dq 64 -causal", "library"; can be repeated'
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help=words)
    parser.add_argument("--head-dims", nargs="+", type=int, choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that compile")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured per key (default: 1)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try it, TRITON_INTERPRET=1")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths and heads, to try it")
    options = parser.parse_args(arguments)
    if options.write and not options.merge and (options.device, options.scale) != ("cuda", 1):
        parser.error("--write needs what was measured on a GPU at full length: leave out --device and --scale")
    file, failed = options.out, list[str]()
    if options.merge:
        write(file, functools.reduce(merge, map(common.read, (file, *options.merge))))
    else:
        tuning = Tuning(options)
        print(f"{tuning.about['device']} | torch {tuning.about['torch']} | commit {tuning.about['commit']}", flush=True)
        if not tuning.tiles(options.jobs) + tuning.libraries():
            parser.error(f"nothing is called {' or '.join(map(repr, options.only))}: try 'tiles forward 64 causal'")
        failed = tuning.failed
    print(f"written: {file}" + (f"; nothing right for {', '.join(failed)}" if failed else ""))
    if options.write:
        write(MEASURED, merge(common.read(MEASURED), common.read(file)))
        print(f"written: {MEASURED}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
