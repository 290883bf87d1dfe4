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
        return testing.make_qkv(
            self.samples,
            self.tokens,
            self.heads,
            head_dim,
            kv_heads=self.kv_heads,
            dtype=torch.float64,
            seed=self.seed,
        )

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
    max_rate: int = 5,
    max_length: int = 24,
) -> Problem:
    """Drawn one by one, numbers would mostly be small or equal; so a seed is drawn and the rest follows evenly."""
    seed = draw(st.integers(0, 2**32 - 1))
    pick = random.Random(seed)
    rule, branches = pick.choice(rules), pick.randint(1, max_branches)
    lengths = tuple(pick.randint(1, max_length) for _ in range(branches))
    rates = tuple(pick.randint(1, max_rate) for _ in range(branches))
    return Problem(
        pattern=DilatedPattern(rule, lengths, rates),
        tokens=pick.randint(1, 30),
        kv_heads=pick.randint(branches if rule == "head_groups" else 1, 5),
        group=pick.randint(1, max_group),
        is_causal=pick.random() < 0.5 if causal is None else causal,
        backend=pick.choice(["sdpa", "eager"]),
        seed=seed,
    )


def close(got: Tensor, expected: Tensor) -> None:
    found = testing.error(got, expected)
    assert found < 1e-12, f"off by {found:.2e}"


def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale).transpose(1, 2)


# --- against plain attention ------------------------------------------------------------------------------------


@FEW
@given(problems(max_group=1), st.integers(0, 5))
def test_dense_branches_over_all_tokens_are_plain_attention(problem: Problem, longer: int) -> None:
    branches = len(problem.pattern.branches)
    dense = DilatedPattern(problem.pattern.rule, (problem.tokens + longer,) * branches, (1,) * branches)
    q, k, v = problem.qkv()
    out, _ = replace(problem, pattern=dense).attend(q, k, v)
    close(out, plain(q, k, v, problem.is_causal))


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
    close(problem.attend(q, k, v)[0], expected)


# --- symmetries -------------------------------------------------------------------------------------------------


@FEW
@given(problems(), st.randoms(use_true_random=False))
def test_samples_may_be_permuted_and_do_not_see_each_other(problem: Problem, shuffle: random.Random) -> None:
    problem = replace(problem, samples=4)
    qkv = problem.qkv()
    mask = torch.rand(4, problem.tokens, generator=torch.Generator().manual_seed(problem.seed)) < 0.3
    out, lse = problem.attend(*qkv, key_padding_mask=mask)
    order = list(range(4))
    shuffle.shuffle(order)
    got, got_lse = problem.attend(*(x[order] for x in qkv), key_padding_mask=mask[order])
    close(got, out[order])
    close(got_lse, lse[order])
    alone, alone_lse = problem.attend(*(x[2:3] for x in qkv), key_padding_mask=mask[2:3])
    close(alone, out[2:3])
    close(alone_lse, lse[2:3])


@FEW
@given(problems(max_rate=3), st.randoms(use_true_random=False))
def test_heads_of_one_kind_may_be_permuted(problem: Problem, shuffle: random.Random) -> None:
    problem = replace(problem, kv_heads=problem.kv_heads + 4)

    def kind(head: int) -> tuple:
        pattern = problem.pattern
        return tuple(
            pattern.offset(branch, head, problem.kv_heads)
            for branch in range(len(pattern.branches))
            if head in pattern.heads(branch, problem.kv_heads)
        ) + tuple(head in pattern.heads(branch, problem.kv_heads) for branch in range(len(pattern.branches)))

    order = list(range(problem.kv_heads))
    shuffle.shuffle(order)
    by_kind = {head: [other for other in order if kind(other) == kind(head)] for head in order}
    order = [by_kind[head].pop() for head in range(problem.kv_heads)]
    assume(order != sorted(order))
    queries = [head * problem.group + i for head in order for i in reversed(range(problem.group))]
    q, k, v = problem.qkv()
    out, lse = problem.attend(q, k, v)
    got, got_lse = problem.attend(q[:, :, queries], k[:, :, order], v[:, :, order])
    close(got, out[:, :, queries])
    close(got_lse, lse[:, :, queries])


@FEW
@given(problems(rules=("longnet", "torchscale")), st.randoms(use_true_random=False))
def test_branches_may_come_in_any_order(problem: Problem, shuffle: random.Random) -> None:
    branches = list(problem.pattern.branches)
    shuffle.shuffle(branches)
    lengths, rates = zip(*branches, strict=True)
    qkv = problem.qkv()
    out, lse = problem.attend(*qkv)
    got, got_lse = replace(problem, pattern=DilatedPattern(problem.pattern.rule, lengths, rates)).attend(*qkv)
    close(got, out)
    close(got_lse, lse)


@FEW
@given(problems(rules=("longnet", "torchscale"), max_branches=2), st.integers(2, 3))
def test_a_repeated_pattern_only_raises_lse(problem: Problem, times: int) -> None:
    pattern = problem.pattern
    repeated = DilatedPattern(pattern.rule, pattern.segment_lengths * times, pattern.dilation_rates * times)
    qkv = problem.qkv()
    out, lse = problem.attend(*qkv)
    got, got_lse = replace(problem, pattern=repeated).attend(*qkv)
    close(got, out)
    close(got_lse, lse + math.log(times))


@FEW
@given(problems(rules=("longnet", "head_groups"), max_length=8, max_branches=2), st.integers(1, 3))
def test_rolling_by_whole_segments_rolls_the_result(problem: Problem, by: int) -> None:
    step = math.lcm(*problem.pattern.segment_lengths)
    assume(step <= 40)
    problem = replace(problem, tokens=4 * step, is_causal=False)
    qkv = problem.qkv()
    out, lse = problem.attend(*qkv)
    got, got_lse = problem.attend(*(x.roll(by * step, 1) for x in qkv))
    close(got, out.roll(by * step, 1))
    close(got_lse, lse.roll(by * step, 1))


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
        got, got_lse = problem.attend(*(x[:, part] for x in qkv))
        close(got, out[:, part])
        close(got_lse, lse[:, part])


@FEW
@given(problems(causal=True), st.data())
def test_a_causal_prefix_does_not_know_what_follows(problem: Problem, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, problem.tokens))
    qkv = [x.requires_grad_() for x in problem.qkv()]
    out, lse = problem.attend(*qkv)
    alone, alone_lse = problem.attend(*(x[:, :cut] for x in qkv))
    close(out[:, :cut], alone)
    close(lse[:, :cut], alone_lse)

    changed = [x.detach().clone() for x in qkv]
    for x in changed:
        x[:, cut:] = 100.0
    got, got_lse = problem.attend(*changed)
    assert torch.equal(got[:, :cut], out[:, :cut])
    assert torch.equal(got_lse[:, :cut], lse[:, :cut])

    finite = lse[:, :cut].masked_fill(lse[:, :cut] == -math.inf, 0.0)
    for grad in torch.autograd.grad(out[:, :cut].sum() + finite.sum(), qkv):
        assert (grad[:, cut:] == 0).all()


@FEW
@given(problems(), st.data())
def test_a_right_padded_sample_is_the_sample_alone(problem: Problem, data: st.DataObject) -> None:
    ends = [data.draw(st.integers(0, problem.tokens)) for _ in range(problem.samples)]
    qkv = problem.qkv()
    dout = torch.randn(qkv[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dlse = torch.randn(qkv[0].shape[:3], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(problem.tokens) >= torch.tensor(ends)[:, None]
    dout, dlse = dout.masked_fill(mask[:, :, None, None], 0.0), dlse.masked_fill(mask[:, :, None], 0.0)
    padded = testing.run(lambda *x: problem.attend(*x, key_padding_mask=mask), qkv, dout, dlse)
    for sample, end in enumerate(ends):
        part = (slice(sample, sample + 1), slice(end))
        alone = testing.run(problem.attend, [x[part] for x in qkv], dout[part], dlse[part])
        for (_, got), (_, expected) in zip(padded.items(), alone.items(), strict=True):
            close(got[part], expected)
        for grad in (padded.dq, padded.dk, padded.dv):
            assert (grad[sample, end:] == 0).all()


# --- values and scores ------------------------------------------------------------------------------------------


@FEW
@given(problems(), st.floats(-3, 3), st.floats(-3, 3))
def test_linear_in_the_values(problem: Problem, a: float, b: float) -> None:
    q, k, v = problem.qkv()
    w = v.flip(1) * 0.5 + 1.0
    (out_v, _), (out_w, _) = problem.attend(q, k, v), problem.attend(q, k, w)
    close(problem.attend(q, k, a * v + b * w)[0], a * out_v + b * out_w)


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


@FEW
@given(problems(rules=("longnet", "head_groups")), st.floats(-5, 5))
def test_weights_of_a_row_sum_to_one(problem: Problem, value: float) -> None:
    q, k, v = problem.qkv()
    out, lse = problem.attend(q, k, torch.full_like(v, value))
    covered = (lse > -math.inf).unsqueeze(-1).to(out.dtype)
    close(out, (covered * value).expand_as(out))


@FEW
@given(problems(rules=("longnet", "head_groups"), max_group=1))
def test_moving_all_keys_moves_only_lse(problem: Problem) -> None:
    q, k, v = problem.qkv()
    by = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    out, lse = problem.attend(q, k, v, scale=0.7)
    got, got_lse = problem.attend(q, k + by, v, scale=0.7)
    close(got, out)
    close(got_lse, lse + 0.7 * (q @ by))


@FEW
@given(problems(), st.floats(0.1, 2.0))
def test_scaling_the_scores_is_scaling_the_queries(problem: Problem, scale: float) -> None:
    q, k, v = problem.qkv()
    out, lse = problem.attend(q, k, v, scale=scale)
    got, got_lse = problem.attend(q * scale, k, v, scale=1.0)
    close(got, out)
    close(got_lse, lse)


@FEW
@given(problems(max_group=3))
def test_both_backends_agree(problem: Problem) -> None:
    qkv = problem.qkv()
    (one, one_lse), (other, other_lse) = (problem.attend(*qkv, backend=name) for name in ("sdpa", "eager"))
    close(one, other)
    close(one_lse, other_lse)


@FEW
@given(problems(max_rate=1, max_group=3))
def test_shared_heads_are_repeated_heads_where_offsets_agree(problem: Problem) -> None:
    assume(problem.pattern.rule != "head_groups")  # there, more key/value heads deal the branches out anew
    q, k, v = problem.qkv()
    out, lse = problem.attend(q, k, v)
    k, v = (x.repeat_interleave(problem.group, 2) for x in (k, v))
    got, got_lse = replace(problem, kv_heads=problem.heads, group=1).attend(q, k, v)
    close(got, out)
    close(got_lse, lse)


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
        close(got[0], expected[0])
        close(got[1], expected[1])
    for got in (merged(a, identity), merged(identity, a)):
        assert torch.equal(got[0], a[0])
        assert torch.equal(got[1], a[1])
