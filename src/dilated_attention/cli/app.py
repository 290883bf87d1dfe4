"""All commands. Each has its help, its options and its work in a file of its name."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import dilated_attention
from dilated_attention.cli.options import Refused, defaults, refusing

NAME = "dilated-attention"
ABOUT = """
Exact dilated attention: measure it, choose and draw its patterns, plan its cost
on many devices, encode slides, fit and score language models.

Example: dilated-attention show -n 64 -w 16,64 -r 1,4 --heads 4
"""
NEEDED = ("tokens", "segment_lengths", "dilation_rates")  # unless a suggestion has them
COLOURS = {r"^[\w ]+:": "1", r"(?<![\w-])--?[a-zA-Z][\w-]*": "36", r"(?<=  )[A-Z][A-Z:.,]*": "33"}  # of help
COMMANDS = (
    "bench", "report", "compare", "show", "suggest", "plan", "doctor", "encode", "sample", "fit", "evaluate", "convert",
    "completion",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """One line for what is wrong, and help in colour on a terminal."""

    def __init__(self, name: str, about: str, **more: Any) -> None:
        lines = argparse.RawDescriptionHelpFormatter
        super().__init__(name, description=about.strip(), formatter_class=lines, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message} (see {self.prog} --help)")

    def print_help(self, file: Any = None) -> None:
        text = self.format_help()
        for what, colour in COLOURS.items() if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ():
            text = re.sub(what, rf"\033[{colour}m\g<0>\033[0m", text, flags=re.MULTILINE)
        print(text, end="", file=file)


def parsers() -> dict[str, Parser]:
    """One for each command, whose file says in its docstring what --help says."""
    made = {}
    for name in COMMANDS:
        command = importlib.import_module(f"dilated_attention.cli.{name}")
        parser = made[name] = Parser(f"{NAME} {name}", command.__doc__ or "")
        for names, how in command.OPTIONS:
            parser.add_argument(*names, **how)
        parser.set_defaults(run=command.run, parsers=made)
    return made


def top(made: dict[str, Parser]) -> Parser:
    """What stands before a command."""
    first_lines = "\n".join(f"  {name:<12}{(x.description or '').splitlines()[0]}" for name, x in made.items())
    epilog = f"Commands, whose options --help after them lists:\n{first_lines}"
    parser = Parser(NAME, ABOUT, usage="%(prog)s [-h] [--version] COMMAND ...", epilog=epilog)
    parser.add_argument("--version", action="version", version=f"{NAME} {dilated_attention.__version__}")
    return parser


def run(given: Sequence[str]) -> int:
    """The exit code of a command line; whatever is wrong with it is Refused."""
    made, words = parsers(), [*given] or ["--help"]
    parser = made.get(words[0]) or top(made)
    if words[0] in made:
        del words[0]
    elif not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], made, 1)
        parser.error(f"no such command: {words[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        with refusing():
            parser.set_defaults(**defaults(parser.parse_intermixed_args(words)))
        arguments = parser.parse_intermixed_args(words)
    except SystemExit as ended:  # of --help and --version
        return int(ended.code or 0)
    needs = NEEDED[:1] if getattr(arguments, "pattern", None) else NEEDED
    if needed := [x for x in parser._actions if x.dest in needs and getattr(arguments, x.dest) is None]:
        parser.error(f"missing {', '.join('/'.join(x.option_strings) for x in needed)}")
    return arguments.run(arguments) or 0
