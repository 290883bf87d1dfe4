"""Draws docs/pattern.svg: which keys each query sees, by rule and head. Run: .venv/bin/python docs/pictures.py"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from dilated_attention import DilatedPattern
from dilated_attention.pattern import RULES
from dilated_attention.show import View, picture

TOKENS, HEADS, LENGTHS, RATES = 16, 4, [4, 8, 16], [1, 2, 4]


def draw() -> Figure:
    figure = Figure(figsize=(8, 6.9), layout="constrained")
    for rule, row in zip(RULES, figure.subplots(len(RULES), HEADS), strict=True):
        view = View.of(DilatedPattern.of(rule, LENGTHS, RATES), TOKENS, HEADS)
        for kind in view.kinds:
            for head in kind.heads:
                picture.draw_cells(row[head], view, f"{rule}, head {head}", kind.counts())
    picture.draw_key(figure, len(LENGTHS), "branches that show the key")
    figure.suptitle(f"queries down, keys across: N={TOKENS}, w={LENGTHS}, r={RATES}", fontsize=10)
    return figure


def main() -> None:
    with mpl.rc_context(picture.SETTINGS):
        picture.write(draw(), Path(__file__).with_name("pattern.svg"))


if __name__ == "__main__":
    main()
