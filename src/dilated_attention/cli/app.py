"""All commands under one name, and one way in which typer's own complaints come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import dilated_attention
from dilated_attention.cli.arguments import Refused
from dilated_attention.cli.bench import bench
from dilated_attention.cli.compare import compare
from dilated_attention.cli.convert import convert
from dilated_attention.cli.doctor import doctor
from dilated_attention.cli.encode import encode
from dilated_attention.cli.plan import plan
from dilated_attention.cli.report import report
from dilated_attention.cli.show import show
from dilated_attention.cli.suggest import suggest

NAME = "dilated-attention"
# Typer once took this class from click and now has its own; either way it stands above what it exports.
USAGE_ERROR: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name=NAME,
    add_completion=False,
    rich_markup_mode=None,  # help as plain text
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (bench, report, compare, show, suggest, plan, doctor, encode, convert):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Exact dilated attention: measure it, choose and draw its patterns, plan its cost on many devices, encode slides.

    Example: dilated-attention show -n 64 -w 16,64 -r 1,4 --heads 4
    """
    if version:
        print(NAME, dilated_attention.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str] | None) -> int:
    """The exit code of a command line; whatever is wrong with it is Refused."""
    command = typer.main.get_command(app)
    given = None if arguments is None else list(arguments)
    try:
        return command.main(args=given, prog_name=NAME, standalone_mode=False) or 0
    except USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        where = NAME if context is None else context.command_path
        raise Refused(f"{error.format_message().rstrip('.')} (see {where} --help)") from error
    except typer.Abort:
        return 1
