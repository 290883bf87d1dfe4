"""Choose a pattern for a model that was trained with dense attention.

It looks at what each layer and head attends to in your text, and spends the
budget of (query, key) pairs where the model's loss depends on them most. It
says which heads stay full, and what the others see. That takes a backward
pass of each row, without checkpointing: --by mass takes less memory.
`convert --pattern` puts the patterns into the model; then fine-tune it.

Example: dilated-attention fit runs/dense --data book.txt --budget 1/8 -o pattern.json
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from fractions import Fraction
from pathlib import Path
from statistics import mean

from dilated_attention.cli import options
from dilated_attention.cli.options import option
from dilated_attention.show import charts


def share(text: str) -> float:
    try:
        if 0 < (found := Fraction(text)) <= 1:
            return float(found)
    except (ValueError, ZeroDivisionError):
        pass
    raise ArgumentTypeError(f"{text!r} is not a share of dense attention's pairs, such as 1/8 or 0.125")


OPTIONS = (
    *options.MODEL,
    option("--budget", "SHARE", "The most pairs, as a share of dense attention's in rows of -n tokens, such as 1/8.",
           share, required=True),
    option("--by", "WHAT", "What is to be kept: the model's loss, or the mass (the share of dense attention's weight).",
           default="loss", choices=("loss", "mass")),
    option("-o --output", "FILE", "The .json file for the patterns, one per layer.", Path, Path("pattern.json")),
)  # fmt: skip


def run(given: Namespace) -> None:
    with options.refusing():
        options.file("-o", given.output, (".json",))
    from dilated_attention.bench import plots
    from dilated_attention.cli.output import console, print_json, print_table, watching
    from dilated_attention.models import fitting
    from dilated_attention.models.transformer import written

    with options.refusing():
        model, _, rows = options.model_and_rows(given)
        with watching() as watch:
            found = fitting.fit(model, rows, given.budget, given.by, lambda share: watch("looking at heads", share))
    patterns = written(found.patterns)
    charts.write(given.output, (json.dumps(patterns, indent=1) + "\n").encode())
    if given.chart is not None:
        cells = [
            {"layer": layer, "head": head, "pairs": pairs, "mass": found.mass[layer][head]}
            for layer, shares in enumerate(found.shares) for head, pairs in enumerate(shares)
        ]  # fmt: skip
        titles = {"pairs": "share of dense attention's pairs", "mass": "share of its weight"}
        maps = [plots.heat_map(cells, name, "head", "layer", title) for name, title in titles.items()]
        charts.write(given.chart, plots.svg(plots.styled({"hconcat": maps})))
    if given.json:
        print_json({"tokens": given.tokens, "rows": len(rows), **vars(found), "patterns": patterns})
        return
    screen, lines = console(), []
    for layer, shares in enumerate(found.shares):
        means = [mean(one[layer]) for one in (*found.alone.values(), found.mass, found.kept)]
        those = ", ".join(str(head) for head, pairs in enumerate(shares) if pairs >= 1)
        lines.append([str(layer), *(f"{x:.3f}" for x in means), f"{mean(shares):.1%}", those or "none"])
    columns = ["layer", *found.alone, "chosen", "kept", "its pairs", "<full heads"]
    title = f"mass, in {len(rows)} rows of {given.tokens:,} tokens: 1 is all of dense attention"
    print_table(screen, title, columns, lines)
    full = [pairs >= 1 for shares in found.shares for pairs in shares]
    pairs = f"{found.share:.1%} of dense attention's pairs"
    screen.print(f"\nchosen: {pairs}; {sum(full)} of {len(full)} heads stay full")
    screen.print(f"kept: of the {given.by} that heads lose with the narrowest windows, the share that they keep")
    screen.print(*(f"written: {file}" for file in (given.output, given.chart) if file), sep="\n")
