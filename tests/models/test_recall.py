"""Recall at a distance: where facts and questions stand, and what readers of different kinds score."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import dilated_attention as da
from dilated_attention.models import LMConfig, LongNetLM, recall

N, DISTANCES, QUESTIONS = 2048, [64, 128, 256, 512, 1024], 15
TEXT = (torch.arange(6 * N).view(6, N) % 10 + ord("0")).byte()  # no letters


@pytest.fixture(scope="module")
def planted() -> recall.Planted:
    return recall.plant(TEXT, DISTANCES, questions=QUESTIONS, seed=3)


def questions(planted: recall.Planted) -> Any:
    """For each question: the bytes before its answer, the answer, its distance and kind."""
    columns = planted.rows, planted.places, planted.distances, planted.kinds
    for row, place, distance, kind in zip(*(column.tolist() for column in columns), strict=True):
        yield bytes(planted.tokens[row].tolist()), place, distance, recall.KINDS[kind]


def read(before: bytes) -> bytes | None:
    """The value that the end of a text asks for, as its facts say."""
    facts = dict(re.findall(rb"@(\w{4})=(\w{4});", before))
    (key, mark) = re.fullmatch(rb"@(\w{4})(=|\?)", before[-6:]).groups()  # type: ignore[union-attr]
    found = facts.get(key)
    return facts.get(found, found) if mark == b"?" and found is not None else found


def test_each_answer_is_at_its_distance_and_nowhere_else(planted: recall.Planted) -> None:
    for row, place, distance, kind in questions(planted):
        answer, fact = row[place : place + 4], place - distance
        assert row[fact : fact + 5] == answer + b";"
        assert row[fact - 6 : fact - 5] == b"@"
        assert row[:place].count(answer) == 1, "nothing else says it"
        assert read(row[:place]) == answer
        without = row[: fact - 6] + b"0" * 11 + row[fact + 5 : place]
        assert read(without) != answer, "the fact is needed"
        key = row[place - 5 : place - 1]
        if kind == "chain":
            assert key not in row[: fact + 5]
            link = re.search(rb"@%b=(\w{4});" % key, row[:place])
            assert link is not None
            assert row[fact - 5 : fact - 1] == link[1], "by way of another fact"
        else:
            assert row[fact - 5 : fact - 1] == key
            assert (key in recall.NEEDLES) == (kind == "needle")


def test_kinds_and_distances_take_turns(planted: recall.Planted) -> None:
    found = recall.by_distance(planted, torch.ones(len(planted.rows), dtype=torch.bool))
    assert [(x["kind"], x["from"], x["questions"]) for x in found] == [
        (kind, distance, 6) for kind in recall.KINDS for distance in DISTANCES
    ]
    assert len(planted.distances.unique()) > 60, "not multiples of one another, which a pattern may all see"
    assert torch.equal((planted.tokens == TEXT).sum(1) > N - QUESTIONS * 34, torch.ones(6, dtype=torch.bool))
    again, other = (recall.plant(TEXT, DISTANCES, questions=QUESTIONS, seed=seed) for seed in (3, 4))
    assert all(map(torch.equal, again, planted))
    assert not torch.equal(other.tokens, planted.tokens)
    none = recall.plant(TEXT, DISTANCES, questions=0, seed=0)
    assert torch.equal(none.tokens, TEXT)
    assert none.answers().shape == (0, 4)


def reader(values: Any) -> recall.LogitsAt:
    """Says what ``values`` reads from the text before an answer; then the next bytes of it."""

    def logits_at(tokens: Tensor, places: Tensor) -> Tensor:
        said = []
        for place in places[::4].tolist():
            said += values(bytes(tokens[:place].tolist()))
        return torch.nn.functional.one_hot(torch.tensor(said), 256).float()

    return logits_at


def test_a_reader_of_facts_is_right_and_a_guess_is_not(planted: recall.Planted) -> None:
    assert recall.answered(planted, reader(read)).all()
    near = recall.answered(planted, reader(lambda text: read(text[-512:]) or b"...."))
    for one in recall.by_distance(planted, near):
        assert one["right"] == 1.0 if one["from"] < 256 else one["right"] == 0.0 or one["from"] == 256
    drawn = torch.Generator().manual_seed(0)
    guessed = recall.answered(planted, reader(lambda text: torch.randint(97, 123, (4,), generator=drawn).tolist()))
    assert not guessed.any()
    wrong_end = recall.answered(planted, reader(lambda text: (read(text) or b"")[:3] + b"."))
    assert not wrong_end.any(), "all bytes count"


@pytest.mark.parametrize("begin", [None, 256])
def test_the_places_of_a_model(begin: int | None) -> None:
    """Its logits are those that a whole pass gives for the bytes of the answers."""
    planted = recall.plant(TEXT[:2, :512], [64, 128], questions=6, seed=0)
    torch.manual_seed(0)
    pattern = da.DilatedPattern.longnet([64, 512], [1, 8])
    model = LongNetLM(LMConfig(257, 32, 1, 2, pattern))
    tokens = planted.tokens.long()
    with torch.no_grad():
        if begin is None:
            said = model(tokens)[:, :-1]
        else:
            said = model(torch.nn.functional.pad(tokens, (1, 0), value=begin))[:, :-2]  # of the bytes from 0 on
    seen: list[Tensor] = []

    def logits_at(tokens: Tensor, places: Tensor) -> Tensor:
        seen.append(recall.logits_of(model, begin)(tokens, places))
        return seen[-1]

    recall.answered(planted, logits_at)
    places = planted.places.unsqueeze(1) + torch.arange(4)
    wanted = said[planted.rows.unsqueeze(1), places - int(begin is None)]
    torch.testing.assert_close(torch.cat(seen).view_as(wanted), wanted)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"text": TEXT.long()}, "text must be"),
        ({"distances": [32]}, "distances must be from 64 to 2025"),
        ({"distances": [64, 2026]}, "distances must be from 64 to 2025"),
        ({"distances": []}, "distances must be"),
        ({"kinds": ["pairs", "riddles"]}, "kinds must be some of pairs, needle, chain"),
        ({"kinds": []}, "kinds must be"),
        ({"questions": 100}, "100 questions find no room in a row of 2048 bytes"),
    ],
)
def test_what_cannot_be_planted(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        recall.plant(**{"text": TEXT, "distances": DISTANCES, "questions": QUESTIONS, "seed": 0, **changed})
