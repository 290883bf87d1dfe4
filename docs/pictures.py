"""Draws pattern.svg, kinds.svg and unions.svg (which keys each query sees), and speed.svg (time against length, from
the committed results).

Run: .venv/bin/python docs/pictures.py
"""

import json
from pathlib import Path
from typing import Any

import torch
from dilated_attention import (
    Blocks,
    Dense,
    Dilated,
    DilatedPattern,
    Global,
    Pattern,
    Prefix,
    Strided,
    Window,
)
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
    "copy and gather, slicing": "head_groups, copy and gather",
    "longnet, auto": "this library, longnet",
    "head_groups, auto": "this library, head_groups",
}


KINDS = {
    "Window(3)": Window(3),
    "Strided(6)": Strided(6),
    "Dilated(12, 3)": Dilated(12, 3),
    "Prefix(4)": Prefix(4),
    "Global(2)": Global(2),
    "Blocks(6, [(0, 2), ...])": Blocks(6, [(0, 2), (1, 1), (2, 3), (3, 0)]),
    "Dense()": Dense(),
}
UNIONS = {
    "language model, causal": [Window(3), Prefix(1), Strided(6)],
    "slide encoder": [Global(1), Window(2), Dilated(24, 4)],
    "genome": [Window(2), Dilated(12, 3), Dilated(24, 6)],
}


def seen(
    pattern: Pattern, head: int = 0, tokens: int = 24, is_causal: bool = False
) -> dict[tuple[int, int], int]:
    """The pairs of query and key that are seen: the first branch that shows them."""
    token, found = torch.arange(tokens), {}
    for index, branch in reversed([*enumerate(pattern.branches_for(HEADS))]):
        pairs = branch.sees(head, token[:, None], token).expand(tokens, tokens)
        shown = (pairs.tril() if is_causal else pairs).nonzero().tolist()
        found |= dict.fromkeys(map(tuple, shown), index)
    return found


def panel(
    left: int, title: str, found: dict[tuple[int, int], int],
    tokens: int = TOKENS, top: int = TOP,
) -> str:  # fmt: skip
    """Queries go down, keys go across."""
    side = tokens * CELL
    paths = dict.fromkeys(sorted({*found.values()}), "")
    for (query, key), branch in sorted(found.items()):
        paths[branch] += f"M{key * CELL} {query * CELL}h5v5h-5z"
    bars = [f'<path class="b{x}" d="{path}"/>' for x, path in paths.items()]
    text = f'<text y="-8">{title}</text>'
    back = f'<rect class="p" width="{side}" height="{side}"/>'
    return f'<g transform="translate({left} {top})">{text}{back}{"".join(bars)}</g>'


def label(branch: int, left: int, y: int, text: str) -> str:
    """Which colour is which branch."""
    return (
        f'<rect class="b{branch}" x="{left}" y="{y}" width="12" height="12"/>'
        f'<text x="{left + 18}" y="{y + 11}">{text}</text>'
    )


def svg(width: int, height: int, parts: list[str]) -> bytes:
    light = STYLE.format(*COLOURS, ink="#1f2328", grid="#f0f2f5")
    dark = STYLE.format(*DARK, ink="#e6edf3", grid="#21262d")
    style = f"{light}@media(prefers-color-scheme: dark){{{dark}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}"><style>{style}</style>{"".join(parts)}</svg>'
    ).encode()


def pattern_picture() -> bytes:
    """Dense attention beside two heads, and which colour is which branch."""
    pairs = [(q, k) for q in range(TOKENS) for k in range(TOKENS)]
    parts = [panel(0, "dense attention", dict.fromkeys(pairs, 3))]
    pattern = DilatedPattern.longnet(LENGTHS, RATES)
    for head in range(2):
        title = f"dilated attention, head {head}"
        found = seen(pattern, head, TOKENS)
        parts.append(panel(STEP * (head + 1), title, found))
    y = TOP + TOKENS * CELL + 12
    for branch, (length, rate) in enumerate(zip(LENGTHS, RATES, strict=True)):
        parts.append(
            label(branch, STEP * branch, y, f"w = {length}, r = {rate}")
        )
    return svg(2 * STEP + TOKENS * CELL, TOP + TOKENS * CELL + 30, parts)


def kinds_picture() -> bytes:
    """Each kind of branch, four in a row."""
    side, row = 24 * CELL, TOP + 24 * CELL + 12
    parts = []
    for index, (title, branch) in enumerate(KINDS.items()):
        down, across = divmod(index, 4)
        found = seen(Pattern([branch]))
        parts.append(panel(across * 180, title, found, 24, TOP + down * row))
    return svg(3 * 180 + side, 2 * row, parts)


def unions_picture() -> bytes:
    """Three unions, each with its branches below."""
    parts, bottom = [], TOP + 24 * CELL + 12
    for index, (title, branches) in enumerate(UNIONS.items()):
        found = seen(Pattern(branches), is_causal="causal" in title)
        parts.append(panel(index * STEP, title, found, 24))
        for place, branch in enumerate(branches):
            values = [
                x for x in branch.to_dict().values() if isinstance(x, int)
            ]
            text = f"{type(branch).__name__}({', '.join(map(str, values))})"
            parts.append(label(place, index * STEP, bottom + 20 * place, text))
    return svg(2 * STEP + 24 * CELL, bottom + 20 * 3, parts)


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


PICTURES = {
    "pattern.svg": pattern_picture,
    "kinds.svg": kinds_picture,
    "unions.svg": unions_picture,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_bytes(draw())
    drawn = plots.svg(plots.styled(speed_chart()))
    (HERE / "speed.svg").write_bytes(drawn)
