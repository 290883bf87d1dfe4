"""What docs/results.md shows of the results of benchmarks/tasks.py: tables, and pictures for light and dark pages."""

import json
from collections.abc import Callable, Iterable
from operator import mul
from pathlib import Path
from typing import Any

from tasks_model import score

from dilated_attention.bench.plots import TOKENS, heat_map, styled, svg
from dilated_attention.show import charts

Result = dict[str, Any]
Groups = dict[tuple[str, int], list[Result]]  # runs that differ in their seeds

COLOURS = {  # of the report, so that each has a form for dark pages
    "dense": "#59636e", "full-layers": "#c4314b", "full-heads": "#a626a4", "window": "#bc4c00", "window-1k": "#9a6700",
    "longnet": "#1a7f37", "longnet-learned": "#4d7c0f", "dilated": "#0550ae", "dilated-learned": "#007a99",
    "strided": "#6639ba", "strided-learned": "#8250df",
}  # fmt: skip
PRIMARY, LENGTH, SHORT = "full-layers", 32768, 8192  # what is registered
BASELINES, SEEDS, WITHIN = ("dense", "window"), 3, 1.01
MOST_BITS = 3.0  # in a picture: what a model does beyond its training may be far off
MARKS = "<!-- patterns: written by `python benchmarks/tasks.py draw` -->\n", "\n<!-- patterns: end -->"
PICTURES = {
    "cost": "Recall, and bits per byte, against the pairs of attention",
    "recall": "Recall by kind of question and distance, of models that were trained at the longest length",
    "position": "Bits by position",
    "training": "Recall over the seconds of training, and over its tokens",
}


def read(folder: Path) -> tuple[list[Result], dict[str, float]]:
    """The runs that have come to their end, and the baselines that need no network, of the same text."""
    found = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    runs = [one for one in found if one.get("part", "pilot") != "pilot" and one["complete"]]
    texts = {one["data"]["sha256"] for one in runs}
    bits = [one["bits"] for one in found if one.get("run") == "baselines" and one["data"]["sha256"] in texts]
    return runs, bits[-1] if bits else {}


def grouped(runs: Iterable[Result]) -> Groups:
    """By attention and window, the longest first, in the order of COLOURS. Fresh seeds, where there are any."""
    made: Groups = {}
    for one in sorted(runs, key=lambda one: (-one["window"], [*COLOURS].index(one["attention"]), one["seed"])):
        made.setdefault((one["attention"], one["window"]), []).append(one)
    return {key: [x for x in some if x["seed"]] or some for key, some in made.items()}


def mean(runs: list[Result], what: str, window: int | str = "") -> float:
    """Of runs that differ in their seeds: the recall or the bits in a window, or what else they have."""
    found = [run["held_out"][str(window)][what] if window else run[what] for run in runs]
    return sum(score(one, int(window)) if what == "recall" else one for one in found) / len(found)


def verdict(runs: list[Result]) -> str:
    """What the registered runs say, by the rule that registered.md gives."""
    groups = grouped(one for one in runs if one["part"] == "registered")
    names = (PRIMARY, *BASELINES)
    wanted = [*((one, LENGTH) for one in names), *((one, SHORT) for one in (PRIMARY, "dense"))]
    missing = sum(SEEDS - len(groups.get(key, [])) for key in wanted)
    if missing:
        return (f"**Whether far tokens pay is not measured yet**: {missing} of {SEEDS * len(wanted)} registered runs "
                "are to come. Words and columns are explained [below](#what-is-compared).")  # fmt: skip
    texts = {(one["data"]["sha256"], one["machine"]["device"], str(one["machine"]["versions"])) for one in runs
             if one["part"] == "registered"}  # fmt: skip
    if len(texts) > 1:
        return "**The registered runs cannot be compared**: their texts, devices or versions differ."
    recalls = {one: sorted(mean([x], "recall", LENGTH) for x in groups[one, LENGTH]) for one in names}
    short = {one: mean(groups[one, SHORT], "bits", SHORT) for one in (PRIMARY, "dense")}
    times, least = short[PRIMARY] / short["dense"], recalls[PRIMARY][0]
    ranges = [f"{low:.3f} to {high:.3f}" for low, *_, high in recalls.values()]
    why = [f"its lowest recall is not above the highest of `{x}`" for x in BASELINES if least <= recalls[x][-1]]
    why += [f"{WITHIN} times the bits were allowed"] if times > WITHIN else []
    holds, but = ("does not hold", f" But {'; and '.join(why)}.") if why else ("holds", "")
    return (
        f"**The [registered claim](#what-is-compared) {holds}.** Of facts planted in texts of {LENGTH:,} bytes, three "
        f"runs of `{PRIMARY}` (windows, and every fourth layer full) recall {ranges[0]}, `dense` {ranges[1]}, and "
        f"`window`, of equal cost, {ranges[2]}. In texts of {SHORT:,} bytes, `{PRIMARY}` needs {times:.3f} times "
        f"the bits of `dense`: {short[PRIMARY]:.4f} and {short['dense']:.4f} a byte.{but}"
    )


def table(groups: Groups, baselines: dict[str, float]) -> str:
    """A line for each pattern and length; the machines on top, so that no number goes alone."""
    every = [one for runs in groups.values() for one in runs]
    judged, digits = every[0]["held_out"], {"recall": 2, "bits": 3}
    columns = [(what, window) for what in digits for window in judged if what in judged[window]]
    made: dict[tuple[str, str], dict[str, None]] = {}
    for x in every:
        about = x["machine"]
        made.setdefault((about["device"], about["versions"]["torch"]), {})[str(about["commit"])[:7]] = None
    lines = [
        *(f"{device}, torch {torch}, commit {' or '.join(commits)}.\n" for (device, torch), commits in made.items()),
        row("", "runs", "cost", "tokens", "TFLOP", *(f"{what} {thousands(x)}" for what, x in columns)),
        f"|---|{'---:|' * (4 + len(columns))}",
    ]
    for (attention, window), runs in groups.items():
        cells = [f"{attention}, {thousands(window)}", str(len(runs)), f"{100 * runs[0]['pairs_of_dense']:.0f} %"]
        work = [sum(map(mul, x["tokens_by_length"], x["operations_per_token"])) for x in runs]
        cells += [f"{mean(runs, 'tokens') / 1e6:.0f}M", f"{sum(work) / len(runs) / 1e12:,.0f}"]
        cells += [f"{mean(runs, what, x):.{digits[what]}f}" for what, x in columns]
        lines.append(row(*cells))
    orders = [one for one in baselines if one.startswith("order")]
    shown = [one for one in baselines if one not in orders] + sorted(orders, key=baselines.__getitem__)[:1]
    dashes = ["–"] * (3 + len(columns))
    return "\n".join([*lines, *(row(one, *dashes, f"{baselines[one]:.3f}") for one in shown)])


def thousands(window: int | str) -> str:
    return f"{int(window) >> 10}k"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def cost(groups: Groups) -> Result:
    """A point for each pattern and length, and the frontier: the best of all that cost as much or less."""
    points = [
        {"name": attention, "at": f"trained at {thousands(window)}", "pairs": 100 * runs[0]["pairs_of_dense"],
         **{what: mean(runs, what, window) for what in ("recall", "bits")}}
        for (attention, window), runs in groups.items()
    ]  # fmt: skip
    x = {"field": "pairs", "type": "quantitative", "title": "(query, key) pairs, % of dense attention's",
         "scale": {"type": "log", "nice": False, "padding": 30}}  # fmt: skip
    parts, coloured = [], {"color": colour([one["name"] for one in points], legend=None)}
    titles = ("recall", "recall in texts as long as in training", 1), ("bits", "bits per byte, fewer is better", -1)
    for what, title, sign in titles:
        best: list[Result] = []
        for one in sorted(points, key=lambda one: (one["at"], one["pairs"], -sign * one[what])):
            if not best or best[-1]["at"] != one["at"] or sign * one[what] > sign * best[-1][what]:
                best.append(one)
        y = {"field": what, "type": "quantitative", "title": title, "scale": {"zero": False}}
        frontier = {"type": "line", "strokeDash": [4, 3], "color": COLOURS["dense"]}
        layers = [
            {"data": {"values": best}, "mark": frontier, "encoding": {"detail": {"field": "at"}}},
            {"mark": {"type": "point", "filled": True, "size": 70},
             "encoding": coloured | {"shape": {"field": "at", "title": None}}},
            {"mark": {"type": "text", "dy": -11, "fontSize": 10}, "encoding": coloured | {"text": {"field": "name"}}},
        ]  # fmt: skip
        parts.append({"width": 330, "height": 300, "encoding": {"x": x, "y": y}, "layer": layers})
    return {"data": {"values": points}, "hconcat": parts}


def recall(groups: Groups) -> Result:
    """A heat map for each kind of question: pattern by distance, in the longest windows."""
    longest, cells = max(window for _, window in groups), dict[tuple[str, str, int], list[float]]()
    for (attention, window), runs in groups.items():
        for one in [x for run in runs for x in [*run["held_out"].values()][-1]["recall"]] if window == longest else []:
            cells.setdefault((one["kind"], attention, one["from"]), []).append(one["right"])
    judged = [*next(iter(groups.values()))[0]["held_out"]][-1]
    axes = f"bytes from the fact to the answer, in texts of {thousands(judged)}", "trained with"
    rows = [
        {"kind": kind, axes[0]: distance, axes[1]: attention, "right": sum(right) / len(right)}
        for (kind, attention, distance), right in cells.items()
    ]
    kinds = dict.fromkeys(one["kind"] for one in rows)
    return {"vconcat": [heat_map([x for x in rows if x["kind"] == one], "right", *axes, one) for one in kinds]}


def lines(groups: Groups, points: Callable[[Result], Iterable[tuple[float, float]]], x: Result, y: Result) -> Result:
    """A line for each pattern that was trained at the longest length: of its first run."""
    longest = max(window for _, window in groups)
    shown = {attention: runs[0] for (attention, window), runs in groups.items() if window == longest}
    rows = [{"name": name, "x": at, "y": value} for name, run in shown.items() for at, value in points(run)]
    encoding = {at: {"field": at, "type": "quantitative", **axis} for at, axis in (("x", x), ("y", y))}
    encoding["color"] = colour(shown)
    mark = {"type": "line", "strokeWidth": 2, "clip": True}
    return {"data": {"values": rows}, "mark": mark, "width": 520, "height": 300, "encoding": encoding}


def position(groups: Groups) -> Result:
    def points(run: Result) -> Iterable[tuple[float, float]]:
        bins = [x["by_position"] for x in run["held_out"].values() if "by_position" in x][-1]
        return [(((x["first"] + 1) * (x["last"] + 1)) ** 0.5, x["bits"]) for x in bins if x["first"] >= 16]

    axis = {"values": [1 << i for i in range(4, 21, 2)], "labelExpr": TOKENS}
    x = {"title": "position", "scale": {"type": "log", "base": 2, "nice": False}, "axis": axis}
    most = max(min(MOST_BITS, bits) for runs in groups.values() for _, bits in points(runs[0]))
    return lines(groups, points, x, {"title": "held-out bits per byte", "scale": {"domainMax": most, "zero": False}})


def training(groups: Groups) -> Result:
    """At equal seconds, and at equal tokens."""
    y, axes = (
        {"title": "recall (one run, some texts of 32k)"},
        ({"title": "seconds of training"}, {"title": "tokens of training", "axis": {"format": "~s"}}),
    )
    parts = []
    for at, x in enumerate(axes):
        part = lines(groups, lambda run, at=at: [(one[at], one[3]) for one in run["held_out_curve"]], x, y)
        parts.append({**part, "width": 300})
    return {"hconcat": parts}


def colour(names: Iterable[str], **more: None) -> Result:
    there = [one for one in COLOURS if one in {*names}]
    scale = {"domain": there, "range": [COLOURS[one] for one in there]}
    return {"field": "name", "title": None, "scale": scale, **more}


def section(folder: Path) -> str:
    """What the page shows between its two marks."""
    runs, baselines = read(folder)
    if not runs:
        return verdict([])
    pictures = [f"![{words}](tasks-{what}.svg)" for what, words in PICTURES.items()]
    return "\n\n".join((verdict(runs), pictures[0], table(grouped(runs), baselines), *pictures[1:]))


def show(folder: Path, docs: Path) -> None:
    """Write the tables into results.md, and draw its pictures."""
    runs, _ = read(folder)
    if not runs:
        raise SystemExit(f"error: {folder} has no run that came to its end: give the folder of the results with --out")
    text = (docs / "results.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    text = f"{before}{MARKS[0]}{section(folder)}{MARKS[1]}{rest.partition(MARKS[1])[2]}"
    for what, draw in zip(PICTURES, (cost, recall, position, training), strict=True):
        charts.write(docs / f"tasks-{what}.svg", svg(styled(draw(grouped(runs)))))
    print(section(folder))
    charts.write(docs / "results.md", text.encode())
