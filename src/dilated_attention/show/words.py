"""The sentences of a view, the same in a terminal, on a page and under a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dilated_attention.ring.cost import size
from dilated_attention.show.coverage import Coverage
from dilated_attention.show.kinds import Kind
from dilated_attention.show.reach import LAYERS, LONGEST_STRETCH, Reach
from dilated_attention.show.seen import View
from dilated_attention.show.travel import MOST_RANKS, Travel

KEYS_NAMED = (8, 3)  # of a long list: so many at the front and at the back


def many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def branch_name(view: View, branch: int) -> str:
    width, rate = view.pattern.branches[branch]
    return f"({width}, {rate})"


def title(view: View) -> str:
    names = [branch_name(view, i) for i in range(len(view.pattern.branches))]
    if len(names) > 5:
        return f"{view.pattern.rule}: {len(names)} branches (w, r) = {names[0]}, {names[1]}, … {names[-1]}"
    return f"{view.pattern.rule}: {'branch' if len(names) == 1 else 'branches'} (w, r) = {', '.join(names)}"


def subtitle(view: View) -> str:
    heads = many(view.heads, "head")
    if view.kv_heads != view.heads:
        heads += f" on {many(view.kv_heads, 'key/value head')}"
    window = (view.edges[0], view.edges[-1])
    drawn = "" if window == (0, view.tokens) else f"; drawn: tokens {window[0]:,} to {window[1] - 1:,}"
    return f"{many(view.tokens, 'token')}, {heads}, {'causal' if view.is_causal else 'not causal'}{drawn}"


def legend(view: View, merged: int = 1) -> str:
    tokens = view.cell_size * merged
    if tokens == 1:
        return "queries down, keys across; a cell is one pair, and its shade says how many branches show it"
    return (
        f"queries down, keys across; a cell is {tokens:,} × {tokens:,} pairs, and its shade says how many branches "
        "show some of them"
    )


def heads_name(heads: Sequence[int], most: int = 6) -> str:
    """head 3; heads 0, 4, 8; heads 0–7."""
    if len(heads) == 1:
        return f"head {heads[0]}"
    if len(heads) > 2 and heads[-1] - heads[0] + 1 == len(heads):
        return f"heads {heads[0]}–{heads[-1]}"
    if len(heads) > most:
        return f"heads {', '.join(map(str, heads[: most - 2]))}, … {heads[-1]} ({len(heads)} of them)"
    return f"heads {', '.join(map(str, heads))}"


def offsets(view: View, kind: Kind) -> str:
    """Where in its segments a head begins."""
    names: dict[int, list[str]] = {}
    for branch, offset in enumerate(kind.offsets):
        if offset is not None:
            names.setdefault(offset, []).append(branch_name(view, branch))
    if len(names) == 1 and len(view.pattern.branches) > 1 and None not in kind.offsets:
        return f"offset {next(iter(names))} in every branch"
    return "offset " + "; ".join(f"{offset} in {', '.join(some)}" for offset, some in names.items())


def told_once(kinds: Sequence[Kind], sentences: Sequence[str]) -> list[tuple[str, str]]:
    """Each sentence once, and all the heads of which it is true."""
    heads: dict[str, list[int]] = {}
    for kind, sentence in zip(kinds, sentences, strict=True):
        heads.setdefault(sentence, []).extend(kind.heads)
    return [(heads_name(sorted(some)), sentence) for sentence, some in heads.items() if sentence]


# --- rows and keys ------------------------------------------------------------------------------------------------


def percent(part: int, whole: int) -> str:
    """Never rounded to 0 % or 100 %."""
    share = 100 * part / whole
    if part in (0, whole):
        return f"{share:.0f} %"
    if share < 0.01 or share > 99.99:
        return "less than 0.01 %" if share < 0.01 else "more than 99.99 %"
    return f"{share:.3g} %" if share < 99 else f"{share:.2f} %"


def coverage(covered: Coverage) -> str:
    """Which rows get an output."""
    if covered.least == covered.tokens:
        return "every row is covered"
    named = ", ".join(f"{row:,}" for row in covered.missing)
    missing = covered.tokens - covered.least
    if covered.is_exact and missing == len(covered.missing):
        rows = f"rows {named} get" if missing > 1 else f"row {named} gets"
    else:
        rows = f"rows {named}, … get"
    if covered.is_exact:
        count = f"{covered.least:,} of {covered.tokens:,} rows ({percent(covered.least, covered.tokens)}) are covered"
    else:
        count = (
            f"between {covered.least:,} and {covered.most:,} of {covered.tokens:,} rows are covered (the pattern "
            "repeats too rarely to be counted exactly)"
        )
    return f"{count}; {rows} output 0" if named else count


def zeros(view: View, kind: Kind) -> str:
    """Torchscale's zero keys."""
    found = []
    for one in kind.zeros:
        parts = [f"{one.whole:,} in a whole segment"] if one.whole else []
        parts += [f"{one.last:,} in the last segment of {many(one.last_length, 'token')}"] if one.last else []
        found.append(f"in {branch_name(view, one.branch)} {' and '.join(parts)}")
    return f"a row also attends to zero keys: {', '.join(found)}" if found else ""


def keys(view: View, kind: Kind) -> str:
    """The keys of the query, elided in the middle; one that several branches show says how many."""
    total = sum(map(len, kind.keys))
    if not total:
        return "no keys: no branch covers this row, its output is 0"
    front, back = KEYS_NAMED
    # the smallest values are among the first of each branch, and the largest among the last
    lowest = _counted([key for some in kind.keys for key in some[: front + back + 1]])
    if len(lowest) <= front + back and total == sum(count for _, count in lowest):
        named = ", ".join(map(_key, lowest))
    else:
        highest = _counted([key for some in kind.keys for key in some[-back:]])
        named = f"{', '.join(map(_key, lowest[:front]))}, … {', '.join(map(_key, highest[-back:]))}"
    by_branch = [f"{len(some):,} by {branch_name(view, i)}" for i, some in enumerate(kind.keys) if some]
    shown = f" ({', '.join(by_branch)})" if 1 < len(by_branch) <= 5 else ""
    zero = f", and {many(kind.zero_keys, 'zero key')}" if kind.zero_keys else ""
    return f"{many(total, 'key')}{shown}: {named}{zero}"


def _counted(values: list[int]) -> list[tuple[int, int]]:
    return [(value, len(list(same))) for value, same in itertools.groupby(sorted(values))]


def _key(counted: tuple[int, int]) -> str:
    value, count = counted
    return f"{value:,}" if count == 1 else f"{value:,} ×{count}"


# --- reach --------------------------------------------------------------------------------------------------------


def reach_title(view: View) -> str:
    return f"what query {view.reach.query:,} can hear of through all heads together, layer by layer"


def reach_layers(reach: Reach) -> list[str]:
    return [
        f"after layer {i}: {many(layer.count, 'token')}, {layer.first:,} to {layer.last:,}"
        for i, layer in enumerate(reach.layers, 1)
    ]


def reach_end(view: View) -> str:
    """What comes after the layers that were counted."""
    reach, bound = view.reach, f"tokens {view.reach.bound[0]:,} to {view.reach.bound[1]:,}"
    if reach.is_all:
        if reach.layers[-1].count == (reach.query + 1 if view.is_causal else view.tokens):
            return "that is every token it may see" if view.is_causal else "that is every token"
        return "more layers reach nothing more"
    if len(reach.layers) >= LAYERS:
        return f"it still grows; {LAYERS} layers are followed at most"
    counted = "later layers are" if reach.layers else "the layers are"
    return f"{counted} not counted: they may reach {bound}, and {LONGEST_STRETCH:,} tokens are followed at most"


# --- ranks --------------------------------------------------------------------------------------------------------


def travel_title(travel: Travel) -> str:
    dtype, auto = str(travel.dtype).removeprefix("torch."), " (the choice of auto)" if travel.is_auto else ""
    what = f"{many(travel.shards.ranks, 'rank')} by {travel.exchange}{auto}"
    return f"what travels between {what}, forward (head dim {travel.head_dim}, {dtype})"


def travel_rows(travel: Travel) -> str:
    """What a row is."""
    if travel.exchange == "alltoall":
        return "a row is a token of a key/value head: its q, k and v there, its out and lse back"
    return "a row is a token of a key/value head: its K and V"


def travel_branches(view: View, travel: Travel) -> list[tuple[str, str, str, str]]:
    """Of each branch its name, its segments on several ranks, the rows that travel, and their bytes."""
    found = []
    for branch, (cut, segments) in enumerate(zip(travel.cut, travel.segments, strict=True)):
        mine = [one for one in travel.sent if one.branch == branch]
        rows, count = sum(one.rows for one in mine), size(sum(one.bytes for one in mine))
        told = (f"{rows:,}", count) if travel.is_listed else ("", "")
        crossing = f"{cut:,} of {segments:,}" if cut else f"none of {segments:,}: local"
        found.append((branch_name(view, branch), crossing, *told))
    return found


def travel_total(travel: Travel) -> str:
    sent = [rank.bytes_sent for rank in travel.of_rank]
    received = [rank.bytes_received for rank in travel.of_rank]
    backward = sum(rank.backward_bytes_received for rank in travel.of_rank)
    if not sum(received):
        return "nothing travels"
    return (
        f"{size(sum(received))} in all; rank {sent.index(max(sent))} sends most, {size(max(sent))}, and rank "
        f"{received.index(max(received))} receives most, {size(max(received))}; the backward pass adds {size(backward)}"
    )


def travel_note(travel: Travel) -> str:
    if not travel.is_listed:
        return f"with more than {MOST_RANKS} ranks, sums by rank are shown, not who sends to whom"
    if travel.exchange == "ring":
        return "in a ring a rank sends to its neighbour only, and passes on what it got"
    return ""


def travel_facts(travel: Travel) -> list[str]:
    """All that is true of the whole."""
    if not any(rank.bytes_sent for rank in travel.of_rank):
        return [travel_total(travel)]
    return [fact for fact in (travel_total(travel), travel_rows(travel), travel_note(travel)) if fact]
