"""`show`: who sees whom, drawn on the terminal or into a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

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
    head: Annotated[str | None, typer.Option(metavar="H", help="Draw this head alone, counted from 0.")] = None,
    query: Annotated[str | None, typer.Option(metavar="N", help="Also what this token sees, counted from 0.")] = None,
    window: Annotated[
        str | None, typer.Option(metavar="FROM:TO", help="Draw these tokens only, counted as -n: 0:4k.")
    ] = None,
    causal: options.Causal = False,
    ranks: Annotated[str | None, typer.Option(metavar="P", help="Also what travels among so many devices,")] = None,
    exchange: Annotated[
        str | None, typer.Option(metavar="NAME", help="by ring, allgather, alltoall or auto,  [default: ring]")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="D", help="with rows of this size,  [default: 64]")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="in this dtype.  [default: bfloat16]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write an .html, .svg or .png file instead.")
    ] = None,
) -> None:
    """Who sees whom: a picture of a pattern.

    The tokens that each head sees, what a single token sees and reaches, and what travels among devices.
    """
    from dilated_attention import show as pictures

    with arguments.refusing():
        if ranks is None and (exchange, head_dim, dtype) != (None, None, None):
            raise ValueError("--exchange, --head-dim and --dtype say what travels: they need --ranks")
        if output is not None:
            arguments.file("-o", output, (".html", ".svg", ".png"))
        view = pictures.View.of(
            options.pattern(rule, segment_lengths, dilation_rates),
            arguments.count("-n", tokens),
            heads,
            kv_heads=kv_heads,
            is_causal=causal,
            head=None if head is None else arguments.count("--head", head, least=0),
            query=None if query is None else arguments.count("--query", query, least=0),
            window=None if window is None else arguments.span("--window", window),
            ranks=None if ranks is None else arguments.count("--ranks", ranks),
            exchange=exchange or "ring",
            head_dim=64 if head_dim is None else head_dim,
            dtype=arguments.dtype("--dtype", dtype or "bfloat16"),
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
