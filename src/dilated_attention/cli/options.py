"""Options that several commands take, so that they are called and explained alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from dilated_attention.cli import arguments
from dilated_attention.pattern import RULES, DilatedPattern
from dilated_attention.pattern import Rule as RuleName

COUNTING = "64k (k, M, G and T count by 1024), 65,536, 2^16, 1e9 or 1B"

Tokens = Annotated[
    str, typer.Option("-n", "--tokens", metavar="N", help=f"Length of the sequence, written as {COUNTING}.")
]
Lengths = Annotated[
    str, typer.Option("-w", "--segment-lengths", metavar="W,W,...", help="Segment lengths, written as -n.")
]
Rates = Annotated[
    str, typer.Option("-r", "--dilation-rates", metavar="R,R,...", help="Dilation rates, one per segment length.")
]
Rule = Annotated[str, typer.Option("--rule", metavar="RULE", help=f"The rule: {', '.join(RULES)}.")]
MOST_HEADS = 2**14
Heads = Annotated[int, typer.Option("--heads", metavar="H", min=1, max=MOST_HEADS, help="Number of query heads.")]
KvHeads = Annotated[
    int | None,
    typer.Option(
        "--kv-heads", metavar="H", min=1, max=MOST_HEADS, help="Number of key/value heads; --heads by default."
    ),
]
HeadDim = Annotated[int, typer.Option("--head-dim", metavar="D", help="Dimension of a head.")]
Batch = Annotated[int, typer.Option("--batch", metavar="B", help="Number of sequences at a time.")]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="The dtype: float64, float32, bfloat16 or float16.")
]
Causal = Annotated[bool, typer.Option("--causal", help="Let no query see later tokens.")]
Ranks = Annotated[str, typer.Option("--ranks", metavar="P", help="Number of devices that share the sequence.")]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory of one device: 80GB (1000³) or 24GiB (1024³).")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="The folder to write into; that of the results by default."),
]


def pattern(rule: str, lengths: str, rates: str) -> DilatedPattern:
    return DilatedPattern.of(cast(RuleName, rule), arguments.counts("-w", lengths), arguments.counts("-r", rates))
