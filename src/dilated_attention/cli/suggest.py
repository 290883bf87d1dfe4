"""Suggest a pattern for a length, and say why.

It prints the reasons, Python to paste, and the cost. With --memory it also says
whether training fits, and if not, what to change. `plan` and `show` read what
it writes with --json.

Example: dilated-attention suggest 1M --heads 12 --memory 80GB
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from typing import Any

from dilated_attention.cli import options
from dilated_attention.cli.options import option, written

OPTIONS = (
    option("length", "N", "The same as -n.", nargs="?"),
    options.TOKENS,
    option("--rule", "RULE", "longnet, torchscale or head_groups: segments and rates, see `plan --help`; or union: "
           "near tokens, far ones sparsely, and first ones that all see (with --causal for a language model, else "
           "for an encoder).", default="longnet"),
    *options.SHAPE, *options.CALL, options.JSON,
)  # fmt: skip


def run(given: Namespace) -> None:
    from dilated_attention import advice
    from dilated_attention.cli.output import console, print_json
    from dilated_attention.pattern import DilatedPattern

    with options.refusing():
        found = advice.suggest(options.workload(given), given.rule, given.memory)
    names = ("rule", "heads", "kv_heads", "causal", "head_dim", "dtype", "batch", "ranks")
    said: dict[str, Any] = {"tokens": written(given.tokens)}
    pattern = found.pattern
    if isinstance(pattern, DilatedPattern):
        said["segment_lengths"] = ",".join(map(written, pattern.segment_lengths))
        said["dilation_rates"] = ",".join(map(written, pattern.dilation_rates))
    else:
        said["pattern"] = repr(pattern)
    said |= {name: value for name in names[given.rule == "union" :] if (value := getattr(given, name))}
    if given.json:
        print_json({"options": said, "suggestion": found})
        return
    named = {f"--{name.replace('_', '-')}": value for name, value in said.items()}
    words = [name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in named.items()]
    console().print(f"{found}\n\nto see its costs and a picture of it:")
    for command, some in (("plan", words), ("show", words[:-4])):  # a picture has no dimension, dtype, batch and ranks
        # a shell joins lines that end in a backslash
        console().print("    " + " \\\n        ".join([f"dilated-attention {command}", *some]))
