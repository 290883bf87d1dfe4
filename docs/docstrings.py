"""Docstrings as Markdown, for the API pages: roles become links, ``::`` a colon, and products stay."""

import re
from typing import Any

from griffe import Extension, Object


class Docstrings(Extension):
    """Named in zensical.toml; the pages are made from the source, which is not imported."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


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
