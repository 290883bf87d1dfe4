"""All commands: their options, their help, and completion for a shell. Each has its options and its work in a file."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import dilated_attention
from dilated_attention.cli import (
    arguments,
    bench,
    compare,
    convert,
    doctor,
    encode,
    options,
    plan,
    report,
    show,
    suggest,
)
from dilated_attention.cli.arguments import Refused

NAME = "dilated-attention"
ABOUT = """
Exact dilated attention: measure it, choose and draw its patterns, plan its cost
on many devices, encode slides.

Example: dilated-attention show -n 64 -w 16,64 -r 1,4 --heads 4
"""
NEEDED = ("tokens", "segment_lengths", "dilation_rates")  # unless a suggestion has them
COLOURS = {r"^[\w ]+:": "1", r"(?<![\w-])--?[a-zA-Z][\w-]*": "36", r"(?<=  )[A-Z][A-Z:.,]*": "33"}  # of help
COMPLETION = """
_dilated_attention() {{
    local words="{commands}"
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [ "$COMP_CWORD" -gt 1 ] || words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
[ -z "$ZSH_VERSION" ] || {{ autoload -U +X bashcompinit && bashcompinit; }}
complete -o default -F _dilated_attention dilated-attention
"""


class Parser(argparse.ArgumentParser):
    """One line for what is wrong, and help in colour on a terminal."""

    def __init__(self, name: str, about: str, **more: Any) -> None:
        lines, about = argparse.RawDescriptionHelpFormatter, inspect.cleandoc(about)
        super().__init__(name, description=about, formatter_class=lines, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message} (see {self.prog} --help)")

    def print_help(self, file: Any = None) -> None:
        text = self.format_help()
        for what, colour in COLOURS.items() if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ():
            text = re.sub(what, rf"\033[{colour}m\g<0>\033[0m", text, flags=re.MULTILINE)
        print(text, end="", file=file)


def completion(given: argparse.Namespace) -> None:
    """Print what makes bash or zsh complete commands and options.

    Example: eval "$(dilated-attention completion)"
    """
    made = parsers()
    words = {name: " ".join(word for word in parser._option_string_actions) for name, parser in made.items()}
    cases = "\n".join(f'        {name}) words="{some}" ;;' for name, some in words.items())
    print(COMPLETION.format(commands=" ".join(made), cases=cases).strip())


COMMANDS: dict[Callable[[argparse.Namespace], int | None], Sequence[options.Option]] = {
    bench.bench: bench.OPTIONS, report.report: report.OPTIONS, compare.compare: compare.OPTIONS,
    show.show: show.OPTIONS, suggest.suggest: suggest.OPTIONS, plan.plan: plan.OPTIONS, doctor.doctor: (options.JSON,),
    encode.encode: encode.OPTIONS, convert.convert: convert.OPTIONS, completion: (),
}  # fmt: skip


def parsers() -> dict[str, Parser]:
    """One for each command."""
    found = {}
    for run, some in COMMANDS.items():
        parser = found[run.__name__] = Parser(f"{NAME} {run.__name__}", run.__doc__ or "")
        for add in some:
            add(parser)
        parser.set_defaults(run=run)
    return found


def top() -> Parser:
    """What stands before a command."""
    listed = "\n".join(f"  {run.__name__:<12}{(run.__doc__ or '').partition(chr(10))[0]}" for run in COMMANDS)
    epilog = f"Commands, whose options --help after them lists:\n{listed}"
    found = Parser(NAME, ABOUT, usage="%(prog)s [-h] [--version] COMMAND ...", epilog=epilog)
    found.add_argument("--version", action="version", version=f"{NAME} {dilated_attention.__version__}")
    return found


def run(given: Sequence[str]) -> int:
    """The exit code of a command line; whatever is wrong with it is Refused."""
    made, (name, *rest) = parsers(), given or ["--help"]
    parser = made.get(name) or top()
    try:
        if name not in made and not name.startswith("-"):
            near = difflib.get_close_matches(name, made, 1)
            parser.error(f"no such command: {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        found = parser.parse_intermixed_args(rest if name in made else [name])
        with arguments.refusing():
            said = options.defaults(found)
        if said:
            parser.set_defaults(**said)
            found = parser.parse_intermixed_args(rest)
    except SystemExit as ended:  # of --help and --version
        return int(ended.code or 0)
    needed = [x for x in parser._actions if x.dest in NEEDED and getattr(found, x.dest) is None]
    if needed:
        parser.error(f"missing {', '.join('/'.join(x.option_strings) for x in needed)}")
    return found.run(found) or 0
