"""Tables of results, as on docs/speed.md: python benchmarks/table.py FILE, of `dilated-attention bench --suite`.

The suite is `all` or `suggested`: the patterns that `DilatedPattern.suggest` gives for each length, beside dense
attention and others' ways to compute the same. That one needs a GPU, and takes about four minutes on an H200.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from dilated_attention import DilatedPattern
from dilated_attention.bench.conclude import far_rows
from dilated_attention.units import measured_text

# who stands in README.md, and at which lengths; the page of the run has all
ROWS = (
    "dense SDPA", "head_groups, auto", "copy and gather, index_select", "copy and gather, slicing", "longnet, auto",
    "torchscale, auto", "gather-pad-scatter", "attention over heads",
)  # fmt: skip
LENGTHS = {"cuda": (8192, 131072, 1 << 20), "cpu": (2048, 8192, 32768)}
# the same of the suite "suggested"
SUITE, MEASURED = "suggested", (8192, 32768, 131072, 262144, 1 << 20)
PATTERNS = ("head_groups, auto", "longnet, auto")
NAMES = ("dense SDPA", "dense cuDNN", "dense flash", *PATTERNS, "copy and gather, index_select",
         "copy and gather, slicing", "FlexAttention")  # fmt: skip
SMALL = 0.02  # of the median


def page_table(results: dict[str, Any]) -> str:
    """Forward / forward + backward by length; the machine on top, and which pattern that is below."""
    machine, kind = results["machine"], "cuda" if "cuda" in results["machine"]["versions"] else "cpu"
    is_suggested, dtype = SUITE in results["suites"], results["dtypes"][0]
    names, lengths = (NAMES, MEASURED) if is_suggested else (ROWS, LENGTHS[kind])
    where = machine["device"] if kind == "cuda" else f"{machine['cores']} cores of {machine['device']}"
    said = " and ".join(dict.fromkeys(one["commit"][:7] for one in (machine, *machine.get("continued", []))))
    found = [
        f"{where}, torch {machine['versions']['torch']}, {dtype}, commit {said}; ms forward / forward + backward:",
        "",
        f"| implementation | verdict | {' | '.join(f'N={n:,}' for n in lengths)} |",
        f"|---|---|{'---:|' * len(lengths)}",
    ]
    records = {
        (x["implementation"], x["tokens"], x["direction"]): x
        for x in results["measurements"]
        if x["suite"] in ("scaling", SUITE) and not x["causal"]
        and (x["dtype"], x["samples"], x["heads"]) == (dtype, 1, 8)
        and (is_suggested or x["lengths"] == [1024, 2048, 4096])
    }  # fmt: skip
    verdicts = {x["implementation"]: x["verdict"] for x in results["checks"] if not x["causal"] and x["dtype"] == dtype}
    for row in names:
        verdict = verdicts.get(row, "–") if verdicts.get(row) in (None, "exact") else f"**{verdicts[row]}**"
        times = [[_time(records.get((row, n, way))) for way in ("forward", "forward_backward")] for n in lengths]
        cells = " | ".join(map(" / ".join, times))
        found.append(f"| {row} | {verdict} | {cells} |")
    return "\n".join([*found, "", *(_reach(records, name) for name in PATTERNS)] if is_suggested else found)


def _reach(records: dict[tuple[str, int, str], dict[str, Any]], name: str) -> str:
    """Which share of the rows the longest branch takes, at each length."""
    shares = []
    for tokens in MEASURED:
        record = records[name, tokens, "forward"]
        pattern = DilatedPattern(record["rule"], record["lengths"], record["rates"])
        shares.append(f"{far_rows(pattern, tokens, record['heads'])[1]:.2%} at {tokens:,}")
    return f"- {name}: of the tokens of all heads, the longest branch takes {', '.join(shares)}."


def _time(record: dict[str, Any] | None) -> str:
    """The median, with as many digits as the quartiles support, and half of their distance unless it is small."""
    if record is None or record["ms"] is None:
        return "–"
    median, lower, upper = (record["ms"][name] for name in ("median", "lower", "upper"))
    text, half = measured_text(median, lower, upper), (upper - lower) / 2
    decimals = len(text.partition(".")[2])
    return f"{text} ± {half:,.{decimals}f}" if half > SMALL * median else text


if __name__ == "__main__":
    print(page_table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
