"""The slide encoder: outputs of the released code from its weights, and what is refused."""

from __future__ import annotations

import contextlib
import doctest
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import dilated_attention
from dilated_attention import models
from dilated_attention.models import PRESETS, SlideEncoder, layers, parts, slide_pattern
from tests.models.golden import SLIDES, golden, slide_encoder, small

CLOSE = {"atol": 1e-5, "rtol": 0.0}  # the released code runs in float32
SAME = {"atol": 1e-12, "rtol": 1e-12}


@pytest.mark.parametrize("name", SLIDES)
def test_outputs_are_the_released_ones(name: str) -> None:
    model, data = slide_encoder(name)
    with torch.no_grad():
        torch.testing.assert_close(model(data["x"], data["coords"])[0], data["cls"], **CLOSE)
        layers = model(data["x"], data["coords"], all_layer_embed=True)
        torch.testing.assert_close(torch.stack(layers), data["all_layers_cls"], **CLOSE)
        model.global_pool = True
        torch.testing.assert_close(model(data["x"], data["coords"])[0], data["pooled"], **CLOSE)


@pytest.mark.parametrize(
    ("max_wsi_size", "lengths"),
    [(262144, [1024, 5792, 32768, 185363, 1048576]), (250000, [1024, 4870, 23170, 110217, 524288])],
)
def test_segments_are_the_released_ones(max_wsi_size: int, lengths: list[int]) -> None:
    pattern = slide_pattern(max_wsi_size)
    assert list(pattern.segment_lengths) == lengths
    assert pattern.dilation_rates == (1, 2, 4, 8, 16)
    assert pattern.rule == "torchscale"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_released_keys_and_sizes(name: str) -> None:
    with torch.device("meta"):
        model = SlideEncoder.preset(name, global_pool=False)
    sizes, keys = PRESETS[name], model.state_dict()
    assert len(keys) == 7 + 20 * sizes["depth"]
    assert keys["encoder.layers.11.ffn.fc1.weight"].shape == (4 * sizes["embed_dim"], sizes["embed_dim"])
    assert keys["patch_embed.proj.weight"].shape == (sizes["embed_dim"], sizes["in_chans"])
    assert all(layer.self_attn.num_heads == 16 for layer in model.encoder.layers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mlp_ratio": 0}, r"embed_dim \* mlp_ratio must be 1 or more, got 0"),
        ({"mlp_ratio": "4"}, "mlp_ratio must be a finite number"),
        ({"pattern": "longnet"}, "pattern must be a DilatedPattern, got 'longnet'"),
        ({"backend": "best"}, "unknown backend 'best'"),
        ({"checkpoint_activations": "no"}, "checkpoint_activations must be True or False, got 'no'"),
        ({"global_pool": None}, "global_pool must be True"),
        ({"embed_dim": 30}, "embed_dim must be a multiple of 4"),
        ({"num_heads": 5}, "embed_dim must be a multiple of num_heads"),
        ({"drop_path_rate": 2}, "drop_path_rate must be a number in"),
    ],
)
def test_options_are_checked_when_a_model_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        small(**options)


# --- loading ----------------------------------------------------------------------------------------------------


def saved(folder: Path, kind: str) -> Path:
    """The weights of a golden file in each format that can be loaded."""
    _, state, _ = golden("gigapath_tiny_50")
    file = folder / ("slide_encoder.safetensors" if kind == "safetensors" else "slide_encoder.pth")
    if kind == "safetensors":
        save_file(state, file)
    else:
        torch.save({"model": state} if kind == "released" else state, file)
    return file


@pytest.mark.parametrize("kind", ["safetensors", "released", "plain"])
def test_weights_load_from_a_file(kind: str, tmp_path: Path) -> None:
    file = saved(tmp_path, kind)
    data = golden("gigapath_tiny_50")[2]
    for path in (tmp_path, str(file)):
        model = SlideEncoder.from_pretrained(path, global_pool=True, num_heads=4, slide_ngrids=64)
        assert not model.training
        torch.testing.assert_close(model.double()(data["x"], data["coords"])[0], data["pooled"], **CLOSE)


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: x for key, x in state.items() if key != name}


FC1 = "encoder.layers.0.ffn.fc1.weight"
LONG = "n" * 100_000
BAD: dict[str, Any] = {
    "missing: norm.bias": lambda s: without(s, "norm.bias"),
    "unexpected: decoder.bias": lambda s: s | {"decoder.bias": torch.ones(1)},
    r"another shape: norm.bias is \(3,\), not \(32,\)": lambda s: s | {"norm.bias": torch.ones(3)},
    "missing: cls_token": lambda s: without(s, "cls_token"),
    "fc1.weight is missing": lambda s: without(s, FC1),
    r"proj.weight is \(2, 3, 4, 4\)": lambda s: s | {"patch_embed.proj.weight": torch.ones(2, 3, 4, 4)},
    r"proj.weight is \(0, 6\), and must be a matrix": lambda s: s | {"patch_embed.proj.weight": torch.ones(0, 6)},
    "encoder.layers.x is not one of 3 layers": lambda s: s | {"encoder.layers.x.bias": torch.ones(1)},
    "encoder.layers.1000000000000 is not one of 3": lambda s: s | {f"encoder.layers.{10**12}.b": torch.ones(1)},
    "unexpected: ...$": lambda s: s | {LONG: torch.ones(1)},
    f"plain tensors of numbers: {LONG[:80]}$": lambda s: s | {LONG: torch.ones(2).to_sparse()},
    "plain tensors of numbers: a": lambda s: s | {"a": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)},
    "plain tensors of numbers: b": lambda s: s | {"b": torch.ones(2, device="meta")},
    "plain tensors of numbers: c": lambda s: s | {"c": torch.ones(2, dtype=torch.complex64)},
    f"plain tensors of numbers: {FC1}": lambda s: s | {FC1: torch.ones(1).expand(10**6, 10**6)},
    "plain tensors of numbers: 3": lambda s: s | {3: torch.ones(1)},
    "not a state dict": lambda s: {"epoch": 3},
    "more in it than tensors": lambda s: s | {"norm.bias": Path("x")},
}


@pytest.mark.parametrize("said", BAD)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantized tensors
def test_weights_that_do_not_fit_are_refused(said: str, tmp_path: Path) -> None:
    """Before anything of their size is made."""
    torch.save({"model": BAD[said](golden("gigapath_tiny_50")[1])}, tmp_path / "slide_encoder.pth")
    with pytest.raises(ValueError, match=said) as raised:
        SlideEncoder.from_pretrained(tmp_path, global_pool=False, num_heads=4)
    assert len(str(raised.value)) < 700
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("ending", ["pth", "old.pth", "safetensors"])
def test_damaged_weights_are_refused(ending: str, tmp_path: Path) -> None:
    """Cut, or with other bits, some of which mean nothing. Only ValueErrors are raised."""
    file = tmp_path / f"weights.{ending}"
    if ending == "safetensors":
        models.weights.save(small().state_dict(), file)
    else:
        torch.save(small().state_dict(), file, _use_new_zipfile_serialization=ending == "pth")
    whole, numbers = file.read_bytes(), random.Random(0)
    flipped = []
    for _ in range(20):
        flipped.append(bytearray(whole))
        flipped[-1][numbers.randrange(min(len(whole), 4000))] ^= 1 << numbers.randrange(8)
    for content in (b"", b"no weights at all", b"version of a pointer\n", whole[: len(whole) // 2], *flipped):
        file.write_bytes(content)
        refused = pytest.raises(ValueError, match=r"is damaged.*: .+")
        with contextlib.suppress(ValueError) if content in flipped else refused:
            SlideEncoder.from_pretrained(file, global_pool=False, num_heads=4)


def test_any_inner_width_is_read_back(tmp_path: Path) -> None:
    """304 * (810 / 304) is just below 810."""
    model = SlideEncoder(6, 304, 1, 16, mlp_ratio=8 / 3, global_pool=False)
    models.weights.save(model.state_dict(), tmp_path / "w.safetensors")
    again = SlideEncoder.from_pretrained(tmp_path / "w.safetensors", global_pool=False)
    assert again.encoder.layers[0].ffn.fc1.out_features == 810  # type: ignore[union-attr]


def test_a_download_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def gone(*_: object) -> str:
        raise hub.errors.LocalEntryNotFoundError("no\nconnection")

    monkeypatch.setattr(hub, "hf_hub_download", gone)
    with pytest.raises(ValueError, match="org/name could not be downloaded from the hub: no connection"):
        SlideEncoder.from_pretrained("hf_hub:org/name", global_pool=False)


@pytest.mark.parametrize("name", ["nothing.pth", "some/nothing.safetensors", "/a/b/c", "word"])
def test_a_path_without_weights_is_an_error_not_a_download(name: str) -> None:
    with pytest.raises(ValueError, match="no weights at"):
        SlideEncoder.from_pretrained(name, global_pool=False)


def test_saving_never_replaces_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new.safetensors"
    models.weights.save(small().state_dict(), file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        models.weights.save({}, file)
    assert file.read_bytes() == before


# --- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("global_pool", [False, True])
def test_a_slide_does_not_depend_on_its_batch(global_pool: bool) -> None:
    model, data = slide_encoder("gigapath_grid_1100", global_pool)
    sizes, tiles, coords = [1100, 1, 700, 37], data["x"][0], data["coords"][0]
    mask = torch.arange(1100) >= torch.tensor(sizes)[:, None]
    padded = torch.where(mask[..., None], torch.nan, tiles.expand(4, -1, -1))  # padding is not read
    with torch.no_grad():
        batch = model(padded, coords, all_layer_embed=True, padding_mask=mask)
        outputs = model(padded, coords, padding_mask=mask, per_tile=True)[0]
        for index, size in enumerate(sizes):
            alone = model(tiles[None, :size], coords[None, :size], all_layer_embed=True)
            for one, many in zip(alone, batch, strict=True):
                torch.testing.assert_close(many[index], one[0], **SAME)
            per_tile = model(tiles[:size], coords[:size], per_tile=True)[0]
            torch.testing.assert_close(outputs[index, :size], per_tile[0], **SAME)
            assert not outputs[index, size:].any()


def test_feed_forward_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "AT_ONCE", 7)
    widest: list[int] = []
    half = layers.FeedForward(8, 32).double()
    half.fc1.register_forward_hook(lambda _, given, found: widest.append(found.shape[1]))
    x = torch.randn(2, 23, 8, dtype=torch.float64)
    with torch.no_grad():
        cut = half(x)
    assert max(widest) == 7
    torch.testing.assert_close(cut, half(x), rtol=1e-12, atol=1e-12)
    assert max(widest) == 23  # all at once where a gradient is wanted


def test_a_slide_of_few_tiles_is_no_mistake() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(num_heads=16)(torch.zeros(1, 3, 6), torch.zeros(1, 3, 2))


@pytest.mark.parametrize("name", models.__all__)
def test_public_names_are_documented(name: str) -> None:
    """And their examples run."""
    value = getattr(models, name)
    if name == "PRESETS":
        return
    text = value.__doc__
    assert text.splitlines()[0].endswith(".")
    names = {"torch": torch, "models": models, "da": dilated_attention}
    examples = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert doctest.DocTestRunner().run(examples).failed == 0
