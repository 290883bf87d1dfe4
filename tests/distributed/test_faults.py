"""What can go wrong among ranks ends in an error on every rank that lives: in time, naming who, where and what.

A fault happens on one rank of a real gloo group, before the call, in a hop or in a block's computation. Where messages
stop to come, the others say for whom they waited; where ranks make different calls, or one cannot make its call, all of
them say so, and the group goes on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dilated_attention
from dilated_attention import ContextParallel, DilatedPattern, RingMultiheadDilatedAttention, testing
from dilated_attention.backends import sdpa
from dilated_attention.compat import RingAdvancedDistributedDilatedAttention
from dilated_attention.distributed.group import CommunicationError, GroupTransport
from dilated_attention.distributed.sequence import gather_sequence
from dilated_attention.ranks import Outcome, pool
from dilated_attention.ring import run
from dilated_attention.testing import Results
from tests.cases import EXCHANGES, Case
from tests.over_ranks import alive, raised, world
from tests.threads import joined

P, VICTIM = 3, 1
TOKENS = 20  # of each rank
PATTERN = DilatedPattern.longnet([16, 100], [1, 2])  # the second segment lies on all ranks
SHORT, LONG = 2.5, 60.0  # timeouts: of calls that run into it, and of those that must not wait for it
AT_ONCE = 15.0  # seconds, on a very busy machine; far less than it takes to wait for the long timeout
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
        if self.how in ("kill", "freeze"):
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        if self.how == "exit":
            sys.exit(3)
        if self.how in ("raise", "out of memory"):
            raise (KeyError if self.how == "raise" else torch.OutOfMemoryError)("the needle")
        time.sleep(self.seconds)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """What every backward, hop and block goes through is replaced."""
        blocks = itertools.count(1)

        def watched(target: Any, name: str, here: Callable[..., bool]) -> Any:
            function = getattr(target, name)

            def call(*args: Any, **options: Any) -> Any:
                if here(*args):
                    self.happen()
                return function(*args, **options)

            return mock.patch.object(target, name, call)

        def second(name: str) -> Callable[..., bool]:
            return lambda *_: self.where == f"a block of the {name}" and next(blocks) == 2

        if self.where == "the call":
            self.happen()
        with (
            watched(torch.autograd, "grad", lambda *_: self.where == "the backward"),
            watched(GroupTransport, "post", lambda _, hop, *__: hop.startswith(self.where)),
            watched(sdpa, "forward", second("forward")),
            watched(sdpa, "backward", second("backward")),
        ):
            yield


NO_FAULT = Fault("none", "nowhere")
OF_THE_GROUP = ("group", "exchange", "use_checkpointing", "timeout", "verify")


def attend(query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern = PATTERN, **options: Any) -> Tensor:
    """Options are those of the function and those of ContextParallel."""
    over = {name: options.pop(name) for name in OF_THE_GROUP if name in options}
    group = ContextParallel(**{"timeout": LONG, **over})
    return dilated_attention.dilated_attention(query, key, value, pattern, group=group, **options)


def right_case(size: int, exchange: str = "ring", number: int = 0) -> Case:
    return Case(
        "faults", number, "longnet", False, "own", TOKENS * size, own_pattern=PATTERN, own_heads=(4, 4), head_dim=8,
        dlse=False, ranks=size, own_lengths=(TOKENS,) * size, exchange=exchange,
    )  # fmt: skip


def right_call(exchange: str, timeout: float = LONG, fault: Fault = NO_FAULT, group: Any = None) -> Results:
    """Forward and backward of this rank's shard."""
    group = group or world()
    with fault.armed():
        return right_case(group.size(), exchange).on_this_rank(group, timeout=timeout)


def call_with(fault: Fault, exchange: str, timeout: float, again: bool = True) -> Results:
    """The right call, but for a fault on one rank. A note on the error tells what the next call over the group does."""
    fault = fault if dist.get_rank() == VICTIM else NO_FAULT
    try:
        return right_call(exchange, timeout, fault)
    except Exception as error:
        if again:
            began, said = time.monotonic(), raised(right_call, exchange, timeout)
            error.add_note(f"again in {time.monotonic() - began:.2f} s: {said}")
        raise


# --- in the test ------------------------------------------------------------------------------------------------


def assert_right(results: list[Results], number: int = 0) -> None:
    right_case(len(results), number=number).check(joined(results))


def outcomes_of(
    function: Callable[..., Any], *args: Any, lost: int | None = None, size: int = P, patience: float = 40.0
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


def assert_waited(outcomes: list[Outcome], where: str, *, seconds: float = 0.0, again: bool = True) -> None:
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
        assert x.seconds < seconds + AT_ONCE, x
        awaited.append(int(whom))
        if again:
            before = FAILED_BEFORE.search(x.traceback)
            assert before is not None, x.traceback
            assert float(before[1]) < AT_ONCE
            assert before[2].startswith(f"rank {rank} waited {waited} s for rank {whom} in {step}")
    assert VICTIM in awaited


def named(error: str) -> set[int]:
    """The ranks that somebody waited for, or has no connection to."""
    lists = re.findall(r"(?:for|connection to) ranks? (\d(?:, \d)*)", error)
    return {int(rank) for one in lists for rank in one.split(", ")}


def step_of(where: str) -> str:
    """What the others are in: neighbours of a rank that is gone may be a step ahead or behind."""
    steps = {"the call": "^the agreement on dil", "the backward": "^the agreement on the backward"}
    return steps.get(where, "of the forward" if "forward" in where else "of the (backward|gradients')")


# --- a fault on one rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "exchange", "where", "timeout"),
    [
        ("exit", "ring", "the call", LONG),
        ("kill", "ring", "hop 2 of the forward", LONG),
        ("kill", "allgather", "hop 1 of the gradients'", LONG),
        ("kill", "alltoall", "hop 1 of the backward", LONG),
        ("hang", "ring", "hop 1 of the gradients'", SHORT),
        ("hang", "alltoall", "the backward", SHORT),
        ("freeze", "allgather", "hop 1 of the forward", SHORT),  # by a signal, with its connections open
        ("raise", "ring", "the call", SHORT),  # the caller's own error, of which the others cannot know
        ("raise", "ring", "the backward", SHORT),
        ("raise", "ring", "hop 1 of the forward", LONG),
        ("raise", "ring", "hop 2 of the gradients'", LONG),
        ("raise", "allgather", "hop 1 of the gradients'", LONG),
        ("raise", "alltoall", "hop 2 of the forward", LONG),
        ("raise", "alltoall", "a block of the forward", LONG),
        ("out of memory", "ring", "a block of the backward", LONG),
        ("out of memory", "allgather", "a block of the forward", LONG),
    ],
)
def test_peers_of_a_faulty_rank_raise_in_time(how: str, exchange: str, where: str, timeout: float) -> None:
    """At once where the rank is gone or has raised an error of ours; else when their timeout is over."""
    lost = {"exit": 3, "kill": -signal.SIGKILL, "freeze": -signal.SIGKILL}.get(how)
    raises, again = how in ("raise", "out of memory"), how != "raise" or timeout == LONG
    outcomes = outcomes_of(
        call_with, Fault(how, where, SHORT + 0.5), exchange, timeout, again,
        lost=lost, size=4 if (how, exchange) == ("kill", "ring") else P, patience=6.5 if how == "freeze" else 40.0,
    )  # fmt: skip
    # those who had all messages of the forward pass notice in the backward pass
    steps = step_of(where) + ("|^the agreement on the backward" if raises and again else "")
    assert_waited(outcomes, steps, seconds=timeout if timeout == SHORT else 0.0, again=again)
    if how in ("exit", "kill"):
        assert all(VICTIM in named(x.error or "") for x in outcomes if x.rank != VICTIM), outcomes
    victim = outcomes[VICTIM]
    if how == "hang":  # it wakes up again, and learns that the others have gone
        found = WAITED.fullmatch(victim.error or "")
        assert found is not None, victim.error
        assert found[5].startswith(CLOSED)
        assert victim.seconds < SHORT + 0.5 + AT_ONCE
    elif raises:
        assert victim.error_type == ("KeyError" if how == "raise" else "OutOfMemoryError")
        assert "the needle" in (victim.error or "")
        before = FAILED_BEFORE.search(victim.traceback) if again else None
        assert not again or before is not None, victim.traceback
        assert before is None or before[2] == f"rank {VICTIM} raised an error while others waited for its messages"
    else:
        assert victim.error_type == ("hung" if how == "freeze" else "died")


def cut_off() -> None:
    """Rank 1 dies while a long message is on its way to it."""
    transport = GroupTransport(world(), torch.device("cpu"), SHORT)
    dist.barrier()
    sends, receives = {VICTIM: torch.empty(LONG_MESSAGE, dtype=torch.uint8)}, {0: LONG_MESSAGE}
    is_victim = transport.rank == VICTIM
    wait = transport.post("hop 1 of the forward ring", {} if is_victim else sends, receives if is_victim else {})
    if is_victim:
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    wait()


def test_the_peer_of_a_rank_killed_in_a_long_message_raises_in_time() -> None:
    """Not at once: gloo forgets a message under way when its connection closes."""
    outcomes = outcomes_of(cut_off, lost=-signal.SIGKILL, size=2)
    found = WAITED.fullmatch(outcomes[0].error or "")
    assert found is not None, outcomes[0]
    assert found.group(1, 3) == ("0", "1")
    assert outcomes[0].seconds < SHORT + AT_ONCE


# --- calls that differ ------------------------------------------------------------------------------------------

MANY_BRANCHES = [DilatedPattern.longnet([2**40] * 63 + [last], [2**20] * 64) for last in (2**41, 2**42)]
SHAPE = "(batch 2, tokens, heads {}, head_dim 8)"

# The field; options of most ranks, and of the odd one; how their values are told.
DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any], Any, Any]] = [
    ("shape", {}, {"heads": 6}, SHAPE.format(4), SHAPE.format(6)),
    ("key heads", {}, {"kv_heads": 2}, 4, 2),
    ("key_padding_mask", {}, {"mask": True}, "not given", "given"),
    ("gradients", {}, {"requires_grad": False}, "wanted", "not wanted"),
    ("heads", {}, {"part": (4, 8)}, "4 from 0 on, of 4", "4 from 4 on, of 8"),
    ("backend", {}, {"backend": "eager"}, "sdpa", "eager"),
    *(
        (name, {name: usual}, {name: odd}, usual, odd)
        for name, usual, odd in (
            ("dtype", torch.float64, torch.float32), ("pattern", *MANY_BRANCHES), ("is_causal", False, True),
            ("scale", 0.5, 0.25), ("dropout_p", 0.1, 0.0), ("exchange", "ring", "alltoall"),
            ("use_checkpointing", True, False), ("verify", "always", "first"),
        )
    ),
    ("sinks", {}, {"sinks": torch.zeros(4)}, "not given", "given"),
]  # fmt: skip


def odd_call(
    heads: int = 4, kv_heads: int | None = None, dtype: torch.dtype = torch.float64, mask: bool = False,
    requires_grad: bool = True, part: Any = None, longer_keys: int = 0, **options: Any,
) -> Tensor:  # fmt: skip
    """A call of this rank with arguments of its own."""
    qkv = testing.make_qkv(2, TOKENS + 5, heads, 8, kv_heads=kv_heads, dtype=dtype)
    lengths = (TOKENS, TOKENS + longer_keys, TOKENS + longer_keys)
    given = [x[:, :length].detach().requires_grad_(requires_grad) for x, length in zip(qkv, lengths, strict=True)]
    tensors = dict(zip(("query", "key", "value"), given, strict=True))
    padding = torch.zeros(2, TOKENS, dtype=torch.bool) if mask else None
    return attend(**{**tensors, "key_padding_mask": padding, "enable_gqa": True, "heads": part, **options})


def error_then(function: Callable[[], Any], right: Callable[[], Any]) -> tuple[str, float, Any]:
    """The error of the function and after how long; the right call over the same group, at once."""
    began, said = time.monotonic(), raised(function)
    assert said != "nothing raised"
    return said, time.monotonic() - began, right()


def call_differently(usual: dict[str, Any], odd: dict[str, Any], exchange: str) -> tuple[str, float, Results]:
    options = {"exchange": exchange, **usual, **(odd if dist.get_rank() == VICTIM else {})}
    return error_then(functools.partial(odd_call, **options), functools.partial(right_call, exchange))


@pytest.mark.parametrize(
    ("different", "exchange"),
    list(zip(DIFFERENT, itertools.cycle(EXCHANGES))),
    ids=lambda x: x if x in EXCHANGES else x[0],
)
def test_every_rank_names_what_differs_and_the_group_goes_on(different: tuple[Any, ...], exchange: str) -> None:
    field, usual, odd, *values = different
    told = pool(P).run(call_differently, usual, odd, exchange)
    for rank, (error, seconds, _) in enumerate(told):
        assert error.startswith("ValueError: the ranks do not make the same call to dilated_attention"), error
        assert f"(this is rank {rank}): " in error
        assert f"{field} is {values[0]} on ranks 0, 2 and {values[1]} on rank {VICTIM}" in error
        assert seconds < AT_ONCE
    assert_right([result for _, _, result in told])


# --- calls that one rank cannot make ----------------------------------------------------------------------------


class Needle(float):
    """A number that cannot be read."""

    def __float__(self) -> float:
        raise KeyError("the needle")


def in_a_module(**given: Any) -> None:
    module = RingMultiheadDilatedAttention(
        16, 4, [4, 64], [1, 2], rule="longnet", dtype=torch.float64, group=ContextParallel(timeout=LONG)
    )
    module(**{"query": torch.ones(2, 8, 16, dtype=torch.float64), **given})


def on_a_mesh(**given: Any) -> None:
    """The projections of this module are split over the heads axis, so that ranks meet along two axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    module = RingAdvancedDistributedDilatedAttention(
        16, 4, [4, 64], [1, 2], mesh, rule="longnet", dtype=torch.float64, parallel=ContextParallel(timeout=LONG)
    )
    module(**{"query": torch.ones(2, 8, 16, dtype=torch.float64), **given})


def wrong_then_right(function: Callable[..., Any], wrong: dict[int, dict[str, Any]]) -> tuple[str, float, None]:
    return error_then(functools.partial(function, **wrong.get(dist.get_rank(), {})), function)


SPARSE = torch.ones(2, 8, dtype=torch.bool).to_sparse()
NO_TENSOR = "TypeError: query must be a tensor, got NoneType"
WRONG_WIDTH = ({"query": torch.ones(2, 8, 15)}, r"ValueError: query, key and value must all be \(batch, tokens, 16\)")


@pytest.mark.parametrize(
    ("function", "victims", "wrong", "error"),
    [
        (odd_call, (0, 2), {"exchange": "ring", "longer_keys": -1}, "ValueError: query has 20 tokens and key 19: "),
        (odd_call, (0, 1, 2), {"dtype": torch.complex64}, "TypeError: query must be float64, .* got torch.complex64"),
        (odd_call, (1,), {"exchange": "alltoall", "dropout_p": 2.0}, r"ValueError: dropout_p must be .* got 2\.0"),
        (odd_call, (1,), {"backend": "none"}, "ValueError: unknown backend 'none'"),
        (odd_call, (1,), {"scale": "x" * 9000}, "ValueError: scale must be .* got 'xxxx"),
        (odd_call, (1,), {"scale": Needle(1.0)}, "KeyError: 'the needle'"),
        (odd_call, (1,), {"query": None}, NO_TENSOR),
        (odd_call, (1,), {"return_lse": "no"}, "TypeError: return_lse must be True or False, got 'no'"),
        (odd_call, (1,), {"part": 3}, "TypeError: "),
        (odd_call, (1,), {"sinks": torch.zeros(3)}, r"ValueError: sinks must be a float tensor of shape \(4,\)"),
        (in_a_module, (1,), {"key_padding_mask": [0]}, "TypeError: key_padding_mask must be a tensor, got list"),
        (in_a_module, (1,), {"key_padding_mask": SPARSE}, "ValueError: key_padding_mask has the layout torch.sparse"),
        (in_a_module, (0, 2), {"query": torch.ones(2, 8, 16)}, "RuntimeError: "),  # float64 is what it projects
        (on_a_mesh, (1,), {"query": torch.ones(2, 8, 16)}, "RuntimeError: "),
        (on_a_mesh, (2,), {"is_causal": 1}, "TypeError: is_causal must be True or False, got 1"),
        (on_a_mesh, (1, 2), *WRONG_WIDTH),
    ],
)
def test_an_error_before_the_ranks_agree_reaches_all_and_the_group_goes_on(
    function: Callable[..., Any], victims: tuple[int, ...], wrong: dict[str, Any], error: str
) -> None:
    """The rank itself raises its own error unchanged: one of our checks, of a projection, or of anything else."""
    called_off = r"ValueError: dilated_attention( over heads)? was called off on all ranks \(this is rank \d\): "
    told = pool(4 if function is on_a_mesh else P).run(wrong_then_right, function, dict.fromkeys(victims, wrong))
    for rank, (said, seconds, _) in enumerate(told):
        assert re.match(error if rank in victims else rf"{called_off}.*rank \d cannot run it: {error}", said), said
        assert seconds < AT_ONCE
        if rank not in victims and function is not on_a_mesh:  # along an axis of a mesh ranks have other numbers
            assert all(f"rank {victim} cannot run it: " in said for victim in victims), said


def changed_in_place() -> None:
    query = testing.make_qkv(2, TOKENS, 4, 8, dtype=torch.float64)[0].requires_grad_()
    out = attend(query, query, query, exchange="ring", timeout=LONG)
    (out.mul_(2) if dist.get_rank() == VICTIM else out).sum().backward()


def test_an_error_before_a_backward_pass_reaches_all_and_the_group_goes_on() -> None:
    told = pool(P).run(error_then, changed_in_place, functools.partial(right_call, "ring"))
    assert_right([right for _, _, right in told])
    called_off = r"ValueError: the backward of dilated_attention was called off on all ranks \(.* rank \d\): rank 1 "
    for rank, (said, seconds, _) in enumerate(told):
        error = "RuntimeError: one of the variables .* modified by an inplace operation"
        assert re.match(error if rank == VICTIM else rf"{called_off}cannot run it: {error}", said), said
        assert seconds < AT_ONCE


# --- ranks that do different things -----------------------------------------------------------------------------


def backward_or(other: str) -> Any:
    """Forward on all ranks, and then on one of them something else than the backward."""
    query = testing.make_qkv(2, TOKENS, 4, 8, dtype=torch.float64)[0].requires_grad_()
    out = attend(query, query, query, exchange="ring")
    if dist.get_rank() != VICTIM:
        return out.sum().backward()
    return right_call("ring") if other == "the next call" else gather_sequence(out.detach(), world())


@pytest.mark.parametrize("other", ["the next call", "a gather"])
def test_a_backward_met_by_another_call_is_named_at_once(other: str) -> None:
    for x in outcomes_of(backward_or, other):
        assert x.error_type == "ValueError"
        assert re.search(r"the backward of is .* on ranks 0, 2 and absent on rank 1", x.error or ""), x.error
        assert x.seconds < AT_ONCE


def change_length(exchange: str, timeout: float, changes: tuple[int, ...]) -> None:
    """One rank's shard becomes longer in some calls, which the others do not know where calls are not checked."""
    query = testing.make_qkv(2, TOKENS + 4, 4, 8, dtype=torch.float64)[0]
    group = dist.new_group()  # on which no other test has made calls of other lengths
    with mock.patch.object(run, "FIRST_CALLS", 8):
        for count in range(12):
            longer = dist.get_rank() == VICTIM and count in changes
            shard = query[:, : TOKENS + 4 if longer else TOKENS]
            attend(shard, shard, shard, group=group, exchange=exchange, timeout=timeout, verify="first")


@pytest.mark.parametrize("exchange", ["ring", "alltoall"])
def test_no_message_of_another_length_is_taken(exchange: str) -> None:
    """Gloo aborts the process when a message is longer than expected."""
    outcomes = outcomes_of(change_length, exchange, SHORT, (11,))
    assert outcomes[VICTIM].error_type == "ValueError"
    assert "verify='always'" in str(outcomes[VICTIM].error)
    assert [x.error_type for x in outcomes if x.rank != VICTIM] == ["CommunicationError"] * (P - 1)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_lengths_that_vary_keep_being_checked(exchange: str) -> None:
    pool(P).run(change_length, exchange, LONG, (1, 5, 11))


# --- backward passes in other orders ----------------------------------------------------------------------------
# Without a number for each call, a rank would take the rows of the other call for those it waits for.


def in_order(exchange: str, reentrant: bool | None, order: tuple[int, int], **options: Any) -> list[Results]:
    """Two calls forward, then their backward passes in ``order``; ``reentrant``: of a checkpoint around each call."""
    call = functools.partial(attend, exchange=exchange, **options)
    cases = [right_case(P, exchange, number) for number in range(2)]
    shard = cases[0].shard(dist.get_rank())
    leaves, outs = [[x[:, shard].detach().requires_grad_() for x in case.qkv()] for case in cases], []
    for some in leaves:
        with torch.no_grad():  # as an evaluation between two steps: it counts on every rank
            call(*some)
        outs.append(call(*some) if reentrant is None else checkpoint(call, *some, use_reentrant=reentrant))
    for number in order:
        outs[number].backward(cases[number].inputs()[1][:, shard])
    return [Results(out.detach(), None, *(x.grad for x in some)) for out, some in zip(outs, leaves, strict=True)]


def swapped(exchange: str, reentrant: bool | None, **options: Any) -> list[Results]:
    """One rank runs the second backward pass first."""
    return in_order(exchange, reentrant, (1, 0) if dist.get_rank() == VICTIM else (0, 1), **options)


def swapped_then_in_order(exchange: str, reentrant: bool | None, then: bool | None) -> tuple[str, float, list[Results]]:
    return error_then(
        functools.partial(swapped, exchange, reentrant), functools.partial(in_order, exchange, then, (1, 0))
    )


@pytest.mark.parametrize(
    ("exchange", "reentrant", "then"), [("ring", None, False), ("allgather", False, None), ("alltoall", None, True)]
)
def test_every_rank_is_told_that_backward_passes_come_in_different_orders(
    exchange: str, reentrant: bool | None, then: bool | None
) -> None:
    """An order that all ranks share is right, with checkpoints too, whose backward passes make the calls again."""
    told = pool(P).run(swapped_then_in_order, exchange, reentrant, then)
    for rank, (error, seconds, _) in enumerate(told):
        number = r"the number of the call \(all ranks must run their backward passes in one order\)"
        who = rf"is (\d+) on ranks 0, 2 and (\d+) on rank {VICTIM}"
        found = re.fullmatch(rf"ValueError: .*the backward of .*\(this is rank {rank}\): {number} {who}", error)
        assert found is not None, error
        assert found[1] != found[2]
        assert seconds < AT_ONCE
    for number in range(2):
        assert_right([results[number] for _, _, results in told], number)


def unchecked(exchange: str) -> None:
    """After all the checks that ``verify="first"`` makes, in a group that knows no other lengths."""
    group = dist.new_group()
    with mock.patch.object(run, "FIRST_CALLS", 8):
        for _ in range(9):
            odd_call(exchange=exchange, verify="first", group=group)
        in_order(exchange, None, (1, 0), verify="first", group=group)
        swapped(exchange, None, verify="first", timeout=SHORT, group=group)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_without_checks_gloo_takes_no_message_of_another_call(exchange: str) -> None:
    """Late, and at the price of the group; but no gradient is wrong. Over NCCL nothing would tell."""
    outcomes = outcomes_of(unchecked, exchange)
    assert [x.error_type for x in outcomes] == ["CommunicationError"] * P, outcomes
    assert all("in swapped" in x.traceback for x in outcomes)


# --- another group --------------------------------------------------------------------------------------------


def survive() -> list[Results]:
    """Those who are left make a group of their own and go on."""
    try:
        right_call("ring", LONG, Fault("kill", "hop 1 of the backward") if dist.get_rank() == VICTIM else NO_FAULT)
    except CommunicationError:
        group = dist.new_group([0, 2], use_local_synchronization=True)
        return [right_call(exchange, LONG, group=group) for exchange in EXCHANGES]
    raise AssertionError("no error")


def test_survivors_go_on_in_a_new_group() -> None:
    outcomes = outcomes_of(survive, lost=-signal.SIGKILL)
    for results in zip(outcomes[0].value, outcomes[2].value, strict=True):
        assert_right(list(results))
