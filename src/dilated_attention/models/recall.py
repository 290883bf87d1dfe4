"""Recall at a distance: facts are planted in a text of bytes, and asked for further on.

pairs: a fact is ``@key=value;`` with random letters. It is asked for by ``@key=``, among the other facts of its row.
needle: the same, with one of a hundred keys that are the same in all rows.
chain: ``@key=value;``, later ``@other=key;``. It is asked for by ``@other?``, and the answer is the value.

Everything is written over the text, so rows keep their lengths. Values are random, and no two of a row are equal: an
answer can be read from its fact alone. Legend: rows (B, n) of bytes; Q questions; an answer has WIDTH bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.models.lm import LongNetLM, states_of

KINDS = ("pairs", "needle", "chain")
WIDTH = 4  # letters of a key and of a value
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
NEEDLES = tuple(b"ke%02d" % number for number in range(100))
FACT = WIDTH * 2 + 3  # the bytes of @key=value;
LEAST = 64  # bytes of a distance: another fact of a chain must find room in between
TRIES = 200  # places that are drawn for a question before there is no room
LogitsAt = Callable[[Tensor, Tensor], Tensor]  # tokens (n,), places (m,) -> what the model says is there, (m, V)


class Planted(NamedTuple):
    """Rows with questions, and where the answers are."""

    tokens: Tensor  # (B, n) uint8
    rows: Tensor  # (Q,) of the questions
    places: Tensor  # (Q,) where in its row an answer begins
    distances: Tensor  # (Q,) from there back to the value in the fact
    kinds: Tensor  # (Q,) indices into KINDS

    def answers(self) -> Tensor:
        """The bytes of the answers, (Q, WIDTH)."""
        return self.tokens[self.rows.unsqueeze(1), self.places.unsqueeze(1) + torch.arange(WIDTH)]


def plant(
    text: Tensor, distances: Sequence[int], *, questions: int, seed: int, kinds: Sequence[str] = KINDS
) -> Planted:
    """Writes ``questions`` questions and their facts over each row of ``text``, (B, n) uint8.

    A distance of d stands for d to 2d - 1 bytes, drawn evenly: at equal distances a pattern would see all or none.
    Kinds and distances take turns. The same seed and text give the same rows.

    Examples:
        >>> text = torch.full((1, 200), ord("."), dtype=torch.uint8)
        >>> planted = models.recall.plant(text, [64], questions=1, seed=0, kinds=["pairs"])
        >>> bytes(planted.answers()[0].tolist()) in bytes(planted.tokens[0, : planted.places[0]].tolist())
        True
    """
    if text.dim() != 2 or text.dtype != torch.uint8 or text.device.type != "cpu":
        raise ValueError(f"text must be (B, n) uint8 on the CPU, got {text.dtype} {tuple(text.shape)} on {text.device}")
    if not kinds or not {*kinds} <= {*KINDS}:
        raise ValueError(f"kinds must be some of {', '.join(KINDS)}, got {list(kinds)}")
    most = text.shape[1] - 2 * FACT - 1
    if not distances or not LEAST <= min(distances) <= max(distances) <= most:
        raise ValueError(f"distances must be from {LEAST} to {most} in rows of {text.shape[1]}, got {list(distances)}")
    tokens, found, drawn = text.clone(), list[tuple[int, int, int, int]](), random.Random(seed)
    turns = [(kind, least) for least in distances for kind in kinds]
    for row, target in enumerate(tokens.numpy()):
        first = row * questions  # rows go on where the last one stopped, so that all turns come equally often
        given = [turns[(first + index) % len(turns)] for index in range(questions)]
        for writings, place, distance, kind in _row(given, len(target), drawn):
            for at, words in writings:
                target[at : at + len(words)] = bytearray(words)
            found.append((row, place, distance, kind))
    return Planted(tokens, *torch.tensor(found, dtype=torch.int64).view(-1, 4).unbind(1))


def _row(
    turns: Sequence[tuple[str, int]], n: int, drawn: random.Random
) -> Iterator[tuple[list[tuple[int, bytes]], int, int, int]]:
    """For each question: what is written where, the place of the answer, its distance, its kind."""
    words, busy = _words(drawn), bytearray(n)
    needles = drawn.sample(NEEDLES, len(NEEDLES))
    for kind, least in turns:
        if kind == "needle" and not needles:
            kind = "pairs"
        key, value = needles.pop() if kind == "needle" else next(words), next(words)
        for _ in range(TRIES):
            distance = drawn.randrange(least, min(2 * least, n - 2 * FACT))
            place = drawn.randrange(distance + FACT, n - FACT)
            ask, fact = place - WIDTH - 2, place - distance - WIDTH - 2
            writings = [(fact, b"@%b=%b;" % (key, value)), (ask, b"@%b=%b;" % (key, value))]
            if kind == "chain":
                other, between = next(words), drawn.randrange(fact + FACT, ask - FACT + 1)
                writings[1:] = [(between, b"@%b=%b;" % (other, key)), (ask, b"@%b?%b;" % (other, value))]
            if all(busy.find(1, at, at + FACT) < 0 for at, _ in writings):
                break
        else:
            raise ValueError(
                f"{len(turns)} questions find no room in a row of {n} bytes: ask fewer, or give longer rows"
            )
        for at, _ in writings:
            busy[at : at + FACT] = b"\1" * FACT
        yield writings, place, distance, KINDS.index(kind)


def _words(drawn: random.Random) -> Iterator[bytes]:
    """Random words, no two of which are equal."""
    known: set[bytes] = set(NEEDLES)
    while True:
        word = bytes(drawn.choices(LETTERS, k=WIDTH))
        if word not in known:
            known.add(word)
            yield word


@torch.no_grad()
def answered(planted: Planted, logits_at: LogitsAt) -> Tensor:
    """Which answers are right, (Q,) bool: each byte is the likeliest one after the true bytes before it.

    ``logits_at`` is asked once for each row, and for the places of answers only: no other logits are needed.
    """
    right = torch.zeros(len(planted.rows), dtype=torch.bool)
    places, answers = planted.places.unsqueeze(1) + torch.arange(WIDTH), planted.answers()
    for row, tokens in enumerate(planted.tokens):
        mine = planted.rows == row
        if mine.any():
            said = logits_at(tokens, places[mine].flatten()).argmax(-1).view(-1, WIDTH)
            right[mine] = (said.cpu() == answers[mine]).all(1)
    return right


def logits_of(model: LongNetLM, begin: int | None = None) -> LogitsAt:
    """The logits of a model of bytes. ``begin``: the token before the first byte, if it was trained with one."""

    def logits_at(tokens: Tensor, places: Tensor) -> Tensor:
        given = tokens.to(model.embed.weight.device).long()
        if begin is not None:
            given = torch.cat((given.new_tensor([begin]), given[:-1]))
        states = states_of(model, True, given.unsqueeze(0), None, None, None)[0]
        return model.head(states[(places - int(begin is None)).to(states.device)])  # type: ignore[no-any-return]

    return logits_at


def by_distance(planted: Planted, right: Tensor) -> list[dict[str, Any]]:
    """For each kind, and distances that double: how many questions there were, and the share of right answers."""
    found, octaves = list[dict[str, Any]](), planted.distances.double().log2().floor().long()
    for kind, name in enumerate(KINDS):
        for octave in sorted({*octaves[planted.kinds == kind].tolist()}):
            hits = right[(planted.kinds == kind) & (octaves == octave)].double()
            found.append({"kind": name, "from": 1 << octave, "questions": len(hits), "right": hits.mean().item()})
    return found
