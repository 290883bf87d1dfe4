"""`bench`: run suites, keep what was found whatever happens, and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dilated_attention.bench.regress import compare
from dilated_attention.cli import arguments, options
from dilated_attention.cli.compare import summary
from dilated_attention.cli.output import console, print_written, watching
from dilated_attention.cli.tables import print_results

NAMES = "quick, copies, improved, ring, profile, scaling, optimisations, kernels, decode, stream, slides, language, all"


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"The suites, comma-separated or one per option: {NAMES}.  [default: quick]"),
    ] = None,
    device: options.Device = "",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE,...",
            help="Comma-separated dtypes; the first is the main one. The default depends on the device.",
        ),
    ] = "",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder for results.json and the report.")] = Path(
        "report"
    ),
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Seconds of timing per setting, for all its calls together.  [default: 3, on CUDA 2]"
        ),
    ] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record if this copy has no .git.")] = None,
) -> int:
    """Check implementations, and time those that are right.

    Each one is checked against the oracle before it is timed. A report is written. Results are saved after every
    setting, so an interrupted run keeps them and still makes its report. The exit code is 1 if one of this library's
    implementations is wrong, and 130 if the run was interrupted.

    Example: dilated-attention bench --suite quick --out report
    """
    # here and not above: help needs no torch, and these take a while
    from dilated_attention.bench import machine, suites
    from dilated_attention.bench.plain import PREVIOUS, Kept, is_ours_wrong
    from dilated_attention.bench.report import write_report

    with arguments.refusing():
        names = suites.named(suite or ["quick"])
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"--seconds must be more than 0, got {seconds}")
        where = arguments.device("--device", device)
        dtypes = [arguments.dtype("--dtype", name) for name in dtype.split(",")] if dtype else None
        arguments.writable(out)
    kept = Kept(out)
    with watching() as watch:
        code = kept.run(names, where, dtypes, watch=watch, seconds=seconds, commit=commit)
    screen = console()
    if kept.results is None:
        screen.print("interrupted before anything was measured: nothing was written")
        return code
    left_out: list[str] = []
    files = write_report(kept.results, out, say=left_out.append)
    screen.print(machine.one_line(kept.results["machine"]), soft_wrap=True)
    print_results(screen, kept.results)
    for line in left_out:
        screen.print(line, soft_wrap=True)
    if kept.last is not None:
        screen.print(f"compared with the run before, which is now {out / PREVIOUS}:", soft_wrap=True)
        screen.print(summary(compare(kept.last, kept.results)))
    print_written(screen, out, [*files[:-1], kept.file, files[-1]])  # the page last: that is what to open
    return code or int(is_ours_wrong(kept.results))
