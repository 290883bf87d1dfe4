"""What `dilated-attention fit` is worth: python benchmarks/fit.py --out report/fit, on one GPU

A dense model of bytes, of 32M parameters, trains for 8 minutes as those of benchmarks/tasks.py: code with facts planted
in it, in rows that grow to 8,192. Each of PATTERNS, of at most 1/8 of dense attention's pairs, is then put into it, and
judged before and after 2 minutes of fine-tuning; dense attention trains on for as long. The same command goes on where
it was cut, so that a call may end after any run.
"""

import bisect
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import tasks_data
import torch
import train_lm
from tasks_model import Timed, score

from dilated_attention import Dense, DilatedPattern, Pattern, Prefix, Window
from dilated_attention.bench import machine
from dilated_attention.integrations.stored import Plain
from dilated_attention.models import LMConfig, LongNetLM, fitting
from dilated_attention.models.transformer import written

BUDGET, TOKENS, ALL = 1 / 8, 8192, Pattern([Dense()])
SEQUENCES = 64  # of held-out text
Patterns = tuple[Pattern, ...]


def window(n: int, share: float) -> Pattern:
    """A window with the first tokens, as wide as the share of pairs allows."""
    two = [(Window(width), Prefix(4)) for width in range(n)]
    wider = bisect.bisect_right(two, share, key=lambda branches: fitting.share_of(Pattern(branches), n, 1))
    return Pattern(two[wider - 1])


def longnet(n: int) -> Pattern:
    """Segments and rates that double, up to one segment."""
    doublings = ([1 << j for j in range(i + 1)] for i in range(n.bit_length()))
    made = (DilatedPattern.longnet([n // rates[-1] * rate for rate in rates], rates) for rates in doublings)
    return next(one for one in made if fitting.share_of(one, n, 8) <= BUDGET)


def some_full(n: int, depth: int) -> Patterns:
    """As many full layers as the budget allows, drawn at random; it leaves the others a window."""
    full = {*random.Random(0).sample(range(depth), int(BUDGET * depth))}
    near = window(n, (BUDGET * depth - len(full)) / (depth - len(full)))
    return tuple(ALL if layer in full else near for layer in range(depth))


PATTERNS: dict[str, Callable[[Plain, torch.Tensor], Patterns]] = {
    "dense-again": lambda model, rows: model.patterns,
    "fitted": lambda model, rows: fitting.fit(model, rows, BUDGET).patterns,
    "window": lambda model, rows: (window(rows.shape[1], BUDGET),) * len(model.patterns),
    "longnet": lambda model, rows: (longnet(rows.shape[1]),) * len(model.patterns),
    "random-full-layers": lambda model, rows: some_full(rows.shape[1], len(model.patterns)),
    "fitted-by-mass": lambda model, rows: fitting.fit(model, rows, BUDGET, "mass").patterns,
}


def perform(options: Any, name: str, data: tasks_data.Data, about: dict[str, Any]) -> None:
    """One run, into its file; the dense one also leaves its weights."""
    small, device, start = options.shrink, options.device, None if name == "dense" else options.out / "dense.pt"
    n, width, depth, heads = TOKENS // small, max(32, 512 // small), 10, 8
    config = LMConfig(257, width, depth, heads, ALL, rotary_base=1e6)
    if start:
        dense = Plain(LongNetLM.from_checkpoint(start).to(device, torch.bfloat16 if device == "cuda" else None))
        rows = tasks_data.step(data, 0, n, max(n, 16 * n // small), 1)[0].to(device)
        config = LMConfig.from_dict({**config.to_dict(), "pattern": PATTERNS[name](dense, rows)})
    share = sum(fitting.share_of(pattern, n, heads) for pattern in config.patterns) / depth
    with tempfile.TemporaryDirectory() as folder, train_lm.ranks(device):
        rate = ["--lr", "5e-4" if start else "2e-3", "--warmup", "100", "--save-every", str(10**9)]
        given = train_lm.arguments(["none", "--out", folder, "--rows", "1", "--device", device, *rate])
        given.shrink, given.start, given.seconds = small, start, options.tuning if start else options.seconds
        lengths, file = [n] if start else [n // 4, n], options.out / f"{name}.json"
        trainer = Timed(given, config, lengths, data, file, {*config.patterns} == {ALL})
        trainer.write(**about, patterns=written(config.patterns), share=share, parameters=trainer.parameters)
        trainer.write(before=trainer.judged([n]) if start else None)
        train_lm.run(trainer, [], trainer)  # type: ignore[arg-type]
        if not start:
            torch.save({"config": config.to_dict(), "model": trainer.state()["model"]}, options.out / "dense.pt")
        trainer.write(after=trainer.judged([n]), complete=True)


def main(words: list[str] | None = None) -> None:
    parser = common.parser(__doc__, "report/fit", "the folder of the results")
    parser.add_argument("--code", nargs="+", type=Path, help="folders of packages; by default those of this Python")
    parser.add_argument("runs", nargs="*", default=["dense", *PATTERNS], help="some of them; by default all")
    parser.add_argument("--seconds", type=float, default=480.0, help="of training")
    parser.add_argument("--tuning", type=float, default=120.0, help="seconds of fine-tuning")
    parser.add_argument("--shrink", type=int, default=1, help="divide rows and widths by this, for a test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    options = parser.parse_args(words)
    if wrong := {*options.runs} - {"dense", *PATTERNS}:
        parser.error(f"there is no run {min(wrong)!r}: use some of dense, {', '.join(PATTERNS)}")
    data = tasks_data.code(options.code or tasks_data.installed(), SEQUENCES, 4 * TOKENS // options.shrink)
    about = {"data": data.facts, "machine": machine.describe(torch.device(options.device), options.commit)}
    for name in options.runs:
        file = options.out / f"{name}.json"
        if not common.read(file).get("complete"):
            perform(options, name, data, about)
        one = common.read(file)
        for when in ("before", "after"):
            for n, judged in (one[when] or {}).items():
                told = f"{judged['bits']:.3f} bits, recall {score(judged['recall'], int(n)):.1%}"
                print(f"{name:20}{when:8}{one['share']:6.1%} of the pairs: {told}", flush=True)


if __name__ == "__main__":
    main()
