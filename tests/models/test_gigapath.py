"""The four programs that call the released code, and what they pass."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.checks import DilatedAttentionWarning
from dilated_attention.models import SlideEncoder
from dilated_attention.models.gigapath import create_model

ARCH = "gigapath_slide_enc12l384d"
SMALL = {"embed_dim": 32, "num_heads": 4}
HUB = "hf_hub:prov-gigapath/prov-gigapath"
TILES, COORDS = torch.randn(2, 20, 24), torch.randint(0, 250, (2, 20, 2)) * 224


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The hub's library without a network: it gives a file in its cache, and notes what was asked for."""
    asked: list[Any] = []
    torch.manual_seed(1)
    model = SlideEncoder(24, 32, 12, 4, global_pool=False)
    cached = tmp_path / "cache" / "slide_encoder.pth"
    cached.parent.mkdir()
    torch.save({"model": model.state_dict()}, cached)
    module: Any = types.ModuleType("huggingface_hub")

    def hf_hub_download(*args: Any, **options: Any) -> str:
        asked.append((args, options))
        return str(cached)

    module.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    yield asked
    assert torch.load(cached, weights_only=True)["model"].keys() == model.state_dict().keys()


def expected(hub: list[Any], tmp_path: Path, **options: Any) -> SlideEncoder:
    return SlideEncoder.from_pretrained(tmp_path / "cache", num_heads=4, **{"global_pool": False, **options})


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_trident(hub: list[Any], tmp_path: Path) -> None:
    """It sets tile_size as an attribute for each slide, and takes index 11."""
    model = create_model(HUB, ARCH, 24, global_pool=True, **SMALL)
    assert model.training
    assert hub == [(("prov-gigapath/prov-gigapath", "slide_encoder.pth"), {})]  # into the hub's cache, not by force
    model.eval()
    wanted = expected(hub, tmp_path, global_pool=True)
    with torch.no_grad():
        for size in (256, 448, 896):
            model.tile_size = size
            found = model(TILES[:1], COORDS[:1], all_layer_embed=True)
            assert len(found) == 13
            close(found[11], wanted(TILES[:1], COORDS[:1], True, tile_size=size)[11])


def test_stamp(hub: list[Any], tmp_path: Path) -> None:
    """Tiles and coordinates in half precision, the latter between 0 and 1000: taken, with one warning."""
    model = create_model(HUB, ARCH, in_chans=24, **SMALL).eval()
    tiles, coords = TILES[:1].half(), (torch.rand(1, 20, 2) * 1000).half()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            [found] = model(tiles, coords)
    assert len(said) == 1
    assert issubclass(said[0].category, DilatedAttentionWarning)
    wanted = expected(hub, tmp_path)
    close(found, wanted(tiles.float(), coords.float())[0])
    with pytest.raises(TypeError, match="float16"):
        wanted(tiles, coords)
    with pytest.raises(ValueError, match="finite"), pytest.warns(DilatedAttentionWarning):
        model(tiles, torch.full((1, 20, 2), 70000.0).half())


def test_slide2vec(hub: list[Any], tmp_path: Path) -> None:
    """Coordinates without a batch, from a file that is there."""
    model = create_model(str(tmp_path / "cache" / "slide_encoder.pth"), ARCH, 24, **SMALL).eval()
    assert not hub
    close(model(TILES[:1], COORDS[0])[0], expected(hub, tmp_path)(TILES[:1], COORDS[:1])[0])
    close(model(TILES, COORDS[0])[0], expected(hub, tmp_path)(TILES, COORDS[:1].expand(2, -1, -1))[0])


def test_lazyslide(hub: list[Any], tmp_path: Path) -> None:
    """The tile size with each call, for each slide."""
    model = create_model(HUB, ARCH, 24, **SMALL).eval()
    both = model(TILES, COORDS, tile_size=[224, 448])[0]
    for slide, size in enumerate((224, 448)):
        model.tile_size = size
        close(both[slide], model(TILES[slide], COORDS[slide])[0][0])


def test_a_copy_of_the_download_never_replaces_a_file(hub: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for _ in range(2):
        create_model(HUB, ARCH, 24, local_dir=folder, **SMALL)
    assert [file.name for file in folder.iterdir()] == ["slide_encoder.pth"]
    (folder / "slide_encoder.pth").write_bytes(b"mine")
    with pytest.raises(ValueError, match="differs from the downloaded file"):
        create_model(HUB, ARCH, 24, local_dir=folder, **SMALL)
    assert (folder / "slide_encoder.pth").read_bytes() == b"mine"
    (folder / "slide_encoder.pth").unlink()
    there = tmp_path / "cache/slide_encoder.pth"
    create_model(str(there), ARCH, 24, local_dir=folder, **SMALL)  # as released: nothing to download, nothing to copy
    assert not [*folder.iterdir()]


def test_a_hub_id_is_asking_for_a_download_and_nothing_else_is(
    hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # there is a folder cache: what begins with its name is a path
    SlideEncoder.from_pretrained("prov-gigapath/prov-gigapath", global_pool=False, num_heads=4)
    for name in ("prov-gigapath/prov-gigapath", "slide_encoder.pth"):
        with pytest.raises(ValueError, match="no weights at"):
            create_model(name, ARCH, 24, **SMALL)
    with pytest.raises(ValueError, match="no weights at 'cache/slide_encodr'"):
        SlideEncoder.from_pretrained("cache/slide_encodr", global_pool=False, num_heads=4)
    assert len(hub) == 1
    assert create_model("", ARCH, 24, **SMALL).cls_token.abs().sum() > 0  # fresh weights, as asked for


def test_without_the_hubs_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"these weights need huggingface_hub, .*: pip install"):
        create_model(HUB, ARCH, 24, **SMALL)


def test_another_width_is_refused(hub: list[Any]) -> None:
    with pytest.raises(ValueError, match="does not fit LongNetViT"):
        create_model(HUB, ARCH, 24, embed_dim=64)
    with pytest.raises(ValueError, match="unknown model"):
        create_model("", "gigapath", 24)
