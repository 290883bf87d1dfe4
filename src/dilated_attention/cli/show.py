"""`show`: which keys each query sees, drawn on the terminal or into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dilated_attention.cli import arguments, options
from dilated_attention.cli.output import console


def show(
    tokens: options.Tokens,
    segment_lengths: options.Lengths,
    dilation_rates: options.Rates,
    rule: options.Rule = "longnet",
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = None,
    head: Annotated[
        int | None,
        typer.Option(parser=options.index, metavar="H", help="Draw only this head, counted from 0."),
    ] = None,
    query: Annotated[
        int | None,
        typer.Option(
            parser=options.index, metavar="N", help="Mark this token (the first is 0), and list the keys that it sees."
        ),
    ] = None,
    window: Annotated[
        Any,
        typer.Option(parser=options.span, metavar="FROM:TO", help="Draw only these tokens, for example 0:512."),
    ] = None,
    causal: options.Causal = False,
    colour: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="Only with -o. What colours show: share, how many of a cell's (query, key) pairs are computed; or "
            "branch, which branch computes most of them.",
        ),
    ] = "share",
    ranks: Annotated[
        int | None,
        typer.Option(
            parser=options.count,
            metavar="P",
            help="Only with -o. Draw where the sequence is cut for P devices.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write an .html, .svg or .png file instead of text."),
    ] = None,
) -> None:
    """Draw which keys each query sees: a picture of a pattern.

    Up to 512 tokens (64 in a terminal) are drawn one by one. A longer sequence is drawn in larger cells of several
    tokens. --window draws only a part of it.

    Example: dilated-attention show -n 64 -w 16,64 -r 1,4 --heads 4
    """
    from dilated_attention import show as pictures
    from dilated_attention.show import terminal

    screen = console()
    with arguments.refusing():
        if output is not None:
            arguments.file("-o", output, pictures.ENDINGS)
        elif ranks is not None or colour != "share":
            raise ValueError("--ranks and --colour change what is drawn into a file: name one with -o")
        view = pictures.View(
            options.pattern(rule, segment_lengths, dilation_rates),
            tokens,
            heads,
            kv_heads=kv_heads,
            is_causal=causal,
            head=head,
            query=query,
            window=window,
            ranks=ranks,
            colour=cast(pictures.Colour, colour),
            cells=terminal.cells_in(screen, tokens) if output is None else pictures.MOST_CELLS,
        )
    if output is None:
        screen.print(terminal.text(view, screen))
    else:
        pictures.save(view, output)
        screen.print(f"written: {output}", soft_wrap=True)
