"""What can go wrong among ranks ends in an error on every rank that lives: in time, naming who, where and what.

A fault happens on one rank of a real gloo group, before the call, in a hop or in a block's computation. Where messages
stop to come, the others say for whom they waited; where ranks make different calls, all of them say what differs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dilated_attention
from dilated_attention import ContextParallel, DilatedPattern, testing
from dilated_attention.backends import sdpa
from dilated_attention.distributed.group import BEFORE_CLOSING, CommunicationError, GroupTransport
from dilated_attention.distributed.sequence import gather_sequence, sequence_mean
from dilated_attention.pattern import Heads
from dilated_attention.ranks import Outcome, pool
from dilated_attention.ring import run
from dilated_attention.testing import Results

EXCHANGES = ("ring", "allgather", "alltoall")
P, VICTIM = 3, 1
TOKENS = 20  # of each rank
PATTERN = DilatedPattern.longnet([16, 100], [1, 2])  # the second segment lies on all ranks
SHORT, LONG = 1.5, 30.0  # timeouts: of calls that run into it, and of those that must not wait for it
AT_ONCE = 5.0  # seconds, on a busy machine; far less than it takes to wait for the timeout
MARGIN = 2.0
LONG_MESSAGE = 256 << 20  # bytes

STEP = r"hop \d of the (?:forward|backward|gradients') (?:ring|allgather|alltoall)"
AGREEMENT = r"the agreement on (?:the backward of )?dilated_attention"
LATE, CLOSED = "nothing came within {:g} s, it hangs or is far behind", "the connection was closed: that rank died, "
WAITED = re.compile(rf"rank (\d) waited (\d+\.\d) s for rank (\d) in ({STEP}|{AGREEMENT}): (.*)")
FAILED_BEFORE = re.compile(
    r"again in (\d+\.\d+) s: CommunicationError: this process group failed before \((.*)\): make"
)


# --- in the ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """``where``: "the call" or "the backward" (just before it), the beginning of a hop's name, or a block's pass."""

    how: str
    where: str
    seconds: float = 0.0

    def happen(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "exit":
            sys.exit(3)
        elif self.how == "raise":
            raise KeyError("the needle")
        elif self.how == "out of memory":
            raise torch.OutOfMemoryError("the needle")
        else:
            time.sleep(self.seconds)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Hops and blocks are met by replacing what every one of them goes through."""
        post, passes, blocks = GroupTransport.post, {"forward": sdpa.forward, "backward": sdpa.backward}, [0]

        def watched_post(transport: GroupTransport, name: str, *args: Any, **options: Any) -> Any:
            if name.startswith(self.where):
                self.happen()
            return post(transport, name, *args, **options)

        def watched_pass(name: str, *args: Any) -> Any:
            if self.where == f"a block of the {name}":
                blocks[0] += 1
                if blocks[0] == 2:
                    self.happen()
            return passes[name](*args)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(GroupTransport, "post", watched_post))
            for name in passes:
                stack.enter_context(mock.patch.object(sdpa, name, functools.partial(watched_pass, name)))
            yield


NO_FAULT = Fault("none", "nowhere")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def whole(size: int, **options: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The sequence of all ranks, and a gradient for it."""
    sizes = {"samples": 2, "heads": 4, "head_dim": 8, "dtype": torch.float64, **options}
    qkv = testing.make_qkv(sizes.pop("samples"), TOKENS * size, sizes.pop("heads"), sizes.pop("head_dim"), **sizes)
    return qkv, testing.make_qkv(2, TOKENS * size, 4, 8, dtype=torch.float64, seed=1)[0]


def right_call(
    exchange: str, timeout: float = LONG, fault: Fault = NO_FAULT, group: dist.ProcessGroup | None = None
) -> Results:
    """Forward and backward of this rank's shard."""
    group = group or world()
    qkv, dout = whole(group.size())
    shard = slice(group.rank() * TOKENS, (group.rank() + 1) * TOKENS)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if fault.where == "the call":
            fault.happen()
        out = dilated_attention.dilated_attention(
            query, key, value, PATTERN, group=ContextParallel(group, exchange=exchange, timeout=timeout)
        )
        if fault.where == "the backward":
            fault.happen()
        return out

    with fault.armed():
        return testing.run(attention, tuple(x[:, shard] for x in qkv), dout[:, shard])


def call_with(fault: Fault, exchange: str, timeout: float, again: bool = True) -> Results:
    """The right call, but for a fault on one rank. A note on the error tells what the next call over the group does."""
    fault = fault if dist.get_rank() == VICTIM else NO_FAULT
    try:
        return right_call(exchange, timeout, fault)
    except Exception as error:
        if again:
            began = time.monotonic()
            try:
                right_call(exchange, timeout)
            except Exception as second:
                seconds = time.monotonic() - began
                error.add_note(f"again in {seconds:.2f} s: {type(second).__name__}: {second}")
        raise


# --- in the test ------------------------------------------------------------------------------------------------


@functools.cache
def expected(size: int) -> Results:
    qkv, dout = whole(size)
    return testing.oracle(qkv, PATTERN, dout)


def assert_right(results: list[Results]) -> None:
    wanted = expected(len(results))
    testing.assert_exact(testing.joined(results), Results(wanted.out, None, wanted.dq, wanted.dk, wanted.dv))


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def outcomes_of(
    function: Callable[..., Any], *args: Any, lost: int | None = None, size: int = P, patience: float = 20.0
) -> list[Outcome]:
    """``function`` on all ranks of a pool. ``lost``: the exit code of the victim; no process may then be left."""
    ranks = pool(size)
    assert_right(ranks.run(right_call, "ring"))  # the ranks are awake, and the last test left them in order
    outcomes: list[Outcome] = ranks.run(function, *args, check=False, timeout=patience)
    codes = [process.exitcode for process in ranks._processes]
    assert -signal.SIGABRT not in [*codes, *(x.exitcode for x in outcomes)]
    assert ranks.broken == (lost is not None), outcomes
    if lost is not None:
        assert outcomes[VICTIM].exitcode == lost
        assert all(x.exitcode is None for x in outcomes if x.rank != VICTIM)
        assert not any(map(alive, ranks.pids))
    return outcomes


def assert_waited(
    outcomes: list[Outcome], where: str, *, seconds: float = 0.0, within: float = AT_ONCE, again: bool = True
) -> None:
    """All but the victim tell whom they waited for, where, and for how long: some of them for the victim."""
    awaited = []
    for rank, x in enumerate(outcomes):
        if rank == VICTIM:
            continue
        assert x.error_type == "CommunicationError", x
        found = WAITED.fullmatch(x.error or "")
        assert found is not None, x.error
        me, waited, whom, step, why = found.groups()
        assert int(me) == rank
        assert int(whom) in {*range(len(outcomes))} - {rank}
        assert re.search(where, step), (where, step)
        assert why == LATE.format(seconds) if float(waited) >= seconds > 0 else why.startswith(CLOSED), x.error
        assert x.seconds < seconds + within, x
        awaited.append(int(whom))
        if again:
            before = FAILED_BEFORE.search(x.traceback)
            assert before is not None, x.traceback
            assert float(before[1]) < AT_ONCE
            assert before[2].startswith(f"rank {rank} waited {waited} s for rank {whom} in {step}")
    assert VICTIM in awaited


# --- a rank that dies or leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "where", "size"),
    [
        ("ring", "the call", P),
        ("ring", "hop 2 of the forward", 4),
        ("allgather", "hop 1 of the gradients'", P),
        ("alltoall", "hop 1 of the backward", P),
    ],
)
def test_peers_of_a_killed_rank_raise_at_once(exchange: str, where: str, size: int) -> None:
    lost = -signal.SIGKILL
    outcomes = outcomes_of(call_with, Fault("kill", where), exchange, LONG, lost=lost, size=size)
    assert_waited(outcomes, step_of(where))


def cut_off(victim_sends: bool) -> None:
    """Rank 1 dies while a long message is between it and rank 0."""
    transport = GroupTransport(world(), torch.device("cpu"), SHORT)
    message, other = torch.empty(LONG_MESSAGE, dtype=torch.uint8), 1 - transport.rank
    dist.barrier()
    if (transport.rank == VICTIM) == victim_sends:
        pending = transport.post("hop 1 of the forward ring", {other: message}, {})
    else:
        pending = transport.post("hop 1 of the forward ring", {}, {other: LONG_MESSAGE})
    if transport.rank == VICTIM:
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    pending.wait()


@pytest.mark.parametrize("victim_sends", [True, False])
def test_the_peer_of_a_rank_killed_in_a_long_message_raises_in_time(victim_sends: bool) -> None:
    """Not at once: gloo forgets a message under way when its connection closes."""
    outcomes = outcomes_of(cut_off, victim_sends, lost=-signal.SIGKILL, size=2)
    found = WAITED.fullmatch(outcomes[0].error or "")
    assert found is not None, outcomes[0]
    assert found.group(1, 3) == ("0", "1")
    assert outcomes[0].seconds < SHORT + MARGIN


@pytest.mark.parametrize(("exchange", "where"), [("ring", "the call"), ("alltoall", "hop 2 of the forward")])
def test_peers_of_a_rank_that_exits_raise_at_once(exchange: str, where: str) -> None:
    outcomes = outcomes_of(call_with, Fault("exit", where), exchange, LONG, lost=3)
    assert_waited(outcomes, step_of(where))


def step_of(where: str) -> str:
    """What the others are in: neighbours of a rank that is gone may be a step ahead or behind."""
    if where in ("the call", "the backward"):
        return "^the agreement on dil" if where == "the call" else "^the agreement on the backward"
    return "of the forward" if "forward" in where else "of the (backward|gradients')"


# --- a rank that hangs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "where"),
    [
        ("ring", "hop 1 of the gradients'"),
        ("allgather", "hop 1 of the forward"),
        ("alltoall", "the backward"),
        ("alltoall", "hop 2 of the forward"),
    ],
)
def test_peers_of_a_rank_that_hangs_raise_in_time(exchange: str, where: str) -> None:
    """It wakes up again, and learns that the others have gone."""
    outcomes = outcomes_of(call_with, Fault("hang", where, SHORT + 0.5), exchange, SHORT)
    assert_waited(outcomes, step_of(where), seconds=SHORT, within=MARGIN)
    woken = outcomes[VICTIM]
    found = WAITED.fullmatch(woken.error or "")
    assert woken.error_type == "CommunicationError"
    assert found is not None, woken.error
    assert found[5].startswith(CLOSED)
    assert woken.seconds < SHORT + 0.5 + MARGIN


def test_peers_of_a_frozen_rank_raise_in_time() -> None:
    """By a signal, with its connections open."""
    where, patience = "hop 1 of the backward", SHORT + MARGIN + 1.0
    outcomes = outcomes_of(call_with, Fault("freeze", where), "ring", SHORT, lost=-signal.SIGKILL, patience=patience)
    assert outcomes[VICTIM].error_type == "hung"
    assert_waited(outcomes, step_of(where), seconds=SHORT, within=MARGIN)


@pytest.mark.parametrize(
    ("exchange", "where"),
    list(zip(EXCHANGES, ("the call", "hop 1 of the forward", "a block of the backward"), strict=True)),
)
def test_a_slow_rank_is_waited_for(exchange: str, where: str) -> None:
    outcomes = outcomes_of(call_with, Fault("slow", where, 0.3), exchange, LONG)
    assert max(x.seconds for x in outcomes) >= 0.3
    assert_right([x.value for x in outcomes])


# --- an exception on one rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "where"),
    [
        *((exchange, f"hop 1 of the {name}") for exchange in EXCHANGES for name in ("forward", "backward")),
        *zip(EXCHANGES, ("a block of the forward", "a block of the backward", "a block of the forward"), strict=True),
        *((exchange, f"hop 2 of the {name}") for exchange in ("ring", "alltoall") for name in ("forward", "backward")),
        ("allgather", "hop 1 of the gradients'"),
        ("ring", "hop 2 of the gradients'"),
    ],
)
def test_peers_of_a_rank_that_raises_in_the_middle_raise_at_once(exchange: str, where: str) -> None:
    outcomes = outcomes_of(call_with, Fault("raise", where), exchange, LONG)
    # those who had all messages of the forward pass notice in the backward pass
    assert_waited(outcomes, f"{step_of(where)}|^the agreement on the backward")
    victim = outcomes[VICTIM]
    assert (victim.error_type, victim.error) == ("KeyError", "'the needle'")
    again = FAILED_BEFORE.search(victim.traceback)
    assert again is not None, victim.traceback
    assert again[2] == f"rank {VICTIM} raised an error while others waited for its messages"


@pytest.mark.parametrize(("exchange", "where"), list(zip(EXCHANGES, ("backward", "forward", "backward"), strict=True)))
def test_peers_of_a_rank_without_memory_raise_at_once(exchange: str, where: str) -> None:
    outcomes = outcomes_of(call_with, Fault("out of memory", f"a block of the {where}"), exchange, LONG)
    assert_waited(outcomes, f"of the {where}|of the gradients'|^the agreement on the backward")
    assert outcomes[VICTIM].error_type == "OutOfMemoryError"


@pytest.mark.parametrize("where", ["the call", "the backward"])
def test_peers_of_a_rank_that_raises_elsewhere_raise_in_time(where: str) -> None:
    """Its error is the caller's own, of which the others cannot know."""
    outcomes = outcomes_of(call_with, Fault("raise", where), "ring", SHORT, False)
    assert_waited(outcomes, step_of(where), seconds=SHORT, within=MARGIN, again=False)
    assert outcomes[VICTIM].error_type == "KeyError"


# --- calls that differ ------------------------------------------------------------------------------------------

MANY_BRANCHES = [DilatedPattern.longnet([2**40] * 63 + [last], [2**20] * 64) for last in (2**41, 2**42)]


@dataclass(frozen=True)
class Argument:
    """What the ranks are told to differ in, and the options of `odd_call` that make them so."""

    field: str
    values: tuple[str, str]
    usual: dict[str, Any]
    odd: dict[str, Any]


def differing(name: str, usual: Any, odd: Any) -> Argument:
    return Argument(name, (str(usual), str(odd)), {name: usual}, {name: odd})


def shape(samples: int = 2, heads: int = 4, head_dim: int = 8) -> str:
    return f"(batch {samples}, tokens, heads {heads}, head_dim {head_dim})"


DIFFERENT = {
    "batch": Argument("shape", (shape(), shape(samples=3)), {}, {"samples": 3}),
    "heads": Argument("shape", (shape(), shape(heads=6)), {}, {"heads": 6}),
    "head_dim": Argument("shape", (shape(), shape(head_dim=4)), {}, {"head_dim": 4}),
    "key heads": Argument("key heads", ("4", "2"), {}, {"kv_heads": 2}),
    "dtype": differing("dtype", torch.float64, torch.float32),
    "pattern": differing("pattern", PATTERN, DilatedPattern.longnet([16, 100], [1, 4])),
    "rule": differing("pattern", PATTERN, DilatedPattern.of("torchscale", [16, 100], [1, 2])),
    "long pattern": differing("pattern", *MANY_BRANCHES),
    "behind a long pattern": Argument(
        "scale", ("0.5", "0.25"), {"pattern": MANY_BRANCHES[0], "scale": 0.5}, {"scale": 0.25}
    ),
    "is_causal": differing("is_causal", False, True),
    "scale": differing("scale", 0.5, 0.25),
    "dropout_p": differing("dropout_p", 0.1, 0.2),
    "no dropout": differing("dropout_p", 0.1, 0.0),
    "mask": Argument("key_padding_mask", ("not given", "given"), {}, {"mask": True}),
    "no mask": Argument("key_padding_mask", ("given", "not given"), {"mask": True}, {"mask": False}),
    "exchange": differing("exchange", "ring", "alltoall"),
    "use_checkpointing": differing("use_checkpointing", True, False),
    "gradients": Argument("gradients", ("wanted", "not wanted"), {}, {"requires_grad": False}),
    "no_grad": Argument("gradients", ("wanted", "not wanted"), {}, {"no_grad": True}),
    "tensor parallelism": Argument("heads", (str(Heads(0, 4, 4)), str(Heads(4, 4, 8))), {}, {"part": (4, 8)}),
}


def odd_call(
    samples: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    pattern: DilatedPattern = PATTERN,
    mask: bool = False,
    requires_grad: bool = True,
    no_grad: bool = False,
    part: tuple[int, int] | None = None,
    lengths: tuple[int, int] = (TOKENS, TOKENS),
    **options: Any,
) -> Tensor:
    """A call of this rank with arguments of its own; ``lengths`` of query and key."""
    qkv = testing.make_qkv(samples, TOKENS + 5, heads, head_dim, kv_heads=kv_heads, dtype=dtype)
    query, key, value = (
        x[:, :length].detach().requires_grad_(requires_grad)
        for x, length in zip(qkv, (lengths[0], lengths[1], lengths[1]), strict=True)
    )
    padding = torch.zeros(samples, lengths[0], dtype=torch.bool) if mask else None
    of_group = {name: options.pop(name) for name in ("exchange", "use_checkpointing", "timeout") if name in options}
    with torch.no_grad() if no_grad else contextlib.nullcontext():
        return dilated_attention.dilated_attention(
            query, key, value, pattern, key_padding_mask=padding, enable_gqa=True, heads=part,
            group=ContextParallel(world(), **{"timeout": LONG, **of_group}), **options,
        )  # fmt: skip


def error_then_right_call(function: Callable[[], Any], exchange: str) -> tuple[str, float, Results]:
    """The error of the function and after how long; the right call over the same group, at once."""
    began = time.monotonic()
    try:
        function()
    except (TypeError, ValueError) as error:
        seconds = time.monotonic() - began
        return f"{type(error).__name__}: {error}", seconds, right_call(exchange)
    raise AssertionError("no error")


def call_differently(argument: Argument, exchange: str) -> tuple[str, float, Results]:
    odd = argument.odd if dist.get_rank() == VICTIM else {}
    options = {"exchange": exchange, **argument.usual, **odd}
    return error_then_right_call(functools.partial(odd_call, **options), exchange)


@pytest.mark.parametrize(("name", "exchange"), list(zip(DIFFERENT, itertools.cycle(EXCHANGES))))
def test_every_rank_names_what_differs_and_the_group_goes_on(name: str, exchange: str) -> None:
    ranks, argument = pool(P), DIFFERENT[name]
    usual, odd = argument.values
    ranks.run(right_call, exchange)
    told = ranks.run(call_differently, argument, exchange)
    for rank, (error, seconds, _) in enumerate(told):
        assert error.startswith("ValueError: the ranks do not make the same call to dilated_attention"), error
        assert f"(this is rank {rank}): " in error
        assert f"{argument.field} is {usual} on ranks 0, 2 and {odd} on rank {VICTIM}" in error
        assert seconds < AT_ONCE
    assert_right([result for _, _, result in told])


def fastest_error(argument: Argument, exchange: str) -> float:
    return min(call_differently(argument, exchange)[1] for _ in range(5))


def test_every_rank_names_what_differs_within_a_second() -> None:
    assert max(pool(P).run(fastest_error, DIFFERENT["scale"], "ring")) < 1.0


def call_wrongly(options: dict[int, dict[str, Any]], exchange: str) -> tuple[str, float, Results]:
    return error_then_right_call(
        functools.partial(odd_call, exchange=exchange, **options.get(dist.get_rank(), {})), exchange
    )


@pytest.mark.parametrize(
    ("exchange", "options", "text"),
    [
        ("ring", {"lengths": (TOKENS, TOKENS - 1)}, "ValueError: query has 20 tokens and key 19: .*"),
        ("allgather", {"lengths": (TOKENS, TOKENS + 1)}, "ValueError: query has 20 tokens and key 21: .*"),
        ("alltoall", {"dtype": torch.complex64}, "TypeError: query must be float64, .* got torch.complex64"),
        ("ring", {"dropout_p": 2.0}, r"ValueError: dropout_p must be .* got 2\.0"),
        ("allgather", {"backend": "none"}, "ValueError: unknown backend 'none'.*"),
        ("alltoall", {"scale": "x" * 9000}, r"ValueError: scale must be .* got 'x*(\.\.\. \(\w+\))?'?"),
    ],
)
def test_every_rank_names_the_one_whose_arguments_are_wrong(options: dict[str, Any], text: str, exchange: str) -> None:
    ranks = pool(P)
    ranks.run(right_call, exchange)
    told = ranks.run(call_wrongly, {VICTIM: options}, exchange)
    for rank, (error, seconds, _) in enumerate(told):
        called_off = rf"ValueError: dilated_attention was called off on all ranks \(this is rank {rank}\): "
        wanted = text if rank == VICTIM else f"{called_off}rank {VICTIM} cannot run it: {text}"
        assert re.fullmatch(wanted, error), error
        assert seconds < AT_ONCE
    assert_right([result for _, _, result in told])


@pytest.mark.parametrize("wrong", [(0, 2), (0, 1, 2)])
def test_all_ranks_whose_arguments_are_wrong_are_named(wrong: tuple[int, ...]) -> None:
    options = {rank: {"lengths": (TOKENS, TOKENS - rank - 1)} for rank in wrong}
    told = pool(P).run(call_wrongly, options, "ring")
    for rank, (error, seconds, _) in enumerate(told):
        if rank in wrong:
            assert error.startswith(f"ValueError: query has 20 tokens and key {TOKENS - rank - 1}"), error
        else:
            for other in wrong:
                text = f"rank {other} cannot run it: ValueError: query has 20 tokens and key {TOKENS - other - 1}"
                assert text in error
        assert seconds < AT_ONCE
    assert_right([result for _, _, result in told])


# --- ranks that do different things -----------------------------------------------------------------------------


def backward_or(other: str, exchange: str, timeout: float) -> Any:
    """Forward on all ranks, and then on one of them something else than the backward."""
    query = testing.make_qkv(2, TOKENS, 4, 8, dtype=torch.float64)[0].requires_grad_()
    out = dilated_attention.dilated_attention(
        query, query, query, PATTERN, group=ContextParallel(world(), exchange=exchange, timeout=timeout)
    )
    if dist.get_rank() != VICTIM:
        return out.sum().backward()
    if other == "the next call":
        return right_call(exchange, timeout)
    if other == "a gather":
        return gather_sequence(out.detach(), world())
    if other == "a mean":
        return sequence_mean(out.detach(), world())
    return None


def test_a_backward_that_one_rank_does_not_run_ends_in_time() -> None:
    outcomes = outcomes_of(backward_or, "nothing", "ring", SHORT)
    assert_waited(outcomes, "^the agreement on the backward", seconds=SHORT, within=MARGIN, again=False)
    assert outcomes[VICTIM].error is None


@pytest.mark.parametrize("other", ["the next call", "a gather"])
def test_a_backward_met_by_another_call_is_named_at_once(other: str) -> None:
    outcomes = outcomes_of(backward_or, other, "ring", LONG)
    for x in outcomes:
        assert x.error_type == "ValueError"
        assert "the backward of is " in (x.error or "")
        assert re.search(r"the backward of is .* on ranks 0, 2 and absent on rank 1", x.error or ""), x.error
        assert x.seconds < AT_ONCE


def test_a_backward_met_by_another_collective_ends_in_time() -> None:
    """The collective of the other rank ends too, as its peers have gone."""
    outcomes = outcomes_of(backward_or, "a mean", "ring", SHORT)
    assert_waited(outcomes, "^the agreement on the backward", seconds=SHORT, within=MARGIN, again=False)
    assert outcomes[VICTIM].error_type == "RuntimeError"
    assert outcomes[VICTIM].seconds < SHORT + MARGIN


def check_differently(exchange: str, timeout: float) -> None:
    """One rank stops to check its calls after the first few, which the others do not."""
    query = testing.make_qkv(2, TOKENS, 4, 8, dtype=torch.float64)[0]
    verify = "first" if dist.get_rank() == VICTIM else "always"
    group = ContextParallel(world(), exchange=exchange, timeout=timeout, verify=verify)
    for _ in range(12):
        dilated_attention.dilated_attention(query, query, query, PATTERN, group=group)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_message_is_taken_for_another(exchange: str) -> None:
    """Gloo aborts the process when a message is longer than expected."""
    outcomes = outcomes_of(check_differently, exchange, SHORT)
    assert [x.error_type in ("ValueError", "CommunicationError") for x in outcomes] == [True] * P, outcomes
    assert all(x.seconds < SHORT + MARGIN for x in outcomes)


def change_length(exchange: str, timeout: float, changes: tuple[int, ...]) -> None:
    """One rank's shard becomes longer in some calls, which the others do not know where calls are not checked."""
    query = testing.make_qkv(2, TOKENS + 4, 4, 8, dtype=torch.float64)[0]
    group = ContextParallel(world(), exchange=exchange, timeout=timeout, verify="first")
    with mock.patch.object(run, "FIRST_CALLS", 8):
        for count in range(12):
            longer = dist.get_rank() == VICTIM and count in changes
            shard = query[:, : TOKENS + 4 if longer else TOKENS]
            dilated_attention.dilated_attention(*[shard] * 3, PATTERN, group=group)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_message_of_another_length_is_taken(exchange: str) -> None:
    outcomes = outcomes_of(change_length, exchange, SHORT, (11,))
    assert outcomes[VICTIM].error_type == "ValueError"
    assert "verify='always'" in str(outcomes[VICTIM].error)
    assert [x.error_type for x in outcomes if x.rank != VICTIM] == ["CommunicationError"] * (P - 1)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_lengths_that_vary_keep_being_checked(exchange: str) -> None:
    pool(P).run(change_length, exchange, LONG, (1, 5, 11))


# --- other groups -----------------------------------------------------------------------------------------------


def in_two_groups(fault: Fault, exchange: str, timeout: float) -> list[Results]:
    """The victim and rank 3 are one group, ranks 0 and 2 another one, which goes on after the fault."""
    groups = [dist.new_group(ranks) for ranks in ([VICTIM, 3], [0, 2])]
    mine = groups[dist.get_rank() % 2 == 0]
    assert isinstance(mine, dist.ProcessGroup)
    results = [right_call(exchange, timeout, group=mine)]
    if dist.get_rank() % 2 == 0:
        time.sleep(0.2)
        return [*results, *(right_call(exchange, timeout, group=mine) for _ in range(3))]
    return [right_call(exchange, timeout, fault if dist.get_rank() == VICTIM else NO_FAULT, mine)]


@pytest.mark.parametrize(("how", "exchange"), [("raise", "allgather"), ("raise", "alltoall"), ("kill", "ring")])
def test_another_group_goes_on(how: str, exchange: str) -> None:
    lost = -signal.SIGKILL if how == "kill" else None
    outcomes = outcomes_of(in_two_groups, Fault(how, "hop 1 of the backward"), exchange, LONG, lost=lost, size=4)
    found = WAITED.fullmatch(outcomes[3].error or "")
    assert found is not None, outcomes[3]
    assert found.group(1, 3, 4) == ("1", "0", f"hop 1 of the backward {exchange}")
    assert float(found[2]) <= BEFORE_CLOSING + 0.1  # it waits no longer than the victim does before it closes
    for first, second in zip(outcomes[0].value, outcomes[2].value, strict=True):
        assert_right([first, second])
    assert len(outcomes[0].value) == 4


def survive() -> list[Results]:
    """Those who are left make a group of their own and go on."""
    try:
        right_call("ring", LONG, Fault("kill", "hop 1 of the backward") if dist.get_rank() == VICTIM else NO_FAULT)
    except CommunicationError:
        group = dist.new_group([0, 2], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return [right_call(exchange, LONG, group=group) for exchange in EXCHANGES]
    raise AssertionError("no error")


def test_survivors_go_on_in_a_new_group() -> None:
    outcomes = outcomes_of(survive, lost=-signal.SIGKILL)
    for results in zip(outcomes[0].value, outcomes[2].value, strict=True):
        assert_right(list(results))


# --- programs ---------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from dilated_attention import ContextParallel, DilatedPattern, dilated_attention

rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=3)
x = torch.ones(1, 16, 2, 4, requires_grad=True)
out = dilated_attention(x, x, x, DilatedPattern.longnet([64], [1]), group=ContextParallel(exchange="ring"))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
out.sum().backward()
"""


def test_programs_end_with_the_error(tmp_path: Path) -> None:
    """Nothing aborts when the interpreter of a rank ends with messages under way."""
    source = Path(dilated_attention.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meeting")],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    texts = [program.communicate(timeout=120)[1] for program in programs]
    assert [program.returncode for program in programs] == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert re.search(rf"CommunicationError: rank {rank} waited \d+\.\d s for rank \d in the agreement", texts[rank])
