"""The most telling implementations at three lengths: one to two minutes on two CPU cores."""

from __future__ import annotations

from dilated_attention.bench import implementations as known
from dilated_attention.bench.session import PATTERNS, Session, Step

LENGTHS = (1024, 4096, 8192)
WHICH = (
    known.DENSE, "head_groups, auto", "longnet, auto", "torchscale, auto", known.GATHER, known.SLICES, "FlexAttention",
    known.RELEASED, known.OVER_HEADS,
)  # fmt: skip
MODULES = ("MultiheadDilatedAttention", "nn.MultiheadAttention")  # at one length


def steps(session: Session) -> list[Step]:
    return [
        session.comparing(
            "quick", known.named(*WHICH, *MODULES * (tokens == 4096)), session.setting(tokens, PATTERNS[0])
        )
        for tokens in LENGTHS
    ]
