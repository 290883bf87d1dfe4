"""What does which pattern get at equal cost? Small models of code with facts planted in it, on one GPU.

    python benchmarks/tasks.py plan                                # what is done, and what comes next
    python benchmarks/tasks.py run --minutes 9                     # goes on where the last call ended
    python benchmarks/tasks.py run dense-8k-0 --seconds 30
    python benchmarks/tasks.py draw --out benchmarks/results/tasks # tables and pictures of docs/results.md

benchmarks/results/tasks/registered.md says what is compared, and was written before the first run. Every run trains for
as many seconds of the same GPU, on the same text, with the same schedule. The learning rate follows the clock, on a
cosine. A run writes its file every few seconds, so one that is cut leaves its curve; the next call starts it again.
"""

import bisect
import lzma
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import common
import tasks_data
import tasks_shown
import torch
import train_lm
import witten_bell
from tasks_model import Run, Timed

from dilated_attention import Dense, Dilated, DilatedPattern, Pattern, Prefix, Strided, Window
from dilated_attention.bench import machine
from dilated_attention.bench.suites.models import operations
from dilated_attention.models import LMConfig

K = 1 << 10
NEAR = K  # tokens of a window, the query's own among them
FULL = 4  # one layer in so many sees all
LENGTHS = (2 * K, 8 * K, 32 * K)  # of rows in training, one after the other
WINDOWS = (8 * K, 32 * K, 128 * K, 256 * K)  # in which held-out text is judged
SEQUENCES, LONGEST = 16, 128 * K  # of held-out text
SECONDS, AROUND = 100.0, 40  # of training; of the rest of a run
MODEL: dict[str, float] = {"dim": 512, "depth": 8, "heads": 8, "lr": 2e-3, "warmup": 100}
FRESH = (1, 2, 3)  # seeds of registered runs
FAR = ("longnet", "dilated", "strided")  # which also run with a learned weight of what only far branches show
SHORT = ("dense", "full-layers", "window", "longnet", "dilated", "strided")
LONG = (*SHORT, "window-1k", "full-heads", *(f"{name}-learned" for name in FAR))
QUEUE = [
    Run("dense", 8 * K, 100, "pilot"),
    *(Run(name, 32 * K, seed, "registered") for seed in FRESH for name in ("full-layers", "dense", "window")),
    *(Run(name, 8 * K, seed, "registered") for seed in FRESH for name in ("full-layers", "dense")),
    *(Run(name, window, 0, "exploration") for window, names in ((32 * K, LONG), (8 * K, SHORT)) for name in names),
]
AGAIN = [Run(name, window, seed, "exploration") for name in LONG for window in (8 * K, 32 * K) for seed in FRESH]
RUNS = {run.name: run for run in (*AGAIN, *QUEUE)}  # those beyond the queue run if they are named
NAMES = ["baselines", *(run.name for run in QUEUE)]
SWITCHES = ("float32", "checkpointing")
RESULTS = common.ROOT / "benchmarks/results/tasks"


def arguments(words: list[str] | None) -> Any:
    parser = common.parser(__doc__, "report/tasks", "the folder of the results")
    parser.add_argument("task", choices=["plan", "run", "draw"])
    parser.add_argument("runs", nargs="*", help="some of the runs, or baselines; by default all that are not done")
    parser.add_argument("--done", type=Path, default=RESULTS, help="the folder of the results of earlier calls")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run that would take longer than this call")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training, for each run")
    parser.add_argument("--code", nargs="+", type=Path, help="folders of packages; by default those of this Python")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this, for a test")
    for name, kind in (*((name, type(value)) for name, value in MODEL.items()), ("device", str)):
        parser.add_argument(f"--{name}", type=kind, help="as of examples/train_lm.py")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help="as of examples/train_lm.py")
    options = parser.parse_args(words)
    if wrong := [name for name in options.runs if name not in ("baselines", *RUNS)]:
        parser.error(f"there is no run {wrong[0]!r}: name it as `tasks.py plan` does, ATTENTION-WINDOW-SEED")
    return options


def patterns_of(attention: str, n: int, depth: int, heads: int, near: int) -> list[Pattern]:
    """Of each layer, for windows of n tokens."""
    window = Window(near - 1)
    doublings = range(1, (n // (2 * near)).bit_length())
    if attention == "full-layers":  # the last of every four
        return [Pattern([window if (layer + 1) % FULL else Dense()]) for layer in range(depth)]
    if attention == "window":  # as many pairs as full-layers
        layers = patterns_of("full-layers", n, depth, heads, near)
        pairs = sum(one.pairs(n, 1, is_causal=True) for one in layers) / depth
        windows = [Pattern([Window(width)]) for width in range(n)]
        at_least = bisect.bisect_left(windows, pairs, key=lambda one: one.pairs(n, 1, is_causal=True))
        return [windows[at_least]] * depth
    rates = [1, *(1 << i for i in doublings)]
    made: dict[str, Pattern] = {
        "dense": Pattern([Dense()]),
        "window-1k": Pattern([window]),
        "longnet": DilatedPattern.longnet([2 * near * rate for rate in rates], rates),
        # what Pattern.suggest proposes
        "dilated": Pattern([window, Prefix(4), *(Dilated(2 * near << i, 1 << i) for i in doublings)]),
        # each far token is seen by one head
        "strided": Pattern([window, *(Strided(heads, head, heads=[head]) for head in range(heads))]),
        "full-heads": Pattern([Window(near - 1, heads=range(1, heads)), Dense(heads=[0])]),  # one in each layer
    }
    return [made[attention]] * depth


def config_of(run: Run, given: Any, small: int) -> LMConfig:
    name = run.attention.removesuffix("-learned")
    layers = patterns_of(name, run.window // small, given.depth, given.heads, NEAR // small)
    near = None if name == run.attention else {"longnet": 1, "dilated": 2, "strided": 1}[name]
    pattern: Any = layers[0] if len({*layers}) == 1 else tuple(layers)
    sizes = tasks_data.BEGIN + 1, given.dim, given.depth, given.heads
    return LMConfig(*sizes, pattern, rotary_base=1e6, near=near)


def training_options(options: Any, seed: int, folder: str) -> Any:
    """Those of examples/train_lm.py. Nothing is saved before the end."""
    given = MODEL | {name: x for name in (*MODEL, "device") if (x := getattr(options, name)) is not None}
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    words += [f"--{name}" for name in SWITCHES if getattr(options, name)]
    words += ["--out", folder, "--rows", "1", "--save-every", str(sys.maxsize), "--seed", str(seed)]
    found = train_lm.arguments(["none", *words])
    found.seconds, found.shrink = options.seconds, options.shrink
    return found


class Turn(NamedTuple):
    """Of a run among others: it may train, since the last one has ended; and it has trained, so the next may start."""

    comes: Any  # events
    ends: Any


def train(options: Any, run: Run, data: tasks_data.Data, about: dict[str, Any], turn: Turn | None) -> None:
    """One run: train, judge, and write as it goes."""
    with tempfile.TemporaryDirectory() as folder:
        given, small = training_options(options, run.seed, folder), options.shrink
        config, window = config_of(run, given, small), run.window // small
        lengths = [x // small for x in LENGTHS if x <= run.window]
        pairs = {"num_heads": given.heads, "is_causal": True}
        share = sum(one.pairs(window, **pairs) for calls in config.calls for one in calls) / given.depth
        with train_lm.ranks(given.device):
            may_begin, file = turn.comes.wait if turn else bool, options.out / f"{run.name}.json"
            trainer = Timed(given, config, lengths, data, file, run.attention == "dense", may_begin)
            trainer.write(
                **about, **run._replace(window=window)._asdict(), config=config.to_dict(),
                parameters=trainer.parameters, lr=given.lr,
                pairs_of_dense=share / Pattern([Dense()]).pairs(window, **pairs),
                operations_per_token=[operations(config, trainer.parameters, n) / n for n in lengths],
            )  # fmt: skip
            if train_lm.run(trainer, [], trainer):  # type: ignore[arg-type]
                if turn:
                    turn.ends.set()
                trainer.write(peak_gib=torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else None)
                trainer.write(held_out=trainer.judged([x // small for x in WINDOWS]), complete=True)


def perform(options: Any, name: str, turn: Turn | None = None) -> None:
    """One run in this process. Or the baselines: xz on held-out text, Witten-Bell models of the training text."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        data = tasks_data.code(options.code or tasks_data.installed(), SEQUENCES, LONGEST // options.shrink)
        about = {"run": name, "data": data.facts, "machine": machine.describe(torch.device(device), options.commit)}
        if name == "baselines":
            text, held_out = (x.numpy().tobytes() for x in data[:2])
            orders = witten_bell.bits_per_byte(text, held_out, tuple(range(7)), device=device)
            packed = lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)
            bits = {"xz -9e": 8 * len(packed) / len(held_out), **{f"order {n}": x for n, x in orders.items()}}
            machine.write_json(options.out / "baselines.json", {**about, "bits": bits, "complete": True})
        else:
            train(options, RUNS[name], data, about, turn)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def is_done(options: Any, name: str) -> bool:
    return any(common.read(folder / f"{name}.json").get("complete") for folder in (options.out, options.done))


def plan(options: Any) -> None:
    """Every run: what part it belongs to, whether it is done, and how many minutes are left with it."""
    left = 0.0
    for name in NAMES:
        done = is_done(options, name)
        left += 0 if done else (options.seconds + AROUND) / 60
        part = RUNS[name].part if name in RUNS else "baselines"
        print(f"{name:24} {part:12} {'done' if done else f'{left:5.0f} min from now'}")


def run_queue(options: Any) -> None:
    """Those that are named, or all that are not done, each in a process of its own: what one breaks ends with it.

    While one is judged, the next reads its text and compiles. It trains when the device is its own.
    """
    began, processes = time.monotonic(), list[Any]()
    spawn, names = multiprocessing.get_context("spawn"), options.runs or [x for x in NAMES if not is_done(options, x)]
    for name in names:
        if time.monotonic() - began + options.seconds + AROUND > 60 * options.minutes:
            print(f"{name} and what follows is left for the next call")
            break
        turn = Turn(spawn.Event(), spawn.Event())
        process = spawn.Process(target=perform, name=name, args=(options, name, turn))
        process.start()
        for last in processes:
            last.join()
        turn.comes.set()
        while process.is_alive() and not turn.ends.wait(1):
            pass
        processes.append(process)
    for last in processes:
        last.join()
    if failed := [process.name for process in processes if process.exitcode]:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    if options.task == "draw":
        tasks_shown.show(options.out, common.ROOT / "docs")
    elif options.task == "plan":
        plan(options)
    elif len(options.runs) == 1:
        perform(options, options.runs[0])
    else:
        run_queue(options)


if __name__ == "__main__":
    main()
