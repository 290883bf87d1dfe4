"""Everything once at a short length, and the most telling ones at a few lengths: three minutes on two CPU cores."""

from __future__ import annotations

from dilated_attention.bench.implementations import everything
from dilated_attention.bench.series import TELLING
from dilated_attention.bench.steps import Session, Step, compare_step
from dilated_attention.bench.suites.common import PATTERNS


def steps(session: Session) -> list[Step]:
    short = PATTERNS[0]
    every = compare_step("quick", everything(), session.setting(2048, short))
    curve = [one for one in everything() if one.name in TELLING]
    return [every, *(compare_step("quick", curve, session.setting(tokens, short)) for tokens in (1024, 4096, 8192))]
