"""DilatedAttention against ImprovedDilatedAttention: are they the same function, and is one faster or smaller?"""

from __future__ import annotations

from dilated_attention.bench import implementations as known
from dilated_attention.bench.run import results
from dilated_attention.bench.steps import Session, Step, compare_step
from dilated_attention.bench.subject import BOTH, FORWARD
from dilated_attention.bench.suites.common import PATTERNS
from dilated_attention.testing import error

SUITE = "improved"
PAIR = ("DilatedAttention", "ImprovedDilatedAttention")
TOKENS, LONG = (4096, 8192, 32768), 1 << 20
TITLE = "How far the two are apart"


def steps(session: Session) -> list[Step]:
    pair = known.named(*PAIR)
    settings = [session.setting(tokens, pattern) for pattern in PATTERNS for tokens in TOKENS]
    long = session.setting(LONG, PATTERNS[1])
    return [
        Step(TITLE, len(PATTERNS), distances),
        *(compare_step(SUITE, pair, setting) for setting in settings),
        compare_step(SUITE, pair, long, FORWARD, timed=False),
        compare_step(SUITE, pair, long, BOTH, timed=False),
    ]


def distances(session: Session) -> None:
    """Of out and of each gradient, the largest difference, relative to the largest value."""
    rows = []
    for pattern in PATTERNS:
        setting = session.setting(TOKENS[0], pattern)
        session.watch.step(f"{TITLE}: {setting}")
        subjects = [one.build(setting) for one in known.named(*PAIR)]
        plain, improved = (results(x.attention, x.inputs, x.dout) for x in subjects)
        rows.append([str(setting), *(error(improved[name], plain[name]) for name in plain)])
    note = "0 means equal to the last bit."
    session.table(SUITE, TITLE, note, ["setting", "out", "dq", "dk", "dv"], rows)
