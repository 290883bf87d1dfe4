"""`suggest`: segment lengths and dilation rates for a length, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dilated_attention.cli import arguments, options
from dilated_attention.cli.output import console

if TYPE_CHECKING:
    from dilated_attention.advice import Suggestion
    from dilated_attention.pattern import Rule


def suggest(
    tokens: options.Tokens,
    heads: options.Heads = 12,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    batch: options.Batch = 1,
    dtype: options.Dtype = "bfloat16",
    rule: options.Rule = "longnet",
    ranks: options.Ranks = 1,
    causal: options.Causal = False,
    memory: options.Memory = None,
) -> None:
    """Suggest segments and rates for a length, and say why.

    It prints Python to paste, the reasons, and the cost. With --memory it also says whether training fits, and if not,
    what to change.

    Example: dilated-attention suggest -n 1M --heads 12 --memory 80GB
    """
    from dilated_attention import advice

    with arguments.refusing():
        kind = arguments.dtype("--dtype", dtype)
        workload = advice.Workload(tokens, heads, head_dim, kv_heads, ranks, batch, kind, causal)
        found = advice.suggest(workload, cast("Rule", rule), memory)
    screen = console()
    screen.print(str(found), soft_wrap=True)
    screen.print("\nto see its costs and a picture of it:")
    for words in commands(found):
        one_line = "    " + " ".join(words)
        # a shell joins lines that end in a backslash
        screen.print(
            one_line if len(one_line) <= advice.WIDTH else "    " + " \\\n        ".join(words), soft_wrap=True
        )


def commands(found: Suggestion) -> list[list[str]]:
    """What to type to see the costs and the pattern, cut where it may be broken into lines."""
    work, pattern = found.workload, found.pattern
    lengths, rates = (
        ",".join(map(options.written, numbers)) for numbers in (pattern.segment_lengths, pattern.dilation_rates)
    )
    heads = f"--rule {pattern.rule} --heads {work.heads}"
    if work.kv_heads is not None:
        heads += f" --kv-heads {work.kv_heads}"
    if work.is_causal:
        heads += " --causal"
    shape = [f"-n {options.written(work.tokens)}", f"-w {lengths}", f"-r {rates}", heads]
    dtype = str(work.dtype).removeprefix("torch.")
    costs = f"--head-dim {work.head_dim} --dtype {dtype} --batch {work.batch} --ranks {work.ranks}"
    return [["dilated-attention plan", *shape, costs], ["dilated-attention show", *shape]]
