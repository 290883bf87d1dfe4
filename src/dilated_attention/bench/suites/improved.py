"""DilatedAttention against ImprovedDilatedAttention: are they the same function, and is one faster or smaller?"""

from __future__ import annotations

from dilated_attention.bench import implementations as known
from dilated_attention.bench.run import results
from dilated_attention.bench.session import PATTERNS, Session, Step
from dilated_attention.testing import error

PAIR = ("DilatedAttention", "ImprovedDilatedAttention")
TOKENS = (4096, 8192, 32768, 1 << 20)
TITLE = "How far the two are apart"


def steps(session: Session) -> list[Step]:
    settings = [session.setting(tokens, pattern) for pattern in PATTERNS for tokens in TOKENS]
    pair = known.named(*PAIR)
    return [Step(distances, 1.0), *(session.comparing("improved", pair, setting) for setting in settings)]


def distances(session: Session) -> None:
    """Of out and of each gradient, the largest difference, relative to the largest value."""
    session.pace.step(TITLE, 1.0)
    rows = []
    for pattern in PATTERNS:
        setting = session.setting(TOKENS[0], pattern)
        subjects = [one.build(setting) for one in known.named(*PAIR)]
        plain, improved = (results(x.attention, x.inputs, x.dout) for x in subjects)
        rows.append([str(setting), *(error(improved[name], plain[name]) for name in plain)])
    session.table("improved", TITLE, "0 means equal to the last bit.", ["setting", "out", "dq", "dk", "dv"], rows)
