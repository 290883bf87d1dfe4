"""What to choose: segments and rates for a length, and what to change where memory is short.

Every number is computed, by the pattern or by `plan_cost`; a change is named only once it was counted and fits.

Legend: w segment length, r dilation rate, N tokens, P ranks; bytes are those of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dilated_attention.pattern import MAX_BRANCHES, DilatedPattern, Rule, whole_number
from dilated_attention.ring.cost import EXCHANGES, LINKS, PlanCost, plan_cost, size

ROWS = 2048  # of a segment, in every branch: what LongNet starts from, and enough to keep a kernel busy
# What blocks under way and kernels take beyond what `plan_cost` counts. Measured on an H200, bfloat16: 5 % more in the
# forward pass and 26 % in the backward pass (benchmarks/results/ring.json, which a test holds this against).
FORWARD_MORE, BACKWARD_MORE = 1.1, 1.3
MOST_TRIED = 2**16  # ranks, where more of them might help
CHEAPER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


@dataclass(frozen=True)
class Speed:
    """Of the link between ranks and of a rank, for modelled times."""

    latency: float = LINKS["nccl"][0]  # seconds per hop
    bandwidth: float = LINKS["nccl"][1]  # bytes per second
    flops_per_second: float = 400e12


@dataclass(frozen=True)
class Workload:
    """One attention call, whatever its pattern."""

    tokens: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    ranks: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = False

    def cost(self, pattern: DilatedPattern, speed: Speed = Speed()) -> PlanCost:  # noqa: B008 - frozen
        return plan_cost(
            pattern, self.tokens, self.ranks, num_heads=self.heads, head_dim=self.head_dim, num_kv_heads=self.kv_heads,
            dtype=self.dtype, batch=self.batch, is_causal=self.is_causal,
            latency=speed.latency, bandwidth=speed.bandwidth, flops_per_second=speed.flops_per_second,
        )  # fmt: skip

    def pairs(self, pattern: DilatedPattern) -> int:
        """Of one sample, over all ranks and heads."""
        return pattern.pairs(self.tokens, self.heads, num_kv_heads=self.kv_heads, is_causal=self.is_causal)


@dataclass(frozen=True)
class Need:
    """Bytes that one call takes on the busiest rank; weights and other layers come on top."""

    inference: int
    training: int

    @staticmethod
    def of(cost: PlanCost, exchange: str) -> Need:
        memory = cost.memory
        held = memory.received[exchange]
        forward = (memory.saved + memory.out_sums + held) * FORWARD_MORE
        grads = memory.out + memory.dq + memory.dk + memory.dv + memory.sums[exchange]  # that of out comes in
        return Need(round(forward), round(max(forward, (memory.saved + grads + held) * BACKWARD_MORE)))


@dataclass(frozen=True)
class Change:
    """Something to do differently, and what training then needs."""

    text: str
    workload: Workload
    exchange: str
    needed: int


@dataclass(frozen=True)
class Suggestion:
    """A pattern for a length, why, and what it costs; print it for people."""

    pattern: DilatedPattern
    reasons: tuple[str, ...]
    workload: Workload
    costs: PlanCost
    need: Need  # with the exchange `costs.best`
    fits: bool | None  # training within the memory; None where none was given
    changes: tuple[Change, ...]  # what would make it fit, where it does not

    def __str__(self) -> str:
        return "\n".join([f"pattern = {self.pattern!r}", *(f"- {reason}" for reason in self.reasons)])


# --- a pattern for a length ---------------------------------------------------------------------------------------


def suggest(
    tokens: int,
    *,
    heads: int,
    head_dim: int,
    rule: Rule = "longnet",
    ranks: int = 1,
    memory: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int | None = None,
    batch: int = 1,
    is_causal: bool = False,
) -> Suggestion:
    """Segments from 2048 tokens to the whole length, each with 2048 rows, and what they cost.

    ``memory``: bytes of one rank that the call may take; without room for training, ``changes`` says what would fit.
    """
    workload = Workload(whole_number("tokens", tokens), heads, head_dim, kv_heads, ranks, batch, dtype, is_causal)
    pattern = pattern_for(tokens, heads, rule, kv_heads)
    ratio = pattern.dilation_rates[1] if len(pattern.branches) > 1 else 1
    cost = workload.cost(pattern)
    need = Need.of(cost, cost.best)
    fits = None if memory is None else need.training <= memory
    changes = () if memory is None or fits else what_fits(pattern, workload, memory)
    reasons = [*_segments(pattern, ratio, workload), _price(pattern, workload), *_borders(cost, workload)]
    where = f" on the busiest of {ranks:,} ranks" if ranks > 1 else ", whatever the segments"
    kept = f"{size(cost.memory.saved)} of it kept for the backward pass"
    reasons.append(f"memory{where}: {size(need.training)} to train, {kept}; {size(need.inference)} to infer")
    if memory is not None:
        reasons += in_words(need, memory, changes)
    return Suggestion(pattern, tuple(reasons), workload, cost, need, fits, changes)


def pattern_for(tokens: int, heads: int, rule: Rule = "longnet", kv_heads: int | None = None) -> DilatedPattern:
    """The pattern that `suggest` suggests."""
    tokens, heads = whole_number("tokens", tokens), whole_number("heads", heads)
    DilatedPattern.of(rule, [tokens], [1]).check_heads(heads, kv_heads)
    return _geometric(tokens, rule, kv_heads or heads)


def _geometric(tokens: int, rule: Rule, kv_heads: int) -> DilatedPattern:
    """Equal rows in every segment: w grows by a ratio from 2048 to N or more, and r with it."""
    most = MAX_BRANCHES
    if rule == "head_groups":  # a head runs one branch only: two heads to a branch, where there are that many
        most = min(kv_heads, max(2, kv_heads // 2))
    if tokens <= ROWS or most == 1:
        return DilatedPattern.of(rule, [tokens], [1])
    ratio = 2
    while ROWS * ratio ** (most - 1) < tokens:
        ratio *= 2
    rates = [1]
    while ROWS * rates[-1] < tokens:
        rates.append(rates[-1] * ratio)
    return DilatedPattern.of(rule, [ROWS * rate for rate in rates], rates)


def _segments(pattern: DilatedPattern, ratio: int, workload: Workload) -> Iterator[str]:
    """Why these, and what a row sees."""
    widths, tokens, kv_heads = pattern.segment_lengths, workload.tokens, workload.kv_heads or workload.heads
    if tokens <= ROWS:
        yield f"a length of {tokens:,} is at most {ROWS:,}: one dense segment is cheap and leaves nothing out"
    elif len(widths) == 1:
        yield (
            "head_groups gives a head one branch, and the only head must cover every row: one dense segment. "
            "With more heads, or rule longnet, the cost grows with the length and not with its square"
        )
    else:
        times = workload.pairs(pattern) / workload.pairs(DilatedPattern.of(pattern.rule, [ROWS], [1]))
        yield (
            f"{len(widths)} branches, {ratio} times as long and as sparse from one to the next, {ROWS:,} rows in each "
            f"segment: {times:.2f} times the work of segments of {ROWS:,} alone"
        )
        few = _few(pattern, kv_heads)
        yield f"the longest segment holds all {tokens:,} tokens: its rows see from one end to the other{few}"
    if pattern.dealing.is_divided and len(widths) > 1:
        dealt = ", ".join(str(len(pattern.heads(branch, kv_heads))) for branch in range(len(widths)))
        yield (
            f"the branches get {dealt} of {kv_heads} heads: those of rate 1 cover every token, those of rate r every "
            "r-th and put 0 into the rest"
        )
    else:
        yield "the branch of rate 1 covers every row of every head: no output is left at 0"
    if not workload.is_causal and _appends_zeros(pattern, tokens, kv_heads):
        yield (
            f"torchscale fills up segments with zero keys and attends to them: {tokens:,} is not a multiple of all, so "
            f"take a multiple of {max(w for w in widths if w <= tokens or w == widths[0]):,}, or attend causally"
        )
    yield f"keys that a row of a head sees, on average: {workload.pairs(pattern) / tokens / workload.heads:,.0f}"


def _few(pattern: DilatedPattern, kv_heads: int) -> str:
    """Which rows the sparsest branch has, where its heads do not take all offsets."""
    last, rate = len(pattern.branches) - 1, pattern.dilation_rates[-1]
    taken = len({pattern.offset(last, head, kv_heads) for head in pattern.heads(last, kv_heads)})
    return f"; these are {taken:,} of every {rate:,}, and layers connect the others with them" if taken < rate else ""


def _appends_zeros(pattern: DilatedPattern, tokens: int, kv_heads: int) -> bool:
    return any(
        pattern.zeros_in_segment(branch, length, pattern.offset(branch, head, kv_heads), tokens)
        for branch, width in enumerate(pattern.segment_lengths)
        for length in {min(width, tokens), tokens % width} - {0}
        for head in range(kv_heads)
    )


def _price(pattern: DilatedPattern, workload: Workload) -> str:
    pairs, dense = workload.pairs(pattern), workload.pairs(DilatedPattern.longnet([workload.tokens], [1]))
    flops = 4 * workload.head_dim * workload.batch * pairs
    if pairs == dense:
        against = "as much as"
    else:
        against = f"{ratio_text(dense / pairs)} times less than" if pairs < dense else f"{pairs / dense:.3g} times"
    return f"{amount(flops)}FLOP forward and {amount(2.5 * flops)}FLOP backward, {against} dense attention"


def _borders(cost: PlanCost, workload: Workload) -> Iterator[str]:
    """What crosses from rank to rank."""
    if workload.ranks == 1:
        return
    best, shard = cost.exchanges[cost.best], cost.tokens_per_rank
    if not best.bytes_total:
        yield f"no segment crosses a border between the {workload.ranks:,} ranks: nothing is sent"
        return
    inside = [w for w in cost.pattern.segment_lengths if shard * workload.ranks == workload.tokens and shard % w == 0]
    where = f"segments up to {max(inside):,} lie inside a shard of {shard:,} and send nothing; " if inside else ""
    yield (
        f"{where}over {workload.ranks:,} ranks {cost.best} is the fastest exchange: a rank receives "
        f"{size(best.bytes_received_max)} forward and {size(best.backward_bytes_received_max)} backward"
    )


# --- what to change -----------------------------------------------------------------------------------------------


Candidate = tuple[Workload, str | None]  # None: the fastest exchange, as "auto" takes it


def what_fits(
    pattern: DilatedPattern,
    workload: Workload,
    memory: int,
    speed: Speed = Speed(),  # noqa: B008 - frozen
) -> tuple[Change, ...]:
    """Single changes with which training fits, each the smallest of its kind; failing these, all of them together.

    Empty if it fits as it is, or if nothing helps.
    """
    now = _counted(pattern, (workload, None), speed)
    if now.needed <= memory:
        return ()
    dtypes = _cheaper(workload.dtype)
    kinds: list[list[Candidate]] = [
        [(workload, name) for name in EXCHANGES if name != now.exchange and workload.ranks > 1],
        [
            (replace(workload, batch=workload.batch >> i), name)
            for i in range(1, workload.batch.bit_length())
            for name in (None, now.exchange)  # another may be the fastest of a smaller batch, and need more
        ],
        [(replace(workload, dtype=dtype), None) for dtype in dtypes],
        [(replace(workload, ranks=ranks), None) for ranks in _more_ranks(workload)],
    ]
    found = [change for kind in kinds for change in _first(pattern, kind, memory, speed)]
    if not found:
        least = replace(workload, batch=1, dtype=[workload.dtype, *dtypes][-1])
        counts = [workload.ranks, *_more_ranks(workload)]
        found = _first(pattern, [(replace(least, ranks=ranks), "ring") for ranks in counts], memory, speed)
    autos = [change.workload.cost(pattern, speed).best for change in found]
    told = [_difference(now, change, auto) for change, auto in zip(found, autos, strict=True)]
    return tuple(replace(change, text=text) for change, text in zip(found, told, strict=True))


def _first(pattern: DilatedPattern, candidates: list[Candidate], memory: int, speed: Speed) -> list[Change]:
    """The first that fits, if any. Many ranks take long to count: what its own rows alone are too much for is not."""
    for workload, exchange in candidates:
        alone = _counted(pattern, (replace(workload, ranks=1), None), speed).needed  # all tokens, nothing received
        if alone * -(-workload.tokens // workload.ranks) > (memory + 1) * workload.tokens:
            continue
        change = _counted(pattern, (workload, exchange), speed)
        if change.needed <= memory:
            return [change]
    return []


def _counted(pattern: DilatedPattern, candidate: Candidate, speed: Speed) -> Change:
    workload, exchange = candidate
    cost = workload.cost(pattern, speed)
    exchange = exchange or cost.best
    return Change("", workload, exchange, Need.of(cost, exchange).training)


def _cheaper(dtype: torch.dtype) -> list[torch.dtype]:
    return [CHEAPER[dtype], *_cheaper(CHEAPER[dtype])] if dtype in CHEAPER else []


def _more_ranks(workload: Workload) -> list[int]:
    """2, 3, 4, 6, 8, 12 ... times as many, as far as there are tokens for all."""
    most = min(workload.tokens, MOST_TRIED)
    many = (factor << i for i in range(most.bit_length()) for factor in (2, 3))
    return [workload.ranks * x for x in many if workload.ranks * x <= most]


def _difference(before: Change, after: Change, auto: str) -> str:
    """In words; ``auto``: the exchange that is taken afterwards if none is asked for."""
    old, new, parts = before.workload, after.workload, []
    if new.ranks != old.ranks:
        parts.append(f"{new.ranks:,} ranks instead of {old.ranks:,}")
    if new.batch != old.batch:
        parts.append(f"a batch of {new.batch:,} instead of {old.batch:,}")
    if new.dtype is not old.dtype:
        parts.append(" instead of ".join(str(x.dtype).removeprefix("torch.") for x in (new, old)))
    if old.ranks > 1 and after.exchange != before.exchange:
        parts.append(f"exchange={after.exchange!r} instead of {before.exchange!r}")
    elif old.ranks > 1 and after.exchange != auto:
        parts.append(f"still exchange={after.exchange!r}")
    return " and ".join(parts)


def in_words(need: Need, memory: int, changes: tuple[Change, ...]) -> Iterator[str]:
    """Whether a call fits, and with which changes it would."""
    if need.training <= memory:
        yield f"training fits: {size(need.training)} of {size(memory)}"
        return
    infer = "inference fits" if need.inference <= memory else f"nor does inference, with {size(need.inference)}"
    yield f"training does not fit: it needs {size(need.training)} of {size(memory)}; {infer}"
    for change in changes:
        yield f"training fits with {change.text}: {size(change.needed)}"
    if not changes:
        yield f"no number of ranks up to {MOST_TRIED:,}, exchange, batch or dtype was found with which it fits"


def amount(number: float) -> str:
    """Operations for people, with a prefix at the end: 1.2 T."""
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z", "Y"]
    while number >= 999.5 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    return f"{ratio_text(number)} {prefixes[0]}"


def ratio_text(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
