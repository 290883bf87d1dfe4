"""V2Simple, V2Collective and Production side by side: time, memory by ranks, and where each runs out of memory."""

from __future__ import annotations

import time

import torch

from dilated_attention.bench import implementations as known
from dilated_attention.bench import probes
from dilated_attention.bench.runners import ran_out
from dilated_attention.bench.session import PATTERNS, Session, Step
from dilated_attention.bench.setting import forget_inputs
from dilated_attention.bench.subject import BOTH, Implementation
from dilated_attention.units import bytes_text

CLASSES = ("RingAttentionV2Simple", "RingDilatedAttentionV2Collective", "RingDilatedAttentionProduction")
TOKENS = (4096, 8192, 16384)
CPU_BUDGET = 1 << 30
PATIENCE = 5.0  # seconds for one length: a dense method would double its length for four times the work
TITLE = "The longest sequence that fits"


def steps(session: Session) -> list[Step]:
    which = known.named(*CLASSES, *(f"{name}, {ranks} ranks" for ranks in known.RANKS for name in CLASSES))
    settings = [session.setting(tokens, PATTERNS[0]) for tokens in TOKENS]
    return [*(session.comparing("ring", which, setting) for setting in settings), Step(longest_table, 60.0)]


def longest_table(session: Session) -> None:
    """Forward and backward on one device, its length doubled until there is no memory, or no patience, left."""
    budget = torch.cuda.get_device_properties(session.device).total_memory if session.on_cuda else CPU_BUDGET
    rows = []
    for one in known.named(*CLASSES):
        session.pace.step(f"{TITLE}: {one.name}", 20.0)
        if session.is_exact(one.name, session.setting(TOKENS[0], PATTERNS[0])):
            rows.append([one.name, *_longest(session, one, budget)])
    note = (
        f"Forward and backward on one device with {bytes_text(budget)} for inputs and all else. Over P ranks each "
        "holds 1/P of it: see the memory by ranks above, and `dilated-attention plan` for lengths that one device "
        "cannot hold."
    )
    session.table("ring", TITLE, note, ["implementation", "longest", "memory there, MiB", "at twice that"], rows)


def _longest(session: Session, one: Implementation, budget: int) -> tuple[int | None, float | None, str]:
    best, held, tokens = None, None, TOKENS[0]
    while True:
        began = time.monotonic()
        needed = _needed(session, one, tokens)
        if needed is None or needed > budget:
            return best, held, "out of memory"
        best, held = tokens, round(needed / (1 << 20), 2)
        if time.monotonic() - began > PATIENCE:
            return best, held, f"not tried: this took {time.monotonic() - began:.0f} s"
        tokens *= 2


def _needed(session: Session, one: Implementation, tokens: int) -> int | None:
    """Bytes of the inputs and of a call; None where there are not so many."""
    try:
        subject = one.build(session.setting(tokens, PATTERNS[0]))
        inputs = sum(x.nbytes for x in (*subject.inputs, subject.dout))
        return inputs + probes.peak_bytes(subject.call(BOTH), session.device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not ran_out(str(error)):
            raise
        return None
    finally:
        forget_inputs()
        if session.on_cuda:
            torch.cuda.empty_cache()
