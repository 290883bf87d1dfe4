"""A view as a file: what its name ends in says which kind."""

from __future__ import annotations

from pathlib import Path

from dilated_attention.show.page import page
from dilated_attention.show.seen import View


def save(view: View, file: Path) -> None:
    """Write a page (.html) or a picture (.png, .svg)."""
    suffix = file.suffix.lower()
    if suffix == ".html":
        file.write_text(page(view), encoding="utf-8")
    elif suffix in (".png", ".svg"):
        try:
            from dilated_attention.show.picture import save_picture
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{file.name} needs {error.name}, which is not installed: pip install matplotlib, or save a .html"
            ) from error
        save_picture(view, file)
    else:
        raise ValueError(f"cannot save {file.name!r}: give it a name that ends in .html, .png or .svg")
