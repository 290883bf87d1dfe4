"""What to choose: segments and rates for a length, what they cost, and what to change where memory is short.

Every number is counted, by the pattern or by `plan_cost`. A change is named only if it was counted and fits.

Legend: w segment length, r dilation rate, N tokens, P ranks; bytes are those of the busiest rank.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dilated_attention.backends.choose import choose
from dilated_attention.backends.triton import nesting, strips
from dilated_attention.branches import Dense, Dilated, Global, Prefix, Window
from dilated_attention.call import Call
from dilated_attention.checks import check_int
from dilated_attention.pattern import MAX_BRANCHES, DilatedPattern, Pattern, Rule
from dilated_attention.ring.cost import LINKS, MOST_COUNTED, PlanCost, plan_cost
from dilated_attention.units import bytes_text, flops_text, number_text

NEAR, SINKS = 1024, 4  # tokens of a window, and first ones that all of a language model see
ROWS = 2048  # of a segment, in every branch: what LongNet starts from, and enough to keep a kernel busy
# What PyTorch's kernels take beyond what `plan_cost` counts. Measured on an H200 in bfloat16: 5 % more in the forward
# pass and 26 % in the backward pass (benchmarks/results/ring.json). A test checks these numbers against that file.
FORWARD_MORE, BACKWARD_MORE = 1.1, 1.3
MOST_TRIED = MOST_COUNTED  # ranks, where more of them might help
CHEAPER = {torch.float64: (torch.float32, torch.bfloat16), torch.float32: (torch.bfloat16,)}
WIDTH = 80  # columns of what is printed


@dataclass(frozen=True, order=True)
class Need:
    """Bytes that one call takes on the busiest rank; weights and other layers come on top."""

    inference: int
    training: int

    def __str__(self) -> str:
        return f"{bytes_text(self.training)} to train, {bytes_text(self.inference)} to infer"


@dataclass(frozen=True)
class Workload:
    """One attention call, whatever its pattern, and the speeds for modelled times."""

    tokens: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    ranks: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = False
    latency: float = LINKS["nccl"][0]  # seconds per hop
    bandwidth: float = LINKS["nccl"][1]  # bytes per second into a rank
    flops_per_second: float = 400e12

    def cost(self, pattern: Pattern) -> PlanCost:
        return plan_cost(
            pattern, self.tokens, self.ranks, num_heads=self.heads, head_dim=self.head_dim, num_kv_heads=self.kv_heads,
            dtype=self.dtype, batch=self.batch, is_causal=self.is_causal,
            latency=self.latency, bandwidth=self.bandwidth, flops_per_second=self.flops_per_second,
        )  # fmt: skip

    def need(self, cost: PlanCost, exchange: str | None = None) -> Need:
        """What the kernels that would run here take, with this exchange or with the best one.

        On one CUDA device our own kernels may run, which need less. Without such a device the kernels of PyTorch are
        assumed, and over ranks they always run.
        """
        memory, over = cost.memory, cost.exchanges[exchange or cost.best]
        gradients = memory.q + memory.gradients  # that of out comes in
        forward = (memory.saved + over.held + memory.out_sums) * FORWARD_MORE
        backward = (memory.saved + over.held + gradients + over.sums) * BACKWARD_MORE
        if self.ranks == 1 and torch.cuda.is_available():
            kv_heads = self.kv_heads or self.heads
            query, key = ((self.batch, self.tokens, heads, self.head_dim) for heads in (self.heads, kv_heads))
            call = Call(cost.pattern, self.is_causal)
            call = call.with_shapes(query, key, self.dtype, torch.device("cuda"), has_padding=False, start=0)
            if choose(call).is_whole:
                share = nesting.heads_at_once(call) / kv_heads  # the results of some heads wait at a time
                waiting = memory.out_sums if share == 1 else (memory.out_sums + memory.lse) * share
                forward = memory.saved + (waiting if strips.launches(call)[1:] else 0)  # type: ignore[index]  # it runs
            if choose(call, backward=True).is_whole:
                backward = memory.saved + gradients + 2 * memory.lse  # two numbers per row, from launch to launch
        return Need(round(forward), round(max(forward, backward)))


@dataclass(frozen=True)
class Suggestion:
    """A pattern for a length, why, and what it costs; print it for people."""

    pattern: Pattern
    workload: Workload
    cost: PlanCost
    reasons: str  # a paragraph
    figures: tuple[str, ...]

    def __str__(self) -> str:
        code = re.sub(r"\b(?=[A-Z])", "da.", f"pattern = {self.pattern!r}")
        lines = (textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in (code, "", *self.figures))
        return "\n".join([textwrap.fill(self.reasons, WIDTH), "", *lines])


# --- a pattern for a length ---------------------------------------------------------------------------------------


def suggest(workload: Workload, rule: str = "longnet", memory: int | None = None) -> Suggestion:
    """The pattern of a rule or, for "union", one with a window, why, and what it costs.

    ``memory``: bytes of one rank that the call may take. If training needs more, it is said what would fit.
    """
    size = workload.tokens, workload.heads, workload.kv_heads
    pattern = union_for(*size, workload.is_causal) if rule == "union" else pattern_for(*size, cast(Rule, rule))
    cost = workload.cost(pattern)
    figures = (*_figures(workload, cost), *verdict(workload, cost, memory))
    return Suggestion(pattern, workload, cost, " ".join(_reasons(pattern, workload)), figures)


def union_for(tokens: int, heads: int, kv_heads: int | None = None, is_causal: bool = False) -> Pattern:
    """Near tokens and some that all see, and the branches of `pattern_for` but the first."""
    far = [Dilated(width, rate) for width, rate in pattern_for(tokens, heads, kv_heads).branches[1:]]
    near = [Window(NEAR - 1), Prefix(SINKS)] if is_causal else [Global(1), Window(NEAR // 2)]
    return Pattern([*near, *far] if far else [Dense()])


def pattern_for(tokens: int, heads: int, kv_heads: int | None = None, rule: Rule = "longnet") -> DilatedPattern:
    """The pattern that `suggest` suggests: w grows by a factor from 2048 to N, and r with it."""
    tokens, heads = check_int("tokens", tokens), check_int("heads", heads)
    dense = DilatedPattern.of(rule, [tokens], [1])
    dense.check_heads(heads, kv_heads)
    most = MAX_BRANCHES
    if dense.head_rule.splits_heads:  # a head runs one branch only: two heads per branch, where there are that many
        kv_heads = kv_heads or heads
        most = min(kv_heads, max(2, kv_heads // 2))
    if tokens <= ROWS or most == 1:
        return dense
    doublings = ((tokens - 1) // ROWS).bit_length()  # from 2048 rows of rate 1 to as many of all tokens
    step = -(-doublings // (most - 1))
    rates = [1 << power for power in (*range(0, doublings, step), doublings)]
    return DilatedPattern.of(rule, [*(ROWS * rate for rate in rates[:-1]), tokens], rates)


def _reasons(pattern: Pattern, workload: Workload) -> Iterator[str]:
    """Why these, one sentence each, the most important first: who sees how far."""
    tokens, heads = workload.tokens, workload.heads
    kv_heads = workload.kv_heads or heads
    branches = [branch for branch in pattern.branches_for(kv_heads) if isinstance(branch, Dilated)]
    if tokens <= ROWS:
        yield f"{tokens:,} tokens are at most {ROWS:,}: one dense segment is cheap and leaves nothing out."
        return
    if branches[-1].rate == 1:
        yield "The only head must cover every row: one dense segment. With rule longnet it could be sparser."
        return
    longest, group = branches[-1], heads // kv_heads
    taken = Counter(longest.offset_of(head) for head in longest.members)  # in how many heads
    yield f"The longest branch takes {len(taken):,} of every {longest.rate:,} of the {tokens:,} tokens, each in"
    yield f"{group * max(taken.values()):,} of {heads:,} heads: these see from one end to the other."
    if len(taken) < longest.rate:
        yield "Later layers connect the others with them."
    if len(branches) > 1:
        factor = branches[1].rate // branches[0].rate
        yield f"From each of the {len(branches)} branches to the next, segments get up to {factor} times longer and"
        yield f"sparser, so that none has more than {ROWS:,} rows."
    if not isinstance(pattern, DilatedPattern):
        near = f"{NEAR:,} near ones" if workload.is_causal else f"{NEAR // 2:,} on either side"
        first = f"the first {SINKS}" if workload.is_causal else "token 0, which sees all"
        yield f"In all heads, a token sees {near}, wherever segments end, and {first}."
        return
    if pattern.head_rule.splits_heads:
        yield "Each head runs one branch; a head of rate r writes 0 into all but every r-th row."
    if pattern.head_rule.adds_zeros and not workload.is_causal and tokens % branches[-2].length:
        yield f"A length that is a multiple of {branches[-2].length:,} avoids the zero keys that fill up segments."
    if not workload.is_causal and group * taken[0] < heads:
        yield f"A class token at the start sees far in {group * taken[0]:,} of {heads:,} heads only: a union with"
        yield "da.Global(1) shows it all."


def _figures(workload: Workload, cost: PlanCost) -> Iterator[str]:
    tokens, heads = workload.tokens, workload.heads
    pairs, dense = (
        x.pairs(tokens, heads, num_kv_heads=workload.kv_heads, is_causal=workload.is_causal)
        for x in (cost.pattern, DilatedPattern.longnet([tokens], [1]))
    )
    flops, best = 4 * workload.head_dim * workload.batch * pairs, cost.exchanges[cost.best]
    work = f"work: {flops_text(flops)} forward, {flops_text(2.5 * flops)} backward"
    yield f"{work}; dense: {number_text(dense / pairs)} times that"
    yield f"keys that a row of a head sees: {pairs / tokens / heads:,.0f} on average"
    if cost.ranks > 1:
        there, back = bytes_text(best.forward.bytes_received), bytes_text(best.backward.bytes_received)
        yield f"exchange: {cost.best} is the fastest; a rank receives {there} forward and {back} backward"
    yield f"memory of a rank: {workload.need(cost)}"


def verdict(workload: Workload, cost: PlanCost, memory: int | None) -> list[str]:
    """Whether training fits into so many bytes; if not, the smallest single change of each kind with which it does."""
    if memory is None:
        return []
    need, room = workload.need(cost), bytes_text(memory)
    training, inference = bytes_text(need.training), bytes_text(need.inference)
    if need.training <= memory:
        return [f"training fits: it needs {training} of {room}"]
    last = f"no single change fits: another exchange, a smaller batch, another dtype, up to {MOST_TRIED:,} ranks"
    return [
        f"training does not fit: it needs {training}, and there are {room}",
        f"inference {'fits' if need.inference <= memory else 'does not fit'}: it needs {inference}",
        *([*_changes(workload, cost, memory)] or [last]),
    ]


def _changes(workload: Workload, cost: PlanCost, memory: int) -> Iterator[str]:
    batch, ranks, most = workload.batch, workload.ranks, min(workload.tokens, MOST_TRIED)
    fewer = [batch >> power for power in range(1, batch.bit_length())]
    more = [ranks << power for power in range(1, most.bit_length()) if ranks << power <= most]
    kinds: tuple[tuple[str, str, object, Sequence[Any]], ...] = (
        ("exchange", "exchange={!r} instead of {!r}", cost.best, [*cost.exchanges] if ranks > 1 else ()),
        ("batch", "a batch of {:,} instead of {:,}", batch, fewer),
        ("dtype", "{} instead of {}", workload.dtype, CHEAPER.get(workload.dtype, ())),
        ("ranks", "{:,} ranks instead of {:,}", ranks, more),
    )
    for name, text, old, values in kinds:
        for new in values:
            if name == "exchange":
                needed = workload.need(cost, new).training
            else:
                changed = replace(workload, **{name: new})
                needed = changed.need(changed.cost(cost.pattern)).training
            if needed <= memory:
                yield f"training fits with {text.format(new, old).replace('torch.', '')}: {bytes_text(needed)}"
                break
