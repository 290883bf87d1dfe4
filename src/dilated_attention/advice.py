"""What to choose: segments and rates for a length, what they cost, and what to change where memory is short.

Every number is counted, by the pattern or by `plan_cost`. A change is named only if it was counted and fits.

Legend: w segment length, r dilation rate, N tokens, P ranks; bytes are those of the busiest rank.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dilated_attention.backends.choose import choose
from dilated_attention.backends.triton import dispatch, nesting
from dilated_attention.call import Call
from dilated_attention.checks import check_int
from dilated_attention.pattern import MAX_BRANCHES, DilatedPattern, Rule
from dilated_attention.ring.cost import EXCHANGES, LINKS, Memory, PlanCost, plan_cost
from dilated_attention.units import bytes_text, number_text

ROWS = 2048  # of a segment, in every branch: what LongNet starts from, and enough to keep a kernel busy
# What PyTorch's kernels take beyond what `plan_cost` counts. Measured on an H200 in bfloat16: 5 % more in the forward
# pass and 26 % in the backward pass (benchmarks/results/ring.json). A test checks these numbers against that file.
FORWARD_MORE, BACKWARD_MORE = 1.1, 1.3
MOST_TRIED = 2**16  # ranks, where more of them might help
CHEAPER = {torch.float64: (torch.float32, torch.bfloat16), torch.float32: (torch.bfloat16,)}
WIDTH = 80  # columns of what is printed


class Need(NamedTuple):
    """Bytes that one call takes on the busiest rank; weights and other layers come on top."""

    inference: int
    training: int


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

    def cost(self, pattern: DilatedPattern) -> PlanCost:
        return plan_cost(
            pattern, self.tokens, self.ranks, num_heads=self.heads, head_dim=self.head_dim, num_kv_heads=self.kv_heads,
            dtype=self.dtype, batch=self.batch, is_causal=self.is_causal,
            latency=self.latency, bandwidth=self.bandwidth, flops_per_second=self.flops_per_second,
        )  # fmt: skip

    def pairs(self, pattern: DilatedPattern) -> int:
        """Of one sample, over all ranks and heads."""
        return pattern.pairs(self.tokens, self.heads, num_kv_heads=self.kv_heads, is_causal=self.is_causal)

    def need(self, cost: PlanCost, exchange: str | None = None) -> Need:
        """What the kernels that would run here take, with this exchange or with the best one.

        On one CUDA device our own kernels may run, which need less. Without such a device the kernels of PyTorch are
        assumed, and over ranks they always run.
        """
        exchange = exchange or cost.best
        memory, held = cost.memory, cost.memory.received[exchange]
        forward = (memory.saved + memory.out_sums + held) * FORWARD_MORE
        backward = (memory.saved + _gradients(memory) + memory.sums[exchange] + held) * BACKWARD_MORE
        if self.ranks == 1 and torch.cuda.is_available():
            call = self._call(cost.pattern)
            ours = self._ours(cost)
            forward = ours[0] if choose(call).is_whole else forward
            backward = ours[1] if choose(call, backward=True).is_whole else backward
        return Need(round(forward), round(max(forward, backward)))

    def need_on_a_gpu(self, cost: PlanCost) -> Need | None:
        """What our kernels would take, if there is no GPU here to ask which ones it runs; None: they would not run."""
        never = self.ranks > 1 or self.dtype is torch.float64 or self.head_dim > max(dispatch.SMALL)
        if never or torch.cuda.is_available():
            return None
        forward, backward = map(round, self._ours(cost))
        return Need(forward, max(forward, backward))

    def _ours(self, cost: PlanCost) -> tuple[float, float]:
        """Bytes of our kernels, forward and backward."""
        call, memory = self._call(cost.pattern), cost.memory
        share = nesting.heads_at_once(call) / call.kv_heads  # the results of some heads wait at a time
        waiting = memory.out_sums if share == 1 else (memory.out_sums + memory.lse) * share
        forward = memory.saved + (waiting if len(nesting.launches(call)) > 1 else 0)
        return forward, memory.saved + _gradients(memory) + 2 * memory.lse  # two numbers per row, from launch to launch

    def _call(self, pattern: DilatedPattern) -> Call:
        """On one CUDA device."""
        return Call(
            pattern, self.is_causal, samples=self.batch, queries=self.tokens, keys=self.tokens, heads=self.heads,
            kv_heads=self.kv_heads or self.heads, head_dim=self.head_dim, dtype=self.dtype,
            device=torch.device("cuda"), total=self.tokens,
        )  # fmt: skip


def _gradients(memory: Memory) -> int:
    """Bytes of the gradients; that of out comes in."""
    return memory.out + memory.dq + memory.dk + memory.dv


class Change(NamedTuple):
    """Something to do differently, and what training then needs."""

    text: str
    workload: Workload
    exchange: str
    needed: int


@dataclass(frozen=True)
class Suggestion:
    """A pattern for a length, why, and what it costs; print it for people."""

    pattern: DilatedPattern
    workload: Workload
    cost: PlanCost
    need: Need  # with the exchange `cost.best`
    reasons: str  # a paragraph
    figures: tuple[str, ...]
    changes: tuple[Change, ...]  # what would make training fit, where it does not

    def __str__(self) -> str:
        code = f"pattern = {self.pattern!r}"
        if len(code) > WIDTH:
            name, lengths, rates = re.split(r"(?=segment_lengths=)|(?=dilation_rates=)", code[:-1])
            wrapper = textwrap.TextWrapper(WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
            code = "\n".join([name, wrapper.fill(lengths.rstrip()), wrapper.fill(f"{rates},"), ")"])
        return "\n".join([code, "", textwrap.fill(self.reasons, WIDTH), "", *map(_wrapped, self.figures)])


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="    ")


# --- a pattern for a length ---------------------------------------------------------------------------------------


def suggest(workload: Workload, rule: Rule = "longnet", memory: int | None = None) -> Suggestion:
    """Segments from 2048 tokens to the whole length, each with 2048 rows, and what they cost.

    ``memory``: bytes of one rank that the call may take. If training needs more, ``changes`` says what would fit.
    """
    pattern = pattern_for(workload.tokens, workload.heads, rule, workload.kv_heads)
    cost = workload.cost(pattern)
    need = workload.need(cost)
    changes = () if memory is None else what_fits(pattern, workload, memory)
    figures = [*_figures(workload, cost, need), *([] if memory is None else verdict(need, memory, changes))]
    return Suggestion(pattern, workload, cost, need, " ".join(_reasons(pattern, workload)), tuple(figures), changes)


def pattern_for(tokens: int, heads: int, rule: Rule = "longnet", kv_heads: int | None = None) -> DilatedPattern:
    """The pattern that `suggest` suggests: w grows by a factor from 2048 to N or more, and r with it."""
    tokens, heads = check_int("tokens", tokens), check_int("heads", heads)
    dense = DilatedPattern.of(rule, [tokens], [1])
    dense.check_heads(heads, kv_heads)
    most = MAX_BRANCHES
    if dense.head_rule.splits_heads:  # a head runs one branch only: two heads per branch, where there are that many
        kv_heads = kv_heads or heads
        most = min(kv_heads, max(2, kv_heads // 2))
    if tokens <= ROWS or most == 1:
        return dense
    factor = 2
    while ROWS * factor ** (most - 1) < tokens:
        factor *= 2
    rates = [1]
    while ROWS * rates[-1] < tokens:
        rates.append(rates[-1] * factor)
    return DilatedPattern.of(rule, [ROWS * rate for rate in rates], rates)


def _reasons(pattern: DilatedPattern, workload: Workload) -> Iterator[str]:
    """Why these, one sentence each."""
    widths, rates, tokens = pattern.segment_lengths, pattern.dilation_rates, workload.tokens
    kv_heads = workload.kv_heads or workload.heads
    if tokens <= ROWS:
        yield f"{tokens:,} tokens are at most {ROWS:,}: one dense segment is cheap and leaves nothing out."
        return
    if len(widths) == 1:
        yield f"{pattern.rule} gives a head one branch, and the only head must cover every row: one dense segment."
        yield "With more heads, or with rule longnet, the cost grows with the length and not with its square."
        return
    times = workload.pairs(pattern) / workload.pairs(DilatedPattern.of(pattern.rule, [ROWS], [1]))
    yield f"From each of the {len(widths)} branches to the next, segments get {rates[1]} times longer and sparser."
    yield f"So every segment has {ROWS:,} rows, and all branches together cost {number_text(times)} times as much as"
    yield f"segments of {ROWS:,} tokens alone."
    last = len(rates) - 1
    taken = len({pattern.offset(last, head, kv_heads) for head in pattern.heads(last, kv_heads)})
    yield f"The longest segment holds all {tokens:,} tokens: those that take part in it see from one end to the other."
    if taken < rates[-1]:
        yield f"These are {taken:,} of every {rates[-1]:,} tokens. Later layers connect the others with them."
    if pattern.head_rule.splits_heads:
        dealt = ", ".join(str(len(pattern.heads(branch, kv_heads))) for branch in range(len(widths)))
        yield f"The branches get {dealt} of {kv_heads} heads; a head of rate r writes 0 into all but every r-th row."
    else:
        yield "The branch of rate 1 covers every row of every head."
    longest = max(width for width in widths if width <= tokens)
    if pattern.head_rule.adds_zeros and not workload.is_causal and tokens % longest:
        yield f"{pattern.rule} fills up segments with fewer rows than others with zero keys, and attends to them."
        yield f"A length that is a multiple of {longest:,} has none, and neither has a causal call."


def _figures(workload: Workload, cost: PlanCost, need: Need) -> Iterator[str]:
    """What it costs, one line each."""
    pattern, best, shard = cost.pattern, cost.exchanges[cost.best], cost.tokens_per_rank
    pairs, dense = workload.pairs(pattern), workload.pairs(DilatedPattern.longnet([workload.tokens], [1]))
    against = f"{number_text(dense / pairs)} times less than" if pairs < dense else f"{pairs / dense:.3g} times"
    flops = 4 * workload.head_dim * workload.batch * pairs
    yield (
        f"work: {flops_text(flops)} forward, {flops_text(2.5 * flops)} backward; "
        f"{'as much as' if pairs == dense else against} dense"
    )
    yield f"keys that a row of a head sees: {pairs / workload.tokens / workload.heads:,.0f} on average"
    if cost.ranks > 1 and not best.bytes_total:
        yield f"exchange: no segment crosses a border between the {cost.ranks:,} ranks, so nothing is sent"
    elif cost.ranks > 1:
        there, back = bytes_text(best.bytes_received_max), bytes_text(best.backward_bytes_received_max)
        yield f"exchange: {cost.best} is the fastest; a rank receives {there} forward and {back} backward"
        inside = [w for w in pattern.segment_lengths if shard * cost.ranks == cost.tokens and shard % w == 0]
        if inside:
            yield f"segments up to {max(inside):,} tokens lie inside a shard of {shard:,} and send nothing"
    where = " of a rank" if cost.ranks > 1 else ""
    yield f"memory{where}: {bytes_text(need.training)} to train, {bytes_text(need.inference)} to infer"
    yield f"kept for the backward pass: {bytes_text(cost.memory.saved)}"
    yield from on_a_gpu(workload, cost)


def on_a_gpu(workload: Workload, cost: PlanCost) -> Iterator[str]:
    """The memory on a GPU, where there is none here: it may be less."""
    ours = workload.need_on_a_gpu(cost)
    if ours is not None:
        text = f"{bytes_text(ours.training)} to train, {bytes_text(ours.inference)} to infer"
        yield f"memory with our kernels, on a GPU: {text}"


# --- what to change -----------------------------------------------------------------------------------------------


def what_fits(pattern: DilatedPattern, workload: Workload, memory: int) -> tuple[Change, ...]:
    """Single changes with which training fits, each the smallest of its kind. Empty if it fits, or if none helps."""
    cost = workload.cost(pattern)
    if workload.need(cost).training <= memory:
        return ()
    found = []
    if workload.ranks > 1:
        needs = {name: workload.need(cost, name).training for name in EXCHANGES}
        name = next((name for name in EXCHANGES if needs[name] <= memory), None)
        if name is not None:
            found.append(Change(f"exchange={name!r} instead of {cost.best!r}", workload, name, needs[name]))
    batches = [replace(workload, batch=workload.batch >> i) for i in range(1, workload.batch.bit_length())]
    dtypes = [replace(workload, dtype=dtype) for dtype in CHEAPER.get(workload.dtype, ())]
    # More ranks take longer to count: counting begins where a rank's own rows alone might fit.
    least = workload.need(replace(workload, ranks=1).cost(pattern), "ring").training / memory
    most = min(workload.tokens, MOST_TRIED)
    ranks = [replace(workload, ranks=workload.ranks << i) for i in range(1, most.bit_length())]
    ranks = [one for one in ranks if least <= one.ranks <= most]
    texts = ("a batch of {0.batch:,} instead of {1.batch:,}", "{0.dtype} instead of {1.dtype}",
             "{0.ranks:,} ranks instead of {1.ranks:,}")  # fmt: skip
    for text, candidates in zip(texts, (batches, dtypes, ranks), strict=True):
        for one in candidates:
            after = one.cost(pattern)
            needed = one.need(after).training
            if needed <= memory:
                found.append(Change(text.format(one, workload).replace("torch.", ""), one, after.best, needed))
                break
    return tuple(found)


def verdict(need: Need, memory: int, changes: tuple[Change, ...]) -> Iterator[str]:
    """Whether a call fits, and with which changes it would."""
    if need.training <= memory:
        yield f"training fits: it needs {bytes_text(need.training)} of {bytes_text(memory)}"
        return
    yield f"training does not fit: it needs {bytes_text(need.training)}, and there are {bytes_text(memory)}"
    yield f"inference {'fits' if need.inference <= memory else 'does not fit'}: it needs {bytes_text(need.inference)}"
    for change in changes:
        yield f"training fits with {change.text}: {bytes_text(change.needed)}"
    if not changes:
        yield f"no single change fits: another exchange, a smaller batch, another dtype, up to {MOST_TRIED:,} ranks"


def flops_text(flops: float) -> str:
    """Operations with a prefix: 1.2 TFLOP."""
    power = min(8, int(math.log10(flops)) // 3) if flops >= 1 else 0
    return f"{number_text(flops / 1000**power)} {' kMGTPEZY'[power].strip()}FLOP"
