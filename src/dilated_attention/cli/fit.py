"""Choose a pattern for a model that was trained with dense attention.

It looks at which tokens each layer and head of the model attends to in your
text, and gives the few (query, key) pairs of the budget to the heads whose
outputs would change most without: it says which few heads stay full, and what
the others see. `convert --pattern` switches the model; then fine-tune it.

Example: dilated-attention fit runs/dense --data book.txt --budget 1/8 -o pattern.json
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention import charts
from dilated_attention.cli import options
from dilated_attention.cli.options import option

if TYPE_CHECKING:
    from dilated_attention.fitting import Fit


def share(text: str) -> float:
    """More than 0, and at most 1."""
    try:
        found = Fraction(text)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if not 0 < found <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share of dense attention's pairs, such as 1/8 or 0.125")
    return float(found)


OPTIONS = (
    *options.MODEL,
    option("--budget", type=share, required=True, metavar="SHARE",
           help="The most pairs, as a share of dense attention's in rows of -n tokens, such as 1/8."),
    option("--per", choices=("head", "layer"), default="head",
           help="What gets a choice of its own: each key/value head, or each layer."),
    option("--by", choices=("output", "mass"), default="output",
           help="What is to be kept of dense attention: the outputs of its heads, or its mass alone."),
    option("-o", "--output", type=Path, default=Path("pattern.json"), metavar="FILE",
           help="The .json file for the patterns, one per layer."),
)  # fmt: skip


def run(given: Namespace) -> None:
    with options.refusing():
        options.file("-o", given.output, (".json",))
    from dilated_attention import fitting, scoring
    from dilated_attention.cli.output import console, print_json
    from dilated_attention.models.transformer import written

    with options.refusing():
        model, text, device = options.model_and_text(given)
        rows = scoring.rows_of(model, text, given.tokens, given.rows)
        found = fitting.fit(model, rows.to(device), given.budget, by=given.by, per_layer=given.per == "layer")
    charts.write(given.output, (json.dumps(written(found.patterns), indent=1) + "\n").encode())
    if given.chart is not None:
        charts.write(given.chart, drawn(found, given.chart.suffix.lower()))
    if given.json:
        print_json({"tokens": given.tokens, "rows": len(rows), "patterns": written(found.patterns), **vars(found)})
        return
    show(found, f"mass in {len(rows)} rows of {given.tokens:,} tokens, of 1 for dense attention")
    for file in filter(None, (given.output, given.chart)):
        console().print(f"written: {file}")


def show(found: Fit, title: str) -> None:
    from dilated_attention.cli.output import console, print_table

    screen, layers = console(), range(len(found.patterns))
    rows = []
    for layer in layers:
        means = [sum(some) / len(some) for some in (*(one[layer] for one in found.alone.values()), found.kept[layer])]
        full = ", ".join(map(str, found.full(layer)))
        pairs = sum(found.shares[layer]) / len(found.shares[layer])
        rows.append([str(layer), *(f"{mean:.3f}" for mean in means), f"{pairs:.1%}", full or "none"])
    print_table(screen, title, ["layer", *found.alone, "chosen", "pairs", "<full heads"], rows)
    full, heads = sum(len(found.full(layer)) for layer in layers), sum(map(len, found.shares))
    kept = sum(map(sum, found.kept)) / heads
    screen.print(
        f"\nchosen: {found.share:.1%} of dense attention's pairs, which keep {kept:.1%} of its weight; {full} of "
        f"{heads} heads stay full"
    )


def drawn(found: Fit, ending: str) -> bytes:
    """Two maps of layers and heads: what the chosen pairs keep, and how many they are."""
    from dilated_attention.bench import plots

    def panel(title: str, numbers: list[list[float]], scheme: str) -> dict[str, Any]:
        cells = [{"layer": i, "head": j, "value": x} for i, some in enumerate(numbers) for j, x in enumerate(some)]
        axes = {name: {"field": name, "type": "ordinal", "axis": {"labelAngle": 0}} for name in ("layer", "head")}
        colour = {
            "field": "value",
            "type": "quantitative",
            "title": None,
            "scale": {"domain": [0, 1], "scheme": scheme},
        }
        return {
            "data": {"values": cells}, "mark": "rect", "title": title, "width": {"step": 18}, "height": {"step": 18},
            "encoding": {"x": axes["head"], "y": axes["layer"], "color": colour},
        }  # fmt: skip

    maps = [panel("weight kept", found.kept, "greens"), panel("share of its pairs", found.shares, "purples")]
    chart = plots.styled({"hconcat": maps, "resolve": {"scale": {"color": "independent"}}})
    return plots.svg(chart) if ending == ".svg" else charts.drawn(chart, ending)
