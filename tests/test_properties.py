"""Properties that hold for every pattern, without an oracle: hypothesis draws the patterns, a seed the numbers.

Everything is float64 on small shapes; results that are equal in exact arithmetic must agree to 1e-12.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.merge import merge_
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
    samples: int = 2

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def qkv(self, head_dim: int = 3) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.samples, self.tokens, self.heads, head_dim
        return testing.make_qkv(*shape, kv_heads=self.kv_heads, dtype=torch.float64, seed=self.seed)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        options = {"is_causal": self.is_causal, "backend": self.backend, **options}
        return dilated_attention(q, k, v, self.pattern, enable_gqa=True, return_lse=True, **options)


@st.composite
def problems(
    draw: st.DrawFn,
    rules: tuple[str, ...] = RULES,
    causal: bool | None = None,
    max_group: int = 2,
    max_branches: int = 3,
    max_length: int = 24,
) -> Problem:
    """Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly."""
    seed = draw(st.integers(0, 2**32 - 1))
    pick = random.Random(seed)
    rule, branches = pick.choice(rules), pick.randint(1, max_branches)
    lengths, rates = (tuple(pick.randint(1, most) for _ in range(branches)) for most in (max_length, 5))
    return Problem(
        pattern=DilatedPattern(rule, lengths, rates),
        tokens=pick.randint(1, 30),
        kv_heads=pick.randint(branches if rule == "head_groups" else 1, 5),
        group=pick.randint(1, max_group),
        is_causal=pick.random() < 0.5 if causal is None else causal,
        backend=pick.choice(["sdpa", "eager"]),
        seed=seed,
    )


def close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(got, expected, strict=True):
        found = testing.error(x, y)
        assert found < 1e-12, f"off by {found:.2e}"


def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)


# --- against plain attention ------------------------------------------------------------------------------------


@FEW
@given(problems(max_group=1), st.integers(0, 5))
def test_dense_branches_over_all_tokens_are_plain_attention(problem: Problem, longer: int) -> None:
    branches = len(problem.pattern.branches)
    dense = DilatedPattern(problem.pattern.rule, (problem.tokens + longer,) * branches, (1,) * branches)
    q, k, v = problem.qkv()
    close(replace(problem, pattern=dense).attend(q, k, v)[:1], (plain(q, k, v, problem.is_causal),))


@FEW
@given(problems(rules=("longnet", "head_groups"), max_group=1, max_branches=1))
def test_one_branch_is_plain_attention_on_its_rows(problem: Problem) -> None:
    ((width, rate),) = problem.pattern.branches
    q, k, v = problem.qkv()
    expected = torch.zeros_like(q)
    for start in range(0, problem.tokens, width):
        for head in range(problem.heads):
            offset = problem.pattern.offset(0, head, problem.heads)
            rows = slice(start + offset, min(start + width, problem.tokens), rate)
            part = [x[:, rows, head : head + 1] for x in (q, k, v)]
            if part[0].shape[1]:
                expected[:, rows, head : head + 1] = plain(*part, problem.is_causal)
    close(problem.attend(q, k, v)[:1], (expected,))


# --- symmetries -------------------------------------------------------------------------------------------------


@FEW
@given(problems(), st.permutations(range(4)))
def test_samples_may_be_permuted_and_do_not_see_each_other(problem: Problem, order: list[int]) -> None:
    problem = replace(problem, samples=4)
    qkv = problem.qkv()
    mask = torch.rand(4, problem.tokens, generator=torch.Generator().manual_seed(problem.seed)) < 0.3
    out, lse = problem.attend(*qkv, key_padding_mask=mask)
    for some in (order, [2]):
        close(problem.attend(*(x[some] for x in qkv), key_padding_mask=mask[some]), (out[some], lse[some]))


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


# --- cutting and padding the sequence ---------------------------------------------------------------------------


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
@given(problems(causal=True), st.data())
def test_a_causal_prefix_does_not_know_what_follows(problem: Problem, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, problem.tokens))
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


@FEW
@given(problems(), st.data())
def test_a_right_padded_sample_is_the_sample_alone(problem: Problem, data: st.DataObject) -> None:
    ends = [data.draw(st.integers(0, problem.tokens)) for _ in range(problem.samples)]
    qkv = problem.qkv()
    mask = torch.arange(problem.tokens) >= torch.tensor(ends)[:, None]
    dout = qkv[0].flip(-1).masked_fill(mask[:, :, None, None], 0.0)
    dlse = dout[..., 0]
    padded = testing.run(lambda *x: problem.attend(*x, key_padding_mask=mask), qkv, dout, dlse)
    for sample, end in enumerate(ends):
        part = (slice(sample, sample + 1), slice(end))
        alone = testing.run(problem.attend, [x[part] for x in qkv], dout[part], dlse[part])
        close(tuple(x[part] for _, x in padded.items()), tuple(x for _, x in alone.items()))
        for grad in (padded.dq, padded.dk, padded.dv):
            assert (grad[sample, end:] == 0).all()


# --- values and scores ------------------------------------------------------------------------------------------


@FEW
@given(problems())
def test_out_is_a_convex_combination_of_the_values_seen(problem: Problem) -> None:
    q, k, v = problem.qkv()
    out, lse = problem.attend(q, k, v)
    row = {"num_tokens": problem.tokens, "num_heads": problem.heads, "num_kv_heads": problem.kv_heads}
    for head in range(problem.heads):
        for query in range(problem.tokens):
            seen = problem.pattern.keys(query, head, **row, is_causal=problem.is_causal)
            zeros = problem.pattern.zero_keys(query, head, **row, is_causal=problem.is_causal)
            values = v[:, list(seen), head // problem.group]
            values = torch.cat([values, values.new_zeros(problem.samples, min(zeros, 1), 3)], 1)
            if not seen:
                assert (out[:, query, head] == 0).all()
                assert (lse[:, query, head] == -math.inf).all()
                continue
            assert (out[:, query, head] <= values.amax(1) + 1e-12).all()
            assert (out[:, query, head] >= values.amin(1) - 1e-12).all()


# --- the monoid -------------------------------------------------------------------------------------------------

LSE = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([0.0, -math.inf]))


def state(lse: float, value: float) -> tuple[Tensor, Tensor]:
    """A pair with this lse; a pair of no keys has out 0."""
    out = torch.tensor([0.0 if lse == -math.inf else value], dtype=torch.float64)
    return out, torch.tensor(lse, dtype=torch.float64)


def merged(*pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = (x.clone() for x in pairs[0])
    for pair in pairs[1:]:
        merge_(out, lse, *pair)
    return out, lse


@settings(FEW, max_examples=300)
@given(st.lists(st.tuples(LSE, st.floats(-10, 10)), min_size=3, max_size=3))
def test_merge_is_a_commutative_monoid(pairs: list[tuple[float, float]]) -> None:
    a, b, c = (state(*pair) for pair in pairs)
    identity = state(-math.inf, 0.0)
    expected = merged(a, b, c)
    for got in (merged(a, merged(b, c)), merged(c, b, a), merged(b, a, c), merged(identity, a, b, identity, c)):
        close(got, expected)
    for got in (merged(a, identity), merged(identity, a)):
        assert all(map(torch.equal, got, a)), "not a bit changes"
