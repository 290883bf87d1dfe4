"""Properties that hold for every pattern, without an oracle: hypothesis draws the patterns, a seed the numbers.

Everything is float64 on small shapes; results that are equal in exact arithmetic must agree to 1e-12.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES
from tests.cases import finite

FEW = settings(deadline=None, derandomize=True, database=None, max_examples=100)


@dataclass(frozen=True)
class Problem:
    pattern: DilatedPattern
    tokens: int
    kv_heads: int
    group: int
    is_causal: bool
    backend: str
    seed: int

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        shape = 2, self.tokens, self.kv_heads * self.group, 3
        return testing.make_qkv(*shape, kv_heads=self.kv_heads, dtype=torch.float64, seed=self.seed)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        options = {"is_causal": self.is_causal, "backend": self.backend}
        return dilated_attention(q, k, v, self.pattern, enable_gqa=True, return_lse=True, **options)


@st.composite
def problems(draw: st.DrawFn, rules: tuple[str, ...] = RULES, max_branches: int = 3, max_length: int = 24) -> Problem:
    """Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly."""
    seed = draw(st.integers(0, 2**32 - 1))
    pick = random.Random(seed)
    rule, branches = pick.choice(rules), pick.randint(1, max_branches)
    lengths, rates = (tuple(pick.randint(1, most) for _ in range(branches)) for most in (max_length, 5))
    return Problem(
        pattern=DilatedPattern(rule, lengths, rates), tokens=pick.randint(1, 30),
        kv_heads=pick.randint(branches if rule == "head_groups" else 1, 5), group=pick.randint(1, 2),
        is_causal=pick.random() < 0.5, backend=pick.choice(["sdpa", "eager"]), seed=seed,
    )  # fmt: skip


def close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(got, expected, strict=True):
        found = testing.error(x, y)
        assert found < 1e-12, f"off by {found:.2e}"


@FEW
@given(problems(rules=("longnet", "head_groups"), max_branches=1))
def test_one_branch_is_plain_attention_on_its_rows(problem: Problem) -> None:
    ((width, rate),) = problem.pattern.branches
    q, k, v = problem.qkv()
    expected = torch.zeros_like(q)
    for start, head in itertools.product(range(0, problem.tokens, width), range(q.shape[2])):
        key_head = head // problem.group
        offset = problem.pattern.offset(0, key_head, problem.kv_heads)
        rows = slice(start + offset, min(start + width, problem.tokens), rate)
        if expected[:, rows].shape[1]:
            part = q[:, rows, head], k[:, rows, key_head], v[:, rows, key_head]
            expected[:, rows, head] = F.scaled_dot_product_attention(*part, is_causal=problem.is_causal)
    close(problem.attend(q, k, v)[:1], (expected,))


@FEW
@given(problems(rules=("longnet", "torchscale")), st.integers(1, 3), st.randoms(use_true_random=False))
def test_branches_come_in_any_order_and_twice_they_only_raise_lse(
    problem: Problem, times: int, shuffle: random.Random
) -> None:
    branches = list(problem.pattern.branches) * times
    shuffle.shuffle(branches)
    lengths, rates = zip(*branches, strict=True)
    qkv = problem.qkv()
    out, lse = problem.attend(*qkv)
    shuffled = replace(problem, pattern=DilatedPattern(problem.pattern.rule, lengths, rates))
    close(shuffled.attend(*qkv), (out, lse + math.log(times)))


@FEW
@given(problems(rules=("longnet", "head_groups"), max_length=8, max_branches=2), st.integers(1, 2))
def test_cutting_between_segments_changes_nothing(problem: Problem, pieces: int) -> None:
    step = math.lcm(*problem.pattern.segment_lengths)
    assume(step <= 40)
    problem = replace(problem, tokens=problem.tokens + pieces * step)
    qkv = problem.qkv()
    out, lse = problem.attend(*qkv)
    for part in (slice(None, pieces * step), slice(pieces * step, None)):
        close(problem.attend(*(x[:, part] for x in qkv)), (out[:, part], lse[:, part]))


@FEW
@given(problems(), st.data())
def test_a_causal_prefix_does_not_know_what_follows(problem: Problem, data: st.DataObject) -> None:
    problem, cut = replace(problem, is_causal=True), data.draw(st.integers(0, problem.tokens))
    qkv = [x.requires_grad_() for x in problem.qkv()]
    out, lse = problem.attend(*qkv)
    close(problem.attend(*(x[:, :cut] for x in qkv)), (out[:, :cut], lse[:, :cut]))

    changed = [x.detach().clone() for x in qkv]
    for x in changed:
        x[:, cut:] = 100.0
    got, got_lse = problem.attend(*changed)
    assert torch.equal(got[:, :cut], out[:, :cut])
    assert torch.equal(got_lse[:, :cut], lse[:, :cut])

    for grad in torch.autograd.grad(out[:, :cut].sum() + finite(lse[:, :cut]).sum(), qkv):
        assert (grad[:, cut:] == 0).all()
