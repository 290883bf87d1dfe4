"""The operation over a group of ranks: agree on the call, exchange rows, compute; one autograd node.

Legend: query (B, n, H, D), key, value (B, n, Hk, D), lse (B, n, H): n tokens of this rank's shard.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dilated_attention import _engine, _ops
from dilated_attention._alltoall import AllToAll
from dilated_attention._exchange import Exchange
from dilated_attention._settings import Settings, compute_dtype, sample_ends
from dilated_attention._shards import Shards, channels, crosses
from dilated_attention._work import Work
from dilated_attention.backends.choose import choose
from dilated_attention.backends.slices import Limit
from dilated_attention.cost import fastest_exchange
from dilated_attention.distributed.agreement import REFUSED, Asked, ask
from dilated_attention.distributed.group import (
    LONGEST_TIMEOUT,
    Buffers,
    CommunicationError,
    GroupTransport,
    carries,
    check_usable,
)
from dilated_attention.distributed.transport import Alone, Stats, Transport

EXCHANGES = ("auto", "ring", "allgather", "alltoall")
VERIFY = ("always", "first")
FIRST_CALLS = 64  # that "first" checks, of each group: forward and backward count


@dataclass
class Link:
    """How calls go over a group: what does not change from call to call."""

    group: ProcessGroup | None  # None: this process alone
    exchange: str = "auto"
    use_checkpointing: bool = True  # received rows are not kept for the backward pass but travel again
    timeout: float = 60.0
    verify: str | None = None  # None: "always" where gloo carries it, else "first"
    debug: bool = False
    limit: Limit | None = None
    stats: Stats = field(default_factory=Stats)
    buffers: Buffers | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def options(self) -> tuple[str, bool, float, str | None, bool]:
        return self.exchange, self.use_checkpointing, self.timeout, self.verify, self.debug

    def check_usable(self) -> None:
        if self.group is not None:
            check_usable(self.group)

    def transport(self, device: torch.device) -> Transport:
        self.check_usable()
        if self.group is None:
            return Alone(self.stats)
        if self.buffers is not None:
            self.buffers.begin()
        return GroupTransport(
            self.group, device, self.timeout, debug=self.debug, stats=self.stats, buffers=self.buffers
        )


@dataclass(frozen=True)
class Call:
    """One call, as all ranks have agreed on it."""

    settings: Settings
    link: Link
    transport: Transport
    shards: Shards
    exchange: str
    wants_gradients: bool
    number: int = 0  # among the calls over the group, the same on all ranks

    def work(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, ends: Tensor | None
    ) -> Work:
        rank = self.transport.rank
        mine = channels(self.settings.pattern, self.shards, self.settings.heads(k), rank)
        return Work.prepare(
            q, k, v, padding, seed, self.settings,
            shards=self.shards, rank=rank, ends=ends, visited=bool(mine),
            elsewhere=mine if self.exchange == "alltoall" else (), limit=self.link.limit,
        )  # fmt: skip

    def ends(self, padding: Tensor | None, device: torch.device) -> Tensor | None:
        """Where each sample ends on the last rank that has some of it; only torchscale asks, for its zero keys."""
        if padding is None:
            return None
        here = sample_ends(padding, self.shards.starts[self.transport.rank])
        if self.settings.pattern.rule != "torchscale" or self.settings.is_causal:
            return here
        if not here.numel():
            return here
        for other in self.transport.post_all("the ends of the samples", here.view(torch.uint8)).wait().values():
            here = torch.maximum(here, other.view(torch.int64).to(device))
        return here

    def agree_on_backward(self, dlse: Tensor | None, lse: Tensor) -> Tensor | None:
        """All ranks are here; dlse, where some rank has one."""
        self.link.check_usable()
        if self.transport.size == 1:
            return dlse
        if not _verifies(self.transport, self.link):
            return torch.zeros_like(lse) if dlse is None and self.exchange == "alltoall" else dlse
        fields = {
            "the backward of": self.settings.pattern,
            "shape": tuple(lse.shape[::2]),
            "exchange": self.exchange,
            "the number of the call (all ranks must run their backward passes in one order)": self.number,
        }
        flag = int(dlse is not None)
        said = _ask(self.transport, self.link, "the backward of dilated_attention", fields, lse.shape[1], flags=flag)
        return torch.zeros_like(lse) if any(said.wait().flags) and dlse is None else dlse

    def exchanger(self, work: Work, k: Tensor) -> Exchange | AllToAll | None:
        """None where no rank has anything to send."""
        if not crosses(self.settings.pattern, self.shards) or work.q.shape[0] == 0:
            return None
        mine = channels(self.settings.pattern, self.shards, self.settings.heads(k), work.rank)
        if self.exchange == "alltoall":
            return AllToAll(work, self.transport, mine)
        return Exchange(work, self.transport, mine, self.exchange)


def check_transforms(*gradients: Tensor | None) -> None:
    """Raise under torch.func, whose many calls ranks cannot make as one, forward or backward."""
    if not torch.compiler.is_compiling() and _ops.is_mapped(*gradients):
        raise NotImplementedError(
            "torch.func and is_grads_batched do not go over a group of ranks: use backward(), once for each gradient"
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, settings: Settings, link: Link
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's shard. Never traced by torch.compile: what is sent depends on what others say."""
    run = _attend
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:  # not as a decorator: it imports the compiler
        run = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]
    return run(q, k, v, padding, seed, settings, link)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, settings: Settings, link: Link
) -> tuple[Tensor, Tensor]:
    try:
        transport = link.transport(q.device)
        fields = _fields(q, k, v, padding, settings, link, resolved_verify(transport, link))
    except Exception as error:
        tell_others(link, q, error)
        raise
    lengths: tuple[int, ...] = (q.shape[1],)
    number = 0
    if transport.size > 1:
        lengths, seed = _agree(transport, link, fields, q.shape[1], seed)
        number = transport.number = _counted(link)
        transport.warm_up()
    shards = Shards.of(lengths)
    exchange = link.exchange
    if exchange == "auto":
        exchange = fastest_exchange(
            settings.pattern, shards, settings.heads(k), q.shape[2] // k.shape[2], q.shape[3],
            compute_dtype(q), settings.is_causal, transport.backend, q.shape[0], padding is not None,
        )  # fmt: skip
    call = Call(settings, link, transport, shards, exchange, fields["gradients"] == "wanted", number)
    out, lse = _Parallel.apply(q, k, v, padding, seed, call)  # type: ignore[no-untyped-call]
    return out, lse


def tell_others(link: Link | None, query: object, error: Exception) -> None:
    """Tell the other ranks that this one cannot run the call, so that none of them waits; they raise, too.

    For every error before the ranks agree on a call, whatever it is; the caller raises it again.
    """
    if link is None or link.group is None or link.size == 1:
        return
    device = torch.device("cpu")
    if isinstance(query, Tensor) and carries(link.group, query.device):
        device = query.device
    elif not carries(link.group, device):
        device = torch.accelerator.current_accelerator() or device
    verify = link.verify if link.verify in VERIFY else None  # it may be the link that is wrong
    timeout = link.timeout if isinstance(link.timeout, Real) and 0 < link.timeout <= LONGEST_TIMEOUT else 60.0
    plain = Link(link.group, timeout=timeout, verify=verify)
    # what all ranks raise, or that this rank can tell nobody: the caller's own error says more
    with contextlib.suppress(ValueError, CommunicationError):
        transport = plain.transport(device)
        if _verifies(transport, plain):
            _ask(transport, plain, "dilated_attention", {REFUSED: f"{type(error).__name__}: {error}"}, 0).wait()


def _fields(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, settings: Settings, link: Link, verify: str
) -> dict[str, object]:
    """What must be alike on all ranks."""
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    request = settings.request(q, padding is not None)
    return {
        "shape": f"(batch {q.shape[0]}, tokens, heads {q.shape[2]}, head_dim {q.shape[3]})",
        "key heads": k.shape[2],
        "dtype": q.dtype,
        "device": q.device.type,
        "backend": choose(settings.backend, request).name,  # with device and dtype, what decides how rows are packed
        "computed in": request.dtype,
        "pattern": settings.pattern,
        "is_causal": settings.is_causal,
        "scale": settings.scale,
        "dropout_p": settings.dropout_p,
        "heads": settings.heads(k),
        "key_padding_mask": "given" if padding is not None else "not given",
        "exchange": link.exchange,
        "use_checkpointing": link.use_checkpointing,
        "verify": verify,
        "gradients": "wanted" if wants_gradients else "not wanted",
    }


class _Seen:
    """What the checked calls over a group were, for those that are not checked."""

    def __init__(self) -> None:
        self.checks = 0
        self.calls = 0  # that all ranks agreed on, checked or not
        self.lengths: set[tuple[int, ...]] = set()  # of all shards


_seen: weakref.WeakKeyDictionary[ProcessGroup, _Seen] = weakref.WeakKeyDictionary()


def _seen_by(link: Link) -> _Seen:
    assert link.group is not None
    return _seen.setdefault(link.group, _Seen())


def resolved_verify(transport: Transport, link: Link) -> str:
    return link.verify or ("always" if transport.agrees_on_host else "first")


def _verifies(transport: Transport, link: Link) -> bool:
    """Whether this call is checked: the same answer on every rank, as all have seen the same calls.

    With shards of several lengths every call is: one rank's own length does not tell it those of the others.
    """
    seen = _seen_by(link)
    return resolved_verify(transport, link) == "always" or seen.checks < FIRST_CALLS or len(seen.lengths) != 1


def _ask(
    transport: Transport, link: Link, call: str, fields: dict[str, object], length: int, seed: int = 0, flags: int = 0
) -> Asked:
    _seen_by(link).checks += 1
    return ask(transport, call, fields, length, seed, flags)


def _counted(link: Link) -> int:
    """The number of a call that all ranks make: two calls that look alike still have backward passes of their own."""
    seen = _seen_by(link)
    seen.calls += 1
    return seen.calls


def _agree(
    transport: Transport, link: Link, fields: dict[str, object], length: int, seed: Tensor | None
) -> tuple[tuple[int, ...], Tensor | None]:
    """The lengths of all shards and rank 0's seed."""
    if _verifies(transport, link):
        number = 0 if seed is None else int(seed.item())
        agreement = _ask(transport, link, "dilated_attention", fields, length, number).wait()
        if seed is not None:
            seed = torch.full_like(seed, agreement.seeds[0])
        _seen_by(link).lengths.add(agreement.lengths)
        return agreement.lengths, seed
    (known,) = _seen_by(link).lengths
    if length != known[transport.rank]:
        raise ValueError(
            f"rank {transport.rank} has {length} tokens and had {known[transport.rank]} in all checked calls over this "
            "group; later ones are not checked: for shards that vary in length give verify='always'"
        )
    if seed is not None:  # it stays on the device: reading it would make the host wait
        others = transport.post_all("the seed", seed.view(1).view(torch.uint8)).wait()
        if transport.rank:
            seed = others[0].view(torch.int64)[0].to(seed.device)
    return known, seed


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        with _engine.no_autocast(q.device), call.transport.closed_on_error():
            ends = call.ends(padding, q.device)
            work = call.work(q, k, v, padding, seed, ends)
            exchanger = call.exchanger(work, k)
            keep = call.wants_gradients and not call.link.use_checkpointing
            kept: list[Tensor] = []
            if exchanger is None:
                out, lse = work.forward()
            else:
                out, lse, kept = exchanger.forward(keep)
            out, lse = _engine.finished(out, lse, q)
        ctx.save_for_backward(q, k, v, padding, seed, ends, out, lse, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)  # None tells that lse was not used, which spares its pass
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        check_transforms(dout, dlse)
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = _backward(ctx.call, dout, dlse, *saved)
        if torch.is_grad_enabled():
            found = _ops.once(found, dout, dlse, *saved[:3])
        return (*found, None, None, None)


def _backward(
    call: Call, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None,
    seed: Tensor | None, ends: Tensor | None, out: Tensor, lse: Tensor, *kept: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    dlse = call.agree_on_backward(dlse, lse)
    with _engine.no_autocast(q.device), call.transport.closed_on_error():
        q, dout, dlse, out, lse, bad = _engine.without_bad_rows(q, dout, dlse, out, lse)
        work = call.work(_engine.one_layout(q), k, v, padding, seed, ends)
        rows = work.rows(dout, dlse, out, lse)
        exchanger = call.exchanger(work, k)
        if exchanger is None:
            grads = work.backward(rows)
        else:
            grads = exchanger.backward(rows, None if call.link.use_checkpointing else list(kept))
        return _engine.finished_grads(grads, q, bad)
