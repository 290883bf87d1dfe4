"""Score a language model on text: bits by position, and recall by distance.

Bits say how well it predicts each token, early or late in a row of the text:
fewer are better. For recall, facts are planted in the text and asked for later:
pairs among many, needles with one of ten names, and chains of two facts.

Example: dilated-attention evaluate runs/one --data book.txt -n 8k
"""

from __future__ import annotations

from argparse import Namespace

from dilated_attention.cli import options
from dilated_attention.show import charts

OPTIONS = options.MODEL
TITLE = "right answers, by distance in bytes"


def run(given: Namespace) -> None:
    from dilated_attention.bench import plots
    from dilated_attention.cli.output import console, print_json, print_table
    from dilated_attention.models import recall, scoring

    with options.refusing():
        model, text, rows = options.model_and_rows(given)
        asked = scoring.planted(text, given.tokens, given.rows)
    bits = scoring.by_position(model, rows)
    hits = recall.by_distance(asked, scoring.recalled(model, asked, rows.device))
    mean = sum(one["bits"] * (one["last"] - one["first"] + 1) for one in bits) / (given.tokens - 1)
    if given.chart is not None:
        chart = plots.heat_map(hits, "right", "from", "kind", TITLE)
        charts.write(given.chart, plots.svg(plots.styled(chart)))
    if given.json:
        print_json({"tokens": given.tokens, "rows": len(rows), "bits": mean, "by_position": bits, "recall": hits})
        return
    screen, cells = console(), {(one["kind"], one["from"]): f"{one['right']:.0%}" for one in hits}
    lines = [[f"{one['first']:,} to {one['last']:,}", f"{one['bits']:.3f}"] for one in bits]
    title = f"bits per token, in {len(rows)} rows of {given.tokens:,}"
    print_table(screen, title, ["position", "bits"], [*lines, ["all", f"{mean:.3f}"]])
    distances = sorted({distance for _, distance in cells})
    table = [[kind, *(cells.get((kind, distance), "") for distance in distances)] for kind in recall.KINDS]
    print_table(screen, TITLE, ["asked for", *(f"from {x:,}" for x in distances)], table)
    if given.chart is not None:
        screen.print(f"written: {given.chart}")
