"""The modules over a group of ranks: each equals the call it documents, bit for bit, and one device's result."""

from __future__ import annotations

import copy
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention import (
    ContextParallel,
    DilatedPattern,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingAttentionV2Simple,
    RingDilatedAttention,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2Collective,
    RingMultiheadDilatedAttention,
    dilated_attention,
    shard_sequence,
    testing,
)
from dilated_attention.backends import eager, sdpa
from dilated_attention.ranks import pool
from dilated_attention.testing import Results, error

RANKS = pytest.mark.parametrize("P", [1, 2, 3, 4])
B, N, H, HK, D = 2, 23, 4, 2, 4
E = H * D
LENGTHS, RATES = [4, 16, 64], [1, 2, 3]
TOLERANCE = 1e-12
CLASSES: list[Any] = [RingDilatedAttention, RingDilatedAttentionV2Collective, RingDilatedAttentionProduction]
EXCHANGE = {RingDilatedAttentionV2Collective: "allgather"}


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def make(cls: Any, **options: Any) -> Any:
    """One module of any of the classes, of float64."""
    if cls is RingAttentionV2Simple:
        return cls(**options)
    if issubclass(cls, MultiheadDilatedAttention):
        torch.manual_seed(0)
        module = cls(E, H, LENGTHS, RATES, dtype=torch.float64, **{"rule": "longnet"} | options)
        with torch.no_grad():
            for index, parameter in enumerate(module.parameters()):  # none at the value it starts with
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                parameter.add_(0.1 * noise.double())
        return module
    return cls(LENGTHS, RATES, **{"rule": "longnet"} | options)


def inputs(seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """q, k, v, the gradient of the result, and a padding mask: of the whole sequence."""
    qkv = testing.make_qkv(B, N, H, D, kv_heads=HK, dtype=torch.float64, seed=seed)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, -5:] = padding[1, 3:6] = True
    return qkv, testing.make_qkv(B, N, H, D, dtype=torch.float64, seed=seed + 1)[0], padding


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(B, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mine(x: Tensor) -> Tensor:
    return shard_sequence(x, world())


def shard(results: Results) -> Results:
    return Results(**{name: None if x is None else mine(x) for name, x in vars(results).items()})


def on_this_rank(attention: Callable[..., Any], seed: int = 0, **options: Any) -> Results:
    """Of this rank's shard; the same random numbers at every call."""
    qkv, dout, _ = inputs()
    torch.manual_seed(seed)
    return testing.run(lambda q, k, v: attention(q, k, v, **options), tuple(mine(x) for x in qkv), mine(dout))


def unequal(got: Results, expected: Results) -> list[str]:
    wanted = dict(expected.items())
    return [name for name, value in got.items() if not torch.equal(value, wanted[name])]


# --- what each class equals -------------------------------------------------------------------------------------


def equals_its_call() -> list[str]:
    """For every class: against the call in its docstring, and against the oracle on one device."""
    wrong = []
    qkv, dout, padding = inputs()
    ways: list[dict[str, Any]] = [{}, {"is_causal": True}, {"key_padding_mask": padding, "is_causal": True}]
    cases: list[tuple[Any, dict[str, Any]]] = [
        (cls, {"rule": rule}) for cls in CLASSES for rule in ("longnet", "torchscale", "head_groups")
    ]
    cases += [(RingDilatedAttention, {"rule": "longnet", "use_checkpointing": False}), (RingAttentionV2Simple, {})]
    for cls, settings in cases:
        rule, lengths, rates = settings.get("rule", "longnet"), LENGTHS, RATES
        if cls is RingAttentionV2Simple:
            lengths, rates = [N], [1]
        elif rule == "head_groups":  # for two key heads
            lengths, rates = LENGTHS[1:], RATES[1:]
        pattern = DilatedPattern.of(rule, lengths, rates)
        module = cls() if cls is RingAttentionV2Simple else cls(lengths, rates, **settings)
        kept = settings.get("use_checkpointing", True)
        group = ContextParallel(world(), exchange=EXCHANGE.get(cls, "ring"), use_checkpointing=kept)
        call: dict[str, Any] = {"group": group, "enable_gqa": True}
        call["backend"] = "eager" if cls is RingAttentionV2Simple else "auto"
        for way in ways:
            here = {name: mine(x) if isinstance(x, Tensor) else x for name, x in way.items()}
            got = on_this_rank(module, **here)
            expected = on_this_rank(lambda q, k, v, p=pattern, c=call, w=here: dilated_attention(q, k, v, p, **c, **w))
            wrong += [f"{cls.__name__} {settings} {list(way)}: {name}" for name in unequal(got, expected)]
            testing.assert_exact(got, shard(testing.oracle(qkv, pattern, dout, **way)))
    return wrong


@RANKS
def test_equals_the_call_it_documents(P: int) -> None:
    assert pool(P).run(equals_its_call) == [[]] * P


def multihead_equals() -> list[str]:
    wrong: list[str] = []
    _, _, padding = inputs()
    dout = tokens(5)
    cases: list[tuple[dict[str, Any], Any]] = [({}, "ring"), ({"rule": "head_groups"}, "alltoall")]
    for settings, exchange in [*cases, ({"bias": False, "layer_norm": False, "num_kv_heads": 2}, "ring")]:
        group = ContextParallel(world(), exchange=exchange)
        many = make(RingMultiheadDilatedAttention, **settings, group=world() if exchange == "ring" else group)
        one = make(MultiheadDilatedAttention, **settings)
        for way in ({}, {"is_causal": True, "key_padding_mask": padding}):
            x, whole = mine(tokens()).requires_grad_(), tokens().requires_grad_()
            here: dict[str, Any] = {name: mine(v) if isinstance(v, Tensor) else v for name, v in way.items()}
            out, weights = many(x, **here)
            expected = one(whole, **way)[0]
            q, k, v = (linear(x).unflatten(-1, (-1, D)) for linear in (many.q_proj, many.k_proj, many.v_proj))
            by_hand = dilated_attention(q, k, v, many.pattern, group=group, enable_gqa=True, **here)
            if weights is not None or not torch.equal(out, many.out_proj(many.norm(by_hand.flatten(2)))):
                wrong.append(f"{settings}: not the documented call")
            grads = torch.autograd.grad(out, [x, *many.parameters()], mine(dout))
            for grad in grads[1:]:
                dist.all_reduce(grad)
            wanted = torch.autograd.grad(expected, [whole, *one.parameters()], dout)
            names = ["out", "input", *(name for name, _ in one.named_parameters())]
            found = zip(names, [out, *grads], [mine(expected), mine(wanted[0]), *wanted[1:]], strict=True)
            wrong += [f"{settings} {list(way)}: {name}" for name, a, b in found if not error(a, b) <= TOLERANCE]
    return wrong


@RANKS
def test_multihead_equals_one_device(P: int) -> None:
    assert pool(P).run(multihead_equals) == [[]] * P


def test_without_a_group_it_is_the_plain_function() -> None:
    qkv, dout, padding = inputs()
    for cls in [*CLASSES, RingAttentionV2Simple]:
        module = make(cls)
        for way in ({}, {"is_causal": True, "key_padding_mask": padding}):
            options: dict[str, Any] = {"enable_gqa": True, "backend": module.backend, **way}
            if cls is RingAttentionV2Simple:
                pattern = DilatedPattern.longnet([N], [1])
            else:
                pattern = module.pattern
            expected = testing.run(lambda *x, p=pattern, o=options: dilated_attention(*x, p, **o), qkv, dout)
            assert not unequal(testing.run(lambda *x, m=module, w=way: m(*x, **w), qkv, dout), expected)
    one, ring = make(MultiheadDilatedAttention), make(RingMultiheadDilatedAttention)
    assert torch.equal(ring(tokens())[0], one(tokens())[0])


def inside_a_layer() -> list[float]:
    """As self_attn of PyTorch's layer, which must not take its dense shortcut in eval mode."""
    found = []
    padding = inputs()[2]
    layers: list[Any] = []
    for cls in (RingMultiheadDilatedAttention, MultiheadDilatedAttention):
        torch.manual_seed(0)
        layer: Any = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
        layer.self_attn = make(cls)
        layers.append(layer)
    for training in (True, False):
        many, one = (layer.train(training) for layer in layers)
        found.append(error(many(mine(tokens()), is_causal=True), mine(one(tokens(), is_causal=True))))
        with torch.no_grad():
            out = many(mine(tokens()), src_key_padding_mask=mine(padding))
            found.append(error(out, mine(one(tokens(), src_key_padding_mask=padding))))
    return found


def test_in_an_encoder_layer() -> None:
    for found in pool(3).run(inside_a_layer):
        assert max(found) <= TOLERANCE


# --- which ranks ------------------------------------------------------------------------------------------------

WRONG_SIZE = r"ring_size is {} and {}: start as many ranks with torchrun, pass a group of that size"


def sizes() -> list[str]:
    """ring_size None, the right one, 1 and a wrong one, in a group of two."""
    said = []
    results = [on_this_rank(make(RingDilatedAttention, ring_size=size)) for size in (None, 2)]
    said += unequal(*results)
    for cls in (RingDilatedAttention, RingDilatedAttentionProduction, RingMultiheadDilatedAttention):
        try:
            make(cls, ring_size=3)
        except ValueError as fault:
            said.append(str(fault))
    if dist.get_rank() == 0:  # on its own: nobody else calls
        alone = make(RingDilatedAttention, ring_size=1)
        expected = on_this_rank(lambda *x: dilated_attention(*x, alone.pattern, enable_gqa=True))
        said += unequal(on_this_rank(alone), expected)
        stats = alone.ranks.stats
        assert stats.hops == stats.bytes_sent == stats.bytes_received == 0
        module, x = make(RingMultiheadDilatedAttention, ring_size=1), mine(tokens())
        assert torch.equal(module(x)[0], make(MultiheadDilatedAttention)(x)[0])
    return said


def test_ring_size() -> None:
    wrong = WRONG_SIZE.format(3, "the process group has 2 ranks")
    for said in pool(2).run(sizes):
        assert len(said) == 3
        assert all(one.startswith(wrong) for one in said)


def test_ring_size_without_a_group() -> None:
    for size in (None, 1):
        make(RingDilatedAttention, ring_size=size)
    with pytest.raises(ValueError, match=WRONG_SIZE.format(4, "no process group is initialised")):
        make(RingDilatedAttention, ring_size=4)
    with pytest.raises(ValueError, match="ring_size must be 1 or more, got 0"):
        make(RingMultiheadDilatedAttention, ring_size=0)
    with pytest.raises(TypeError, match=r"ring_size must be a whole number, got 2\.0"):
        make(RingDilatedAttentionProduction, ring_size=2.0)
    with pytest.raises(ValueError, match="max_workspace_bytes must be 1 or more, got 0"):
        make(RingDilatedAttentionProduction, max_workspace_bytes=0)
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup or a 1-D DeviceMesh"):
        make(RingDilatedAttention, group="world")
    with pytest.raises(ValueError, match=r"dropout must be a number in \[0, 1\], got 2"):
        make(RingDilatedAttention, dropout=2)
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        make(RingAttentionV2Simple, backend="fast")


def wrong_settings() -> list[str]:
    """With a group they are seen at once, not in the first step."""
    said = []
    for options in ({"use_checkpointing": 1}, {"group": 2}, {"group": ContextParallel(exchange="auto")}):
        try:
            make(RingDilatedAttention, **options)
        except (TypeError, ValueError) as fault:
            said.append(str(fault))
    return said


def test_wrong_settings() -> None:
    expected = ["use_checkpointing must", "group must be a torch", "RingDilatedAttention has the exchange 'ring'"]
    (said,) = pool(1).run(wrong_settings)
    assert len(said) == len(expected)
    assert all(got.startswith(wanted) for got, wanted in zip(said, expected, strict=True))


def on_a_mesh() -> list[str]:
    """Two rings of two, as a 1-D mesh each, with different sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    group = mesh["sequence"]
    qkv, dout, _ = inputs(seed=mesh.get_local_rank("data"))
    module = make(RingDilatedAttention, group=group, ring_size=2)
    parts = tuple(shard_sequence(x, group) for x in qkv)
    got = testing.run(module, parts, shard_sequence(dout, group))
    expected = testing.oracle(qkv, module.pattern, dout)
    wanted = dict(expected.items())
    return [x for x, value in got.items() if not error(value, shard_sequence(wanted[x], group)) <= TOLERANCE]


def test_a_mesh_as_group() -> None:
    assert pool(4).run(on_a_mesh) == [[]] * 4


def made_first(meeting: str) -> list[str]:
    """A module made, and used, before there is a group, takes the group when there is one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    qkv, dout, _ = inputs()
    module = make(RingDilatedAttention)
    plain = testing.run(lambda *x: dilated_attention(*x, module.pattern, enable_gqa=True), qkv, dout)
    wrong = unequal(testing.run(module, qkv, dout), plain)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit)
    testing.assert_exact(on_this_rank(module), shard(testing.oracle(qkv, module.pattern, dout)))
    return wrong + ["sent nothing"] * (module.ranks.stats.bytes_sent == 0)


def test_a_module_made_before_the_group(tmp_path: Path) -> None:
    assert pool(2).run(made_first, str(tmp_path / "meeting")) == [[], []]


def copies() -> list[str]:
    wrong = []
    for cls in [*CLASSES, RingAttentionV2Simple]:
        module = make(cls, group=world())
        twin = copy.deepcopy(module)
        wrong += unequal(on_this_rank(twin), on_this_rank(module))
    module = make(RingMultiheadDilatedAttention, group=world())
    twin = copy.deepcopy(module)
    if not torch.equal(twin(mine(tokens()))[0], module(mine(tokens()))[0]):
        wrong.append("multihead")
    if any(a is b for a, b in zip(twin.parameters(), module.parameters(), strict=True)):
        wrong.append("parameters are shared")
    if "2 ranks" not in repr(module) or "one device" not in repr(make(RingDilatedAttention, ring_size=1)):
        wrong.append(repr(module))
    return wrong


def test_deep_copies_run_over_the_same_group() -> None:
    assert pool(2).run(copies) == [[], []]


# --- settings ---------------------------------------------------------------------------------------------------


def checkpointing() -> tuple[list[str], list[int]]:
    """What differs with received rows kept, and the bytes that the backward pass receives either way.

    By the class that uses receive buffers again, with so many steps that one would come again in the same pass.
    """
    results, received = [], []
    for use in (True, False):
        module = make(RingDilatedAttentionProduction, use_checkpointing=use)
        leaves = [mine(x).requires_grad_() for x in inputs()[0]]
        out = module(*leaves)
        before = module.ranks.stats.bytes_received
        out.backward(mine(inputs()[1]))
        received.append(module.ranks.stats.bytes_received - before)
        results.append(Results(out.detach(), None, *(x.grad for x in leaves)))
    return unequal(*results), received


def test_use_checkpointing_changes_what_travels_and_no_number() -> None:
    for wrong, (again, kept) in pool(4).run(checkpointing):
        assert wrong == []
        assert again > kept > 0


def dropout() -> list[str]:
    """By the seed of the first rank, as on one device; none in eval mode."""
    wrong = []
    qkv, dout, _ = inputs()
    for cls in [*CLASSES, RingAttentionV2Simple]:
        module = make(cls, dropout=0.4)
        pattern = DilatedPattern.longnet([N], [1]) if cls is RingAttentionV2Simple else module.pattern
        plain = {"enable_gqa": True, "backend": "eager"}
        torch.manual_seed(7)
        one = testing.run(lambda *x, p=pattern, o=plain: dilated_attention(*x, p, dropout_p=0.4, **o), qkv, dout)
        got = on_this_rank(module, seed=7 + dist.get_rank())
        testing.assert_exact(got, shard(one))
        if not unequal(got, on_this_rank(module, seed=8)):
            wrong.append(f"{cls.__name__}: the same whatever the seed")
        testing.assert_exact(on_this_rank(module.eval()), shard(testing.oracle(qkv, pattern, dout)))
    many, one = (make(cls, dropout=0.4) for cls in (RingMultiheadDilatedAttention, MultiheadDilatedAttention))
    torch.manual_seed(7)
    expected = one(tokens())[0]
    torch.manual_seed(7 + dist.get_rank())
    if error(many(mine(tokens()))[0], mine(expected)) > TOLERANCE:
        wrong.append("multihead")
    if error(many.eval()(mine(tokens()))[0], mine(one.eval()(tokens())[0])) > TOLERANCE:
        wrong.append("multihead in eval mode")
    return wrong


def test_dropout_in_training_mode_only() -> None:
    assert pool(3).run(dropout) == [[]] * 3


def test_state_dicts_are_those_of_one_device() -> None:
    ring = make(RingMultiheadDilatedAttention)
    for cls in (MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention):
        other = cls(E, H, LENGTHS, RATES, rule="longnet", dtype=torch.float64)
        other.load_state_dict(ring.state_dict())
        assert torch.equal(other(tokens())[0], ring(tokens())[0])
        fresh = RingMultiheadDilatedAttention(E, H, LENGTHS, RATES, rule="longnet", dtype=torch.float64)
        fresh.load_state_dict(other.state_dict())
        assert torch.equal(fresh(tokens())[0], ring(tokens())[0])
    assert list(ring.state_dict()) == list(make(MultiheadDilatedAttention).state_dict())
    for cls in [*CLASSES, RingAttentionV2Simple]:
        assert not make(cls).state_dict()


def told() -> str:
    """One rank gives one token too little of the key."""
    module, x = make(RingMultiheadDilatedAttention), mine(tokens())
    try:
        module(x, x[:, 1:] if dist.get_rank() == 1 else x)
    except ValueError as fault:
        return str(fault)
    return "nothing raised"


def test_what_is_wrong_on_one_rank_is_told_to_all() -> None:
    said = pool(3).run(told)
    assert "needs equal lengths" in said[1]
    for rank in (0, 2):
        assert "called off on all ranks" in said[rank]
        assert "rank 1 cannot run it: ValueError: key is (2, 7, 16) and query (2, 8, 16)" in said[rank]


# --- production -------------------------------------------------------------------------------------------------


def production(**options: Any) -> Any:
    """Dense, so that every block has all heads."""
    return RingDilatedAttentionProduction([64], [1], rule="longnet", **options)


@contextmanager
def watched(
    name: str, fails: Callable[[int, int], bool] = lambda call, heads: False, backend: Any = sdpa
) -> Iterator[list[int]]:
    """The key heads of each call of the backend; those for which fails(call, heads) run out of memory."""
    heads: list[int] = []
    original = getattr(backend, name)

    def counted(kernels: Any, *args: Any) -> Any:
        key = args[1] if name == "forward" else args[2]
        heads.append(key.shape[2])
        if fails(len(heads), key.shape[2]):
            raise torch.OutOfMemoryError("the needle")
        return original(kernels, *args)

    with mock.patch.object(backend, name, counted):
        yield heads


@contextmanager
def warnings_of_the_library() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("dilated_attention")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def whole_heads() -> tuple[tuple[Tensor, ...], Tensor]:
    return testing.make_qkv(B, N, H, D, dtype=torch.float64), inputs()[1]


FORWARD_BYTES = B * N * (D * 8 + 8)  # of one head: out and lse
BACKWARD_BYTES = 3 * B * N * D * 8


@pytest.mark.parametrize(
    ("cap", "forward", "backward"),
    [
        (None, [4], [4]),
        (10**9, [4], [4]),
        (4 * BACKWARD_BYTES - 1, [4], [3, 1]),
        (2 * FORWARD_BYTES, [2, 2], [1] * 4),
        (3 * FORWARD_BYTES, [3, 1], [1] * 4),
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

    def fails(call: int, heads: int) -> bool:
        return call == 1

    with watched("forward", fails) as forward_heads, watched("backward") as backward_heads:
        got = testing.run(compiled, qkv, dout)
    assert forward_heads == [2, 1, 1, 2]  # the first two heads run out of memory and come again one by one
    assert backward_heads == [1] * 4
    assert not unequal(got, plain)
    assert module.stats()["retries"] == 1


def capped() -> list[str]:
    """The same on several ranks, with grouped heads, causal, padding, and, where the backend has it, dropout."""
    wrong: list[str] = []
    way: dict[str, Any] = {"is_causal": True, "key_padding_mask": mine(inputs()[2])}
    for backend, drop in ((sdpa, 0.0), (eager, 0.2)):
        results, calls = [], []
        for cap in (None, 1):
            module = make(RingDilatedAttentionProduction, dropout=drop, max_workspace_bytes=cap)
            with watched("forward", backend=backend) as heads:
                results.append(on_this_rank(module, **way))
            calls.append(heads)
        assert max(calls[0]) == 2
        assert calls[1] == [1] * sum(calls[0])
        wrong += unequal(*results)
    return wrong


def test_a_cap_on_several_ranks() -> None:
    assert pool(3).run(capped) == [[]] * 3


def out_of_memory(name: str, victim: int) -> tuple[list[str], list[float], list[str]]:
    """Memory runs out in the second block of one rank, until a single head is left: what differs, retries, log."""
    qkv, dout = whole_heads()
    parts, mine_dout = tuple(mine(x) for x in qkv), mine(dout)
    undisturbed, disturbed = production(), production()
    expected = testing.run(undisturbed, parts, mine_dout)

    def fails(call: int, heads: int) -> bool:
        return dist.get_rank() == victim and call > 1 and heads > 1

    with watched(name, fails), warnings_of_the_library() as said:
        got = testing.run(disturbed, parts, mine_dout)
    return unequal(got, expected), [x.stats()["retries"] for x in (undisturbed, disturbed)], said


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_block_that_runs_out_of_memory_is_computed_again(name: str) -> None:
    victim = 1
    for rank, (wrong, retries, said) in enumerate(pool(3).run(out_of_memory, name, victim)):
        assert wrong == []
        if rank != victim:
            assert (retries, said) == ([0, 0], [])
            continue
        assert retries[0] == 0
        assert retries[1] == len(said) >= 2
        assert said[:2] == [
            "WARNING out of memory with 4 heads in a call: going on with 2 at a time",
            "WARNING out of memory with 2 heads in a call: going on with 1 at a time",
        ]


def hopeless(name: str) -> None:
    qkv, dout = whole_heads()
    with watched(name, lambda call, heads: dist.get_rank() == 1 and call > 1):
        testing.run(production(group=ContextParallel(timeout=20.0)), tuple(mine(x) for x in qkv), mine(dout))


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_when_not_even_one_head_fits_every_rank_knows(name: str) -> None:
    outcomes = pool(3).run(hopeless, name, check=False)
    assert [x.error_type for x in outcomes] == ["CommunicationError", "OutOfMemoryError", "CommunicationError"]
    shard_tokens = 8
    bytes_of_one = (D * 8 + 8 if name == "forward" else 3 * D * 8) * B * shard_tokens
    assert "out of memory with a single head in a call" in outcomes[1].error
    assert f"results alone take {bytes_of_one:,} bytes: use more ranks, shorter segments, or" in outcomes[1].error
    assert any("rank 1" in outcomes[rank].error for rank in (0, 2))  # the other may hear it from a third
    assert max(x.seconds for x in outcomes) < 15.0  # nobody waited for the timeout


def statistics() -> list[dict[str, float]]:
    module = make(RingDilatedAttentionProduction)
    found = [module.stats()]
    with torch.no_grad():
        on = module(*(mine(x) for x in inputs()[0]))
    assert on.shape == mine(inputs()[1]).shape
    found.append(module.stats())
    on_this_rank(module)
    return [*found, module.stats()]


@pytest.mark.parametrize("P", [1, 2, 4])
def test_statistics_agree_between_the_ends(P: int) -> None:
    by_rank = pool(P).run(statistics)
    names = ["hops", "bytes_sent", "bytes_received", "seconds_waited", "peak_bytes", "retries"]
    for stats in by_rank:
        assert list(stats[0]) == names
        assert set(stats[0].values()) == {0}
    for moment in (1, 2):
        sent, received = (sum(x[moment][key] for x in by_rank) for key in ("bytes_sent", "bytes_received"))
        assert sent == received
        assert (sent > 0) == (P > 1)
    for _, forward, all_three in by_rank:
        assert all_three["hops"] > 2 * forward["hops"] or P == 1  # two forward passes and a backward
        assert (all_three["peak_bytes"] > 0) == (all_three["seconds_waited"] > 0) == (P > 1)
    if P == 2:
        assert by_rank[0][2]["bytes_sent"] == by_rank[1][2]["bytes_received"]


def buffers() -> list[list[int]]:
    """Where the buffers lie after each of three steps."""
    module, places = make(RingDilatedAttentionProduction), []
    for _ in range(3):
        on_this_rank(module)
        waiting = module.ranks.buffers.free.values()
        places.append(sorted(buffer.data_ptr() for some in waiting for buffer in some))
    return places


def test_receive_buffers_are_used_again() -> None:
    for first, second, third in pool(3).run(buffers):
        assert first
        assert first == second == third


def profiled() -> set[str]:
    with torch.profiler.profile() as profile:
        on_this_rank(make(RingDilatedAttentionProduction))
    return {event.name for event in profile.events() if event.name.startswith("dilated_attention::")}


def test_the_profiler_shows_the_steps() -> None:
    for names in pool(3).run(profiled):
        for direction in ("forward", "backward"):
            assert f"dilated_attention::ring {direction} step 1" in names
