"""Draws pattern.svg (which keys each query sees) and speed.svg (time against length, from the committed results).

Run: .venv/bin/python docs/pictures.py
"""

import json
from pathlib import Path
from typing import Any

from dilated_attention import DilatedPattern
from dilated_attention.bench import plots

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks/results/suggested/results.json"
TOKENS, HEADS, LENGTHS, RATES = 32, 4, [8, 16, 32], [1, 2, 4]
CELL, TOP, STEP = 6, 24, 220
# of branches, and of dense attention: colours, and those on a dark page
COLOURS = ("#0b3d82", "#4a8fdc", "#9ecbff", "#8c959f")
DARK = ("#a5d0ff", "#3b82d0", "#1f4d7a", "#6e7681")
STYLE = """text{{font:13px sans-serif;fill:{ink}}}.p{{fill:{grid}}}
.b0{{fill:{}}}.b1{{fill:{}}}.b2{{fill:{}}}.b3{{fill:{}}}"""
NAMES = {
    "dense cuDNN": "dense attention (cuDNN)",
    "copy and gather, slicing": "head_groups by copies",
    "longnet, auto": "this library, longnet",
    "head_groups, auto": "this library, head_groups",
}


def cells(head: int) -> dict[tuple[int, int], int]:
    """The pairs of query and key that are computed: in which branch, the shortest if there are several."""
    size = {"num_tokens": TOKENS, "num_heads": HEADS}
    return {
        (query, key): branch
        for branch in reversed(range(len(LENGTHS)))
        for query in range(TOKENS)
        for key in DilatedPattern.longnet(
            LENGTHS[branch : branch + 1], RATES[branch : branch + 1]
        ).keys(query, head, **size)
    }


def panel(left: int, title: str, found: dict[tuple[int, int], int]) -> str:
    """Queries go down, keys go across."""
    side = TOKENS * CELL
    paths = dict.fromkeys(sorted({*found.values()}), "")
    for (query, key), branch in found.items():
        paths[branch] += f"M{key * CELL} {query * CELL}h5v5h-5z"
    bars = [f'<path class="b{x}" d="{path}"/>' for x, path in paths.items()]
    text = f'<text y="-8">{title}</text>'
    back = f'<rect class="p" width="{side}" height="{side}"/>'
    return f'<g transform="translate({left} {TOP})">{text}{back}{"".join(bars)}</g>'


def pattern_picture() -> bytes:
    """Dense attention beside two heads, and which colour is which branch."""
    pairs = [(q, k) for q in range(TOKENS) for k in range(TOKENS)]
    parts = [panel(0, "dense attention", dict.fromkeys(pairs, 3))]
    for head in range(2):
        title = f"dilated attention, head {head}"
        parts.append(panel(STEP * (head + 1), title, cells(head)))
    for branch, (length, rate) in enumerate(zip(LENGTHS, RATES, strict=True)):
        at, y = STEP * branch, TOP + TOKENS * CELL + 12
        parts.append(
            f'<rect class="b{branch}" x="{at}" y="{y}" width="12" height="12"/>'
            f'<text x="{at + 18}" y="{y + 11}">w = {length}, r = {rate}</text>'
        )
    size = (2 * STEP + TOKENS * CELL, TOP + TOKENS * CELL + 30)
    light = STYLE.format(*COLOURS, ink="#1f2328", grid="#f0f2f5")
    dark = STYLE.format(*DARK, ink="#e6edf3", grid="#21262d")
    style = f"{light}@media(prefers-color-scheme: dark){{{dark}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}"'
        f' width="{size[0]}" height="{size[1]}"><style>{style}</style>{"".join(parts)}</svg>'
    ).encode()


def speed_chart() -> dict[str, Any]:
    """With the patterns that are suggested for each length."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    points = plots.points(results["measurements"])
    shown = [
        {**one, "series": NAMES[one["series"]]}
        for one in points
        if one["direction"] == "forward_backward" and one["series"] in NAMES
    ]
    machine = results["machine"]
    about = f"{machine['device']}, torch {machine['versions']['torch']}, bfloat16, 8 heads of 64"
    rule = "the longest segment spans the sequence"
    title = [f"Time in ms, forward + backward. {about}", rule]
    lengths = sorted({one["tokens"] for one in shown})
    chart = {
        **plots.line_chart({"values": shown}, 300),
        "params": plots.parameters("time", lengths),
    }
    return {**chart, "width": 600, "title": title}


if __name__ == "__main__":
    (HERE / "pattern.svg").write_bytes(pattern_picture())
    drawn = plots.svg(plots.styled(speed_chart()))
    (HERE / "speed.svg").write_bytes(drawn)
