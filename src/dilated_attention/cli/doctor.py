"""Say what is installed, and check that it works.

It says which kernels run here and why others do not, and compares results with
the oracle, a slow float64 reference. The exit code is 1 if a check fails. Paste
the output into a bug report. `python -m torch.utils.collect_env` tells more of
the machine.

Example: dilated-attention doctor
"""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import product

from dilated_attention.bench.results import first_line
from dilated_attention.cli import options

OPTIONS = (options.JSON,)


def run(given: Namespace) -> int:
    import torch

    from dilated_attention.bench import machine

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    about = machine.describe(torch.device(devices[-1]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runs, verdicts = kernels(devices), dict(checks(devices))
    failed, count = sum(map(bool, verdicts.values())), len(verdicts)
    verdict = f"{failed} of {count} checks failed" if failed else f"all {count} checks passed"
    said = sorted({first_line(warning.message) for warning in told})
    if given.json:
        found = {"machine": about, "runs": runs, "checks": verdicts, "warnings": said, "verdict": verdict}
        print(json.dumps(found, indent=1))
    else:
        print(machine.one_line(about), f"{about['system']}, {about['cores']} cores", sep="\n")
        for title, lines in runs.items():
            print(f"\n{title}", *lines, sep="\n    ")
        print("\nchecks against the float64 oracle, gradients included:")
        print(*(f"    {what}: {why or 'exact'}" for what, why in verdicts.items()), sep="\n")
        print(*(f"warning: {text}" for text in said), verdict, sep="\n")
    return int(failed > 0)


def kernels(devices: Sequence[str]) -> dict[str, list[str]]:
    """What a plain call runs on each device in each dtype, and why no other does; alike ones together."""
    import torch

    from dilated_attention.functional import explain
    from dilated_attention.pattern import DilatedPattern

    alike: dict[str, list[str]] = {}
    for device, dtype in product(devices, ("float32", "bfloat16", "float16", "float64")):
        x = torch.zeros(1, 64, 4, 16, dtype=options.dtype(dtype), device=device)
        said = str(explain(x, x, x, DilatedPattern.longnet([16, 32], [1, 2])))
        alike.setdefault(said, []).append(f"{device} {dtype}")
    return {", ".join(where): said.splitlines() for said, where in alike.items()}


def checks(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each check, and what is wrong if anything is. The length is one that no segment divides."""
    from dilated_attention import testing
    from dilated_attention.pattern import RULES, DilatedPattern

    for device, dtype, rule in product(devices, ("float32", "bfloat16"), RULES):
        is_causal, why = dtype == "bfloat16", ""
        qkv = testing.make_qkv(2, 100, 6, 16, kv_heads=3, dtype=options.dtype(dtype), device=device)
        try:
            testing.check(qkv, DilatedPattern.of(rule, [16, 32, 64], [1, 2, 3]), is_causal=is_causal)
        except (AssertionError, RuntimeError) as error:  # torch's own errors, too: a kernel that fails is a finding
            why = f"failed: {first_line(error)}"
        yield f"{rule} {dtype} on {device}{', causal' if is_causal else ''}", why
