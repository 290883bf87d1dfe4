"""Draws pattern.svg (which keys each query sees) and speed.svg (time against length, from the committed results).

Run: .venv/bin/python docs/pictures.py
"""

import json
from pathlib import Path

import matplotlib as mpl
from dilated_attention import DilatedPattern
from dilated_attention.pattern import RULES
from dilated_attention.show import View, colours, picture
from matplotlib.figure import Figure

HERE = Path(__file__).parent
TOKENS, HEADS, LENGTHS, RATES = 16, 4, [4, 8, 16], [1, 2, 4]
INK, PAPER, LINES = "#1f2328", "#ffffff", "#d8dde3"
DARK = {
    INK: "#e6edf3",
    PAPER: "#0d1117",
    LINES: "#3d444d",
}  # what each becomes on a dark page
SERIES = {  # implementation: (name, colour, dark colour, where its name is beside its last point)
    "dense SDPA": ("dense attention", "#8c959f", "#9198a1", (-8, 2)),
    "FlexAttention": ("FlexAttention, same mask", "#bf8700", "#d4a72c", (2, 8)),
    "copy and gather, slicing": (
        "copy rows out and back, in PyTorch",
        "#bc4c00",
        "#f0883e",
        (-2, 8),
    ),
    "head_groups, auto": ("this library", "#0550ae", "#388bfd", (0, -22)),
}


def adapt(file: Path, dark: dict[str, str]) -> None:
    """Let an SVG change its colours where the reader's page is dark."""
    rules = "".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {other} !important }}\n'
        for light, other in dark.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}}}</style>\n</svg>"
    file.write_text(
        file.read_text(encoding="utf-8").replace("</svg>", style),
        encoding="utf-8",
    )


def settings() -> dict[str, object]:
    names = (
        "text.color",
        "axes.edgecolor",
        "axes.labelcolor",
        "xtick.color",
        "ytick.color",
    )
    return {
        **picture.SETTINGS,
        **dict.fromkeys(names, INK),
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
    }


def draw() -> Figure:
    figure = Figure(figsize=(8, 6.9), layout="constrained")
    for rule, row in zip(
        RULES, figure.subplots(len(RULES), HEADS), strict=True
    ):
        view = View.of(DilatedPattern.of(rule, LENGTHS, RATES), TOKENS, HEADS)
        for kind in view.kinds:
            for head in kind.heads:
                picture.draw_cells(
                    row[head], view, f"{rule}, head {head}", kind.counts()
                )
    picture.draw_key(
        figure, len(LENGTHS), "number of branches that contain the key"
    )
    figure.suptitle(
        f"queries down, keys across: N={TOKENS}, w={LENGTHS}, r={RATES}",
        fontsize=10,
    )
    return figure


def times(
    results: dict[str, list[dict[str, object]]], implementation: str
) -> list[tuple[int, float]]:
    """(tokens, median ms) of a training step, as the suite `scaling` measured it."""
    wanted = {
        "suite": "scaling", "implementation": implementation, "direction": "forward_backward", "status": "measured",
        "samples": 1, "heads": 8, "head_dim": 64, "dtype": "bfloat16", "causal": False,
    }  # fmt: skip
    found = {}
    for one in results["measurements"]:
        same = all(one[name] == value for name, value in wanted.items())
        if same and one["lengths"] in ([1024, 2048, 4096], [one["tokens"]]):
            found.setdefault(one["tokens"], one["ms"]["median"])
    return sorted(found.items())


def draw_speed() -> Figure:
    results = json.loads(
        (HERE.parent / "benchmarks/results/h200/results.json").read_text(
            encoding="utf-8"
        )
    )
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axis = figure.subplots()
    for implementation, (name, colour, _, place) in SERIES.items():
        points = times(results, implementation)
        axis.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=3,
            linewidth=2,
            color=colour,
        )
        axis.annotate(
            name,
            points[-1],
            place,
            textcoords="offset points",
            ha="right",
            color=colour,
            fontsize=9,
        )
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="ms, forward + backward",
    )
    axis.set_xticks(
        [2**i for i in (11, 13, 15, 17, 18, 20)],
        ["2k", "8k", "32k", "128k", "256k", "1M"],
    )
    axis.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axis.minorticks_off()
    axis.grid(color=LINES, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    machine = results["machine"]
    about = f"{machine['device']}, torch {machine['versions']['torch']}, bfloat16, 8 heads of 64, rule head_groups"
    axis.set_title(about, loc="left", fontsize=8)
    return figure


def main() -> None:
    with mpl.rc_context(settings()):
        picture.write(draw(), HERE / "pattern.svg")
        picture.write(draw_speed(), HERE / "speed.svg")
    levels = zip(
        colours.levels(len(LENGTHS)),
        colours.levels(len(LENGTHS), "dark"),
        strict=True,
    )
    adapt(HERE / "pattern.svg", {**DARK, **dict(levels)})
    adapt(
        HERE / "speed.svg",
        {**DARK, **{colour: dark for _, colour, dark, _ in SERIES.values()}},
    )


if __name__ == "__main__":
    main()
