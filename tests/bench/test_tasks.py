"""benchmarks/tasks.py on made-up packages and a made-up genome, on a CPU: what is held out, and what is measured."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F

from dilated_attention import DilatedPattern
from dilated_attention.models import LongNetLM

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import tasks  # noqa: E402
import tasks_data  # noqa: E402
import tasks_shown  # noqa: E402

SHRINK = 512  # windows of 16, 64 and 256 bytes, and of 16 and 2048 bases; segments from 4
SMALL = ["--shrink", SHRINK, "--seconds", "0.001", "--dim", "16", "--depth", "2", "--heads", "2", "--device", "cpu"]
RUNS = [("code", "longnet-32k"), ("code", "dense-8k"), ("genome", "longnet-1m")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages, one of which is large, one a single file and all partly the same; and a genome."""
    found, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)

    def write(name: str, lines: int) -> None:
        (found / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (found / "code" / name).write_text("".join(f"def name_{draw.randrange(99)}\n" for _ in range(lines)))

    for package in range(20):
        for file in ("b.py", "inner/a.py", "a.py"):
            write(f"package{package}/{file}", 2000 if package == 3 else 15)
        (found / f"code/package{package}/same.py").write_text("# a licence that all of them have\n" * 9)
    write("single.py", 20)
    bases = "".join(draw.choice("ACGT") for _ in range(3000)) + "NNN"
    (found / "genome.fna").write_text(f">short\nACGT\n>made up\n{bases[:1500].lower()}\n{bases[1500:]}\n")
    return found


def run(folder: Path, task: str, *runs: str) -> None:
    data = ["--code", folder / "code"] if task == "code" else ["--fasta", folder / "genome.fna"]
    tasks.main([str(word) for word in (task, *runs, "--out", folder / "out", *data, *SMALL)])


def result(folder: Path, task: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / f"{task}-{name}.json").read_text())
    return found


def test_nothing_of_a_held_out_package_is_trained_on(folder: Path) -> None:
    data = tasks_data.code([folder / "code"], 7, 256)
    text, held_out = data.text.numpy().tobytes(), data.facts["held_out"]
    assert 1 < len(held_out) < 5
    assert "package3" not in held_out  # it has more than a tenth of all bytes
    for file in (folder / "code").rglob("*.py"):
        package = file.relative_to(folder / "code").parts[0].removesuffix(".py")
        assert (file.read_bytes() in text) == (package not in held_out or file.name == "same.py"), file
    assert text.count(b"# a licence") == 9  # of twenty copies one is kept
    first, size = next(iter(held_out.items()))
    whole = b"".join((folder / f"code/{first}" / x).read_bytes() for x in ("a.py", "b.py", "inner/a.py"))
    assert data.held_out.numpy().tobytes()[:size] in whole
    assert sum(held_out.values()) == data.held_out.numel() == 256 * len(data.held_out)


def direct(trainer: Any, window: int) -> torch.Tensor:
    """The bits of each held-out symbol, window by window, from the logits of a plain model."""
    config = trainer.config
    if trainer.run.attention == "dense":
        config = replace(config, pattern=DilatedPattern.longnet([window], [1]))
    model, bits = LongNetLM(config), []
    model.load_state_dict(get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True)))
    for labels in trainer.data.held_out.long().split(window, dim=1):
        inputs = torch.cat((torch.full_like(labels[:, :1], trainer.data.begin), labels[:, :-1]), 1)
        with torch.no_grad():
            bits.append(F.cross_entropy(model(inputs).movedim(-1, 1), labels, reduction="none") / math.log(2))
    return torch.cat(bits, 1)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Any, Any]:
    """All runs; by run and window, what a direct computation finds."""
    found: dict[Any, Any] = {}
    judged = tasks.judged

    def checked(trainer: Any, windows: list[int], shortest: int) -> Any:
        found[trainer.file.stem] = {window: direct(trainer, window) for window in windows}
        return judged(trainer, windows, shortest)

    with mock.patch.object(tasks, "judged", checked):
        for task, name in RUNS:
            run(folder, task, name)
    for task in ("code", "genome"):
        run(folder, task, "baselines")
    return found


@pytest.mark.parametrize(("task", "name"), RUNS)
def test_bits_by_position_are_those_of_a_direct_computation(
    folder: Path, expected: dict[Any, Any], task: str, name: str
) -> None:
    found, wanted = result(folder, task, name), expected[f"{task}-{name}"]
    assert list(found["held_out"]) == [str(window) for window in wanted]
    for window, bits in wanted.items():
        told, length = found["held_out"][str(window)], min(window, bits.shape[1])
        assert told["bits"] == pytest.approx(bits.mean().item(), rel=1e-4)
        places = torch.arange(bits.shape[1]) % length
        kept = torch.arange(bits.shape[1]) < bits.shape[1] // length * length
        bins = [range(one["first"], one["last"] + 1) for one in told["by_position"]]
        assert [place for one in bins for place in one] == list(range(length))
        for one, inside in zip(told["by_position"], bins, strict=True):
            chosen = kept & (places >= inside.start) & (places < inside.stop)
            assert one["bits"] == pytest.approx(bits[:, chosen].mean().item(), rel=1e-4)


def test_tables_and_pictures(folder: Path, expected: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no run that came to its end"):
        tasks_shown.show(tmp_path, tmp_path)
    (tmp_path / "results.md").write_text((ROOT / "docs/results.md").read_text(encoding="utf-8"), encoding="utf-8")
    for _ in range(2):  # the second time changes nothing
        tasks_shown.show(folder / "out", tmp_path)
        page = (tmp_path / "results.md").read_text(encoding="utf-8")
        assert page.count("| longnet-32k |") == page.count("| dense-8k |") == 1
    bits = result(folder, "code", "dense-8k")["held_out"]["16"]["bits"]
    (line,) = (x for x in page.splitlines() if x.startswith("| dense-8k |") and "M |" in x)
    assert f" {bits:.3f} " in line
    assert len([*tmp_path.glob("tasks-*.svg")]) == 4


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for task in tasks.TASKS:
        first, last = tasks_shown.marks(task)
        shown = page.partition(first)[2].partition(last)[0]
        told = tasks_shown.section(ROOT / "benchmarks/results/tasks", task)
        assert shown == told, "run: python benchmarks/tasks.py draw --out benchmarks/results/tasks"
