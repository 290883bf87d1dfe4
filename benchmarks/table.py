"""Tables of results, as on docs/speed.md: python benchmarks/table.py FILE, of `dilated-attention bench --suite`.

The suite is `all` or `suggested`: the patterns that `DilatedPattern.suggest` gives for each length, beside dense
attention and others' ways to compute the same. That one needs a GPU, and takes about four minutes on an H200.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from dilated_attention import DilatedPattern
from dilated_attention.bench.conclude import far_rows
from dilated_attention.units import measured_text

PATTERNS = ("head_groups, auto", "longnet, auto")
NAMES = (  # of the lines, if there are measurements
    "dense SDPA", "dense cuDNN", "dense flash", *PATTERNS, "copy and gather, index_select", "copy and gather, slicing",
    "FlexAttention", "torchscale, auto", "gather-pad-scatter", "attention over heads",
)  # fmt: skip
SMALL = 0.02  # of the median


def page_table(results: dict[str, Any]) -> str:
    """Forward / forward + backward by length; the machine on top, and which pattern that is below."""
    machine, is_suggested, dtype = results["machine"], "suggested" in results["suites"], results["dtypes"][0]
    where = machine["device"] if "cuda" in machine["versions"] else f"{machine['cores']} cores of {machine['device']}"
    said = " and ".join(dict.fromkeys(one["commit"][:7] for one in (machine, *machine.get("continued", []))))
    records = {
        (x["implementation"], x["tokens"], x["direction"]): x
        for x in results["measurements"]
        if x["suite"] in ("scaling", "suggested") and not x["causal"]
        and (x["dtype"], x["samples"], x["heads"]) == (dtype, 1, 8)
        and (is_suggested or x["lengths"] == [1024, 2048, 4096])
    }  # fmt: skip
    lengths = sorted({tokens for _, tokens, _ in records})
    found = [
        f"{where}, torch {machine['versions']['torch']}, {dtype}, commit {said}; ms forward / forward + backward:",
        "",
        f"| implementation | verdict | {' | '.join(f'N={n:,}' for n in lengths)} |",
        f"|---|---|{'---:|' * len(lengths)}",
    ]
    verdicts = {x["implementation"]: x["verdict"] for x in results["checks"] if not x["causal"] and x["dtype"] == dtype}
    for row in (name for name in NAMES if name in verdicts):
        verdict = verdicts[row] if verdicts[row] == "exact" else f"**{verdicts[row]}**"
        times = [[_time(records.get((row, n, way))) for way in ("forward", "forward_backward")] for n in lengths]
        cells = " | ".join(map(" / ".join, times))
        found.append(f"| {row} | {verdict} | {cells} |")
    return "\n".join([*found, "", *(_reach(records, name, lengths) for name in PATTERNS)] if is_suggested else found)


def _reach(records: dict[tuple[str, int, str], dict[str, Any]], name: str, lengths: list[int]) -> str:
    """Which share of the rows the longest branch takes, at each length."""
    shares = []
    for tokens in lengths:
        record = records[name, tokens, "forward"]
        pattern = DilatedPattern(record["rule"], record["lengths"], record["rates"])
        shares.append(f"{far_rows(pattern, tokens, record['heads'])[1]:.2%} at {tokens:,}")
    return f"- {name}: averaged over all heads, the longest branch takes {', '.join(shares)}."


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
