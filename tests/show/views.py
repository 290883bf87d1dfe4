"""Views for these tests: drawn ones, and those that several files look at."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.pattern import RULES
from dilated_attention.show import View


@dataclass(frozen=True)
class Case:
    pattern: DilatedPattern
    tokens: int
    kv_heads: int
    group: int
    is_causal: bool

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def view(self, **more: object) -> View:
        return View.of(self.pattern, self.tokens, self.heads, kv_heads=self.kv_heads, is_causal=self.is_causal, **more)  # type: ignore[arg-type]

    def keys(self, query: int, head: int) -> tuple[int, ...]:
        return self.pattern.keys(
            query, head, num_tokens=self.tokens, num_heads=self.heads, num_kv_heads=self.kv_heads,
            is_causal=self.is_causal,
        )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, most_tokens: int = 40) -> Case:
    """Every rule; lengths and rates that divide nothing, or are longer than the sequence."""
    kv_heads = draw(st.integers(1, 5))
    count = draw(st.integers(1, min(3, kv_heads)))
    branch = st.tuples(st.integers(1, most_tokens + 5), st.integers(1, 9))
    branches = draw(st.lists(branch, min_size=count, max_size=count))
    pattern = DilatedPattern.of(draw(st.sampled_from(RULES)), *zip(*branches, strict=True))
    tokens = draw(st.integers(1, most_tokens))
    return Case(pattern, tokens, kv_heads, draw(st.integers(1, 2)), draw(st.booleans()))


def long_view(tokens: int = 10**9, **more: object) -> View:
    """LongNet's own growth: segments from 2048 tokens to all of them, 2048 rows each."""
    branches = range((tokens // 2048).bit_length() + 1)
    pattern = DilatedPattern.longnet([2048 << i for i in branches], [1 << i for i in branches])
    return View.of(pattern, tokens, 8, **more)  # type: ignore[arg-type]
