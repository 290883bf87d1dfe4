"""Score a language model on text: bits by position, and recall by distance.

Bits say how well it predicts each token, early or late in a row (lower is
better). For recall, facts are planted in the text, and asked for further on:
pairs among many, needles with one of ten names, and chains of two facts.

Example: dilated-attention evaluate runs/one --data book.txt -n 8k
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from dilated_attention import charts
from dilated_attention.cli import options

OPTIONS = options.MODEL
Found = list[dict[str, Any]]


def run(given: Namespace) -> None:
    from dilated_attention import scoring
    from dilated_attention.cli.output import console, print_json, print_table
    from dilated_attention.models import recall

    with options.refusing():
        model, text, device = options.model_and_text(given)
        rows = scoring.rows_of(model, text, given.tokens, given.rows)
        asked = scoring.planted(text, given.tokens, given.rows)
    bits = scoring.by_position(model, rows, device)
    hits = recall.by_distance(asked, scoring.recalled(model, asked, device))
    mean = sum(one["bits"] * (one["last"] - one["first"] + 1) for one in bits) / (given.tokens - 1)
    if given.chart is not None:
        charts.write(given.chart, drawn(bits, hits, given.chart.suffix.lower()))
    if given.json:
        print_json({"tokens": given.tokens, "rows": len(rows), "bits": mean, "by_position": bits, "recall": hits})
        return
    screen, columns = console(), [f"from {one:,}" for one in sorted({one["from"] for one in hits})]
    lines = [[f"{one['first']:,} to {one['last']:,}", f"{one['bits']:.3f}"] for one in bits]
    print_table(
        screen,
        f"bits per token in {len(rows)} rows of {given.tokens:,}",
        ["position", "bits"],
        [*lines, ["all", f"{mean:.3f}"]],
    )
    cells = {(one["kind"], f"from {one['from']:,}"): f"{one['right']:.0%}" for one in hits}
    table = [[kind, *(cells.get((kind, name), "") for name in columns)] for kind in recall.KINDS]
    print_table(screen, "right answers by distance, in bytes", ["asked for", *columns], table)
    if given.chart is not None:
        screen.print(f"written: {given.chart}")


def drawn(bits: Found, hits: Found, ending: str) -> bytes:
    from dilated_attention.bench import plots

    points = [{"x": (one["first"] * one["last"]) ** 0.5, "bits": one["bits"]} for one in bits]
    x = {"field": "x", "type": "quantitative", "title": "position", "scale": {"type": "log", "base": 2}}
    y = {"field": "bits", "type": "quantitative", "title": "bits per token", "scale": {"zero": False}}
    line = {
        "data": {"values": points},
        "mark": {"type": "line", "point": True},
        "width": 320,
        "height": 220,
        "encoding": {"x": x, "y": y},
    }
    cell = {
        "x": {"field": "from", "type": "ordinal", "title": "distance in bytes, from", "axis": {"labelAngle": 0}},
        "y": {"field": "kind", "type": "nominal", "title": None},
    }
    colour = {"field": "right", "type": "quantitative", "scale": {"domain": [0, 1], "scheme": "greens"}, "title": None}
    heat = {
        "data": {"values": hits},
        "mark": "rect",
        "title": "right answers",
        "width": {"step": 56},
        "height": {"step": 40},
        "encoding": {**cell, "color": colour},
    }
    chart = plots.styled({"hconcat": [line, heat]})
    return plots.svg(chart) if ending == ".svg" else charts.drawn(chart, ending)
