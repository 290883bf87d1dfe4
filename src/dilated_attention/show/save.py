"""A view as a file: what its name ends in says which kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dilated_attention.show.page import page
from dilated_attention.show.seen import View


@contextmanager
def needing_matplotlib(what: str, instead: str) -> Iterator[None]:
    """Around the import of what draws: say what to do where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{what} {error.name}, which is not installed: pip install matplotlib, {instead}"
        raise ModuleNotFoundError(text) from error


def save(view: View, file: Path) -> None:
    """Write a page (.html) or a picture (.png, .svg)."""
    suffix = file.suffix.lower()
    if suffix == ".html":
        file.write_text(page(view), encoding="utf-8")
    elif suffix in (".png", ".svg"):
        with needing_matplotlib(f"{file.name} needs", "or save a .html"):
            from dilated_attention.show.picture import save_picture
        save_picture(view, file)
    else:
        raise ValueError(f"cannot save {file.name!r}: give it a name that ends in .html, .png or .svg")
