"""Check and time implementations of dilated attention.

Some are of this library, others of other libraries. Each one is compared with
the oracle, a slow float64 reference. Those that are right are timed, and a
report is written. Results are saved after every setting, so an interrupted run
keeps them and still makes its report. The exit code is 1 if one of this
library's implementations is wrong, and 130 if the run was interrupted.

Suites:
  quick          the most telling ones at three lengths, 1 to 2 minutes
  copies         what copies of rows cost
  improved       DilatedAttention and ImprovedDilatedAttention
  ring           the Ring classes over ranks
  profile        why one is faster than another
  scaling        all by length, batch size, heads and dtype
  optimisations  published optimisations, each on and off
  all            the six from copies to optimisations
  kernels        how near our kernels come to dense ones
  decode         one token more at the end of a long context
  stream         a sequence longer than memory
  packed         many sequences in one row
  slides         slide encoders
  language       LongNet as a language model
  suggested      suggested patterns up to a million tokens

Example: dilated-attention bench --suite quick --out report
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention.bench import regress
from dilated_attention.bench.pace import log
from dilated_attention.bench.results import Record
from dilated_attention.cli import options
from dilated_attention.cli.compare import summary
from dilated_attention.cli.options import option
from dilated_attention.show import charts
from dilated_attention.units import cell_text

if TYPE_CHECKING:
    from rich.console import Console

    from dilated_attention.bench.suites import ResultsFile

OPTIONS = (
    option("--suite", "NAME", "Suites, see above; comma-separated or one per option.  [default: quick]",
           action="append"),
    options.DEVICE,
    option("--dtype", "DTYPE,...", "Comma-separated dtypes; suites that need only one take the first.  [default: "
           "float32,bfloat16,float16 on a CPU; bfloat16,float16,float32 on CUDA]"),
    option("--out", "FOLDER", "The folder for results.json and the report.", Path, Path("report")),
    option("--seconds", "S", "Seconds of timing per setting, for all its calls together.  [default: 3, on CUDA 2]",
           options.seconds),
    option("--commit", "ID", "The commit to record if this copy has no .git."), options.JSON,
)  # fmt: skip


def run(given: Namespace) -> int:
    # here and not above: help needs no torch, and these take a while
    from dilated_attention.bench import suites

    with options.refusing():
        names = suites.named(given.suite or ["quick"])
        where = options.device(given.device)
        dtypes = [options.dtype(name) for name in given.dtype.split(",")] if given.dtype else None
        charts.writable(given.out)
    kept, is_pretty = suites.ResultsFile(given.out), find_spec("rich") is not None  # a benchmark needs PyTorch alone
    if is_pretty:
        from dilated_attention.cli.output import watching
    with watching() if is_pretty else nullcontext(log) as watch:
        code = 130  # as a shell has it for Ctrl-C, after which what there is was saved
        with suppress(KeyboardInterrupt):
            suites.run(names, where, dtypes, save=kept.save, watch=watch, seconds=given.seconds, commit=given.commit)
            code = 0
    if kept.results is None:
        print("interrupted before anything was measured: nothing was written")
    elif is_pretty:
        _show(kept, kept.results, given)
    else:
        print(kept.results["answer"], f"written: {kept.file}, for `dilated-attention report` where rich is", sep="\n")
    return code or int(kept.results is not None and suites.is_ours_wrong(kept.results))


def _show(kept: ResultsFile, results: Record, given: Namespace) -> None:
    """The report in its folder, and the tables or JSON on the terminal."""
    from dilated_attention.bench import machine
    from dilated_attention.bench.page import write_report
    from dilated_attention.bench.suites import PREVIOUS
    from dilated_attention.cli.output import console, print_json

    screen = console(stderr=given.json)
    if given.json:
        print_json(results)
    else:
        screen.print(machine.one_line(results["machine"]))
        print_results(screen, results)
    if kept.last is not None:
        screen.print(f"compared with the run before: {summary(regress.compare(kept.last, results))}")
        screen.print(f"to see which: dilated-attention compare {given.out / PREVIOUS} {given.out}")
    screen.print(f"written: {kept.file}")
    write_report(results, given.out, say=screen.print)  # the page last: that is what to open


def print_results(screen: Console, results: Record) -> None:
    """The tables of the report but for the claims and what cannot run here, what is wrong, and the answer."""
    from dilated_attention.bench import page

    run = [one for one in results["measurements"] if one["status"] != "skipped"]
    for suite in page.suites({**results, "measurements": run}):
        for table in suite["tables"]:
            _print_table(screen, f"{suite['suite']}: {table['title']}", table)
    if wrong := page.checks(results).get("wrong"):
        _print_table(screen, "what is wrong has no time", wrong)
    if results["recommendations"]:
        _print_table(screen, "which to use", page.recommendations(results))
    screen.print("\n" + results["answer"].replace("`", ""), style="bold")
    if results["machine"].get("too_busy"):
        took = f"other work took {results['machine']['others']:.0%} of its cores"
        said = f"The machine was too busy to trust these times: {took}. Run it again when idle."
        screen.print(said, style="bold red")
    if not results["complete"]:
        screen.print("The run was interrupted: this is what it had until then.")


def _print_table(screen: Console, title: str, table: Record) -> None:
    from dilated_attention.cli.output import print_table

    rows = [[cell_text(cell).replace("`", "") for cell in row] for row in table["rows"]]
    print_table(screen, title, table["columns"], rows)
    if table["note"]:
        screen.print(table["note"].replace("`", ""))
