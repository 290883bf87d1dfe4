"""Do all ranks mean the same call? One small message from each to all, before anything else is sent.

Gloo checks neither shapes nor dtypes of what it carries, and a rank that takes another path leaves the others waiting.
So at the same point of every call all ranks exchange a few bytes: a hash of what must agree, the length of the local
shard, a seed. If hashes differ, a second exchange carries the fields themselves, and every rank raises.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from dilated_attention.distributed.group import CommunicationError, GroupTransport, ranks_text

_LONGEST = 2000  # characters of a field that are told
REFUSED = "error"  # the only field of a rank that cannot take part


class Agreement(NamedTuple):
    """What every rank said, by rank."""

    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    flags: tuple[int, ...]


@contextlib.contextmanager
def errors_reach_all(say: Callable[[Mapping[str, object]], object]) -> Iterator[None]:
    """An error in here reaches the other ranks, so that none of them waits for this one. It is raised here as it is.

    ``say`` takes the fields of a rank that cannot take part, and asks the other ranks with them, for example by `ask`.
    """
    try:
        yield
    except Exception as error:  # whatever it is
        # `say` raises too: that a rank refused, or is gone. This rank's own error says more
        with contextlib.suppress(ValueError, CommunicationError):
            say({REFUSED: f"{type(error).__name__}: {error}"})
        raise


@contextlib.contextmanager
def same_on_all(say: Callable[[Mapping[str, object]], object]) -> Iterator[dict[str, object]]:
    """An error in here, on any rank, is raised on all of them.

    What a rank writes into the dict must be the same on every rank, or all raise. Nothing in here may wait for others.
    """
    same: dict[str, object] = {}
    with errors_reach_all(say):
        yield same
    say(same)


def ask(
    transport: GroupTransport, call: str, fields: Mapping[str, object], length: int = 0, seed: int = 0, flags: int = 0
) -> Agreement:
    """What the ranks say. Raises ValueError on every rank if they do not mean the same ``call``, a name for people."""
    text = json.dumps({name: _cut(str(value)) for name, value in fields.items()}).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    mine = torch.tensor([digest, len(text), length, seed, flags], device="cpu")
    words = transport.from_all(f"the agreement on {call}", mine)
    digests, sizes, *numbers = zip(*(word.tolist() for word in words), strict=True)
    if len(set(digests)) > 1 or REFUSED in fields:
        texts = transport.from_all(f"{call}: what differs", torch.tensor([*text.ljust(max(sizes))], device="cpu"))
        raise ValueError(difference([json.loads(bytes(x.tolist())) for x in texts], transport.rank, call))
    return Agreement(*numbers)


def difference(said: list[dict[str, str]], rank: int, call: str) -> str:
    """Which fields differ: the value of most ranks, and who has another one."""
    refused = [
        f"rank {other} cannot run it: {fields[REFUSED]}" for other, fields in enumerate(said) if REFUSED in fields
    ]
    if refused:
        return f"{call} was called off on all ranks (this is rank {rank}): {'; '.join(refused)}"
    differing = []
    for name in dict.fromkeys(itertools.chain.from_iterable(said)):
        by_value: dict[str, list[int]] = {}
        for other, fields in enumerate(said):
            by_value.setdefault(fields.get(name, "absent"), []).append(other)
        usual_first = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
        told = [f"{value} on {ranks_text(who)}" for value, who in usual_first]
        differing += [f"{name} is {' and '.join(told)}"] if len(told) > 1 else []
    return f"the ranks do not make the same call to {call} (this is rank {rank}): {'; '.join(differing)}"


def _cut(text: str) -> str:
    """The beginning of a long text, and a hash that tells whether the rest differs."""
    rest = f"... ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + rest
