"""Tables for the documentation: python benchmarks/table.py FILE [LATER]

From the results of `dilated-attention bench --suite all` a table of README.md, from those of h200.py the one of
docs/benchmark.md, from those of ring.py the one of docs/scaling.md. From two results of h200.py, where the time went
before and after. A test holds each to its page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# who stands in README.md, and at which lengths; the page of the run has all
ROWS = (
    "dense SDPA", "head_groups, auto", "copy and gather, index_select", "copy and gather, slicing", "longnet, auto",
    "torchscale, auto", "gather-pad-scatter", "attention over heads",
)  # fmt: skip
LENGTHS = {"cuda": (8192, 131072, 1 << 20), "cpu": (2048, 8192, 32768)}
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
    records = [*sorted(results["cases"], key=lambda record: record["case"]), *results["dense"]]  # C is measured first
    found += [_line(record) for record in records if not record["causal"]]
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


def comparison_table(results: dict[str, Any]) -> str:
    """Forward / forward + backward by length, w = 1024, 2048, 4096; the machine on top."""
    machine, kind = results["machine"], "cuda" if "cuda" in results["machine"]["versions"] else "cpu"
    dtype, lengths = results["ceilings"][0]["dtype"], LENGTHS[kind]
    where = machine["device"] if kind == "cuda" else f"{machine['cores']} cores of {machine['device']}"
    commits = [machine["commit"], *(again["commit"] for again in machine.get("continued", []))]
    said = " and ".join(commit[:7] for commit in dict.fromkeys(commits))
    found = [
        f"{where}, torch {machine['versions']['torch']}, {dtype}, commit {said}; ms forward / forward + backward:",
        "",
        f"| implementation | verdict | {' | '.join(f'N={n:,}' for n in lengths)} |",
        f"|---|---|{'---:|' * len(lengths)}",
    ]
    records = {
        (x["implementation"], x["tokens"], x["direction"]): x
        for x in results["measurements"]
        if x["suite"] == "scaling" and not x["causal"] and (x["dtype"], x["samples"], x["heads"]) == (dtype, 1, 8)
        and x["lengths"] == [1024, 2048, 4096]
    }  # fmt: skip
    verdicts = {x["implementation"]: x["verdict"] for x in results["checks"] if not x["causal"] and x["dtype"] == dtype}
    for row in ROWS:
        name = row if row in verdicts else row.replace("auto", "sdpa")  # results of before `auto` was a line
        verdict = verdicts[name] if verdicts[name] == "exact" else f"**{verdicts[name]}**"
        cells = " | ".join(_cell(records, name, tokens) for tokens in lengths)
        found.append(f"| {name} | {verdict} | {cells} |")
    return "\n".join(found)


def _cell(records: dict[tuple[str, int, str], dict[str, Any]], name: str, tokens: int) -> str:
    return " / ".join(_time(records.get((name, tokens, way))) for way in ("forward", "forward_backward"))


def _time(record: dict[str, Any] | None) -> str:
    if record is None or record["ms"] is None:
        return "–"
    return f"{record['ms']['median']:,.0f}" if record["ms"]["median"] >= 100 else f"{record['ms']['median']:.3g}"


ATTENTION = ("flash", "forward_kernel", "dq_kernel", "dkdv_kernel")  # in the names of kernels that compute pairs


def profile_table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Kernel times of one forward + backward in both runs: pairs, and all that is around them."""
    commits = [run["machine"]["commit"] for run in (before, after)]
    found = [
        f"{after['machine']['device']}, kernels of one forward + backward; commit {commits[0]}, then {commits[1]}:",
        "",
        "| case | rule | attention, without our kernels | around it, without "
        "| attention, with our kernels | around it, with |",
        "|---|---|---:|---:|---:|---:|",
    ]
    records = [{(x["case"], x["rule"]): x.get("kernels") for x in run["profiles"]} for run in (before, after)]
    for case, rule in (key for key, kernels in records[0].items() if kernels and records[1].get(key)):
        cells = [cell for kernels in records for cell in _split(kernels[case, rule])]
        found.append(f"| {case} | {rule} | {' | '.join(cells)} |")
    return "\n".join(found)


def _split(kernels: list[tuple[str, int, float]]) -> tuple[str, str]:
    pairs = [kernel for kernel in kernels if any(word in kernel[0] for word in ATTENTION)]
    others = [kernel for kernel in kernels if kernel not in pairs]
    first, second = (
        f"{sum(x[2] for x in some):.1f} ms, {sum(x[1] for x in some)} launches" for some in (pairs, others)
    )
    return first, second


def page_table(results: dict[str, Any]) -> str:
    """Which table these results are for, by what they hold."""
    if "schema" in results:
        return comparison_table(results)
    return ring_table(results) if "runs" in results else table(results)


if __name__ == "__main__":
    given = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    print(profile_table(*given) if len(given) == 2 else page_table(*given))
