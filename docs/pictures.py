"""Draws docs/pattern.svg: which keys each query sees, by rule and head. Run: .venv/bin/python docs/pictures.py"""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

from dilated_attention import DilatedPattern

TOKENS, HEADS, LENGTHS, RATES = 16, 4, [4, 8, 16], [1, 2, 4]
COLOURS = ListedColormap(["#f4f4f2", "#b9d3ea", "#5d9bd0", "#1f4e79"])


def seen(pattern: DilatedPattern, head: int) -> list[list[int]]:
    """How many branches show key j (column) to query i (row)."""
    rows = (pattern.keys(i, head, num_tokens=TOKENS, num_heads=HEADS) for i in range(TOKENS))
    return [[keys.count(j) for j in range(TOKENS)] for keys in rows]


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "dilated attention", "svg.fonttype": "none", "font.size": 9})
    rules = {"longnet": DilatedPattern.longnet, "torchscale": DilatedPattern.torchscale,
             "head_groups": DilatedPattern.head_groups}  # fmt: skip
    figure, axes = plt.subplots(len(rules), HEADS, figsize=(8, 6.4), layout="constrained")
    for row, (rule, make) in zip(axes, rules.items(), strict=True):
        for head, axis in enumerate(row):
            image = axis.imshow(seen(make(LENGTHS, RATES), head), cmap=COLOURS, vmin=-0.5, vmax=3.5)
            axis.set(xticks=[], yticks=[], title=f"{rule}, head {head}")
            axis.set_xticks([x - 0.5 for x in range(TOKENS)], minor=True)
            axis.set_yticks([x - 0.5 for x in range(TOKENS)], minor=True)
            axis.grid(which="minor", color="white", linewidth=0.6)
            axis.tick_params(which="both", length=0)
    bar = figure.colorbar(image, ax=axes, ticks=range(4), shrink=0.4)
    bar.set_label("branches that show the key")
    figure.suptitle(f"queries down, keys across: N={TOKENS}, w={LENGTHS}, r={RATES}", fontsize=10)
    figure.savefig(Path(__file__).with_name("pattern.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
