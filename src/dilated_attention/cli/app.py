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
NEEDED = {  # unless a suggestion has them
    "tokens": "-n/--tokens", "segment_lengths": "-w/--segment-lengths", "dilation_rates": "-r/--dilation-rates",
}  # fmt: skip
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

    def __init__(self, name: str, about: str) -> None:
        lines = argparse.RawDescriptionHelpFormatter
        super().__init__(name, description=inspect.cleandoc(about), formatter_class=lines, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message} (see {self.prog} --help)")

    def print_help(self, file: Any = None) -> None:
        text = self.format_help()
        if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            for what, colour in COLOURS.items():
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
        parser = Parser(f"{NAME} {run.__name__}", run.__doc__ or "")
        for add in some:
            add(parser)
        parser.set_defaults(run=run)
        found[run.__name__] = parser
    return found


def top() -> Parser:
    """What stands before a command."""
    first_lines = {run.__name__: (run.__doc__ or "").partition("\n")[0] for run in COMMANDS}
    listed = "\n".join(f"  {name:<12}{line}" for name, line in first_lines.items())
    found = Parser(NAME, ABOUT)
    found.epilog = f"Commands:\n{listed}"
    found.add_argument("--version", action="version", version=f"{NAME} {dilated_attention.__version__}")
    found.add_argument("command", nargs="?", help="one of those below; --help after it lists its options")
    return found


def run(given: Sequence[str]) -> int:
    """The exit code of a command line; whatever is wrong with it is Refused."""
    made = parsers()
    try:
        if not given or given[0] not in made:
            return _without_command(given, made)
        parser = made[given[0]]
        found = parser.parse_intermixed_args(given[1:])
        with arguments.refusing():
            said = options.defaults(found)
        if said:
            parser.set_defaults(**said)
            found = parser.parse_intermixed_args(given[1:])
    except SystemExit as ended:  # of --help and --version
        return int(ended.code or 0)
    missing = [names for name, names in NEEDED.items() if getattr(found, name, names) is None]
    if missing:
        parser.error(f"missing {', '.join(missing)}")
    return found.run(found) or 0


def _without_command(given: Sequence[str], made: dict[str, Parser]) -> int:
    wrong = top().parse_args(given[:1]).command
    if wrong is not None:
        near = difflib.get_close_matches(wrong, made, 1)
        top().error(f"no such command: {wrong!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    top().print_help()
    return 0
