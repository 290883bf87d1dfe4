"""The four programs that call the released code, and what they pass."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.checks import DilatedAttentionWarning
from dilated_attention.models import SlideEncoder
from dilated_attention.models.gigapath import create_model

ARCH = "gigapath_slide_enc12l384d"
SMALL: dict[str, Any] = {"embed_dim": 32, "num_heads": 4}
HUB = "hf_hub:prov-gigapath/prov-gigapath"
TILES, COORDS = torch.randn(2, 20, 24), torch.randint(0, 250, (2, 20, 2)) * 224


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hub's library without a network: it gives a file in its cache, and notes what was asked for."""
    asked: list[Any] = []
    torch.manual_seed(1)
    cached = tmp_path / "cache" / "slide_encoder.pth"
    cached.parent.mkdir()
    torch.save({"model": SlideEncoder(24, 32, 12, 4, global_pool=False).state_dict()}, cached)

    def hf_hub_download(*given: Any, **options: Any) -> str:
        asked.append((given, options))
        return str(cached)

    library: Any = types.SimpleNamespace(hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return asked


def expected(tmp_path: Path, global_pool: bool = False) -> SlideEncoder:
    return SlideEncoder.from_pretrained(tmp_path / "cache", num_heads=4, global_pool=global_pool)


close = functools.partial(torch.testing.assert_close, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_trident_and_lazyslide(hub: list[Any], tmp_path: Path) -> None:
    """One sets tile_size as an attribute for each slide, and takes index 11; the other gives it with each call."""
    model = create_model(HUB, ARCH, 24, global_pool=True, **SMALL)
    assert model.training
    assert hub == [(("prov-gigapath/prov-gigapath", "slide_encoder.pth"), {})]  # into the hub's cache, not by force
    model.eval()
    both = expected(tmp_path, global_pool=True)(TILES, COORDS, True, tile_size=[256, 896])
    assert len(both) == 13
    for slide, size in enumerate((256, 896)):
        model.tile_size = size
        close(both[11][slide], model(TILES[slide], COORDS[slide], True)[11][0])


def test_stamp(hub: list[Any], tmp_path: Path) -> None:
    """Tiles and coordinates in half precision, the latter between 0 and 1000: taken, with one warning."""
    model, wanted = create_model(HUB, ARCH, in_chans=24, **SMALL).eval(), expected(tmp_path)
    tiles, coords = TILES[:1].half(), (torch.rand(1, 20, 2) * 1000).half()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        found = [model(tiles, coords)[0] for _ in range(3)]
    assert [one.category for one in said] == [DilatedAttentionWarning]
    close(found[2], wanted(tiles.float(), coords.float())[0])
    with pytest.raises(TypeError, match="float16"):
        wanted(tiles, coords)
    with pytest.raises(ValueError, match="beyond the grid"), pytest.warns(DilatedAttentionWarning):
        model(tiles, torch.full((1, 20, 2), 70000.0).half())


def test_slide2vec(hub: list[Any], tmp_path: Path) -> None:
    """Coordinates without a batch, from a file that is there."""
    model, wanted = (
        create_model(str(tmp_path / "cache/slide_encoder.pth"), ARCH, 24, **SMALL).eval(),
        expected(tmp_path),
    )
    assert not hub
    for tiles in (TILES[:1], TILES):
        close(model(tiles, COORDS[0])[0], wanted(tiles, COORDS[:1].expand(len(tiles), -1, -1))[0])


def test_a_copy_of_the_download_never_replaces_a_file(hub: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "mine/slide_encoder.pth"
    made = functools.partial(create_model, model_arch=ARCH, in_chans=24, local_dir=file.parent, **SMALL)
    made(str(tmp_path / "cache/slide_encoder.pth"))  # as released: nothing to download, nothing to copy
    assert not file.exists()
    made(HUB)
    assert [*file.parent.iterdir()] == [file]
    file.write_bytes(b"mine")
    made(HUB)
    assert file.read_bytes() == b"mine"


def test_a_hub_id_is_asking_for_a_download_and_nothing_else_is(
    hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # there is a folder cache: what begins with its name is a path
    made: Any = functools.partial(create_model, model_arch=ARCH, in_chans=24, **SMALL)
    load: Any = functools.partial(SlideEncoder.from_pretrained, global_pool=False, num_heads=4)
    load("prov-gigapath/prov-gigapath")
    for make, name in ((made, "slide_encoder.pth"), (load, "cache/slide_encodr")):
        with pytest.raises(ValueError, match=f"no weights at '{name}'"):
            make(name)
    assert len(hub) == 1
    assert create_model("", ARCH, 24, **SMALL).cls_token.abs().sum() > 0  # fresh weights, as asked for


def test_another_width_is_refused(hub: list[Any]) -> None:
    with pytest.raises(ValueError, match="does not fit LongNetViT"):
        create_model(HUB, ARCH, 24, embed_dim=64)
    with pytest.raises(ValueError, match="unknown model"):
        create_model("", "gigapath", 24)
