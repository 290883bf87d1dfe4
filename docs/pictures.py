"""Draws pattern.svg (which keys each query sees) and speed.svg (time against length, from the committed results).

Run: .venv/bin/python docs/pictures.py
"""

import json
from pathlib import Path

import altair as alt
from dilated_attention import DilatedPattern
from dilated_attention.bench import plots, series
from dilated_attention.pattern import RULES

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks/results/h200/results.json"
TOKENS, HEADS, LENGTHS, RATES = 16, 4, [4, 8, 16], [1, 2, 4]
# in how many branches a key is: its colour, and that on a dark page
LEVELS = {1: "#9ecbff", 2: "#4a8fdc", 3: "#0b3d82"}
DARK = {"#9ecbff": "#1f4d7a", "#4a8fdc": "#3b82d0", "#0b3d82": "#a5d0ff"}
NAMES = {
    "dense SDPA": "dense attention",
    "FlexAttention": "FlexAttention, same mask",
    "copy and gather, slicing": "copy rows out and back",
    "head_groups, auto": "this library",
}


def cells(rule: str) -> list[dict[str, object]]:
    """One per head, query and key that it sees: in how many branches."""
    pattern = DilatedPattern.of(rule, LENGTHS, RATES)
    return [
        {"head": head, "query": query, "key": key, "count": keys.count(key)}
        for head in range(HEADS)
        for query in range(TOKENS)
        for keys in [
            pattern.keys(query, head, num_tokens=TOKENS, num_heads=HEADS)
        ]
        for key in sorted(set(keys))
    ]


def pattern_chart() -> alt.VConcatChart:
    """A row per rule, a column per head; queries go down, keys go across."""
    scale = alt.Scale(domain=list(LEVELS), range=list(LEVELS.values()))
    legend = alt.Legend(title="branches that contain the key", orient="bottom")
    tokens = alt.Scale(domain=list(range(TOKENS)))
    rows = [
        alt.Chart(alt.Data(values=cells(rule)))
        .mark_rect(stroke=series.PAPER, strokeWidth=0.5)
        .encode(
            x=alt.X("key:O", axis=None, scale=tokens),
            y=alt.Y("query:O", axis=None, scale=tokens),
            color=alt.Color("count:N", scale=scale, legend=legend),
        )
        .properties(
            width=150, height=150, view=alt.ViewBackground(fill=series.GRID)
        )
        .facet(
            column=alt.Column("head:N", title=None).header(
                labelExpr=f"'{rule}, head ' + datum.value"
            )
        )
        for rule in RULES
    ]
    title = (
        f"queries down, keys across: {TOKENS} tokens, w={LENGTHS}, r={RATES}"
    )
    return alt.vconcat(*rows, title=title)


def speed_chart() -> alt.LayerChart:
    """A training step of the suite `scaling`, in its first setting."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    points = series.points(results["measurements"])
    wanted = series.settings(points)[0]
    shown = [
        {**one, "series": NAMES[one["series"]]}
        for one in points
        if one["setting"] == wanted
        and one["direction"] == "forward_backward"
        and one["series"] in NAMES
    ]
    machine = results["machine"]
    about = f"{machine['device']}, torch {machine['versions']['torch']}, bfloat16, 8 heads of 64, rule head_groups"
    title = [f"Time in ms, forward + backward. {about}"]
    lengths = sorted({one["tokens"] for one in shown})
    chart = plots.line_chart(alt.Data(values=shown), 300, lengths=lengths)
    return chart.properties(width=600, title=title)


def write(name: str, chart: alt.TopLevelMixin) -> None:
    (HERE / name).write_bytes(
        plots.svg(plots.styled(chart), series.DARK | DARK)
    )


if __name__ == "__main__":
    write("pattern.svg", pattern_chart())
    write("speed.svg", speed_chart())
