"""The command `dilated-attention`. Here is its door: whatever the user got wrong ends here, in one line and code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dilated_attention.bench.results import escaped
from dilated_attention.cli.options import Refused

# what the extras `bench`, `models` and `slides` install
OPTIONAL = ("rich", "altair", "vl_convert", "jinja2", "safetensors", "huggingface_hub", "h5py")


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
        name = str(error.name).partition(".")[0]
        if name not in OPTIONAL:
            raise
        told = isinstance(error.__cause__, ModuleNotFoundError)  # by `charts.library`, which says what to install
        message = str(error) if told else f'this needs {name}: pip install ".[bench]" from a clone'
    print("error:", escaped(" ".join(message.split())), file=sys.stderr)
    return 2
