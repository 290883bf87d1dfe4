"""Draw which keys each query sees: a picture of a pattern.

Up to 512 tokens (64 in a terminal) are drawn one by one. A longer sequence is
drawn in larger cells of several tokens. --window draws only a part of it.

Example: dilated-attention show -n 64 -w 16,64 -r 1,4 --heads 4
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from dilated_attention.cli import options
from dilated_attention.cli.options import option

OPTIONS = (
    options.SUGGESTION, options.TOKENS, *options.PATTERN, options.RULE, *options.SHAPE,
    option("--head", "H", "Draw only this head, counted from 0.", options.index),
    option("--query", "N", "Mark this token (the first is 0), and list the keys that it sees.", options.index),
    option("--window", "FROM:TO", "Draw only these tokens, for example 0:512.", options.span),
    option("--colour --color", "WHAT", "Only with -o. What colours show: share, how many of a cell's (query, key) "
           "pairs are computed; or branch, which branch computes most of them.", default="share"),
    # not `ranks`: a suggestion has those of a call
    option("--ranks", "P", "Only with -o. Draw where the sequence is cut for P devices.", options.count,
           dest="borders"),
    option("-o --output", "FILE", "Write an .html, .svg or .png file instead of text.", Path),
)  # fmt: skip


def run(given: Namespace) -> None:
    from dilated_attention.cli.output import console
    from dilated_attention.show import terminal, vega
    from dilated_attention.show.view import MOST_CELLS, Plot

    screen = console()
    with options.refusing():
        if given.output is not None:
            options.file("-o", given.output, vega.ENDINGS)
        elif given.borders is not None or given.colour != "share":
            raise ValueError("--ranks and --colour change what is drawn into a file: name one with -o")
        view = Plot(
            options.pattern(given), given.tokens, given.heads, kv_heads=given.kv_heads, is_causal=given.causal,
            head=given.head, query=given.query, window=given.window, ranks=given.borders, colour=given.colour,
            cells=terminal.cells_in(screen, given.tokens) if given.output is None else MOST_CELLS,
        )  # fmt: skip
    if given.output is None:
        screen.print(terminal.text(view, screen), soft_wrap=False)
    else:
        vega.save(view, given.output)
        screen.print(f"written: {given.output}")
