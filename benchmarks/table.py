"""Tables for the documentation: python benchmarks/table.py [FILE]

From the results that h200.py wrote the one of README.md, from those of ring.py the one of docs/scaling.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "h200.json"
HEAD = """\
| case | rule | implementation | gradients | forward ms | forward + backward ms |
|---|---|---|---|---|---|"""


def table(results: dict[str, Any]) -> str:
    """One line per implementation of each case that is not causal; the machine on top, so that no number goes alone."""
    machine = results["machine"]
    found = [
        f"{machine['device']}, torch {machine['versions']['torch']}, cuDNN {machine['versions']['cudnn']}, bfloat16, "
        f"commit {machine['commit']}; `{machine['command'].split(' --')[0]}`, medians:",
        "",
        HEAD,
    ]
    found += [_line(record) for record in results["cases"] + results["dense"] if not record["causal"]]
    return "\n".join(found)


def _line(record: dict[str, Any]) -> str:
    samples, tokens, heads, dim = record["shape"]
    shape = f"{record['case']}: N={samples * tokens:,} H={heads} D={dim}"
    verdict = record["check"]["verdict"].replace("wrong gradients", "**wrong**")
    times = " | ".join(
        f"{record[key]['median']:.2f}" if key in record else "–" for key in ("forward", "forward_backward")
    )
    return f"| {shape} | {record['rule']} | {record['implementation']} | {verdict} | {times} |"


def ring_table(results: dict[str, Any]) -> str:
    """Memory of the busiest rank beyond its q, k and v: first at a fixed length, then at a fixed length a rank."""
    machine = results["runs"][0]["machine"]
    found = [
        f"{machine['device']}, torch {machine['versions']['torch']}, bfloat16, commit {machine['commit']}; "
        "`benchmarks/ring.py --backend gloo`, the ranks sharing one GPU:",
        "",
        "| tokens | ranks | each | exchange | q, k, v MiB | forward MiB | forward + backward MiB | received MiB |",
        "|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    fixed = max(run["tokens"] for run in results["runs"] if run["ranks"] == 1)
    each = min(run["tokens"] for run in results["runs"] if run["ranks"] == 1)
    runs = [run for run in results["runs"] if run["tokens"] == fixed]
    runs += [run for run in results["runs"] if run["tokens"] == each * run["ranks"] and run["tokens"] != fixed]
    for run in runs:
        figures = (run["inputs_mib"], run["forward/peak_mib"], run["forward + backward/peak_mib"])
        sizes = " | ".join(f"{figure:,.0f}" for figure in figures)
        tokens = f"{run['tokens']:,} | {run['ranks']} | {run['tokens'] // run['ranks']:,} | {run['exchange']}"
        found.append(f"| {tokens} | {sizes} | {run['received_mib']:.2f} |")
    return "\n".join(found)


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS).read_text(encoding="utf-8"))
    print(ring_table(results) if "runs" in results else table(results))
