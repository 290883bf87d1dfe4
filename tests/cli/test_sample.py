"""`sample`: the tokens of the model, from the newest checkpoint of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.models import LMConfig, LongNetLM
from dilated_attention.models.generate import BEGIN
from tests.cli.conftest import Refused, Run

PATTERN = DilatedPattern.longnet([8, 16], [1, 2])


def model(vocab_size: int = BEGIN + 1) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(LMConfig(vocab_size, 16, 1, 2, PATTERN))


def save(file: Path, model: LongNetLM, **more: object) -> None:
    torch.save({"config": model.config.to_dict(), "model": model.state_dict(), "step": 7, **more}, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "step-00000003.pt", model(100))
    save(tmp_path / "step-00000007.pt", model())
    return tmp_path


def test_it_writes_what_the_model_does(run: Run, folder: Path) -> None:
    def found(*more: object) -> tuple[list[int], str]:
        ran = run("sample", folder, "--max-new-tokens", 30, "--json", *more)
        told = json.loads(ran.out)
        assert (ran.code, told["step"], told["checkpoint"]) == (0, 7, str(folder / "step-00000007.pt"))
        return told["tokens"], told["text"]

    prompt = [BEGIN, *"día".encode()]
    greedy = model().generate_tokens([prompt], 30, stop=BEGIN)[0].tolist()
    assert found("--prompt", "día", "--temperature", 0)[0] == greedy
    drawn = torch.Generator().manual_seed(5)
    expected = model().generate_tokens([[BEGIN]], 30, temperature=0.5, generator=drawn, stop=BEGIN)[0].tolist()
    tokens, text = found("--temperature", 0.5, "--seed", 5)
    assert tokens == expected != found("--temperature", 0.5)[0]
    assert text == bytes(x for x in tokens if x < BEGIN).decode(errors="replace")
    assert run("sample", folder, "--max-new-tokens", "30", "--temperature", 0.5, "--seed", 5).out == f"{text}\n"


def test_what_is_refused(refused: Refused, folder: Path, tmp_path: Path) -> None:
    assert "there is no checkpoint at 'nowhere': name" in refused("sample", "nowhere")
    assert "it was trained with a tokenizer, or with another" in refused("sample", folder / "step-00000003.pt")
    assert "'-1' is not a number of 0 or more" in refused("sample", folder, "--temperature=-1")
    save(tmp_path / "step-00000009.pt", model(), tokenizer="words")
    assert "step-00000009.pt was trained with a tokenizer: give --tokenizer words" in refused("sample", folder)
