"""Suggest segments and rates for a length, and say why.

It prints the reasons, Python to paste, and the cost. With --memory it also says
whether training fits, and if not, what to change. `plan` and `show` read what
it writes with --json.

Example: dilated-attention suggest 1M --heads 12 --memory 80GB
"""

from __future__ import annotations

from argparse import Namespace

from dilated_attention.cli import options
from dilated_attention.cli.options import written

OPTIONS = (
    options.option("length", nargs="?", metavar="N", help="The same as -n."),
    options.TOKENS, options.RULE, *options.SHAPE, *options.CALL, options.JSON,
)  # fmt: skip


def run(given: Namespace) -> None:
    from dilated_attention import advice
    from dilated_attention.cli.output import console, print_json

    with options.refusing():
        found = advice.suggest(options.workload(given), given.rule, given.memory)
    names = ("rule", "heads", "kv_heads", "causal", "head_dim", "dtype", "batch", "ranks")
    said = {
        "tokens": written(given.tokens),
        "segment_lengths": ",".join(map(written, found.pattern.segment_lengths)),
        "dilation_rates": ",".join(map(written, found.pattern.dilation_rates)),
        **{name: value for name in names if (value := getattr(given, name))},
    }
    if given.json:
        print_json({"options": said, "suggestion": found})
        return
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in said.items()]
    console().print(f"{found}\n\nto see its costs and a picture of it:")
    for command, some in (("plan", words), ("show", words[:-4])):  # a picture has no dimension, dtype, batch and ranks
        # a shell joins lines that end in a backslash
        console().print("    " + " \\\n        ".join([f"dilated-attention {command}", *some]))
