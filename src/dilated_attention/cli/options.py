"""Options that several commands take, so that they are called and explained alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from dilated_attention.cli import arguments
from dilated_attention.pattern import RULES, DilatedPattern
from dilated_attention.pattern import Rule as RuleName

COUNTING = "k, M, G and T count by 1024 (64k is 65536), 2^20 and 1e9 go too"

Tokens = Annotated[str, typer.Option("-n", "--tokens", metavar="N", help=f"Length of the sequence: {COUNTING}.")]
Lengths = Annotated[
    str, typer.Option("-w", "--segment-lengths", metavar="W,W,...", help="Segment lengths, counted as -n.")
]
Rates = Annotated[str, typer.Option("-r", "--dilation-rates", metavar="R,R,...", help="Dilation rates, one a length.")]
Rule = Annotated[str, typer.Option("--rule", metavar="RULE", help=f"One of {', '.join(RULES)}.")]
Heads = Annotated[int, typer.Option("--heads", metavar="H", help="Query heads.")]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", metavar="H", help="Key/value heads; as --heads if not given.")
]
HeadDim = Annotated[int, typer.Option("--head-dim", metavar="D", help="Numbers in a row of a head.")]
Batch = Annotated[int, typer.Option("--batch", metavar="B", help="Sequences at a time.")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="float64, float32, bfloat16 or float16.")]
Causal = Annotated[bool, typer.Option("--causal", help="A query sees no later token.")]
Ranks = Annotated[str, typer.Option("--ranks", metavar="P", help="Devices that share the sequence.")]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory of a device: 80GB (1000³), 24GiB (1024³).")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Where to write; next to the results if not given.")
]


def pattern(rule: str, lengths: str, rates: str) -> DilatedPattern:
    return DilatedPattern.of(cast(RuleName, rule), arguments.counts("-w", lengths), arguments.counts("-r", rates))
