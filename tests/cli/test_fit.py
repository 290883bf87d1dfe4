"""`fit`, `convert --pattern` and `evaluate`, one after another, on small models from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention import Pattern, Window
from dilated_attention.integrations.stored import Plain, stored
from dilated_attention.models import recall, scoring
from dilated_attention.models.transformer import read_pattern
from tests.cli.conftest import Refused, Run
from tests.test_fitting import lm, saved

N = 192
TEXT = b"".join(b"line %d of a text that goes on and on\n" % number for number in range(400))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "book.txt").write_bytes(TEXT)
    (tmp_path / "text" / "picture.bin").write_bytes(b"\0" * 9999)
    return tmp_path / "text"


@pytest.mark.parametrize("kind", ["longnet file", "llama"])
def test_from_a_dense_model_to_a_pattern(kind: str, run: Run, data: Path, tmp_path: Path) -> None:
    dense, target = tmp_path / "dense", tmp_path / ("sparse.pt" if kind == "longnet file" else "sparse")
    dense.mkdir()
    saved(kind, dense)
    file, chart = tmp_path / "pattern.json", tmp_path / "fit.svg"
    given = ("--data", data, "-n", N, "--rows", 2, "--device", "cpu")
    ran = run("fit", dense, *given, "--budget", "3/10", "-o", file, "--chart", chart)
    assert ran.code == 0, ran.err
    assert ran.out.endswith(f"written: {file}\nwritten: {chart}\n")
    patterns = read_pattern(json.loads(file.read_text()))
    pairs = sum(pattern.pairs(N, 4, num_kv_heads=2, is_causal=True) for pattern in patterns)
    share = pairs / (2 * 4 * N * (N + 1) / 2)
    assert 0.2 < share <= 0.3
    assert f"chosen: {share:.1%} of dense attention's pairs" in ran.out
    assert b"share of its weight" in chart.read_bytes()
    found = json.loads(run("fit", dense, *given, "--budget", 0.3, "-o", file, "--json", "--by", "mass").out)
    assert found["patterns"] == json.loads(file.read_text()) != [pattern.to_dict() for pattern in patterns]

    assert run("convert", dense, target, "--pattern", file).out == f"written: {target}\n"
    before, after = stored(dense), stored(target)
    assert after.patterns == read_pattern(json.loads(file.read_text())) != before.patterns
    weights = before.model.state_dict()
    assert all(torch.equal(weights[name], x) for name, x in after.model.state_dict().items())

    for model, place in ((before, dense), (after, target)):
        chart = tmp_path / "evaluate.svg"
        found = json.loads(run("evaluate", place, *given, "--json", "--chart", chart).out)
        assert b"right answers" in chart.read_bytes()
        rows = scoring.rows_of(model, TEXT, N, 2)
        with torch.no_grad():
            bits = model.losses(rows) / torch.tensor(2.0).log()
        assert found["bits"] == pytest.approx(float(bits.mean()), rel=1e-5)
        assert [(x["first"], x["last"]) for x in found["by_position"]] == [(1, 63), (64, 127), (128, 191)]
        assert found["by_position"][1]["bits"] == pytest.approx(float(bits[:, 63:127].mean()), rel=1e-5)
        assert {x["kind"] for x in found["recall"]} <= {*recall.KINDS}
    told = run("evaluate", dense, *given).out
    assert "bits per token, in 2 rows of 192" in told
    assert "right answers, by distance" in told


def test_what_is_refused(refused: Refused, data: Path, tmp_path: Path) -> None:
    dense, pattern, given = saved("longnet file", tmp_path), tmp_path / "p.json", ("--data", data, "--device", "cpu")
    assert "is not a share of dense attention's pairs" in refused("fit", dense, *given, "--budget", "9/8")
    assert "must be at least 0." in refused("fit", dense, *given, "--budget", "1/1000", "-n", N)
    assert "no checkpoint at" in refused("fit", tmp_path / "none", *given, "--budget", "1/8")
    assert "does not fill a row of 65,536 tokens" in refused("evaluate", dense, *given, "-n", "64k")
    assert "No such file" in refused("evaluate", dense, "--data", tmp_path / "none.txt")
    assert "recall needs rows of more than 128 bytes" in refused("evaluate", dense, *given, "-n", 100)
    target = tmp_path / "new.pt"
    for content in ("[]", "[[", '{"kind": 3}', "[3]", '[{"branches": [{"kind": "window"}]}]', "7"):
        pattern.write_text(content)
        said = refused("convert", dense, target, "--pattern", pattern)
        assert "holds no pattern that `fit` wrote" in said or "0 patterns for 2 layers" in said
    pattern.write_text(json.dumps([Pattern([Window(3)]).to_dict()]))
    assert "1 patterns for 2 layers" in refused("convert", dense, target, "--pattern", pattern)
    assert "must be a file, and end in .pt" in refused("convert", dense, tmp_path / "new", "--pattern", pattern)
    assert not target.exists()
    target.write_bytes(b"mine")
    assert "exists already" in refused("convert", dense, target, "--pattern", pattern)


# --- rows and answers -------------------------------------------------------------------------------------------


class Words:
    """A tokenizer that joins letters, two by two where it can."""

    bos_token_id = 299

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": [sum(map(ord, text[at : at + 2])) for at in range(0, len(text), 2)]}


def test_rows_come_from_all_over_the_text() -> None:
    plain, words = Plain(lm()), Plain(lm(vocab_size=300), Words())
    rows = scoring.rows_of(plain, TEXT, 100, 5)
    assert rows.shape == (5, 100)
    assert rows[:, 0].tolist() == [256] * 5
    places = [TEXT.index(bytes(row[1:].tolist())) for row in rows]
    assert places[0] == 0
    assert places[-1] > len(TEXT) * 0.7
    assert len(scoring.rows_of(plain, TEXT, 5000, 9)) == len(TEXT) // 5000
    assert scoring.rows_of(words, TEXT, 100, 5)[:, :2].tolist()[0] == [299, ord("l") + ord("i")]


class Reader(Plain):
    """Knows each next token of one text, but for those that it does not remember."""

    def __init__(self, tokenizer: Any, forgets: int) -> None:
        super().__init__(lm(vocab_size=300), tokenizer)
        self.forgets = forgets

    def logits(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        said = tokens[:, places + 1].clone()
        said[:, self.forgets] += 1
        return torch.nn.functional.one_hot(said, 600).float()


@pytest.mark.parametrize("tokenizer", [None, Words()])
def test_an_answer_counts_if_all_its_tokens_are_right(tokenizer: Any) -> None:
    asked = scoring.planted(TEXT, 1024, 3)
    assert asked.tokens.shape == (3, 1024)
    answer = recall.WIDTH if tokenizer is None else recall.WIDTH // 2
    for forgets in (0, 3 * answer - 1):
        right = scoring.recalled(Reader(tokenizer, forgets), asked)
        wrong = [asked.places[asked.rows == row].sort().values[forgets // answer] for row in range(3)]
        assert asked.places[~right].tolist() == [int(place) for place in wrong]
