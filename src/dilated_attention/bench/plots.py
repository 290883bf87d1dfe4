"""The plots of a report as pictures, for a README: the most telling lines only, as the page has them all.

The same results give the same bytes: no dates, and ids from a fixed salt. Nothing is drawn for what was not measured.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dilated_attention.bench import series
from dilated_attention.bench.page import times_limit
from dilated_attention.bench.series import Measurement

COLOURS = ("#0072b2", "#c2500a", "#00805a", "#a8418a", "#8a6d00", "#5b52c9", "#4a4f55")  # as --s0 … --s6 of page.css
MARKERS = "os^DvP*"
INK, MUTED, GRID, GOOD, BAD = "#17191c", "#59616b", "#e4e6e9", "#0b6b3a", "#b3261e"
MOST_LINES = len(COLOURS)
MOST_ROWS = 18
DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "dilated attention",
    "svg.fonttype": "none",
    "font.size": 9,
}


@dataclass(frozen=True)
class Quantity:
    """What is drawn against length."""

    name: str
    value: Callable[[Measurement], float | None]
    say: Callable[[float], str]  # the value on an axis
    base: int  # of the logarithm
    spread: bool  # whether the quartiles of the time are its quartiles


def figures(results: dict[str, Any]) -> dict[str, Figure | None]:
    """By name, the picture or, where there is nothing to draw, None."""
    measurements = series.prepared(results["measurements"])
    best = {one["best"] for one in results["recommendations"]}
    time = Quantity("time", lambda m: m["ms"]["median"], _duration, 10, True)
    memory = Quantity("peak memory", lambda m: m["peak_bytes"], _size, 2, False)
    with _style():
        return {
            "time": _against_length(measurements, best, time),
            "memory": _against_length(measurements, best, memory),
            "roofline": _roofline(measurements, best, results["ceilings"]),
            "errors": _errors(results["checks"]),
        }


def encoded(figure: Figure, kind: str) -> bytes:
    """The figure as "png" or "svg", the same bytes each time."""
    written = io.BytesIO()
    with _style():
        FigureCanvasAgg(figure)
        figure.savefig(written, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return written.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Settings of our own, whatever the user's are, and theirs again afterwards."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


# --- time and memory --------------------------------------------------------------------------------------------


def _against_length(measurements: list[Measurement], best: set[str], what: Quantity) -> Figure | None:
    picked = series.start(measurements)
    here = [m for m in measurements if all(m[key] == picked[key] for key in series.PICKED if key != "direction")]
    drawn = [m for m in here if m["ms"] and (what.value(m) or 0) > 0]
    if not drawn:
        return None
    lines = _telling(drawn, best)
    panels = [name for name in DIRECTIONS if any(m["direction"] == name for m in drawn)]
    figure = Figure(figsize=(8.2, 4.6), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for name, style in lines.items():
            mine = [m for m in here if m["series"] == name and m["direction"] == panel]
            _line(axis, sorted(mine, key=lambda m: int(m["tokens"])), what, style)
        axis.set_title(DIRECTIONS[panel], fontsize=10, color=INK)
        axis.set_xlabel("tokens")
    for axis in axes:  # when all is drawn: they share their limits
        _log_log(axis, what)
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low, high * (high / low) ** 0.06)  # room for the × of what ran out of memory
    axes[0].set_ylabel(f"{what.name} (log)")
    _title(figure, f"{what.name.capitalize()} against length", picked, drawn)
    handles = [_handle(name, style) for name, style in lines.items()]
    if any(m["status"] == series.LOST and m["series"] in lines for m in here):
        handles.append(Line2D([], [], color=MUTED, marker="x", linestyle="none", label="out of memory"))
    _legend(figure, handles)
    return figure


def _line(axis: Axes, mine: Sequence[Measurement], what: Quantity, style: dict[str, Any]) -> None:
    """A series, with quartiles where there were repeats enough, hollow where not; × at the top where memory ended."""
    drawn = [m for m in mine if m["ms"] and (what.value(m) or 0) > 0]
    lost = next((m["tokens"] for m in mine if m["status"] == series.LOST), None)
    xs, ys = [m["tokens"] for m in drawn], [what.value(m) or 0.0 for m in drawn]
    axis.plot(xs, ys, **style)
    for m, x, y in zip(drawn, xs, ys, strict=True):
        if m["ms"]["repeats"] < series.ENOUGH:
            axis.plot(x, y, **{**style, "markerfacecolor": "white"})
        elif what.spread:
            axis.vlines(x, m["ms"]["lower"], m["ms"]["upper"], color=style["color"], linewidth=1.2)
    if lost is not None:
        axis.plot(lost, 0.98, "x", color=style["color"], transform=axis.get_xaxis_transform(), markersize=7, mew=2)


def _telling(drawn: Sequence[Measurement], best: set[str]) -> dict[str, dict[str, Any]]:
    """The lines to draw and their styles: the most telling, what is recommended, then what is fastest far out."""
    longest = max(m["tokens"] for m in drawn)
    far: dict[str, tuple[int, float]] = {}  # by name: how far it came, then its time there
    for m in drawn:
        here = (longest - m["tokens"], m["ms"]["median"])
        far[m["series"]] = min(here, far.get(m["series"], here))
    ours = {m["series"]: m["ours"] for m in drawn}
    kept = sorted(far, key=lambda name: (name not in series.TELLING, name not in best, far[name]))[:MOST_LINES]
    styles = {
        name: {
            "color": COLOURS[place],
            "marker": MARKERS[place],
            "linestyle": "-" if ours[name] else "--",
            "linewidth": 1.6,
            "markersize": 5.5,
        }
        for place, name in enumerate(kept)
    }
    return {name: styles[name] for name in sorted(kept, key=far.__getitem__, reverse=True)}  # as they lie, top first


# --- roofline ---------------------------------------------------------------------------------------------------


def _roofline(measurements: list[Measurement], best: set[str], ceilings: list[dict[str, Any]]) -> Figure | None:
    picked = series.start(measurements)
    here = [m for m in measurements if all(m[key] == picked[key] for key in series.PICKED)]
    drawn = [m for m in here if m["tflops"] and m["flops"] and m["bytes"]]
    if not drawn:
        return None
    lines = _telling(drawn, best)
    figure = Figure(figsize=(8.2, 4.6), layout="constrained", facecolor="white")
    axis = figure.subplots()
    intensity = [m["flops"] / m["bytes"] for m in drawn if m["series"] in lines]
    for ceiling in ceilings:
        if ceiling["dtype"] == picked["dtype"]:
            _ceilings(axis, ceiling, min(intensity), max(intensity))
    points = {name: {**style, "linestyle": "none"} for name, style in lines.items()}
    for name, style in points.items():
        mine = [m for m in drawn if m["series"] == name]
        axis.plot([m["flops"] / m["bytes"] for m in mine], [m["tflops"] for m in mine], **style)
    axis.set(xscale="log", yscale="log", xlabel="flops of the pattern per byte of least traffic", ylabel="TFLOP/s")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _plain(axis)
    _title(figure, f"Roofline, {DIRECTIONS[picked['direction']]}", picked, drawn)
    _legend(figure, [_handle(name, style) for name, style in points.items()])
    return figure


def _ceilings(axis: Axes, ceiling: dict[str, Any], low: float, high: float) -> None:
    matmul, copy = ceiling["matmul_tflops"], ceiling["copy_gb_per_s"]
    bend = 1000 * matmul / copy
    low, high = min(low, bend / 3), max(high, bend * 3)
    axis.plot([low, bend, high], [copy * low / 1000, matmul, matmul], ":", color=MUTED, linewidth=1.5)
    axis.annotate(f"matmul, {matmul:.3g} TFLOP/s", (bend, matmul), (0, 5), textcoords="offset points", color=MUTED)
    middle = math.sqrt(low * bend)
    where = (middle, copy * middle / 1000)
    axis.annotate(f"copy, {copy:.3g} GB/s", where, (8, -10), textcoords="offset points", color=MUTED)


# --- errors -----------------------------------------------------------------------------------------------------


def _errors(checks: Sequence[dict[str, Any]]) -> Figure | None:
    """One row per implementation and dtype: its largest errors as multiples of their limits, the wrong ones first."""
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    wrong = set()
    for check in checks:
        row = f"{series.with_ranks(check['implementation'], check['ranks'])}, {check['dtype']}"
        for name, error in check["errors"].items():
            part = "out" if name == "out" else "gradients"
            rows[row][part] = max(rows[row].get(part, 0.0), times_limit(error, check["limits"][name]))
        if check["verdict"] != "exact":
            wrong.add(row)
    order = sorted((row for row in rows if rows[row]), key=lambda row: (row not in wrong, -max(rows[row].values())))
    shown = order[:MOST_ROWS]
    if not shown:
        return None
    finite = [number for row in shown for number in rows[row].values() if 0 < number < math.inf]
    low, high = min([0.01, *finite]) / 2, max([10.0, *finite]) * 3
    figure = Figure(figsize=(8.2, 1.6 + 0.26 * len(shown)), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for place, row in enumerate(shown):
        for part, marker in (("out", "o"), ("gradients", "D")):
            if part in rows[row]:
                over = not rows[row][part] <= 1
                x = min(max(rows[row][part], low), high)
                axis.plot(x, place, marker, color=BAD if over else GOOD, markersize=6, alpha=0.9)
    axis.axvline(1, color=INK, linewidth=1)
    axis.set(xscale="log", xlim=(low / 1.3, high * 1.3), ylim=(len(shown) - 0.5, -0.5))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_yticks(range(len(shown)), [_short(row) for row in shown])
    axis.set_xlabel("largest error against float64, in multiples of its limit")
    _plain(axis)
    for label, row in zip(axis.get_yticklabels(), shown, strict=True):
        label.set_color(BAD if row in wrong else INK)
    left = f"; {len(order) - len(shown)} more on the page" if len(order) > len(shown) else ""
    figure.suptitle(f"Errors against limits: right of the line is wrong{left}", x=0.01, ha="left", fontsize=10)
    signs = (("o", GOOD, "out"), ("D", GOOD, "worst gradient"), ("s", BAD, "red: beyond its limit"))
    _legend(figure, [Line2D([], [], marker=m, color=c, linestyle="none", label=label) for m, c, label in signs])
    return figure


# --- shared -----------------------------------------------------------------------------------------------------


def _log_log(axis: Axes, what: Quantity) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=what.base)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: what.say(value)))
    _plain(axis)


def _plain(axis: Axes) -> None:
    axis.grid(color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    for one in (axis.xaxis, axis.yaxis):
        one.set_minor_locator(NullLocator())
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
    axis.tick_params(length=0, colors=MUTED)


def _handle(name: str, style: dict[str, Any]) -> Line2D:
    return Line2D([], [], label=_short(name), **style)


def _short(name: str) -> str:
    """A name on one line, of a length that fits, and with no formula in it for matplotlib."""
    name = " ".join(name.split()).replace("$", r"\$")
    return name if len(name) <= 48 else f"{name[:47]}…"


def _legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Below the plots, in as many columns as fit."""
    for columns in (3, 2, 1):
        legend = figure.legend(
            handles=list(handles), loc="outside lower left", ncols=columns, frameon=False, fontsize=9, handlelength=3
        )
        figure.draw_without_rendering()
        if legend.get_window_extent().x1 <= figure.bbox.x1 or columns == 1:
            return
        legend.remove()


def _title(figure: Figure, what: str, picked: dict[str, Any], drawn: Sequence[Measurement]) -> None:
    setting = ", ".join([picked["dtype"], "causal" if picked["causal"] else "not causal", picked["shape"]])
    more = len({m["series"] for m in drawn}) - MOST_LINES
    left = f"; {more} more on the page" if more > 0 else ""
    figure.suptitle(f"{what}: {_short(setting)}{left}", x=0.01, ha="left", fontsize=10, color=INK)


def _tokens(value: float) -> str:
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def _duration(ms: float) -> str:
    for unit, name in ((1e3, "s"), (1.0, "ms"), (1e-3, "µs")):
        if ms >= unit * 0.999:
            return f"{ms / unit:.3g} {name}"
    return f"{ms * 1e6:.3g} ns"


def _size(size: float) -> str:
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.3g} {name}"
    return f"{size:.3g} B"
