"""Docstrings as Markdown, for the API pages: roles become links, ``::`` a colon, and products stay.

The page of the command line has the help of every command, as it is printed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from griffe import Extension, Object

COMMAND = "dilated_attention.cli.main"


class Docstrings(Extension):
    """Named in zensical.toml; the pages are made from the source, which is not imported."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
            if obj.path == COMMAND:
                obj.docstring.value += helps()


def as_markdown(text: str) -> str:
    text = re.sub(
        r":(?:class|func):`(\w+)`", r"[`\1`][dilated_attention.\1]", text
    )
    text = re.sub(r":meth:`(\w+)`", r"`\1`", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    prose, *others = re.split(
        r"(`+[^`]+`+)", text
    )  # code spans at every second place
    others[1::2] = [_times(part) for part in others[1::2]]
    return "".join([_times(prose), *others])


def _times(prose: str) -> str:
    """A product is no emphasis: h*G."""
    return re.sub(r"(?<=[\w)])\*(?=[\w(])", r"\\*", prose)


def helps() -> str:
    """What --help prints, for all commands."""
    names = re.findall(
        r"^\W*([a-z]+)  ",
        _help().partition("Commands")[2],
        flags=re.MULTILINE,
    )
    return "".join(f"\n\n```text\n{_help(name)}\n```" for name in names)


def _help(*command: str) -> str:
    source = Path(__file__).parents[1] / "src"
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "dilated_attention", *command, "--help"],
        env={**os.environ, **plain, "PYTHONPATH": str(source)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout.strip()
