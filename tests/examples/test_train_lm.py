"""The training example: gradients on any mesh, going on after SIGTERM, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dilated_attention.models.text import BEGIN, BYTES, PackedRows, held_out_rows, read_texts, summary, tokens_of
from dilated_attention.models.training import read_lines
from dilated_attention.ranks import pool
from dilated_attention.testing import error

pytestmark = pytest.mark.usefixtures("pools_that_end")
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_lm  # noqa: E402
import witten_bell  # noqa: E402

SMALL = {
    "dim": 16, "depth": 2, "heads": 2, "segments": (8, 16), "rates": (1, 2), "tokens": 40, "rows": 4, "steps": 4,
    "save-every": 2,
}  # fmt: skip


def corpus(folder: Path) -> Path:
    """Documents of a few words each."""
    folder.mkdir(exist_ok=True)
    for index in range(12):
        words = [f"word{(index * i) % 7} in line {i}\n" for i in range(3 + index)]
        (folder / f"{index:02}.txt").write_text("".join(words))
    return folder


def given(folder: Path, *more: Any) -> list[str]:
    small: list[Any] = []
    for name, value in SMALL.items():
        small += [f"--{name}", *(value if isinstance(value, tuple) else [value])]
    words = [corpus(folder / "text"), "--out", folder / "out", "--device", "cpu", *small, *more]
    return [str(word) for word in words]


def names(folder: Path) -> list[str]:
    """The checkpoints, finished or not."""
    return sorted(file.name for file in (folder / "out").glob("*.pt"))


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]


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


@pytest.mark.parametrize(("ranks", "sequence"), [(2, 2), (4, 4), (4, 2)], ids=["2", "4", "2x2"])
def test_loss_and_gradients_are_those_of_one_rank(ranks: int, sequence: int, tmp_path: Path) -> None:
    expected = pool(1).run(gradients, given(tmp_path))[0]
    for found in pool(ranks).run(gradients, given(tmp_path, "--sequence", sequence)):
        assert max(error(x, y) for x, y in zip(found, expected, strict=True)) < 1e-12


def half(arguments: list[str]) -> list[torch.Tensor]:
    """`gradients` in the precision of a GPU: FSDP then copies what a block is given."""
    policy = train_lm.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with mock.patch.object(train_lm, "MixedPrecisionPolicy", return_value=policy):
        return gradients(arguments)


def test_half_precision(tmp_path: Path) -> None:
    expected, *others = pool(2).run(gradients, given(tmp_path, "--sequence", 2))[0]
    loss, *found = pool(2).run(half, given(tmp_path, "--sequence", 2))[0]
    assert 0 < error(loss, expected) < 0.01
    assert max(error(x, y) for x, y in zip(found, others, strict=True)) < 0.05


def interrupted(arguments: list[str], at: int) -> None:
    """The training on a rank that gets SIGTERM after a step."""
    add = train_lm.Log.add

    def told(self: Any, step: int, **facts: float) -> None:
        add(self, step, **facts)
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(train_lm.Log, "add", told):
        train_lm.main(arguments)


def test_a_training_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    """Bit for bit on as many ranks, correctly on fewer."""
    calm, ended, fewer = (tmp_path / name for name in ("calm", "ended", "fewer"))
    calm.mkdir()
    ended.mkdir()
    pool(2).run(train_lm.main, given(calm, "--sequence", 2))
    pool(2).run(interrupted, given(ended, "--sequence", 2), 2)
    assert names(ended) == ["step-00000002.pt", "step-00000003.pt"]  # the step that it was in was ended, and saved
    assert [line["step"] for line in lines(ended)] == [1, 2, 3]
    shutil.copytree(ended, fewer)
    pool(2).run(train_lm.main, given(ended, "--sequence", 2))
    pool(1).run(train_lm.main, given(fewer))
    assert lines(ended) == lines(calm)
    pool(2).run(train_lm.main, given(calm, "--sequence", 2))  # again, though it is finished
    assert lines(ended) == lines(calm)
    assert names(ended) == ["step-00000003.pt", "step-00000004.pt"]
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
    """The second step of the optimizer makes weights NaN."""
    step, taken = torch.optim.AdamW.step, []

    def then(self: Any, **given: Any) -> None:
        step(self, **given)
        taken.extend([] if given else [1])  # the other steps are those by which PyTorch makes the optimizer's state
        if len(taken) == 2:
            self.param_groups[0]["params"][0].data.to_local().fill_(math.nan)

    with mock.patch.object(torch.optim.AdamW, "step", then):
        return said([*arguments, "--save-every", "1"])


def overflowing(arguments: list[str]) -> str:
    """The gradients of the fourth step are infinite, its loss is not."""
    gradients = train_lm.Trainer.gradients

    def then(self: Any, rows: Any) -> Any:
        loss = gradients(self, rows)
        if self.step == 3:
            self.model.embed.weight.grad.to_local()[0, 0] = math.inf
        return loss

    with mock.patch.object(train_lm.Trainer, "gradients", then):
        return said([*arguments, "--save-every", "1"])


def without_room(arguments: list[str]) -> str:
    """No file may grow beyond a few kilobytes after the first checkpoint."""
    save, limits = train_lm.Checkpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def then(self: Any, step: int, state: Any) -> None:
        self.finish()
        if step > 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        save(self, step, state)

    try:
        with mock.patch.object(train_lm.Checkpoints, "save", then):
            return said(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_failures_leave_the_last_good_checkpoint(tmp_path: Path) -> None:
    arguments = given(tmp_path)
    told = pool(1).run(without_room, arguments)[0]
    assert told.startswith("error: step 4 could not be saved; the last good checkpoint is ")
    assert "step-00000002" in told
    other = pool(1).run(said, [*arguments, "--dim", "32"])[0]
    assert "is from another training: dim was 16 and is 32" in other
    assert pool(1).run(said, [*arguments, "--sequence", "3"])[0].startswith("error: 1 ranks: --sequence must divide")


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
    last = tmp_path / "out" / "step-00000003.pt"
    whole = last.read_bytes()
    for why, content in damages(whole).items():
        last.write_bytes(content)
        for told in pool(2).run(said, arguments):
            assert re.search(why, told)
            assert f"the checkpoint {last} cannot be read (" in told
            assert told.endswith(f"remove it, and training goes on from {last.with_name('step-00000002.pt')}")
            assert "\n" not in told
    assert names(tmp_path) == ["step-00000002.pt", "step-00000003.pt"]
    assert not list(tmp_path.rglob("it ran"))
    last.unlink()
    assert pool(2).run(said, arguments) == ["nothing"] * 2
    assert names(tmp_path) == ["step-00000002.pt", "step-00000004.pt"]


def test_a_training_goes_on_with_more_steps_and_its_model_is_loaded(tmp_path: Path) -> None:
    pool(1).run(train_lm.main, given(tmp_path))
    pool(1).run(train_lm.main, given(tmp_path, "--steps", 6))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 4, 5, 6, 6]
    checkpoint = torch.load(tmp_path / "out/step-00000006.pt", weights_only=True)
    model = train_lm.LongNetLM(train_lm.LMConfig.from_dict(checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    tokens = torch.tensor([[BEGIN, *b"word1 in line"]])
    assert model(tokens, train_lm.shifted(tokens)).sum() < len(tokens[0]) * math.log(BYTES)


def test_other_texts_are_another_training(tmp_path: Path) -> None:
    arguments = given(tmp_path)
    pool(1).run(interrupted, arguments, 1)
    (tmp_path / "text" / "03.txt").write_text("something else")
    told = pool(1).run(said, arguments)[0]
    assert "is from another training: texts was 11 documents of " in told
    assert told.endswith("; use the old values, or another folder")
    one, other = torch.arange(5, dtype=torch.int32), torch.arange(7, dtype=torch.int32)
    split = [one[:2], torch.cat((one[2:], other))]
    assert len({summary(x) for x in ([one, other], [other, one], split, [one])}) == 4


def test_a_torn_line_of_the_log_is_left_out(tmp_path: Path) -> None:
    arguments, log = given(tmp_path), tmp_path / "out" / "log.jsonl"
    pool(1).run(interrupted, arguments, 2)
    with log.open("a") as file:
        file.write('{"step": 4, "lo')
    assert pool(1).run(said, arguments)[0] == "nothing"
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 4]
    for wrong in ('{"step": 1\n{"step": 2}\n', "3\n"):
        log.write_text(wrong)
        with pytest.raises(ValueError, match=r"line 1 of .* is not JSON with a step"):
            read_lines(log)


WHOLE = "argument --{}: give a whole number of {} or more, got '{}'"
BAD = {
    "--rates 1 2": "--segments and --rates belong together", "--segments 8": "--segments and --rates belong together",
    "--segments 8 --rates 0": WHOLE.format("rates", 1, 0),
    "--lr nan": "argument --lr: give a finite number of 0 or more, got 'nan'",
    "--device cuda": "--device cuda needs a GPU per rank, 1 here, and torch sees 0",
    "--device cuda:0": "argument --device: invalid",
    "--steps -1": WHOLE.format("steps", 1, -1), "--steps many": WHOLE.format("steps", 1, "many"),
    "--seed 1e99": "argument --seed: give a whole number",
    **{f"--{name} 0": WHOLE.format(name, 1, 0)
       for name in ("dim", "depth", "heads", "rows", "steps", "sequence", "save-every")},
    **{f"--{name} 1": WHOLE.format(name, 2, 1) for name in ("tokens", "evaluate")},
    **{f"--{name} -1": WHOLE.format(name, 0, -1) for name in ("warmup", "sample")},
}  # fmt: skip


@pytest.mark.parametrize("wrong", BAD)
def test_bad_arguments(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False), pytest.raises(SystemExit, match="2"):
        train_lm.arguments(["text", "--out", "out", *wrong.split()])
    told = capsys.readouterr().err
    assert told.startswith(f"error: {BAD[wrong]}")
    assert told.count("\n") == 1


def test_lengths_are_checked_before_training(tmp_path: Path) -> None:
    told = pool(1).run(said, given(tmp_path, "--evaluate", 40, 10_000))[0]
    assert told.startswith("error: held-out text does not fill a row of 10000: the text has ")
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
    told, own = pool(2).run(said_apart, [arguments[0], "nowhere"], arguments)
    assert own == "error: nowhere does not exist"
    assert told.endswith("rank 1 cannot run it: ValueError: nowhere does not exist")
    (other / "03.txt").write_text("something else")
    for told in pool(2).run(said_apart, [arguments[0], str(other)], arguments):
        assert "texts is 11 documents of " in told
    (tmp_path / "file").touch()  # only the first rank writes
    for told in pool(2).run(said, [*arguments, "--out", str(tmp_path / "file")]):
        assert "exists" in told or "Not a directory" in told


@pytest.mark.parametrize(("fault", "step"), [(poisoned, 2), (overflowing, 4)])
def test_what_is_not_finite_is_never_saved(tmp_path: Path, fault: Any, step: int) -> None:
    told = pool(1).run(fault, given(tmp_path))[0]
    assert told.startswith(f"error: step {step} has a loss, gradients or weights that are not finite (loss ")
    assert "): start again with a lower --lr and another --out" in told
    assert told.endswith(f"the last good checkpoint is {tmp_path / 'out'}/step-{step - 1:08}.pt"), told


def words(folder: Path) -> Path:
    """A tokenizer of the words of the corpus, as a folder of Hugging Face's."""
    tokenizers = pytest.importorskip("tokenizers")  # a machine with a GPU may have little beside torch
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[unk]": 0}, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = [file.read_text() for file in corpus(folder / "text").iterdir()]
    made.train_from_iterator(texts, tokenizers.trainers.WordLevelTrainer(special_tokens=["[unk]"]))
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[unk]")
    fast.save_pretrained(folder / "words")
    return folder / "words"


def test_a_tokenizer_a_sample_and_a_plot(tmp_path: Path) -> None:
    more = ["--tokenizer", words(tmp_path), "--tokens", 8, "--sample", 5, "--plot", "--checkpointing"]
    assert pool(1).run(said, given(tmp_path, *more)) == ["nothing"]
    last = json.loads((tmp_path / "out/log.jsonl").read_text().splitlines()[-1])
    assert 0 < last["bits_per_byte_8"] < 8
    assert "</svg>" in (tmp_path / "out/loss.svg").read_text()
    (tmp_path / "text" / "99.txt").write_bytes(b"caf\xe9 and more words")
    assert "is not UTF-8" in pool(1).run(said, given(tmp_path, *more))[0]


def test_a_sample_goes_on_from_a_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for prompt, begins in (["--prompt", "word6 is"], "word6 is"), ([], "word0 in line 0\nword2"):
        train_lm.main(given(tmp_path, "--steps", 1, "--sample", 3, *prompt))
        assert f"\n{begins}" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        train_lm.arguments(["--help"])
    assert "(default: 450)" in " ".join(capfd.readouterr().out.split())


# --- text -------------------------------------------------------------------------------------------------------


def test_bad_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\0\0")
    for name, says in (("empty", "got 0 in"), ("nowhere", "does not exist"), ("picture.txt", "it has zero bytes")):
        with pytest.raises(ValueError, match=says):
            read_texts([tmp_path / name])
    with pytest.raises(ValueError, match="token 256 is outside the vocabulary of 100"):
        tokens_of([b"text"], 100)
    with pytest.raises(ValueError, match="has 5 tokens, and a row 40"):
        PackedRows(tokens_of([b"text"], BYTES), 40)


def test_rows_hold_every_document(tmp_path: Path) -> None:
    texts = read_texts([corpus(tmp_path / "text")])
    rows = PackedRows(tokens_of(texts, BYTES), 40, seed=3)
    rounds = [[rows[around * rows.count + i] for i in range(rows.count)] for around in range(2)]
    for found in rounds:
        assert Counter(byte for row, _ in found for byte in row[0].tolist() if byte < BEGIN) <= Counter(b"".join(texts))
        for row, ends in found:
            begins = (row[0] == BEGIN).nonzero().flatten().tolist()
            assert ends.tolist() == sorted({0, *begins, 40})
    first, second = (torch.cat([row for row, _ in found]) for found in rounds)
    assert not torch.equal(first, second), "another order"
    assert torch.equal(first[4:5], rows[4][0])


@pytest.mark.parametrize("width", [8, 2])
def test_witten_bell_by_hand(width: int) -> None:
    texts, order = (b"abracadabra, abracadabra! " * 3, b"cadabra abra zoo"), 3
    train, held_out = (bytes(byte % 2**width for byte in text) for text in texts)
    counts: list[Any] = [defaultdict(Counter) for _ in range(order + 1)]
    seen, new = bytes(order) + train, bytes(order) + held_out
    for at in range(order, len(seen)):
        for n in range(order + 1):
            counts[n][seen[at - n : at]][seen[at]] += 1
    bits = 0.0
    for at in range(order, len(new)):
        share = 2.0**-width
        for n in range(order + 1):
            after = counts[n][new[at - n : at]]
            if after:
                share = (after[new[at]] + len(after) * share) / (sum(after.values()) + len(after))
        bits -= math.log2(share) / len(held_out)
    found = witten_bell.bits_per_byte(train, held_out, (order,), width=width)
    assert found[order] == pytest.approx(bits, rel=1e-12)
