"""Problems over ranks that are drawn: patterns, lengths and heads beyond those of the table of cases."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.pattern import RULES
from tests.cases import EXCHANGES, Case


def few(examples: int) -> settings:
    return settings(deadline=None, derandomize=True, database=None, max_examples=examples)


def drawn(most_ranks: int = 8, most_tokens: int = 60, **given: Any) -> st.SearchStrategy[Case]:
    """Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly."""
    return st.integers(0, 2**32 - 1).map(lambda seed: problem(seed, most_ranks, most_tokens, **given))


def problem(seed: int, most_ranks: int, most_tokens: int, dtypes: tuple[str, ...] = ("f64",)) -> Case:
    pick = random.Random(seed)
    rule, branches, tokens = pick.choice(RULES), pick.randint(1, 3), pick.randint(1, most_tokens)
    width = pick.choice((tokens // 2, tokens + 5, 2 * tokens))
    pattern = DilatedPattern(
        rule,
        tuple(pick.randint(1, max(1, width)) for _ in range(branches)),
        tuple(pick.choice((1, pick.randint(1, 4), pick.randint(1, 14))) for _ in range(branches)),
    )
    kv_heads = pick.randint(branches if rule == "head_groups" else 1, 7)
    return Case(
        "drawn", seed, rule, is_causal=pick.random() < 0.5, pattern="own", own_pattern=pattern, tokens=tokens,
        ranks=pick.choice((pick.randint(1, min(8, most_ranks)), pick.randint(1, most_ranks))),
        shards=pick.choice(("even", "unequal", "unequal", "empty")),
        own_heads=(kv_heads * pick.choice((1, 1, 2, 3)), kv_heads), head_dim=pick.randint(1, 9),
        samples=pick.choice((1, 1, 2, 3)), dtype=pick.choice(dtypes), mask=pick.choice(("none", "random", "right")),
        dlse=pick.random() < 0.7, dropout_p=pick.choice((0.0, 0.0, 0.4)), backend=pick.choice(("auto", "eager")),
        exchange=pick.choice(EXCHANGES), recompute=pick.random() < 0.5,
    )  # fmt: skip
