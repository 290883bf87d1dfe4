"""`encode`: one result per slide, what the model gives, and nothing computed twice.

What one slide can have wrong is tested in tests/slides.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from dilated_attention.models import SlideEncoder
from dilated_attention.slides import encode as work
from dilated_attention.slides import files
from tests.cli.conftest import Ran, Refused, Run
from tests.slides import feature_files

LENGTHS = {"long": 40, "mid": 33, "short": 5}
Encoded = Callable[..., Ran]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(SlideEncoder(6, 32, 2, 4, global_pool=False).state_dict(), tmp_path / "slide_encoder.safetensors")
    return tmp_path / "slide_encoder.safetensors"


@pytest.fixture
def features(tmp_path: Path) -> Path:
    folder = tmp_path / "features"
    feature_files.trident(folder / "long.h5", *feature_files.content(40, 6, 0))
    feature_files.gigapath(folder / "mid.h5", *feature_files.content(33, 6, 1))
    feature_files.trident(folder / "short.h5", *feature_files.content(5, 6, 2), tile_size=512)
    return folder


@pytest.fixture
def encoded(run: Run, weights: Path, features: Path, tmp_path: Path) -> Encoded:
    """Run the command on the folder with features; an option that is said again replaces the one here."""
    given = ["encode", features, "--weights", weights, "--heads", 4, "--out", tmp_path / "out", "--pool", "mean"]
    return lambda *more: run(*given, *more)


@pytest.fixture
def embeds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], object]], None]:
    """``before``: called with the names of the slides of each batch, before it is computed."""
    embed = work.embed

    def install(before: Callable[[list[str]], object]) -> None:
        def noted(model: SlideEncoder, slides: Any, layer: int | None) -> list[Tensor]:
            before([slide.name for slide, _, _ in slides])
            return embed(model, slides, layer)

        monkeypatch.setattr(work, "embed", noted)

    return install


def fail(error: BaseException) -> None:
    raise error


def embedding(folder: Path, name: str) -> Tensor:
    with h5py.File(folder / f"out/{name}.h5") as file:
        return torch.from_numpy(file["features"][()])


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "out/embeddings.csv").open(newline="") as stream:
        return {row["slide"]: row for row in csv.DictReader(stream)}


def test_every_slide_has_a_result_and_a_row(encoded: Encoded, weights: Path, tmp_path: Path) -> None:
    code, out, err = encoded()
    assert code == 0
    assert out.startswith("slides encoded: 3 (78 tiles, ")
    assert "written: " in out
    assert "tiles/s" in err
    model = SlideEncoder.from_pretrained(weights, global_pool=True, num_heads=4)
    for seed, (name, tiles) in enumerate(LENGTHS.items()):
        side, row = 512 if name == "short" else 256, rows(tmp_path)[name]
        found = embedding(tmp_path, name)
        with torch.no_grad():
            alone = model(*feature_files.content(tiles, 6, seed), tile_size=side)[0][0]
        torch.testing.assert_close(found, alone, atol=1e-6, rtol=0)
        assert row["tiles"] == str(tiles)
        assert [float(row[f"e{index}"]) for index in range(32)] == pytest.approx(found.tolist(), rel=1e-6)
        with h5py.File(tmp_path / f"out/{name}.h5") as file:
            about = {"tiles": tiles, "tile_size": side, "layer": "last", "pool": "mean"}
            assert about.items() <= dict(file.attrs).items()
    long = embedding(tmp_path, "long")
    assert encoded("--dtype", "bfloat16").code == 0
    assert not embedding(tmp_path, "long").equal(long)
    torch.testing.assert_close(embedding(tmp_path, "long"), long, atol=0.05, rtol=0.05)


def test_options_reach_the_model(encoded: Encoded, weights: Path, tmp_path: Path) -> None:
    line = "--heads 2 --slide-ngrids 120 --max-wsi-size 10240 --pool cls --layer 1"
    assert encoded(*line.split()).code == 0
    sizes = {"num_heads": 2, "slide_ngrids": 120, "max_wsi_size": 10240}
    model = SlideEncoder.from_pretrained(weights, global_pool=False, **sizes)
    with torch.no_grad():
        layers = model(*feature_files.content(40, 6, 0), all_layer_embed=True)
    torch.testing.assert_close(embedding(tmp_path, "long"), layers[1][0], atol=1e-6, rtol=0)


def test_what_is_there_is_not_computed_again(
    encoded: Any, embeds: Any, features: Path, weights: Path, tmp_path: Path
) -> None:
    seen: list[str] = []
    embeds(seen.extend)

    def again(*more: object) -> list[str]:
        seen.clear()
        assert encoded(*more).code == 0
        assert len(rows(tmp_path)) == 3
        return sorted(seen)

    everything, other = sorted(LENGTHS), ("--layer", 1, "--pool", "cls")
    assert again() == everything
    assert again() == []
    feature_files.trident(features / "short.h5", *feature_files.content(5, 6, seed=9), tile_size=512)
    assert again() == ["short"], "the file is another"
    assert again("--layer", 1) == everything
    assert again(*other) == everything
    save_file(SlideEncoder(6, 32, 2, 4, global_pool=False).state_dict(), weights)
    assert again(*other) == everything, "the weights are others"
    result = tmp_path / "out/mid.h5"
    half = result.read_bytes()[:900]
    result.write_bytes(half)
    assert "mid.h5 exists and is not a result of this command: name another --out" in encoded(*other).err
    assert result.read_bytes() == half, "nothing is overwritten"


def test_an_interruption_keeps_what_was_written(encoded: Encoded, embeds: Any, tmp_path: Path) -> None:
    embeds(lambda names: fail(KeyboardInterrupt()) if "short" in names else None)
    code, out, _ = encoded("--memory", "1kB")
    assert code == 130
    assert "slides encoded: 2" in out
    assert "interrupted: run the same command again to continue" in out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["embeddings.csv", "long.h5", "mid.h5"]
    embeds(lambda names: None)
    assert "slides encoded: 1 (5 tiles" in encoded().out


def test_a_full_disk_still_tells_what_was_done(encoded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = files.write

    def full(path: Path, *content: Any) -> None:
        if path.stem == "mid":
            raise OSError(28, "No space left on device", str(path))
        write(path, *content)

    monkeypatch.setattr(files, "write", full)
    code, out, err = encoded("--memory", "1kB")
    assert code == 2
    assert "slides encoded: 1 (40 tiles" in out
    assert "run the same command again" in out
    assert "mid.h5: No space left on device" in " ".join(err.split())
    monkeypatch.setattr(files, "write", write)
    monkeypatch.setattr(work, "write_table", lambda job, outcome, file: full(file.with_name("mid")))
    code, out, err = encoded()
    assert (code, err.splitlines()[-1]) == (2, f"error: cannot write {tmp_path}/out/mid: No space left on device")
    assert "1 were encoded before; 0 skipped; interrupted: run the same command again" in out


def test_a_bad_file_is_reported_and_the_others_are_encoded(encoded: Encoded, features: Path, tmp_path: Path) -> None:
    tiles, coords = feature_files.content(9, 6)
    feature_files.trident(features / "far.h5", tiles, coords * 1000)
    feature_files.trident(features / "large.h5", tiles * 1e37, coords)
    (features / "text\x1b[2J.h5").write_text("no HDF5")
    (features / "gone.h5").symlink_to("nowhere")
    code, out, err = encoded()
    assert code == 1
    assert "slides encoded: 3 (78 tiles" in out
    assert "4 skipped" in out
    whys = ("/far.h5: .*beyond the grid", "/large.h5: its embedding is not finite", "/text.*read as HDF5")
    for why in (*whys, "/gone.h5: there is no such file"):
        assert re.search(f"^skipped: .*{why}", err, re.MULTILINE)
    assert "\x1b" not in err
    assert sorted(rows(tmp_path)) == sorted(LENGTHS)


def test_without_memory_for_a_batch_slides_go_alone(encoded: Encoded, embeds: Any) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    embeds(lambda names: fail(full) if len(names) > 1 or "long" in names else None)
    code, out, err = encoded()
    assert code == 1
    assert "slides encoded: 2" in out
    assert "long.h5: CUDA out of memory. Tried to allocate" in err


def test_batches_fit_the_budget() -> None:
    tiles = [10, 1000, 9, 400, 12, 390, 11]
    slides = [files.Slide(Path(f"{name}.h5"), count, 6, 256.0, 1.0, {}, (0, 0)) for name, count in enumerate(tiles)]
    found = [[one.tiles for one in batch] for batch in work.batches(slides, per_tile=10, budget=8000)]
    assert found == [[1000], [400, 390], [12, 11, 10, 9]]


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("--pool max", "--pool: invalid choice: 'max'"),
        ("--layer 3", "--layer must be from 0 to 2, the depth of these weights, got 3"),
        ("--table all.xls", "--table must be a file, and end in .csv"),
        ("--thumbnails .", "--thumbnails must be a folder, and needs --attention"),
        ("--weights none.pth", "there are no weights at 'none.pth'"),
        ("--heads 5", "multiple of num_heads"),
        ("--attention --thumbnails out", "--thumbnails and --out must be different folders"),
        ("more", "these files have the same name"),
        ("slide.pt", "only .h5 files are read, got slide.pt"),
        ("none", "there is no file or folder none"),
    ],
)
def test_what_is_refused(
    refused: Refused, weights: Path, features: Path, tmp_path: Path, more: str, match: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("slide.pt").write_bytes(b"")
    feature_files.trident(Path("more/mid.h5"), *feature_files.content(4, 6))
    given = ["--weights", weights, "--pool", "mean", "--heads", 4, "--out", "out"]
    assert match in refused("encode", *given, features, *more.split())
    assert not [*Path("out").glob("*")]
    assert "there is no .h5 file in out" in refused("encode", "out", *given)


def test_maps(encoded: Encoded, weights: Path, features: Path, tmp_path: Path) -> None:
    (features / "long.h5").unlink()
    tiles, coords = feature_files.content(60, 6)
    feature_files.trident(features / "mid.h5", tiles, coords, level0_width=25600, level0_height=25600)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (10, 10)).save(tmp_path / "pictures/mid.jpg")
    assert encoded().code == 0  # without maps: they are no reason to keep it
    (tmp_path / "out/short.h5").unlink()
    drawn = ["--attention", "--thumbnails", tmp_path / "pictures"]
    ran = encoded(*drawn)
    assert ran.code == 1
    assert "short.h5: there is no picture short.png or .jpg" in ran.err
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["embeddings.csv", "mid.h5", "mid.html", "mid.png"]
    found, _ = files.written(tmp_path / "out/mid.h5", ["attention", "attention_cls", "attention_zeros", "coords"])
    model = SlideEncoder.from_pretrained(weights, global_pool=True, num_heads=4)
    wanted = model.attention_map(tiles, coords, "cls", None, None)
    for part, expected in zip(found.values(), (wanted.tiles, wanted.cls, wanted.zeros, coords), strict=True):
        torch.testing.assert_close(torch.from_numpy(part), expected, check_dtype=False)
    assert "1 were encoded before" in encoded(*drawn).out
    (tmp_path / "out/mid.png").unlink()
    assert "slides encoded: 1" in encoded(*drawn).out  # a map that is missing is drawn again
    assert (tmp_path / "out/mid.png").exists()
