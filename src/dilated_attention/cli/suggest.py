"""`suggest`: segment lengths and dilation rates for a length, and why."""

from __future__ import annotations

import shlex
from typing import cast

from dilated_attention import advice
from dilated_attention.cli import arguments, options
from dilated_attention.cli.output import console
from dilated_attention.pattern import Rule


def suggest(
    tokens: options.Tokens,
    heads: options.Heads = 12,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    batch: options.Batch = 1,
    dtype: options.Dtype = "bfloat16",
    rule: options.Rule = "longnet",
    ranks: options.Ranks = "1",
    causal: options.Causal = False,
    memory: options.Memory = None,
) -> None:
    """Suggest segments and rates for a length, and say why.

    It prints a line of Python to paste, the reasons, and the cost. If --memory is too little, it says what would fit.

    Example: dilated-attention suggest -n 1M --heads 12 --memory 80GB
    """
    with arguments.refusing():
        found = advice.suggest(
            arguments.count("-n", tokens),
            heads=heads,
            head_dim=head_dim,
            rule=cast(Rule, rule),
            ranks=arguments.count("--ranks", ranks),
            memory=None if memory is None else arguments.size("--memory", memory),
            dtype=arguments.dtype("--dtype", dtype),
            kv_heads=kv_heads,
            batch=batch,
            is_causal=causal,
        )
    screen = console()
    screen.print(str(found), soft_wrap=True)
    screen.print("more of it:")
    for command in commands(found, memory):
        screen.print("   ", shlex.join(command), soft_wrap=True)


def commands(found: advice.Suggestion, memory: str | None) -> list[list[str]]:
    """What to type to see the costs and the pattern."""
    work, pattern = found.workload, found.pattern
    segments = ["-w", ",".join(map(str, pattern.segment_lengths)), "-r", ",".join(map(str, pattern.dilation_rates))]
    shape = ["--rule", pattern.rule, "-n", str(work.tokens), *segments, "--heads", str(work.heads)]
    if work.kv_heads is not None:
        shape += ["--kv-heads", str(work.kv_heads)]
    if work.is_causal:
        shape.append("--causal")
    rows = ["--head-dim", str(work.head_dim), "--dtype", str(work.dtype).removeprefix("torch.")]
    if work.ranks > 1:
        rows += ["--ranks", str(work.ranks)]
    costs = [*rows, "--batch", str(work.batch), *([] if memory is None else ["--memory", memory])]
    return [["dilated-attention", "plan", *shape, *costs], ["dilated-attention", "show", *shape]]
