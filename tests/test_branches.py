"""Every kind of branch, alone and beside another, pair by pair: rectangles show what the definition says."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import dilated_attention as da
from dilated_attention import Pattern, dilated_attention, reference, testing
from dilated_attention.branches import KINDS, Blocks, Branch, Dense, Dilated, Global, Prefix, Strided, Window
from dilated_attention.branches.base import Rect
from dilated_attention.call import Call
from dilated_attention.plan import plan


def drawn(kind: str, n: int, pick: random.Random) -> Branch:
    def number(least: int, most: int) -> int:
        return pick.randint(least, most)

    if kind == "dilated":
        return Dilated(number(1, n + 3), number(1, 6), pick.choice(["head", number(0, 5)]))
    if kind == "window":
        return Window(number(0, n), pick.choice([None, number(0, n)]), number(1, 4))
    if kind == "strided":
        return Strided(number(1, 6), number(0, 5), pick.choice([None, number(1, n + 2)]))
    if kind == "prefix":
        return Prefix(number(1, n + 2))
    if kind == "global":
        return Global(pick.choice([number(1, n), pick.sample(range(n + 3), number(1, min(n, 5)))]))
    if kind == "blocks":
        size = number(1, 7)
        return Blocks(size, [(number(0, n // size), number(0, n // size)) for _ in range(number(1, 8))])
    return Dense()


def shown(rects: Iterable[Rect], n: int) -> Tensor:
    """How often each pair is in a rectangle."""
    counts = torch.zeros(n, n, dtype=torch.int)
    for rect in rects:
        for one in rect.singles() if not rect.is_empty else ():
            queries, keys = (torch.tensor(rows) for rows in (one.queries, one.keys))
            distance = keys - queries[:, None]
            inside = (distance >= one.low) & (distance <= one.high)
            counts[queries[:, None], keys] += inside.int()
            assert one.pairs() == inside.sum()
    return counts


DEFINITIONS = [  # for head 3
    (Dilated(4, 2), lambda i, j: i // 4 == j // 4 and i % 2 == j % 2 == 1),
    (Dilated(5, 3, 8), lambda i, j: i // 5 == j // 5 and i % 5 % 3 == j % 5 % 3 == 2),
    (Window(2), lambda i, j: abs(i - j) <= 2),
    (Window(2, 1, 3), lambda i, j: j - i in (-6, -3, 0, 3)),
    (Strided(3, 4), lambda i, j: j % 3 == 1),
    (Strided(3, 1, 5), lambda i, j: i // 5 == j // 5 and j % 5 % 3 == 1),
    (Prefix(2), lambda i, j: j < 2),
    (Global(2), lambda i, j: i < 2 or j < 2),
    (Global([4, 1]), lambda i, j: i in (1, 4) or j in (1, 4)),
    (Blocks(3, [(1, 0), (2, 2)]), lambda i, j: (i // 3, j // 3) in ((1, 0), (2, 2))),
    (Dense(), lambda i, j: True),
]


@pytest.mark.parametrize(("branch", "shows"), DEFINITIONS, ids=lambda x: repr(x) if isinstance(x, Branch) else "")
def test_the_definitions(branch: Branch, shows: Callable[[int, int], bool]) -> None:
    """Said once more, for the oracle reads them too."""
    token = torch.arange(13)
    assert branch.sees(3, token[:, None], token).expand(13, 13).tolist() == [
        [shows(i, j) for j in range(13)] for i in range(13)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_rectangles_show_what_the_definition_says(kind: str) -> None:
    """Of some of the queries; and without another branch, where rectangles can say it."""
    pick = random.Random(kind)
    for _ in range(300):
        n, head, is_causal = pick.randint(1, 26), pick.randint(0, 5), pick.random() < 0.5
        first = pick.randrange(n)
        queries = range(first, pick.randint(first + 1, n)) if pick.random() < 0.5 else range(n)
        token = torch.arange(n)
        mine = (token[:, None] >= queries.start) & (token[:, None] < queries.stop)
        mine = mine & (token <= token[:, None]) if is_causal else mine
        branch, other = drawn(kind, n, pick), drawn(pick.choice([*KINDS]), n, pick)
        rects = [*branch.rects(head, queries, n, is_causal)]
        sees, others = (x.sees(head, token[:, None], token).expand(n, n) & mine for x in (branch, other))
        assert torch.equal(shown(rects, n), sees.int()), (branch, n, head, is_causal, queries)
        assert torch.equal(shown((even for x in rects for even in x.even()), n), sees.int())
        assert torch.equal(shown((x.turned() for x in rects), n).T, sees.int())
        rests = [other.without(rect, head) for rect in rects if not rect.is_empty]
        if None not in rests:
            rest = shown((part for parts in rests for part in parts or ()), n)
            assert torch.equal(rest, (sees & ~others).int()), (branch, other, n, head, is_causal, queries)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_is_written_and_read(kind: str) -> None:
    pick = random.Random(kind)
    for _ in range(20):
        branches = [drawn(kind, 20, pick), Window(3, heads=[1, 0])]
        pattern = Pattern(branches, counts=pick.choice(["once", "sum"]))
        assert Pattern.from_dict(pattern.to_dict()) == pattern
        assert eval(repr(pattern), vars(da)) == pattern  # what it prints can be typed
    ruled = da.DilatedPattern.torchscale([4, 8], [1, 2], mixing_gradient="detached")
    assert Pattern.from_dict(ruled.to_dict()) == ruled


def test_any_whole_number_will_do() -> None:
    some = np.arange(2, 9)
    pattern = Pattern([Window(*some[:3]), Strided(*some[:3]), Dilated(*some[:3]), Prefix(some[0]), Global(some[0])])
    assert Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern


FAR = 2**48


@pytest.mark.parametrize(
    "far",
    [Window(FAR, rate=FAR), Window(1, 40, rate=40), Blocks(4, [(0, 0), (FAR, 1), (3, FAR)]), Global(FAR)],
    ids=repr,
)
@pytest.mark.parametrize("first", [Strided(3), Dilated(7, 2, 1)], ids=repr)
def test_what_lies_beyond_the_sequence_costs_nothing(far: Branch, first: Branch) -> None:
    """Neither memory, where pairs are masked, nor time, where they are counted."""
    pattern, token = Pattern([first, far, Dilated(9, 2)]), torch.arange(40)
    qkv = testing.make_qkv(1, 40, 2, 8, dtype=torch.float64)
    got = dilated_attention(*qkv, pattern, backend="eager")
    assert (got - reference.attention(*qkv, pattern)[0]).abs().max() < 1e-12
    if not isinstance(far, Global):
        near = {Window: token[:, None] == token, Blocks: (token < 4) & (token[:, None] < 4)}[type(far)]
        assert torch.equal(far.sees(0, token[:, None], token), near)
    assert pattern.pairs(10**6, 2) <= 10**12 * 2


@dataclass(frozen=True, repr=False)
class Mirror(Branch):
    """A kind that the library does not know: a query sees the token as far from the end as it is from the start."""

    kind: ClassVar[str] = "mirror"

    tokens: int

    def sees(self, head: int, query: Tensor, key: Tensor) -> Tensor:
        return query + key == self.tokens - 1

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        for query in queries:
            if query < self.tokens and (self.tokens - 1 - query <= query or not is_causal):
                yield Rect(range(query, query + 1), range(self.tokens - 1 - query, self.tokens - query))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_new_kind_is_one_class(backend: str) -> None:
    pattern = Pattern([Window(2), Mirror(30)])
    qkv = testing.make_qkv(2, 30, 2, 8, dtype=torch.float64)
    got = dilated_attention(*qkv, pattern, is_causal=True, backend=backend)
    assert (got - reference.attention(*qkv, pattern, is_causal=True)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_heads_of_one_block_that_see_other_keys_have_masks_of_their_own(backend: str) -> None:
    """Queries are the same in both heads, and the prefix cuts away what head 1 sees first."""
    pattern = Pattern([Blocks(4, [(2, 0), (2, 1)]), Prefix(4, heads=[1])])
    qkv, mask = testing.make_qkv(1, 12, 2, 8, dtype=torch.float64), (torch.arange(12) % 5 == 1)[None]
    got = dilated_attention(*qkv, pattern, key_padding_mask=mask, backend=backend)
    assert (got - reference.attention(*qkv, pattern, key_padding_mask=mask)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("is_causal", [True, False])
def test_branches_in_any_order_leave_nothing_to_mask(is_causal: bool) -> None:
    """Where a key counts once, pairs are cut out of the branch that they can be cut out of best."""
    for some in itertools.permutations([Window(9), Strided(8), Global(1), Prefix(2), Dilated(32, 4, 0), Dense()], 3):
        if {Strided, Dilated} <= {type(branch) for branch in some}:
            continue  # these overlap here and there
        call = Call(Pattern(some), is_causal, samples=1, queries=64, keys=64, heads=1, kv_heads=1, total=64)
        assert not any(block.but for block in plan(call).blocks), some


def test_what_is_wrong_with_a_pattern_is_said() -> None:
    for make, error, match in (
        (lambda: Pattern([]), TypeError, "must be a list of Window"),
        (lambda: Pattern([8]), TypeError, "must be a list of Window"),
        (lambda: Pattern([Window(1)], counts="twice"), ValueError, "'once' or 'sum'"),
        (lambda: Pattern.from_dict({"branches": [{"kind": "ring"}]}), ValueError, "unknown kind of branch 'ring'"),
        (lambda: Window(-1), ValueError, "left must be 0 or more"),
        (lambda: Dilated(8, 0), ValueError, "rate must be 1 or more"),
        (lambda: Prefix(2, heads=[0.5]), TypeError, "every entry of heads must be a whole number"),
        (lambda: Blocks(8, [(0, -1)]), ValueError, "pairs must be pairs of block numbers"),
        (lambda: Blocks(8, [(0.5, 1)]), ValueError, "pairs must be pairs of block numbers"),
        (lambda: Blocks(8, [3]), ValueError, "pairs must be pairs of block numbers"),
        (lambda: Blocks.random(0, 1, 0, num_tokens=8), ValueError, "size must be 1 or more"),
        (lambda: Blocks.bigbird(8, num_tokens=64, per_row=-1), ValueError, "per_row must be 0 or more"),
        (lambda: Pattern.from_dict({"kind": "window"}), TypeError, "has a 'rule' or a list of 'branches'"),
        (lambda: Pattern.from_dict({"branches": [{"kind": "dense"}], "count": "sum"}), TypeError, "'count'"),
        (lambda: Pattern([Dense()]).keys(0.5, 0, num_tokens=8, num_heads=1), TypeError, "query must be a whole number"),
        (
            lambda: Pattern([Window(1, heads=[5])]).check_heads(4),
            ValueError,
            "is for key/value head 5, and there are 4",
        ),
    ):
        with pytest.raises(error, match=match):
            make()


def test_listed_blocks() -> None:
    for is_causal in (False, True):
        made = Blocks.random(8, 3, seed=1, num_tokens=100, is_causal=is_causal)
        assert made == Blocks.random(8, 3, seed=1, num_tokens=100, is_causal=is_causal)
        rows = [[key for query, key in made.pairs if query == row] for row in range(13)]
        assert all(len(keys) == (min(row, 3) + 1 if is_causal else 4) for row, keys in enumerate(rows))
    pairs = set(Blocks.bigbird(10, num_tokens=100, window=3, first=1, per_row=0).pairs)
    assert pairs == {(i, j) for i in range(10) for j in range(10) if abs(i - j) < 2 or not (i and j)}


def test_sinks_are_one_more_key() -> None:
    qkv, sinks = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    pattern, leaves = Pattern([Strided(4, 3)]), [x.clone().requires_grad_() for x in (*qkv, sinks)]
    got = dilated_attention(*leaves[:3], pattern, is_causal=True, return_lse=True, sinks=leaves[3])
    want = reference.attention(*leaves[:3], pattern, is_causal=True, sinks=leaves[3])
    for x, y in zip(got, want, strict=True):  # the first queries see the sink alone
        assert (x - y).abs().max() < 1e-12
    grads = [torch.autograd.grad((x * x.detach().cos()).sum() + lse.sum(), leaves) for x, lse in (got, want)]
    assert all((x - y).abs().max() < 1e-10 for x, y in zip(*grads, strict=True))
    with pytest.raises(ValueError, match=r"sinks must be a float tensor of shape \(4,\)"):
        dilated_attention(*qkv, pattern, sinks=sinks[:3])
