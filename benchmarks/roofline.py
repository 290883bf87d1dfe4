"""A roofline of the figures of h200.py: python benchmarks/roofline.py [FILE] [--out DIR]

Work against traffic, both logarithmic: FLOP per byte of the least traffic (q, k, v, out and, with the backward pass,
dout, dq, dk, dv, each read or written once) to the right, TFLOP/s upwards. The roof is what the same device did in a
large matrix product and a large copy.

TFLOP/s count the pairs of the pattern, so a kernel that computes shared pairs once can stand above what it executes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dilated_attention.bench.plots import COLOURS, GRID, INK, MARKERS, MUTED, encoded

RESULTS = Path(__file__).parent / "results"
TITLES = {"forward": "forward", "forward_backward": "forward + backward"}
TENSORS = {"forward": 4, "forward_backward": 8}  # of least traffic
ITEM_BYTES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4}


class Point(NamedTuple):
    series: str
    case: str
    causal: bool
    intensity: float  # FLOP per byte
    tflops: float


def points(results: dict[str, Any], part: str) -> list[Point]:
    """All that was timed of "forward" or "forward_backward"."""
    found = []
    for record in results["cases"] + results["dense"]:
        if part not in record:  # wrong, or too large for the memory: it has no time
            continue
        figures = record[part]
        flops = figures["tflops"] * figures["median"] * 1e9
        least = TENSORS[part] * math.prod(record["shape"]) * ITEM_BYTES[results["dtype"]]
        series = (
            record["implementation"] if record["rule"] == "dense" else f"{record['implementation']}, {record['rule']}"
        )
        found.append(Point(series, record["case"], record["causal"], flops / least, figures["tflops"]))
    return found


def draw(results: dict[str, Any]) -> Figure:
    panels = {part: points(results, part) for part in TITLES}
    everything = [point for drawn in panels.values() for point in drawn]
    if not everything:
        raise ValueError("these results have no times: run benchmarks/h200.py to the end of a case")
    names = list(dict.fromkeys(point.series for point in everything))
    styles = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}
    figure = Figure(figsize=(10.5, 6.0), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for axis, (part, drawn) in zip(axes, panels.items(), strict=True):
        _roof(axis, results["ceilings"][0], everything)
        for point in drawn:
            colour, marker = styles[point.series]
            face = "white" if point.causal else colour
            axis.plot(point.intensity, point.tflops, marker, color=colour, markerfacecolor=face, markersize=6.5)
            axis.annotate(point.case, (point.intensity, point.tflops), (6, -3), textcoords="offset points",
                          fontsize=7.5, color=colour)  # fmt: skip
        axis.set_title(TITLES[part], fontsize=10, color=INK)
        _plain(axis)
    axes[0].set_ylabel("TFLOP/s of the pattern's pairs")
    machine = results["machine"]
    figure.suptitle(
        f"Roofline: {machine['device']}, torch {machine['versions']['torch']}, "
        f"{results['dtype'].removeprefix('torch.')}, commit {machine['commit'][:12]}",
        fontsize=11,
        color=INK,
    )
    handles = [Line2D([], [], color=c, marker=m, linestyle="none", label=name) for name, (c, m) in styles.items()]
    handles.append(
        Line2D([], [], color=MUTED, marker="o", markerfacecolor="white", linestyle="none", label="hollow: causal")
    )
    handles.append(Line2D([], [], color=MUTED, linestyle=":", label="measured ceilings"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _roof(axis: Axes, ceiling: dict[str, Any], drawn: list[Point]) -> None:
    matmul, copy = ceiling["matmul_tflops"], ceiling["copy_tb_per_s"]  # TFLOP/s; TB/s are TFLOP/s at 1 FLOP per byte
    bend = matmul / copy
    low, high = min(bend / 4, *(p.intensity / 1.5 for p in drawn)), max(bend * 4, *(p.intensity * 2 for p in drawn))
    axis.plot([low, bend, high], [copy * low, matmul, matmul], ":", color=MUTED, linewidth=1.5)
    axis.annotate(f"matmul, {matmul:.0f} TFLOP/s", (high, matmul), (0, 4), textcoords="offset points", ha="right",
                  fontsize=8, color=MUTED)  # fmt: skip
    axis.annotate(f"copy, {copy:.2f} TB/s", (low, copy * low), (6, 0), textcoords="offset points", va="top",
                  fontsize=8, color=MUTED)  # fmt: skip


def _plain(axis: Axes) -> None:
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte of least traffic")
    axis.grid(color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, colors=MUTED, labelleft=True)
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        one.set_minor_locator(NullLocator())
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a roofline of the results of h200.py.")
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "h200.json")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="of roofline.svg and roofline.png")
    options = parser.parse_args(arguments)
    figure = draw(json.loads(options.file.read_text(encoding="utf-8")))
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in ("svg", "png"):
        (options.out / f"roofline.{kind}").write_bytes(encoded(figure, kind))
        print(f"written: {options.out / f'roofline.{kind}'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
