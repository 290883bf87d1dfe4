"""Charts as files: one Vega-Lite specification becomes an .svg, a .png, or part of a page that loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# a page may use its own scripts and styles, and load nothing
POLICY = "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'"
# What XML forbids: control characters, and what stands in for names that are not UTF-8. vl-convert ends the process.
NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def library(name: str, needing: str = "a chart needs", extra: str = "bench") -> Any:
    """An optional module, or one line that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, package := name.partition(".")[0]):
            raise
        text = f'{needing} {package}, which is not installed: pip install ".[{extra}]" from a clone'
        raise ModuleNotFoundError(text, name=package) from error


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """What JSON can hold, with all names and values in its lists and objects changed."""
    if isinstance(value, list | tuple):
        return [changed(part, change) for part in value]
    if isinstance(value, dict):
        return {change(key): changed(part, change) for key, part in value.items()}
    return change(value)


def plain(value: Any) -> Any:
    """A text without the characters that a picture cannot hold; anything else as it is."""
    return NO_XML.sub("\ufffd", value) if isinstance(value, str) else value


def drawn(specification: dict[str, Any], ending: str, scale: float = 2) -> bytes:
    """A chart as the content of an .svg or a .png file."""
    convert, specification = library("vl_convert"), changed(specification, plain)
    if ending == ".svg":
        return str(convert.vegalite_to_svg(specification)).encode()
    return bytes(convert.vegalite_to_png(specification, scale=scale))


@functools.cache
def scripts() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines window.embed."""
    text = str(library("vl_convert").javascript_bundle("window.embed = vegaEmbed;"))
    return text.replace("</script", "<\\/script")  # inside a page it must not end its own element


def page(folder: Path, data: object, *, scripts: Sequence[str] = (), styles: Sequence[str] = (), **values: Any) -> str:
    """The page.html of a folder with its page.css and page.js, these scripts and styles, data as JSON, and values."""
    import jinja2  # comes with PyTorch, and brings markupsafe
    from markupsafe import Markup as safe  # noqa: N813 - it marks what is

    html, css, js = ((folder / f"page.{ending}").read_text("utf-8") for ending in ("html", "css", "js"))
    own = {"styles": [css, *styles], "scripts": [*scripts, js]}
    values |= {name: [*map(safe, texts)] for name, texts in own.items()}
    policy = safe(POLICY.format(_hashes(own["scripts"]), _hashes(own["styles"])))
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    template = jinja2.Template(html, undefined=jinja2.StrictUndefined, **options)
    return str(template.render(policy=policy, data=safe(as_json(data)), **values))


def _hashes(texts: Iterable[str]) -> str:
    """Scripts or styles as a policy names them."""
    codes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{code}'" for code in codes)


def as_json(data: object) -> str:
    """JSON for the inside of a script element: nothing in it ends the element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def write(file: Path, content: bytes) -> None:
    """The whole file or none of it, also when the program is stopped meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".half-written-{secrets.token_hex(8)}")
    try:
        part.write_bytes(content)  # with the rights that any new file gets
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def writable(folder: Path, option: str = "--out") -> Path:
    """The folder, made if need be, in which a file can be written: better known before hours of work than after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}): name another with {option}") from error
    return folder
