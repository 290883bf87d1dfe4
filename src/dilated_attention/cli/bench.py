"""`bench`: run suites, keep what was found whatever happens, and show it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dilated_attention.bench import machine, results
from dilated_attention.bench.regress import compare
from dilated_attention.cli import arguments
from dilated_attention.cli.compare import summary
from dilated_attention.cli.output import console, print_written
from dilated_attention.cli.progress import watching
from dilated_attention.cli.tables import is_ours_wrong, print_results

NAMES = "quick, copies, improved, ring, profile, scaling, optimisations, all"
PREVIOUS = "previous.json"
INTERRUPTED = 130  # as a shell has it for a program ended by Ctrl-C


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Comma-separated, or repeat the option: {NAMES}.  [default: quick]"),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="The device: cpu, cuda or cuda:1. By default cuda, if there is one."
        ),
    ] = "",
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
        typer.Option(metavar="S", help="Seconds of timing per setting, shared by all.  [default: 6, on CUDA 2]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the interrupted run in --out.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit to record if this copy has no .git.")] = None,
) -> int:
    """Check and time every implementation.

    Each one is checked against the oracle. Those that are right are timed, and a report is written. Results are saved
    after every setting, so an interrupted run keeps them and still makes its report. The exit code is 1 if one of this
    library's implementations is wrong, and 130 if the run was interrupted.

    Example: dilated-attention bench --suite quick --out report
    """
    # here and not above: it takes a while
    from dilated_attention.bench import session
    from dilated_attention.bench.report import write_report

    with arguments.refusing():
        suites = [name for some in suite or ["quick"] for name in some.split(",")]
        unknown = [name for name in suites if name not in session.SUITES]
        if unknown:
            raise ValueError(f"--suite must be one or more of {', '.join(session.SUITES)}, got {', '.join(unknown)!r}")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"--seconds must be more than 0, got {seconds}")
        where = arguments.device("--device", device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtypes = [arguments.dtype("--dtype", name) for name in dtype.split(",")] if dtype else None
        arguments.writable(out)
        before = interrupted(out / "results.json") if resume else None
        if before is not None:
            session.check_continues(before, suites, where, dtypes)
    kept = Kept(out / "results.json", aside=None if resume else out / PREVIOUS)
    is_interrupted = False
    try:
        with watching() as watch:
            more: dict[str, Any] = {} if before is None else {"before": before}
            session.run(suites, where, dtypes, save=kept.save, watch=watch, seconds=seconds, commit=commit, **more)
    except KeyboardInterrupt:
        is_interrupted = True
        kept.interrupt()
    screen = console()
    if kept.results is None:
        screen.print("interrupted before anything was measured: nothing was written")
        return INTERRUPTED
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
    return INTERRUPTED if is_interrupted else int(is_ours_wrong(kept.results))


def interrupted(file: Path) -> dict[str, Any]:
    """The results of a run to go on with."""
    if not file.exists():
        raise ValueError(f"--resume needs the results of an interrupted run, and there is no {file}")
    return results.load(file, whole=True)


class Kept:
    """The results so far, in memory and on disk. Those of the run before are put aside when the first ones come."""

    def __init__(self, file: Path, aside: Path | None = None) -> None:
        self.file, self.aside = file, aside
        self.results: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None  # of the run before, if it can be read

    def save(self, found: dict[str, Any]) -> None:
        if self.results is None and self.aside is not None and self.file.exists():
            with contextlib.suppress(ValueError):  # not results of ours: kept, and not compared
                self.last = results.load(self.file)
            self.file.replace(self.aside)
        self.results = found
        machine.write_json(self.file, found)

    def interrupt(self) -> None:
        if self.results is not None:
            self.save({**self.results, "complete": False})
