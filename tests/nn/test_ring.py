"""The modules over a group of ranks: each equals the call it documents, bit for bit."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dilated_attention as da
from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, shard_sequence, testing
from dilated_attention.backends import sdpa
from dilated_attention.pattern import RULES
from dilated_attention.ranks import pool
from dilated_attention.testing import Results
from tests.over_ranks import changed, raised, world

B, N, H, HK, D = 2, 23, 4, 2, 4
E = H * D
LENGTHS, RATES = [8, 64], [1, 3]
LIMIT = timedelta(seconds=60)
SHARD = 8  # tokens, of each of three ranks
RING, COLLECTIVE, PRODUCTION = (
    da.RingDilatedAttention, da.RingDilatedAttentionV2Collective, da.RingDilatedAttentionProduction,
)  # fmt: skip
SIMPLE, MULTIHEAD = da.RingAttentionV2Simple, da.RingMultiheadDilatedAttention
CLASSES: list[Any] = [RING, COLLECTIVE, PRODUCTION, SIMPLE]


def make(cls: Any, **options: Any) -> Any:
    """One module of any of the classes, of float64."""
    options = {"rule": "longnet", **options}
    if cls is SIMPLE:
        return cls(**options)
    if issubclass(cls, da.MultiheadDilatedAttention):
        torch.manual_seed(0)
        return changed(cls(E, H, LENGTHS, RATES, dtype=torch.float64, **options))
    return cls(LENGTHS, RATES, **options)


def inputs() -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """q, k, v, the gradient of the result, and a padding mask: of the whole sequence."""
    qkv = testing.make_qkv(B, N, H, D, kv_heads=HK, dtype=torch.float64)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, -5:] = padding[1, 3:6] = True
    return qkv, testing.make_qkv(B, N, H, D, dtype=torch.float64, seed=1)[0], padding


def mine(x: Any) -> Any:
    """Of what is a tensor, this rank's shard."""
    return shard_sequence(x, world()) if isinstance(x, Tensor) else x


def on_this_rank(attention: Callable[..., Any], seed: int = 0, **options: Any) -> Results:
    """Of this rank's shard; the same random numbers at every call."""
    qkv, dout, _ = inputs()
    torch.manual_seed(seed)
    return testing.run(lambda q, k, v: attention(q, k, v, **options), tuple(mine(x) for x in qkv), mine(dout))


def unequal(got: Results, expected: Results) -> list[str]:
    return [name for name, value in got.items() if not torch.equal(value, getattr(expected, name))]


# --- what each class equals -------------------------------------------------------------------------------------


def documented(cls: Any, rule: Any, group: Any, **options: Any) -> Callable[..., Any]:
    """The call in the docstring of the class."""
    pattern = DilatedPattern.of(rule, LENGTHS, RATES)
    if cls is SIMPLE:
        pattern, options["backend"] = DilatedPattern.of(rule, [N], [1]), "eager"
    return functools.partial(dilated_attention, pattern=pattern, group=group, enable_gqa=True, **options)


def equals_its_call() -> list[str]:
    """In training with dropout, which eval mode leaves out."""
    wrong = []
    way, seed = {"is_causal": True, "key_padding_mask": mine(inputs()[2])}, 7 + dist.get_rank()
    for cls, rule in itertools.product(CLASSES, RULES):
        exchange: Any = "allgather" if cls is COLLECTIVE else "ring"
        group, ways = ContextParallel(world(), exchange=exchange), way if rule == "torchscale" else {}
        module, results = make(cls, rule=rule, dropout=0.4), []
        for dropout_p in (0.4, 0.0):
            results.append(on_this_rank(module, seed, **ways))
            expected = on_this_rank(documented(cls, rule, group, dropout_p=dropout_p), seed, **ways)
            wrong += [f"{cls} {rule} {dropout_p}: {x}" for x in unequal(results[-1], expected)]
            module.eval()
        wrong += [f"{cls} drops nothing"] if not unequal(*results) else []
    return wrong


@pytest.mark.parametrize("P", [1, 3])
def test_equals_the_call_it_documents(P: int) -> None:
    assert pool(P).run(equals_its_call) == [[]] * P


# --- which ranks ------------------------------------------------------------------------------------------------

WRONG_SIZE = r"ring_size is {} and {}: start as many ranks with torchrun, pass a group of that size"


def sizes() -> list[str]:
    """ring_size None, the right one, 1 and a wrong one, in a group of two."""
    said = unequal(*(on_this_rank(make(RING, ring_size=size)) for size in (None, 2)))
    if dist.get_rank() == 0:  # on its own: nobody else calls
        alone = make(RING, ring_size=1)
        said += unequal(on_this_rank(alone), on_this_rank(documented(RING, "longnet", None)))
        assert alone.ranks.stats.hops == 0
    return [*said, *(raised(make, x, ring_size=3) for x in (RING, MULTIHEAD))]


def test_ring_size() -> None:
    wrong = f"ValueError: {WRONG_SIZE.format(3, 'the process group has 2 ranks')}"
    for first, second in pool(2).run(sizes):
        assert first.startswith(wrong)
        assert second.startswith(wrong)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (RING, {"ring_size": 4}, WRONG_SIZE.format(4, "no process group is initialised")),
        (MULTIHEAD, {"ring_size": 0}, "ring_size must be 1 or more, got 0"),
        (PRODUCTION, {"max_workspace_bytes": 0}, "max_workspace_bytes must be 1 or more, got 0"),
        (RING, {"group": "world"}, r"group must be a torch\.distributed\.ProcessGroup or a 1-D Device"),
    ],
)
def test_wrong_settings(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(cls, **options)


def made_first(meeting: str) -> list[str]:
    """A module made, and used, before there is a group, takes the group when there is one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    module, (qkv, dout, _) = make(RING), inputs()
    plain = testing.run(documented(RING, "longnet", None), qkv, dout)
    wrong = unequal(testing.run(module, qkv, dout), plain)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=LIMIT)
    testing.assert_exact(on_this_rank(module), Results(*map(mine, plain)))
    return wrong + ["sent nothing"] * (module.ranks.stats.bytes_sent == 0)


def test_a_module_made_before_the_group(tmp_path: Path) -> None:
    assert pool(2).run(made_first, str(tmp_path / "meeting")) == [[], []]


def copies() -> list[str]:
    """Of modules over a group, which go over the same one."""
    modules = [make(cls, group=world()) for cls in CLASSES]
    wrong = [x for module in modules for x in unequal(on_this_rank(copy.deepcopy(module)), on_this_rank(module))]
    said = [repr(modules[0]), repr(make(RING, ring_size=1))]
    return wrong if "2 ranks" in said[0] and "one device" in said[1] else [*wrong, *said]


def test_deep_copies_run_over_the_same_group() -> None:
    assert pool(2).run(copies) == [[], []]


def checkpointing() -> tuple[list[str], list[int]]:
    """What differs with received rows kept, and the bytes that the backward pass receives either way."""
    results, received = [], []
    for use in (True, False):
        module = make(PRODUCTION, use_checkpointing=use)
        leaves = [mine(x).requires_grad_() for x in inputs()[0]]
        out = module(*leaves)
        before = module.ranks.stats.bytes_received
        out.backward(mine(inputs()[1]))
        received.append(module.ranks.stats.bytes_received - before)
        results.append(Results(out.detach(), None, *(x.grad for x in leaves)))
    return unequal(*results), received


def test_use_checkpointing_changes_what_travels_and_no_number() -> None:
    for wrong, (again, kept) in pool(4).run(checkpointing):  # the third step could take the buffer of the first
        assert wrong == []
        assert again > kept > 0


# --- production -------------------------------------------------------------------------------------------------


def production(**options: Any) -> Any:
    """Dense, so that every block has all heads."""
    return PRODUCTION([64], [1], rule="longnet", **options)


@contextmanager
def watched(name: str, fails: Callable[[int, int], bool] = lambda call, heads: False) -> Iterator[list[int]]:
    """The key heads of each call of sdpa; those for which fails(call, heads) run out of memory."""
    heads: list[int] = []
    original = getattr(sdpa, name)

    def counted(kernels: Any, problem: Any, *results: Any) -> Any:
        heads.append(problem.k.shape[2])
        if fails(len(heads), heads[-1]):
            raise torch.OutOfMemoryError("the needle")
        return original(kernels, problem, *results)

    with mock.patch.object(sdpa, name, counted):
        yield heads


def whole_heads() -> tuple[tuple[Tensor, ...], Tensor]:
    return testing.make_qkv(B, N, H, D, dtype=torch.float64), inputs()[1]


FORWARD_BYTES = B * N * (D * 8 + 8)  # of one head: out and lse
BACKWARD_BYTES = 3 * B * N * D * 8


@pytest.mark.parametrize(
    ("cap", "forward", "backward"),
    [
        (None, [4], [4]),
        (4 * BACKWARD_BYTES - 1, [4], [3, 1]),
        (2 * FORWARD_BYTES, [2, 2], [1] * 4),
        (1, [1] * 4, [1] * 4),
    ],
)
def test_a_cap_on_memory_slices_the_heads(cap: int | None, forward: list[int], backward: list[int]) -> None:
    qkv, dout = whole_heads()
    plain = testing.run(lambda *x: dilated_attention(*x, DilatedPattern.longnet([64], [1])), qkv, dout)
    module = production(max_workspace_bytes=cap)
    with watched("forward") as forward_heads, watched("backward") as backward_heads:
        got = testing.run(module, qkv, dout)
    assert (forward_heads, backward_heads) == (forward, backward)
    assert not unequal(got, plain)
    assert module.stats()["retries"] == module.stats()["hops"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_production_compiles_to_one_graph_and_keeps_its_cap_and_its_count(dynamic: bool) -> None:
    """Without a group. The limit is an object: the compiled call names it by number and still reaches it."""
    qkv, dout = whole_heads()
    module = production(max_workspace_bytes=2 * FORWARD_BYTES)
    plain = testing.run(module, qkv, dout)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with watched("forward", lambda call, heads: call == 1) as forward_heads, watched("backward") as backward_heads:
        got = testing.run(compiled, qkv, dout)
    assert forward_heads == [2, 1, 1, 2]  # the first two heads run out of memory and come again one by one
    assert backward_heads == [1] * 4
    assert not unequal(got, plain)
    assert module.stats()["retries"] == 1


def out_of_memory(name: str, hopeless: bool) -> tuple[list[str], list[float], list[str]]:
    """Memory runs out in the second block of one rank, until a single head is left: what differs, retries, log."""
    qkv, dout = whole_heads()
    parts = tuple(mine(x) for x in qkv)
    undisturbed, disturbed = production(), production(group=ContextParallel(timeout=20.0))
    expected = testing.run(undisturbed, parts, mine(dout))

    def fails(call: int, heads: int) -> bool:
        return dist.get_rank() == 1 and call > 1 and (hopeless or heads > 1)

    with watched(name, fails), mock.patch.object(logging.getLogger("dilated_attention"), "handle") as handle:
        got = testing.run(disturbed, parts, mine(dout))
    said = [f"{x.args[0].levelname} {x.args[0].getMessage()}" for x in handle.call_args_list]
    return unequal(got, expected), [x.stats()["retries"] for x in (undisturbed, disturbed)], said


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_block_that_runs_out_of_memory_is_computed_again(name: str) -> None:
    first, (wrong, (none, retries), said), last = pool(3).run(out_of_memory, name, False)
    assert first == last == ([], [0, 0], [])
    assert (wrong, none) == ([], 0)
    assert retries == len(said) >= 2
    for text, before, after in zip(said, (4, 2), (2, 1), strict=False):
        assert text == f"WARNING out of memory with {before} heads in a call: going on with {after} at a time"


@pytest.mark.parametrize(("name", "row"), [("forward", D * 8 + 8), ("backward", 3 * D * 8)])
def test_when_not_even_one_head_fits_every_rank_knows(name: str, row: int) -> None:
    outcomes = pool(3).run(out_of_memory, name, True, check=False)
    assert [x.error_type for x in outcomes] == ["CommunicationError", "OutOfMemoryError", "CommunicationError"]
    assert "out of memory with a single head in a call" in outcomes[1].error
    assert f"results alone take {row * B * SHARD:,} bytes: use more ranks, shorter segments, or" in outcomes[1].error
    assert any("rank 1" in outcomes[rank].error for rank in (0, 2))  # the other may hear it from a third


def observed() -> tuple[list[dict[str, float]], set[str]]:
    """Statistics at first, after a forward pass and after three steps; what the profiler names."""
    module = make(PRODUCTION)
    found = [module.stats()]
    with torch.no_grad():
        module(*(mine(x) for x in inputs()[0]))
    found.append(module.stats())
    for _ in range(3):
        with torch.profiler.profile() as profile:
            on_this_rank(module)
    return [*found, module.stats()], {event.name for event in profile.events()}


def test_what_is_sent_is_counted_and_named_for_the_profiler() -> None:
    by_rank, names = zip(*pool(3).run(observed), strict=True)
    for moment in (1, 2):
        sent, received = (sum(x[moment][key] for x in by_rank) for key in ("bytes_sent", "bytes_received"))
        assert sent == received > 0
    for none, forward, everything in by_rank:
        assert list(none) == ["hops", "bytes_sent", "bytes_received", "seconds_waited", "peak_bytes", "retries"]
        assert set(none.values()) == {0}
        assert everything["hops"] > 4 * forward["hops"]  # four forward passes and three backward
        assert min(everything["peak_bytes"], everything["seconds_waited"]) > 0
    wanted = {f"dilated_attention::ring {direction} step 1" for direction in ("forward", "backward")}
    assert all(wanted <= some for some in names)
