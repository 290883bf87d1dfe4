"""The training example: gradients on any mesh, going on after SIGTERM, and what it says when something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import resource
import runpy
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dilated_attention as da
from dilated_attention.ranks import pool
from dilated_attention.testing import error

pytestmark = pytest.mark.usefixtures("pools_that_end")
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import stories  # noqa: E402
import train_lm  # noqa: E402
import witten_bell  # noqa: E402
from texts import BEGIN, BYTES, PackedRows, held_out_rows, read_texts, tokens_of  # noqa: E402

SMALL = {"dim": 16, "depth": 2, "heads": 2, "tokens": 40, "rows": 4, "steps": 4, "save-every": 2, "device": "cpu"}


def corpus(folder: Path) -> Path:
    """Documents of a few words each."""
    folder.mkdir(exist_ok=True)
    for index in range(12):
        words = [f"word{(index * i) % 7} in line {i}\n" for i in range(3 + index)]
        (folder / f"{index:02}.txt").write_text("".join(words))
    return folder


def given(folder: Path, *more: Any) -> list[str]:
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    lists = ["--segments", 8, 16, "--rates", 1, 2]
    return [str(word) for word in (corpus(folder / "text"), "--out", folder / "out", *lists, *options, *more)]


def alone(function: Any, *given: Any) -> Any:
    """What it gives on one rank."""
    return pool(1).run(function, *given)[0]


def names(folder: Path) -> list[str]:
    """The checkpoints, finished or not."""
    return sorted(file.name for file in (folder / "out").glob("*.pt"))


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "out/log.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[float]:
    return [line["step"] for line in lines(folder)]


# --- over ranks -------------------------------------------------------------------------------------------------


def gradients(arguments: list[str]) -> list[torch.Tensor]:
    """Loss and gradients of the first step, whole, in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        options = train_lm.arguments(arguments)
        config = train_lm.LMConfig(
            BYTES, options.dim, options.depth, options.heads, train_lm.da.DilatedPattern.longnet([8, 16], [1, 2])
        )
        trainer = train_lm.Trainer(options, config)
        loss = trainer.gradients(PackedRows(tokens_of(read_texts(options.text), BYTES), options.tokens, options.seed))
        return [loss, *(parameter.grad.full_tensor() for parameter in trainer.model.parameters())]  # type: ignore[union-attr]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("ranks", "sequence"), [(2, 2), (4, 2)], ids=["2", "2x2"])
def test_loss_and_gradients_are_those_of_one_rank(ranks: int, sequence: int, tmp_path: Path) -> None:
    expected = alone(gradients, given(tmp_path))
    for found in pool(ranks).run(gradients, given(tmp_path, "--sequence", sequence)):
        assert max(map(error, found, expected)) < 1e-12


def half(arguments: list[str]) -> list[torch.Tensor]:
    """`gradients` in the precision of a GPU: FSDP then copies what a block is given."""
    policy = train_lm.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with mock.patch.object(train_lm, "MixedPrecisionPolicy", return_value=policy):
        return gradients(arguments)


def test_half_precision(tmp_path: Path) -> None:
    expected, found = (alone(function, given(tmp_path)) for function in (gradients, half))
    assert 0 < max(map(error, found, expected)) < 0.05


@contextlib.contextmanager
def followed(owner: type, name: str, then: Any) -> Iterator[None]:
    """Each call of this method is followed by one of ``then``."""
    method = getattr(owner, name)

    def call(self: Any, *given: Any, **options: Any) -> Any:
        result = method(self, *given, **options)
        then(self, *given, **options)
        return result

    with mock.patch.object(owner, name, call):
        yield


def interrupted(arguments: list[str], at: int) -> str:
    """The training on a rank that gets SIGTERM after a step."""

    def told(_: Any, step: int, **facts: float) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with followed(train_lm.Log, "add", told), contextlib.redirect_stdout(io.StringIO()) as printed:
        train_lm.main(arguments)
    return printed.getvalue()


def test_a_training_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    """Bit for bit on as many ranks, correctly on fewer."""
    calm, ended, fewer = folders = [tmp_path / name for name in ("calm", "ended", "fewer")]
    for folder in folders[:2]:
        folder.mkdir()
    pool(2).run(train_lm.main, given(calm, "--sequence", 2))
    printed = pool(2).run(interrupted, given(ended, "--sequence", 2), 2)
    assert "stopped after step 3, which is saved: the same command goes on" in printed[0]
    assert names(ended) == ["step-00000002.pt", "step-00000003.pt"]  # the step that it was in was ended, and saved
    assert steps(ended) == [1, 2, 3]
    shutil.copytree(ended, fewer)
    for _ in range(2):  # again, though it is finished
        pool(2).run(train_lm.main, given(ended, "--sequence", 2))
        assert lines(ended) == lines(calm)
        assert names(ended) == ["step-00000003.pt", "step-00000004.pt"]
    alone(train_lm.main, given(fewer))
    for one, other in zip(lines(fewer), lines(calm), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


# --- what is wrong ----------------------------------------------------------------------------------------------


def said(arguments: list[str]) -> str:
    """What a training on this rank says when it gives up."""
    try:
        train_lm.main(arguments)
    except SystemExit as refused:
        return str(refused.code)
    return "nothing"


def poisoned(arguments: list[str]) -> str:
    """The fourth step of the optimizer makes weights NaN."""

    def then(trainer: Any, _: Any) -> None:
        if trainer.step == 3:
            weights, step = trainer.model.embed.weight, trainer.optimizer.step
            trainer.optimizer.step = lambda: (step(), weights.data.to_local().fill_(math.nan))

    with followed(train_lm.Trainer, "gradients", then):
        return said([*arguments, "--save-every", "1"])


def overflowing(arguments: list[str]) -> str:
    """The gradients of the fourth step are infinite, its loss is not."""

    def then(trainer: Any, _: Any) -> None:
        if trainer.step == 3:
            trainer.model.embed.weight.grad.to_local()[0, 0] = math.inf

    with followed(train_lm.Trainer, "gradients", then):
        return said([*arguments, "--save-every", "1"])


def without_room(arguments: list[str]) -> str:
    """No file may grow beyond a few kilobytes after the first checkpoint."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def then(*_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))

    try:
        with followed(train_lm.Checkpoints, "save", then):
            return said(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_failures_leave_the_last_good_checkpoint(tmp_path: Path) -> None:
    arguments = given(tmp_path)
    told = alone(without_room, arguments)
    assert re.match(r"error: step 4 could not be saved; the last good checkpoint is .*step-00000002", told)
    assert "is from another training: dim was 16 and is 32" in alone(said, [*arguments, "--dim", "32"])
    assert alone(said, [*arguments, "--sequence", "3"]).startswith("error: 1 ranks: --sequence must divide")


class Code:
    """Leaves a file behind if it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("it ran",)


def damages(content: bytes) -> dict[str, bytes]:
    at = content.index(b"data/0") + 100  # in a tensor: its bytes follow their name
    torch.save({"facts": {}, "model": Code()}, code := io.BytesIO())
    return {
        "damaged or incomplete": content[: len(content) // 2],
        "wrong checksum of .*/data/0": content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :],
        "more in it than tensors": code.getvalue(),
    }


def test_a_bad_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, in one line; no code in it runs, and what is there stays."""
    monkeypatch.chdir(tmp_path)
    arguments = given(tmp_path)
    pool(2).run(interrupted, arguments, 2)
    before, last = (tmp_path / f"out/step-0000000{step}.pt" for step in (2, 3))
    for why, content in damages(last.read_bytes()).items():
        last.write_bytes(content)
        for told in pool(2).run(said, arguments):
            assert re.search(rf"the checkpoint {last} cannot be read \(.*{why}", told)
            assert told.endswith("remove it, and training goes on from the one before")
            assert "\n" not in told
    assert names(tmp_path) == [before.name, last.name]
    assert not list(tmp_path.rglob("it ran"))
    last.unlink()
    assert pool(2).run(said, arguments) == ["nothing"] * 2
    assert names(tmp_path) == [before.name, "step-00000004.pt"]


def test_a_training_goes_on_with_more_steps_and_its_model_is_loaded(tmp_path: Path) -> None:
    alone(train_lm.main, given(tmp_path))
    with (tmp_path / "out/log.jsonl").open("a") as log:
        log.write('{"step": 5, "lo')  # a torn line is left out
    alone(train_lm.main, given(tmp_path, "--steps", 6))
    assert steps(tmp_path) == [1, 2, 3, 4, 4, 5, 6, 6]
    assert names(tmp_path) == ["step-00000004.pt", "step-00000006.pt"]
    model, last = map(train_lm.LongNetLM.from_checkpoint, (tmp_path / "out", tmp_path / "out/step-00000006.pt"))
    assert all(map(torch.equal, model.parameters(), last.parameters()))
    tokens = torch.tensor([[BEGIN, *b"word1 in line"]])
    assert model(tokens, train_lm.shifted(tokens)).mean() < math.log(BYTES)


def test_a_training_begins_with_a_model_of_another_pattern(tmp_path: Path) -> None:
    """At a learning rate of 0, it stays what it was."""
    alone(train_lm.main, given(tmp_path))
    dense, start = train_lm.LongNetLM.from_checkpoint(tmp_path / "out"), tmp_path / "start.pt"
    pattern = da.Pattern([da.Window(3), da.Dense(heads=[1])])
    config = {**dense.config.to_dict(), "pattern": pattern.to_dict()}
    torch.save({"config": config, "model": dense.state_dict()}, start)
    plain = [word for word in given(tmp_path, "--from", start, "--lr", 0, "--steps", 1) if word[:6] != "--dim="]
    plain = [word for word in plain if not word.startswith(("--depth", "--heads"))]
    del plain[plain.index("--segments") : plain.index("--rates") + 3]
    plain[plain.index("--out") + 1] = str(tmp_path / "fine")
    alone(train_lm.main, plain)
    found = train_lm.LongNetLM.from_checkpoint(tmp_path / "fine")
    assert found.config.pattern == pattern
    assert all(map(torch.equal, found.parameters(), dense.parameters()))
    torch.save({"config": config, "model": dense.state_dict(), "tokenizer": "words"}, start)
    assert "was trained with --tokenizer words: so go on" in alone(said, [*plain, "--out", str(tmp_path / "other")])


def test_other_texts_are_another_training(tmp_path: Path) -> None:
    arguments = given(tmp_path)
    alone(interrupted, arguments, 1)
    (tmp_path / "text" / "03.txt").write_text("something else")
    told = alone(said, arguments)
    assert "is from another training: texts was 11 documents of " in told
    assert told.endswith("; use the old values, or another folder")


WHOLE = "argument --{0}: '{2}' is not a whole number of {1} or more, such as "
BAD = {
    "--segments 8": "--segments and --rates belong together", "--segments 8 --rates 0": WHOLE.format("rates", 1, 0),
    "--lr nan": "argument --lr: 'nan' is not a number of 0 or more",
    "--device cuda": "--device cuda needs a GPU per rank, 1 here, and torch sees 0",
    "--from x --heads 2": "--from names a whole model: leave out --size, --dim",
    "--from x --pattern Dense()": "--from names a whole model: leave out --size, --dim",
    "--pattern Dense() --segments 8 --rates 1": "--pattern says all branches: leave out --segments and --rates",
    "--pattern Sparse()": "argument --pattern: 'Sparse()' is no pattern (there is no Sparse: use Pattern",
    "--ask = --tokenizer words": "--ask needs bytes: leave out --tokenizer",
    "--steps many": WHOLE.format("steps", 1, "many"), "--tokens 1": WHOLE.format("tokens", 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("wrong", BAD)
def test_bad_arguments(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False), pytest.raises(SystemExit, match="2"):
        train_lm.arguments(["text", "--out", "out", *wrong.split()])
    told = capsys.readouterr().err
    assert told.startswith(f"error: {BAD[wrong]}")
    assert told.count("\n") == 1


def test_lengths_are_checked_before_training(tmp_path: Path) -> None:
    told = alone(said, given(tmp_path, "--evaluate", 40, 10_000))
    assert told.startswith("error: held-out text does not fill a row of 10000: it has ")
    assert not (tmp_path / "out").exists()
    rows = held_out_rows([torch.arange(start, start + 7) for start in range(0, 70, 7)], [4, 60], most=10)
    assert [rows[4][index][0].tolist() for index in range(2)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert (rows[4].count, rows[60].count, rows[60][0][0].tolist()) == (2, 1, [list(range(60))])
    with pytest.raises(ValueError, match="in held-out rows of 2, no token has a next one: give longer texts or rows"):
        held_out_rows([torch.tensor([1])] * 4, [2])


def said_apart(folders: list[str], arguments: list[str]) -> str:
    """What each rank says whose text is in another place."""
    return said([folders[dist.get_rank()], *arguments[1:]])


def test_what_is_wrong_on_one_rank_stops_all(tmp_path: Path) -> None:
    arguments, other = given(tmp_path), corpus(tmp_path / "other")
    (other / "03.txt").write_text("something else")
    (tmp_path / "file").touch()  # only the first rank writes
    for told, says in (
        (pool(2).run(said_apart, [arguments[0], "nowhere"], arguments), "No such file or directory: 'nowhere'"),
        (pool(2).run(said_apart, [arguments[0], str(other)], arguments), "texts is 11 documents of "),
        (pool(2).run(said, [*arguments, "--out", str(tmp_path / "file")]), "exists|Not a directory"),
    ):
        assert all(re.search(says, text) for text in told)


@pytest.mark.parametrize("fault", [poisoned, overflowing])
def test_what_is_not_finite_is_never_saved(tmp_path: Path, fault: Any) -> None:
    told = alone(fault, given(tmp_path))
    assert told.startswith("error: step 4 has a loss, gradients or weights that are not finite (loss ")
    assert told.endswith(f"the last good checkpoint is {tmp_path}/out/step-00000003.pt")


def words(folder: Path) -> Path:
    """A tokenizer of the words of the corpus, as a folder of Hugging Face's."""
    tokenizers = pytest.importorskip("tokenizers")  # a machine with a GPU may have little beside torch
    known = {word: index for index, word in enumerate(["[unk]", "in", "line", *(f"word{i}" for i in range(7))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[unk]")
    fast.save_pretrained(folder / "words")
    return folder / "words"


def test_a_tokenizer_a_sample_and_a_plot(tmp_path: Path) -> None:
    more = ["--tokenizer", words(tmp_path), "--tokens", 8, "--sample", 5, "--plot", "--checkpointing"]
    assert alone(said, given(tmp_path, *more)) == "nothing"
    assert 0 < lines(tmp_path)[-1]["bits_per_byte_8"] < 8
    assert "</svg>" in (tmp_path / "out/loss.svg").read_text()
    (tmp_path / "text" / "99.txt").write_bytes(b"caf\xe9 and more words")
    assert "is not UTF-8" in alone(said, given(tmp_path, *more))


def test_a_sample_goes_on_from_a_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for prompt, begins in (["--prompt", "word6 is"], "word6 is"), ([], "word0 in line 0\nword0"):  # a training text
        train_lm.main(given(tmp_path, "--steps", 1, "--sample", 3, *prompt))
        said.append(capfd.readouterr().out)
        assert f"\n{begins}" in said[-1]
    assert re.search(r"^step 1/1: \d\.\d{3} bits per token, [\d,]+ tokens/s, 0 s left$", said[0], re.MULTILINE)
    with pytest.raises(SystemExit, match="0"):
        train_lm.arguments(["--help"])
    told = " ".join(capfd.readouterr().out.split())
    assert "--steps STEPS in all; give more, and a training goes on [default: 450]" in told


def answering(arguments: list[str]) -> None:
    """Gradients are those of a loss in which bytes after digits weigh more."""
    trainer = train_lm.Trainer(options := train_lm.arguments(arguments), ANY)
    rows = PackedRows(tokens_of(read_texts(options.text), BYTES), options.tokens, options.seed)
    plain = trainer.gradients(rows)
    found = [parameter.grad.full_tensor().clone() for parameter in trainer.model.parameters()]  # type: ignore[union-attr]
    trainer.optimizer.zero_grad()
    row, documents = rows[0]
    losses, counted, answers = trainer.losses(row, documents)
    after_a_digit = torch.tensor([[chr(x).isdigit() for x in row[0].tolist()]])
    assert torch.equal(answers, after_a_digit & counted)
    assert plain == pytest.approx(float(losses.sum() / counted.sum()), rel=1e-6)
    ((losses * torch.where(answers, train_lm.ANSWER, 1.0)).sum() / counted.sum()).backward()
    for parameter, gradient in zip(trainer.model.parameters(), found, strict=True):
        assert error(gradient, parameter.grad.full_tensor()) < 1e-5  # type: ignore[union-attr]


ANY = train_lm.LMConfig(BYTES, 16, 2, 2, da.Pattern([da.Dense()]))


def test_answers_weigh_more(tmp_path: Path) -> None:
    alone(answering, given(tmp_path, "--rows", 1, "--ask", "0123456789"))


def judged(arguments: list[str]) -> tuple[float, float]:
    """Of a model that is sure of line feeds, and of the bytes after them."""
    trainer = train_lm.Trainer(options := train_lm.arguments(arguments), ANY)
    losses = trainer.losses

    def sure(row: torch.Tensor, documents: torch.Tensor) -> Any:
        _, counted, answers = losses(row, documents)
        is_right = torch.isin(train_lm.shifted(row, documents), torch.tensor([*b"\nw"]))
        return torch.where(is_right, 0.5, 4.0) * counted, counted, answers

    trainer.losses = sure  # type: ignore[method-assign]
    rows = PackedRows(tokens_of(read_texts(options.text), BYTES), options.tokens)
    return trainer.judged(rows)


def test_answers_are_known_that_are_likelier_than_all_else(tmp_path: Path) -> None:
    """A line feed follows the second digit of every line."""
    bits, known = alone(judged, given(tmp_path, "--ask", "0123456789"))
    assert 0.5 / math.log(2) < bits < 4 / math.log(2)
    assert 0.4 < known < 0.6


def test_a_pattern_for_each_layer_short_rows_and_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = ["--pattern", "Window(3)", "Dense(), Prefix(1)", "--short", 2, "--ask", "0123456789", "--evaluate", 20, 40]
    arguments = [word for word in given(tmp_path, *more) if word != "--tokens=40"]
    del arguments[arguments.index("--segments") : arguments.index("--rates") + 3]
    train_lm.main([*arguments, "--tokens", "128"])
    patterns = train_lm.LongNetLM.from_checkpoint(tmp_path / "out").config.patterns
    assert patterns == (da.Pattern([da.Window(3)]), da.Pattern([da.Dense(), da.Prefix(1)]))
    table = (
        r"^held-out rows of   bits per byte   answers known\n +20 +\d\.\d{3} +\d+%\n +40 +\d\.\d{3} +\d+%\nWitten-Bell"
    )
    assert re.search(table, capfd.readouterr().out, re.MULTILINE)
    assert "is from another training: short was 2 and is 1" in alone(said, [*arguments, "--tokens=128", "--short=1"])


# --- text -------------------------------------------------------------------------------------------------------


def test_bad_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\0\0")
    for name, says in (("empty", "got 0 in"), ("picture.txt", "it has zero bytes")):
        with pytest.raises(ValueError, match=says):
            read_texts([tmp_path / name])
    with pytest.raises(ValueError, match="token 256 is outside the vocabulary of 100"):
        tokens_of([b"text"], 100)
    with pytest.raises(ValueError, match="has 5 tokens, and a row 40"):
        PackedRows(tokens_of([b"text"], BYTES), 40)


def test_rows_hold_every_document(tmp_path: Path) -> None:
    texts = read_texts([corpus(tmp_path / "text")])
    rows = PackedRows(tokens_of(texts, BYTES), 40, seed=3)
    found = [rows[i] for i in range(2 * rows.count)]
    for row, ends in found:
        begins = (row[0] == BEGIN).nonzero().flatten().tolist()
        assert ends.tolist() == sorted({0, *begins, 40})
    rounds = [torch.cat([row[0] for row, _ in some]) for some in (found[: rows.count], found[rows.count :])]
    for tokens in rounds:
        assert Counter(tokens[tokens < BEGIN].tolist()) <= Counter(b"".join(texts))
    assert not torch.equal(*rounds), "another order"
    assert torch.equal(found[4][0], rows[4][0])


def test_first_rows_are_joined_of_pieces() -> None:
    """Each from another place, and cut off from its neighbours; all of a round are the whole text."""
    text = torch.arange(1000)
    rows, plain = (PackedRows([text[:300], text[300:]], 128, seed=3, short=short) for short in (7, 0))
    found = [rows[index] for index in range(7)]
    for _, ends in found:
        assert {0, 64, 128} <= {*ends.tolist()}
    assert sum(bool(row[0, 63] + 1 == row[0, 64]) for row, _ in found) <= 1
    assert len(torch.cat([row[0] for row, _ in found]).unique()) == 7 * 128
    for one, other in zip(rows[7], plain[7], strict=True):
        assert torch.equal(one, other)
    assert PackedRows([text], 40, short=1)[0][0].tolist() == [[*range(40)]]


def test_stories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has two names in one text; held-out texts are stories of many."""
    monkeypatch.setattr(sys, "argv", ["stories.py", str(tmp_path / "stories")])
    runpy.run_path(str(EXAMPLES / "stories.py"), run_name="__main__")
    texts = read_texts([tmp_path / "stories"])
    assert (len(texts), {*map(len, texts)}) == (stories.TEXTS, {stories.SIZE})
    people = [{*re.findall(rb"[A-Z][a-z]", text)} for text in texts]
    for some in people:
        assert len({name[:1] for name in some}) == len(some)
    assert min(map(len, people[9::10])) > 20
    assert len({*map(frozenset, people)}) == len(texts)


@pytest.mark.parametrize("width", [8, 2])
def test_witten_bell_by_hand(width: int) -> None:
    """1 follows 0 at the beginning, and 2 follows 1; in the other text the contexts are 0, 1, 1 and 3, which is new."""
    alone = [(count + 2 * 2.0**-width) / 4 for count in (1, 0)]  # of a byte that was there, and of one that was not
    shares = [(1 + alone[0]) / 2, alone[0] / 2, alone[1] / 2, alone[0]]
    found = witten_bell.bits_per_byte(bytes([1, 2]), bytes([1, 1, 3, 1]), (1,), width=width)
    assert found[1] == pytest.approx(-sum(map(math.log2, shares)) / 4, rel=1e-12)
