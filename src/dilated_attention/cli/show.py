"""`show`: who sees whom, drawn on the terminal or into a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dilated_attention.cli import arguments, options
from dilated_attention.cli.output import console

PLAIN_WIDTH = 100  # where no terminal says how wide


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
        typer.Option(parser=options.index, metavar="N", help="Also list what this token sees, counted from 0."),
    ] = None,
    window: Annotated[
        Any,
        typer.Option(parser=options.span, metavar="FROM:TO", help="Draw only these tokens, for example 0:4k."),
    ] = None,
    causal: options.Causal = False,
    ranks: Annotated[
        int | None,
        typer.Option(parser=options.count, metavar="P", help="Also show what this many devices send to each other."),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How they send: ring, allgather, alltoall or auto.  [default: ring]"),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(metavar="D", help="Dimension of a head, for the bytes sent.  [default: 64]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="The dtype, for the bytes sent.  [default: bfloat16]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write an .html, .svg or .png file instead of text."),
    ] = None,
) -> None:
    """Draw who sees whom: a picture of a pattern.

    It shows the tokens that each head sees, what a single token sees and reaches, and what devices send to each other.

    Example: dilated-attention show -n 64 -w 16,64 -r 1,4 --heads 4
    """
    from dilated_attention import show as pictures

    with arguments.refusing():
        if ranks is None and (exchange, head_dim, dtype) != (None, None, None):
            raise ValueError("--exchange, --head-dim and --dtype say what travels: they need --ranks")
        if output is not None:
            arguments.file("-o", output, (".html", ".svg", ".png"))
        drawn = tokens if window is None else window[1] - window[0]
        view = pictures.View.of(
            options.pattern(rule, segment_lengths, dilation_rates),
            tokens,
            heads,
            kv_heads=kv_heads,
            is_causal=causal,
            head=head,
            query=query,
            window=window,
            ranks=ranks,
            exchange=exchange or "ring",
            head_dim=64 if head_dim is None else head_dim,
            dtype=arguments.dtype("--dtype", dtype or "bfloat16"),
            cells=pictures.MOST_CELLS if output is not None and drawn <= pictures.MOST_CELLS else 64,
        )
    screen = console()
    if output is None:
        is_coloured = screen.color_system is not None and not screen.no_color
        width = screen.width if screen.is_terminal else PLAIN_WIDTH
        is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
        print(pictures.text(view, width, is_coloured, ascii_only=not is_unicode), end="")
    else:
        pictures.save(view, output)
        screen.print(f"written: {output}", soft_wrap=True)
