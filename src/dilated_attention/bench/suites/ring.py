"""V2Simple, V2Collective and Production side by side: time, memory by ranks, and where each runs out of memory."""

from __future__ import annotations

import time

import torch

from dilated_attention.bench import implementations as known
from dilated_attention.bench import memory
from dilated_attention.bench.memory import OutOfMemory
from dilated_attention.bench.setting import forget_inputs
from dilated_attention.bench.steps import Session, Step, compare_step
from dilated_attention.bench.subject import BOTH, Implementation
from dilated_attention.bench.suites.common import PATTERNS, mib
from dilated_attention.ring.cost import size

SUITE = "ring"
CLASSES = ("RingAttentionV2Simple", "RingDilatedAttentionV2Collective", "RingDilatedAttentionProduction")
TOKENS = (4096, 8192, 16384)
CPU_BUDGET = 1 << 30
PATIENCE = 5.0  # seconds for one length: a dense method would double its length for four times the work
TITLE = "The longest sequence that fits"


def steps(session: Session) -> list[Step]:
    names = [*CLASSES, *(f"{name}, {ranks} ranks" for ranks in known.RANKS for name in CLASSES)]
    which = known.named(*names)
    settings = [session.setting(tokens, PATTERNS[0]) for tokens in TOKENS]
    return [*(compare_step(SUITE, which, setting) for setting in settings), Step(TITLE, len(CLASSES), longest_table)]


def longest_table(session: Session) -> None:
    """Forward and backward on one device, its length doubled until there is no memory, or no patience, left."""
    budget = _budget(session.device)
    rows = []
    for one in known.named(*CLASSES):
        session.watch.step(f"{TITLE}: {one.name}")
        rows.append([one.name, *_longest(session, one, budget)])
    note = (
        f"Forward and backward on one device with {size(budget)} for inputs and all else. Over P ranks each holds 1/P "
        "of it: see the memory by ranks above, and `dilated-attention plan` for lengths that one device cannot hold."
    )
    columns = ["implementation", "longest", "memory there, MiB", "at twice that"]
    session.table(SUITE, TITLE, note, columns, rows)


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return CPU_BUDGET


def _longest(session: Session, one: Implementation, budget: int) -> tuple[int | None, float | None, str]:
    limit = None if session.on_cuda else budget
    best, held, tokens = None, None, TOKENS[0]
    while True:
        began = time.monotonic()
        try:
            held = memory.peaks(one.build, session.setting(tokens, PATTERNS[0]), [BOTH], limit=limit)[BOTH]
        except (OutOfMemory, torch.OutOfMemoryError):
            return best, mib(held), "out of memory"
        finally:
            forget_inputs()
            if session.on_cuda:
                torch.cuda.empty_cache()
        best = tokens
        if time.monotonic() - began > PATIENCE:
            return best, mib(held), f"not tried: this took {time.monotonic() - began:.0f} s"
        tokens *= 2
