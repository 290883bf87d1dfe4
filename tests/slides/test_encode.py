"""Many slides: one that cannot be encoded, whatever is wrong with it, takes none of the others with it."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from dilated_attention.models import SlideEncoder
from dilated_attention.slides import encode, files, maps
from tests.slides import feature_files

TILES, COORDS = feature_files.content(7, 6)
Encoded = Callable[..., encode.Outcome]


@pytest.fixture
def encoded(tmp_path: Path) -> Encoded:
    """Encodes the files in a folder, each in a batch of its own; ``maps``: with attention maps."""
    torch.manual_seed(0)
    model = SlideEncoder(6, 32, 1, 4, global_pool=True).eval()

    def run(maps: bool = False, key: str = "a") -> encode.Outcome:
        job = encode.Job(model, tmp_path / "out", key, None, 1, maps)
        outcome = encode.Outcome()
        encode.run(job, sorted((tmp_path / "in").iterdir()), outcome, tile_size=None, watch=lambda *_: None)
        encode.write_table(job, outcome, tmp_path / "out/table.csv")
        return outcome

    return run


def slide(folder: Path, name: str, **attributes: Any) -> Path:
    return feature_files.trident(folder / "in" / f"{name}.h5", TILES, COORDS, **attributes)


def rows(folder: Path) -> list[list[str]]:
    with (folder / "out/table.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))[1:]


def test_any_name(encoded: Encoded, tmp_path: Path) -> None:
    """Those that a spreadsheet would compute, that XML cannot hold (vl-convert ends the process), and not UTF-8."""
    names = ["=1+1", "+1", "-1", "@a", "\tb", "\n=", "＝1", "a\x01\x1b\ufffe", "caf\udce9", "plain"]
    for name in names:
        slide(tmp_path, name)
    outcome = encoded(maps=True)
    assert (len(outcome.encoded), outcome.failed) == (10, {})
    assert {row[0] for row in rows(tmp_path)} == {
        "'=1+1", "'+1", "'-1", "'@a", "'\tb", "'\n=", "'＝1", "a\ufffd\ufffd\ufffd", "caf\ufffd", "plain"
    }  # fmt: skip
    assert all((tmp_path / "out" / f"{name}{ending}").exists() for name in names for ending in (".h5", *maps.ENDINGS))
    assert len(encoded(maps=True).kept) == 10


def test_what_is_wrong_with_one_slide(encoded: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "changed", "memory", "also good"):
        slide(tmp_path, name)
    slide(tmp_path, "wordy", patch_size_level0="w" * 16_000)
    slide(tmp_path, "n" * 252)  # as a page it would have a longer name than there may be
    os.mkfifo(tmp_path / "in/pipe.h5")
    with h5py.File(tmp_path / "in/huge.h5", "w") as file:
        file.create_dataset("features", (10**11, 6), "f4")
        file.create_dataset("coords", (10**11, 2), "i4")
    feature_files.trident(tmp_path / "in/narrow.h5", *feature_files.content(7, 5), extractor=[0, 0])
    check = files.check_places

    def checked(one: files.Slide, *given: Any) -> str:
        if one.name == "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")
        return check(one, *given)

    look = files.look

    def looked(path: Path, *given: Any) -> files.Slide:
        found = look(path, *given)
        if path.stem == "changed":
            feature_files.trident(path, *feature_files.content(7, 5))
        return found

    monkeypatch.setattr(files, "look", looked)
    monkeypatch.setattr(files, "check_places", checked)
    outcome = encoded(maps=True)
    assert {one.name for one in outcome.encoded} == {"good", "also good"} == {row[0] for row in rows(tmp_path)}
    said = {path.stem[:9]: reason for path, reason in outcome.failed.items()}
    whys = {
        "changed": "it changed while this command was running", "memory": "can't allocate memory",
        "wordy": "its patch_size_level0 is ...", "n" * 9: "File name too long", "pipe": "it is not a file",
        "huge": "its features take", "narrow": "5 features (the file says [0 0])",
    }  # fmt: skip
    assert said.keys() == whys.keys()
    assert all(why in said[name] for name, why in whys.items())
    assert all(len(reason) <= 300 and "\n" not in reason for reason in said.values())


def test_pictures_of_others_are_not_replaced(encoded: Encoded, tmp_path: Path) -> None:
    for name in ("one", "two"):
        slide(tmp_path, name)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/one.png").write_bytes(b"a photograph")
    for drawn in (True, False, True):  # with the result of a run without maps beside it, too
        assert [path.stem for path in encoded(drawn).failed] == (["one"] if drawn else [])
        assert (tmp_path / "out/one.png").read_bytes() == b"a photograph"
    (tmp_path / "out/one.png").unlink()
    for drawn in (True, False, True):  # our own may be
        assert encoded(drawn, key=f"{drawn}").failed == {}


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: h5py.File(file, "r+").clear(), lambda file: file.write_bytes(b"")]
)
def test_a_result_that_is_gone_when_the_table_is_written(
    encoded: Encoded, tmp_path: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        slide(tmp_path, name)
    run = encode.run
    monkeypatch.setattr(encode, "run", lambda *given, **more: (run(*given, **more), damage(tmp_path / "out/one.h5")))
    (reason,) = encoded().failed.values()
    assert "one.h5 was removed or damaged before " in reason
    assert [row[0] for row in rows(tmp_path)] == ["two"]


def test_a_damaged_result_is_made_again(encoded: Encoded, tmp_path: Path) -> None:
    slide(tmp_path, "one")
    for _ in range(2):
        assert len(encoded().encoded) == 1
        with h5py.File(tmp_path / "out/one.h5", "r+") as file:
            del file["features"]
            file["features"] = [0.0]
    assert len(encoded().encoded) == 1
    with h5py.File(tmp_path / "out/one.h5", "r+") as file:
        file.attrs["key"] = [1, 2]
    assert len(encoded().encoded) == 1
