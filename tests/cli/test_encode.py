"""`encode`: released outputs from feature files, one result per slide, and nothing computed twice."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from dilated_attention.models import SlideEncoder
from dilated_attention.slides import encode as work
from dilated_attention.slides import files
from dilated_attention.slides.files import Slide
from tests.cli.conftest import Ran, Refused, Run
from tests.slides import feature_files

GOLDEN = Path(__file__).parents[1] / "data/gigapath_tiny_50.safetensors"
LENGTHS = {"long": 40, "mid": 33, "short": 5}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = SlideEncoder(6, 32, 2, 4, global_pool=False)
    save_file(model.state_dict(), tmp_path / "slide_encoder.safetensors")
    return tmp_path / "slide_encoder.safetensors"


@pytest.fixture
def features(tmp_path: Path) -> Path:
    folder = tmp_path / "features"
    feature_files.trident(folder / "long.h5", *feature_files.content(40, 6, 0))
    feature_files.gigapath(folder / "mid.h5", *feature_files.content(33, 6, 1))
    feature_files.trident(folder / "short.h5", *feature_files.content(5, 6, 2), tile_size=512)
    return folder


@pytest.fixture
def encoded(run: Run, weights: Path, features: Path, tmp_path: Path) -> Any:
    """Run the command on the folder with features."""

    def one(*more: object, pool: str = "mean") -> Ran:
        out = tmp_path / "out"
        return run("encode", features, "--weights", weights, "--pool", pool, "--out", out, "--heads", 4, *more)

    return one


def embedding(folder: Path, name: str) -> torch.Tensor:
    with h5py.File(folder / f"{name}.h5") as file:
        return torch.from_numpy(file["features"][()])


def rows(table: Path) -> dict[str, dict[str, str]]:
    with table.open(newline="") as stream:
        return {row["slide"]: row for row in csv.DictReader(stream)}


@pytest.mark.parametrize(("pool", "layer"), [("cls", None), ("mean", None), ("cls", 1)])
def test_the_outputs_are_the_released_ones(run: Run, tmp_path: Path, pool: str, layer: int | None) -> None:
    with safe_open(GOLDEN, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file({key[3:]: x for key, x in tensors.items() if key.startswith("sd.")}, tmp_path / "weights.safetensors")
    for slide, (tiles, coords) in enumerate(zip(tensors["x"], tensors["coords"], strict=True)):
        feature_files.gigapath(tmp_path / f"in/{slide}.h5", tiles, coords)
    options = ["--heads", config["heads"], "--slide-ngrids", config["slide_ngrids"]]
    options += ["--max-wsi-size", config["max_wsi_size"], *(["--layer", layer] if layer else [])]
    ran = run(
        "encode", tmp_path / "in", "--weights", tmp_path / "weights.safetensors", "--pool", pool, *options,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert ran.code == 0, ran
    wanted = tensors["pooled" if pool == "mean" else "cls"] if layer is None else tensors["all_layers_cls"][layer]
    for slide, row in enumerate(wanted):
        torch.testing.assert_close(embedding(tmp_path / "out", str(slide)), row, atol=1e-5, rtol=0)


def test_every_slide_has_a_result_and_a_row(encoded: Any, weights: Path, tmp_path: Path) -> None:
    code, out, err = encoded()
    assert code == 0
    assert out.startswith("slides encoded: 3 (78 tiles, ")
    assert "written: " in out
    assert "tiles/s" in err
    table = rows(tmp_path / "out/embeddings.csv")
    model = SlideEncoder.from_pretrained(weights, global_pool=True, num_heads=4)
    for seed, (name, tiles) in enumerate(LENGTHS.items()):
        content, side = feature_files.content(tiles, 6, seed), 512 if name == "short" else 256
        found = embedding(tmp_path / "out", name)
        with torch.no_grad():
            alone = model(*content, tile_size=side)[0][0]
        torch.testing.assert_close(found, alone, atol=1e-6, rtol=0)
        assert table[name]["tiles"] == str(tiles)
        assert [float(table[name][f"e{index}"]) for index in range(32)] == pytest.approx(found.tolist(), rel=1e-6)
        with h5py.File(tmp_path / f"out/{name}.h5") as file:
            about = {"tiles": tiles, "tile_size": side, "layer": "last", "pool": "mean"}
            assert about.items() <= dict(file.attrs).items()


def test_what_is_there_is_not_computed_again(
    encoded: Any, features: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = work.embed

    def counted(model: SlideEncoder, slides: Any, layer: int | None) -> list[torch.Tensor]:
        seen.extend(slide.name for slide, _, _ in slides)
        return original(model, slides, layer)

    def again(*more: object, **how: str) -> list[str]:
        seen.clear()
        assert encoded(*more, **how).code == 0
        assert len(rows(tmp_path / "out/embeddings.csv")) == 3
        return sorted(seen)

    monkeypatch.setattr(work, "embed", counted)
    everything = sorted(LENGTHS)
    assert again() == everything
    assert again() == []
    feature_files.trident(features / "short.h5", *feature_files.content(5, 6, seed=9), tile_size=512)
    assert again() == ["short"], "the file is another"
    assert again("--layer", 1) == everything
    assert again("--layer", 1, pool="cls") == everything
    state = SlideEncoder(6, 32, 2, 4, global_pool=False).state_dict()
    save_file(state, weights)
    assert again("--layer", 1, pool="cls") == everything, "the weights are others"
    (tmp_path / "out/mid.h5").write_bytes((tmp_path / "out/mid.h5").read_bytes()[:900])
    assert "mid.h5 exists and is not a result" in encoded("--layer", 1, pool="cls").err, "half a file is not trusted"


def test_an_interruption_keeps_what_was_written(encoded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = work.embed

    def stopped(model: SlideEncoder, slides: Any, layer: int | None) -> list[torch.Tensor]:
        if slides[0][0].name == "short":
            raise KeyboardInterrupt
        return original(model, slides, layer)

    monkeypatch.setattr(work, "embed", stopped)
    code, out, _ = encoded("--memory", "1kB")
    assert code == 130
    assert "slides encoded: 2" in out
    assert "interrupted: run the same command again to continue" in out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["embeddings.csv", "long.h5", "mid.h5"]
    monkeypatch.setattr(work, "embed", original)
    assert "slides encoded: 1 (5 tiles" in encoded().out


def test_a_full_disk_still_tells_what_was_done(
    encoded: Any, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.write

    def full(path: Path, *content: Any) -> None:
        if path.stem == "mid":
            raise OSError(28, "No space left on device", str(path))
        original(path, *content)

    monkeypatch.setattr(files, "write", full)
    (features / "bad.h5").write_bytes(b"none")
    code, out, err = encoded("--memory", "1kB")
    assert code == 2
    assert "slides encoded: 1 (40 tiles" in out
    assert "run the same command again" in out
    assert "skipped: " in err
    assert "bad.h5" in err
    assert "mid.h5: No space left on device" in " ".join(err.split())
    monkeypatch.setattr(files, "write", original)
    (features / "bad.h5").unlink()
    assert "slides encoded: 2 (38 tiles" in encoded().out
    monkeypatch.setattr(work, "write_table", lambda job, outcome, file: full(file.with_name("mid")))
    code, out, err = encoded()
    assert (code, err.count("\n")) == (2, 2), err
    assert "3 were encoded before; interrupted: run the same command again" in out
    assert err.endswith("mid: No space left on device\n")


def test_in_bfloat16(encoded: Any, tmp_path: Path) -> None:
    assert encoded().code == 0
    exact = {name: embedding(tmp_path / "out", name) for name in LENGTHS}
    assert encoded("--dtype", "bfloat16").code == 0
    for name, wanted in exact.items():
        torch.testing.assert_close(embedding(tmp_path / "out", name), wanted, atol=0.05, rtol=0.05)
        assert not embedding(tmp_path / "out", name).equal(wanted)


def test_a_bad_file_is_reported_and_the_others_are_encoded(encoded: Any, features: Path, tmp_path: Path) -> None:
    tiles, coords = feature_files.content(9, 6)
    feature_files.trident(features / "wide.h5", *feature_files.content(9, 1024))
    feature_files.trident(features / "far.h5", tiles, coords * 1000)
    feature_files.trident(features / "nan.h5", tiles * torch.nan, coords)
    feature_files.trident(features / "large.h5", tiles * 1e37, coords)
    feature_files.trident(features / "word.h5", tiles, coords, patch_size_level0="unknown")
    (features / "text\x1b[2J.h5").write_text("no HDF5")
    code, out, err = encoded()
    assert code == 1
    assert "slides encoded: 3 (78 tiles" in out
    assert "6 skipped" in out
    skipped = [line for line in err.splitlines() if line.startswith("skipped: ")]
    assert len(skipped) == 6
    for name, why in {
        "wide": "looks like UNI", "far": "beyond the grid", "nan": "9 of 9 tiles have NaN", "text": "read as HDF5",
        "large": "its embedding is not finite", "word": "its patch_size_level0 is 'unknown'",
    }.items():  # fmt: skip
        assert any(f"/{name}" in line and why in line for line in skipped), name
    assert "\x1b" not in err
    assert sorted(rows(tmp_path / "out/embeddings.csv")) == sorted(LENGTHS)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_without_memory_for_a_batch_slides_go_alone(
    encoded: Any, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    original = work.embed

    def small(model: SlideEncoder, slides: Any, layer: int | None) -> list[torch.Tensor]:
        if len(slides) > 1 or slides[0][0].name == "long":
            raise error
        return original(model, slides, layer)

    monkeypatch.setattr(work, "embed", small)
    code, out, err = encoded()
    assert code == 1
    assert "slides encoded: 2" in out
    assert f"long.h5: {' '.join(str(error).split())}" in err


def slide(name: str, tiles: int) -> Slide:
    return Slide(Path(f"{name}.h5"), tiles, 6, 256.0, 1.0, {}, (0, 0))


def test_batches_fit_the_budget() -> None:
    slides = [slide(str(index), tiles) for index, tiles in enumerate([10, 1000, 9, 400, 12, 390, 11])]
    found = [[one.tiles for one in batch] for batch in work.batches(slides, per_tile=10, budget=8000)]
    assert found == [[1000], [400, 390], [12, 11, 10, 9]]
    assert work.batches([], 10, 8000) == []


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--pool", "max"], "--pool: invalid choice: 'max'"),
        (["--layer", "3"], "--layer must be from 0 to 2, the depth of these weights, got 3"),
        (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["--device", "cuda:99"], "--device is cuda:99"),
        (["--table", "all.xls"], "--table must end in .csv"),
        (["--memory", "8"], "a size of a byte or more with its unit"),
        (["--thumbnails", "."], "--thumbnails must be a folder, and needs --attention"),
        (["--weights", "none.pth"], "there are no weights at 'none.pth'"),
        (["--heads", "5"], "multiple of num_heads"),
        (["--attention", "--thumbnails", "OUT"], "--thumbnails and --out must be different folders"),
    ],
)
def test_what_is_refused(
    refused: Refused, weights: Path, features: Path, tmp_path: Path, more: list[str], match: str
) -> None:
    (tmp_path / "out").mkdir()
    given = ["--weights", weights, "--pool", "mean", "--heads", 4, "--out", tmp_path / "out", *more]
    given = [tmp_path / "out" if word == "OUT" else word for word in given]
    assert match in refused("encode", features, *given)
    assert not [*(tmp_path / "out").glob("*")]


def test_files_that_cannot_be_told_apart(refused: Refused, weights: Path, features: Path, tmp_path: Path) -> None:
    feature_files.trident(tmp_path / "more/mid.h5", *feature_files.content(4, 6))
    given = ["--weights", weights, "--pool", "mean", "--out", tmp_path / "out"]
    assert "these files have the same name" in refused("encode", features, tmp_path / "more", *given)
    (tmp_path / "slide.pt").write_bytes(b"")
    assert f"only .h5 files are read, got {tmp_path}/slide.pt" in refused("encode", tmp_path / "slide.pt", *given)
    (tmp_path / "empty").mkdir()
    assert "there is no .h5 file in" in refused("encode", tmp_path / "empty", *given)


def test_features_are_never_overwritten(run: Run, weights: Path, features: Path) -> None:
    before = (features / "mid.h5").read_bytes()
    ran = run("encode", features, "--weights", weights, "--pool", "mean", "--heads", 4, "--out", features)
    assert ran.code == 1
    assert "exists and is not a result of this command: name another --out" in ran.err
    assert (features / "mid.h5").read_bytes() == before


def test_maps(run: Run, weights: Path, tmp_path: Path) -> None:
    tiles, coords = feature_files.content(60, 6)
    size = {"level0_width": 25600, "level0_height": 25600}
    for name in ("one", "two"):
        feature_files.trident(tmp_path / f"in/{name}.h5", tiles, coords, **size)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (10, 10)).save(tmp_path / "pictures/one.jpg")
    given = ["--weights", weights, "--pool", "mean", "--heads", 4, "--out", tmp_path / "out"]
    assert run("encode", tmp_path / "in/one.h5", *given).code == 0  # without maps: they are no reason to keep it
    ran = run("encode", tmp_path / "in", *given, "--attention", "--thumbnails", tmp_path / "pictures")
    assert ran.code == 1
    assert "two.h5: there is no picture two.png or .jpg" in ran.err
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["embeddings.csv", "one.h5", "one.html", "one.png"]
    found = files.written(tmp_path / "out/one.h5", ["attention", "attention_cls", "attention_zeros", "coords"])
    assert found is not None
    model = SlideEncoder.from_pretrained(weights, global_pool=True, num_heads=4)
    wanted = model.attention_map(tiles, coords, "cls", None, None)
    parts = {"attention": wanted.tiles, "attention_cls": wanted.cls, "attention_zeros": wanted.zeros, "coords": coords}
    for name, part in parts.items():
        torch.testing.assert_close(torch.from_numpy(found[0][name]), part, check_dtype=False)
    drawn = [tmp_path / "in/one.h5", *given, "--attention", "--thumbnails", tmp_path / "pictures"]
    assert "1 were encoded before" in run("encode", *drawn).out
    (tmp_path / "out/one.png").unlink()
    assert "slides encoded: 1" in run("encode", *drawn).out  # a map that is missing is drawn again
    assert (tmp_path / "out/one.png").exists()
