"""The command `dilated-attention`. Here is its door: whatever the user got wrong ends here, in one line and code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dilated_attention.bench.results import escaped
from dilated_attention.cli.options import Refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, sys.argv's by default; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a µ that cannot be printed must not stop a command
    try:
        from dilated_attention.cli.app import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except Refused as error:
        message = str(error)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("rich"):
            message = 'this needs rich: pip install ".[bench]" from a clone'
        elif isinstance(error.__cause__, ModuleNotFoundError):  # `charts.library` says what to install
            message = str(error)
        else:
            raise
    print("error:", escaped(" ".join(message.split())), file=sys.stderr)
    return 2
