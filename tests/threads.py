"""Ranks that are threads of one process: the messages of a plan are carried, checked and counted without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call, checked_cu_seqlens
from dilated_attention.context_parallel import ContextParallel
from dilated_attention.distributed.group import Past, Stats, Waiting
from dilated_attention.pattern import Pattern
from dilated_attention.ring import run as ring
from dilated_attention.testing import Results, run

T = TypeVar("T")
Address = tuple[int, int, str, int]  # source, target, name of the step, how often that name was posted before


class Office:
    """Where messages wait for their receivers."""

    def __init__(self, size: int, patience: float = 30.0) -> None:
        self.size, self.patience = size, patience
        self.waiting: dict[Address, Tensor] = {}
        self.changed = threading.Condition()
        self.failed = False  # some rank raised: nobody is to wait for it

    def put(self, messages: Mapping[Address, Tensor]) -> None:
        with self.changed:
            assert not set(messages) & set(self.waiting), "a message was sent twice"
            self.waiting.update(messages)
            self.changed.notify_all()

    def take(self, address: Address, count: int) -> Tensor:
        with self.changed:
            came = self.changed.wait_for(lambda: address in self.waiting or self.failed, self.patience)
            if not came or address not in self.waiting:
                raise RuntimeError(f"rank {address[1]} waited for rank {address[0]} in {address[2]}")
            message = self.waiting.pop(address)
        assert message.numel() == count, f"{count} bytes expected and {message.numel()} came: {address}"
        return message

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class FakeTransport(ring.Checks):
    """A `Transport` over an office. ``log``: (step, bytes to, bytes from each rank) of what was posted."""

    backend, verify = "fake", "always"
    agrees_on_host = True

    def __init__(self, office: Office, rank: int) -> None:
        self.office, self.rank, self.size = office, rank, office.size
        self.stats, self.past = Stats(), Past()
        self.log: list[tuple[str, dict[int, int], dict[int, int]]] = []
        self._posted: dict[str, int] = {}

    def post(self, name: str, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> Waiting:
        sends = {peer: message for peer, message in sends.items() if message.numel()}
        receives = {peer: count for peer, count in receives.items() if count}
        if sends or receives:
            self.log.append((name, {peer: message.numel() for peer, message in sends.items()}, receives))
        self.stats.hops += bool(sends or receives)
        self.stats.bytes_sent += sum(message.numel() for message in sends.values())
        self.stats.bytes_received += sum(receives.values())
        self.stats.hold(sum(receives.values()))
        return self._carry(name, sends, receives)

    def from_all(self, name: str, mine: Tensor) -> list[Tensor]:
        others, message = [peer for peer in range(self.size) if peer != self.rank], mine.view(-1).view(torch.uint8)
        came = self._carry(name, dict.fromkeys(others, message), dict.fromkeys(others, mine.nbytes))()
        return [came.get(peer, message).view(mine.dtype).view(mine.shape) for peer in range(self.size)]

    def warm_up(self) -> None:
        pass

    def closed_on_error(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _carry(self, name: str, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> Waiting:
        turn = self._posted.get(name, 0)
        self._posted[name] = turn + 1
        # a copy: the sender may not touch what it has sent, but what it sent must not change with it either
        self.office.put({(self.rank, peer, name, turn): message.clone() for peer, message in sends.items()})
        addresses = {peer: (peer, self.rank, name, turn) for peer in receives}
        return lambda: {peer: self.office.take(addresses[peer], count) for peer, count in receives.items()}


def run_threads(size: int, function: Callable[[FakeTransport], T]) -> tuple[list[T], list[FakeTransport]]:
    """``function`` on every rank of an office of its own; the results, and the transports with their counts."""
    office = Office(size)
    transports = [FakeTransport(office, rank) for rank in range(size)]

    def run(transport: FakeTransport) -> T:
        try:
            return function(transport)
        except BaseException:
            office.fail()
            raise

    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(run, transport) for transport in transports]
    errors = [error for rank in ranks if (error := rank.exception())]
    if errors:  # the first cause, not one who waited for it
        raise min(errors, key=lambda error: "waited for rank" in str(error))
    assert not office.waiting, f"messages that nobody received: {list(office.waiting)[:5]}"
    return [rank.result() for rank in ranks], transports


# --- a call over such ranks ------------------------------------------------------------------------------------


def joined(results: Sequence[Results]) -> Results:
    """The results of all shards as one."""
    parts = zip(*([value for _, value in result.items()] for result in results), strict=True)
    names = [name for name, _ in results[0].items()]
    whole = dict(zip(names, (torch.cat(some, 1) for some in parts), strict=True))
    return Results(whole["out"], whole.get("lse"), whole["dq"], whole["dk"], whole["dv"])


class FakeRanks(ring.Ranks):
    def __init__(self, transport: FakeTransport, **settings: Any) -> None:
        super().__init__(ContextParallel(verify="always", **settings))
        self.fake = transport

    group = None  # nobody can be told of an error

    def transport(self, device: torch.device) -> FakeTransport:
        return self.fake


def run_sharded(
    qkv: tuple[Tensor, ...],
    lengths: Sequence[int],
    pattern: Pattern,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    exchange: str = "ring",
    use_checkpointing: bool = True,
    key_padding_mask: Tensor | None = None,
    seed: Tensor | None = None,
    cu_seqlens: Sequence[int] = (),
    **options: Any,
) -> tuple[Results, list[FakeTransport]]:
    """As `testing.run`, with the sequence cut into shards of these lengths, one per rank; the ranks are threads."""
    packed = checked_cu_seqlens(cu_seqlens, sum(lengths)) if cu_seqlens else ()
    asked = Call(pattern, cu_seqlens=packed, in_parts=True, **options)

    def rank(transport: FakeTransport) -> Results:
        start = sum(lengths[: transport.rank])
        shard = slice(start, start + lengths[transport.rank])
        ranks = FakeRanks(transport, exchange=exchange, use_checkpointing=use_checkpointing)
        padding = None if key_padding_mask is None else key_padding_mask[:, shard]

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Any:
            inputs = Inputs(query, key, value, padding, seed)
            return ring.attend_over_ranks(inputs, asked.of(query, key, padding, 0), ranks)

        parts = tuple(x[:, shard] for x in qkv)
        return run(attention, parts, dout[:, shard], None if dlse is None else dlse[:, shard])

    results, transports = run_threads(len(lengths), rank)
    return joined(results), transports
