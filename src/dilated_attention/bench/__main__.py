"""python -m dilated_attention.bench: the comparison as a table, and as JSON with --out.

The exit code is 1 when one of our implementations is wrong, however fast it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dilated_attention.bench import machine
from dilated_attention.bench.cases import DENSE, Implementation, Setting, implementations
from dilated_attention.bench.compare import Result, compare, ratio, tokens_per_second
from dilated_attention.bench.run import Timing

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
STYLES = {"exact": "green"}


def main(arguments: list[str] | None = None, which: list[Implementation] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    setting = Setting.of_tokens(2048 if options.quick else options.tokens, device, DTYPES[options.dtype])
    found = machine.describe(device)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(machine.one_line(found), highlight=False)
    console.print(f"{found['command']} | {found['date']}", highlight=False)

    began = time.monotonic()
    with _progress(console) as say, torch._dynamo.config.patch(recompile_limit=64):  # one function, many patterns
        results = compare(which or implementations(), setting, seconds=options.seconds, say=say)
    took = time.monotonic() - began
    console.print(table(results, setting))
    for line in notes(results, took):
        console.print(line, highlight=False)
    if options.out is not None:
        machine.write_json(options.out, as_dict(found, setting, results, took))
        console.print(f"written: {options.out}", highlight=False)
    return int(any(result.ours and result.verdict != "exact" for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dilated_attention.bench",
        description="Hold every implementation against the float64 oracle, then time it against dense SDPA.",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="(default: float32)")
    parser.add_argument("--tokens", type=int, default=8192, help="sequence length, a multiple of 64 (default: 8192)")
    parser.add_argument("--quick", action="store_true", help="2048 tokens")
    parser.add_argument("--seconds", type=float, default=40.0, help="of measuring, shared by all (default: 40)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the results")
    return parser


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal; elsewhere each message once, on a line of its own."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda message: status.update(message)
        return
    said: set[str] = set()

    def say(message: str) -> None:
        if message not in said:
            said.add(message)
            print(message, file=sys.stderr, flush=True)

    yield say


def table(results: list[Result], setting: Setting) -> Table:
    shape = f"B={setting.samples} N={setting.tokens} H={setting.heads} D={setting.head_dim}"
    pattern = f"w={','.join(map(str, setting.lengths))} r={','.join(map(str, setting.rates))}"
    made = Table(title=f"{shape} {pattern} {str(setting.dtype).removeprefix('torch.')} on {setting.device}")
    made.add_column("implementation")
    for name in ("error out", "error grads"):
        made.add_column(name, justify="right")
    made.add_column("verdict")
    for name in ("forward ms", "x dense", "fwd+bwd ms", "x dense", "tokens/s"):
        made.add_column(name, justify="right")
    dense = next((result for result in results if result.name == DENSE), None)
    for result in results:
        made.add_row(*_cells(result, dense, setting))
    return made


def _cells(result: Result, dense: Result | None, setting: Setting) -> Iterator[str]:
    yield result.name
    yield f"{result.check.errors['out']:.1e}"
    yield f"{result.check.gradient_error:.1e}"
    style = STYLES.get(result.verdict, "bold red")
    yield f"[{style}]{result.verdict}[/{style}]"
    yield _timing(result.forward)
    yield _times(ratio(dense.forward if dense else None, result.forward))
    yield _timing(result.forward_backward)
    yield _times(ratio(dense.forward_backward if dense else None, result.forward_backward))
    speed = tokens_per_second(result, setting)
    yield "-" if speed is None else f"{speed:,.0f}"


def _timing(timing: Timing | None) -> str:
    """Median, and the quartiles where there were repeats enough to have any."""
    if timing is None:
        return "-"
    digits = 2 if timing.median < 10 else 0
    spread = {1: "once", 2: "twice"}.get(timing.repeats, f"{timing.lower:.{digits}f}–{timing.upper:.{digits}f}")
    return f"{timing.median:.{digits}f} ({spread})"


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}"


def notes(results: list[Result], took: float) -> Iterator[str]:
    yield "times: median (quartiles); x dense: how many times faster than dense SDPA; tokens/s of fwd+bwd"
    yield "Multihead classes: with projections and norm, which dense SDPA has not. No times: checked only."
    for result in results:
        if result.verdict != "exact":
            wrong = {n: e for n, e in result.check.errors.items() if not e <= result.check.limits[n]}
            which = ", ".join(f"{name} off by {error:.1e}" for name, error in wrong.items()) or f"rows {result.rows}"
            yield f"{'[bold red]OURS[/bold red] ' if result.ours else ''}{result.name}: {result.verdict}: {which}"
    yield f"took {took:.0f} s"


def as_dict(found: dict[str, Any], setting: Setting, results: list[Result], took: float) -> dict[str, Any]:
    dense = next((result for result in results if result.name == DENSE), None)
    described = {**asdict(setting), "device": str(setting.device), "dtype": str(setting.dtype)}
    return {
        "machine": found,
        "setting": described,
        "seconds": took,
        "results": [result.as_dict(setting, dense) for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
