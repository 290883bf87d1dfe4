"""The table of README.md, from the results that h200.py wrote: python benchmarks/table.py [FILE]"""

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


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS).read_text(encoding="utf-8"))))
