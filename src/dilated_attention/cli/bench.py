"""`bench`: run suites, keep what was found whatever happens, and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dilated_attention import charts
from dilated_attention.bench.regress import compare
from dilated_attention.cli import arguments, options
from dilated_attention.cli.compare import summary
from dilated_attention.cli.output import console, print_written, watching
from dilated_attention.cli.tables import print_results


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Suites, see above; comma-separated or one per option.  [default: quick]"),
    ] = None,
    device: options.Device = "",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE,...",
            help="Comma-separated dtypes; suites that need only one take the first.  [default: "
            "float32,bfloat16,float16 on a CPU; bfloat16,float16,float32 on CUDA]",
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
    commit: Annotated[
        str | None, typer.Option(metavar="ID", help="The commit to record if this copy has no .git.")
    ] = None,
) -> int:
    """Check and time implementations of dilated attention.

    They are those of this library and those of others. Each one is compared with the oracle, a slow float64 reference.
    Those that are right are timed, and a report is written. Results are saved after every setting, so an interrupted
    run keeps them and still makes its report. The exit code is 1 if one of this library's implementations is wrong, and
    130 if the run was interrupted.

    \b
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

    Example: dilated-attention bench --suite quick --out report
    """
    # here and not above: help needs no torch, and these take a while
    from dilated_attention.bench import machine, suites
    from dilated_attention.bench.plain import PREVIOUS, Kept, check_seconds, is_ours_wrong
    from dilated_attention.bench.report import write_report

    with arguments.refusing():
        names = suites.named(suite or ["quick"])
        check_seconds(seconds)
        where = arguments.device("--device", device)
        dtypes = [arguments.dtype("--dtype", name) for name in dtype.split(",")] if dtype else None
        charts.writable(out)
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
        screen.print(f"compared with the run before: {summary(compare(kept.last, kept.results))}", soft_wrap=True)
        screen.print(f"to see which: dilated-attention compare {out / PREVIOUS} {out}", soft_wrap=True)
    print_written(screen, out, [*files[:-1], kept.file, files[-1]])  # the page last: that is what to open
    return code or int(is_ours_wrong(kept.results))
