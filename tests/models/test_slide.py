"""The slide encoder: outputs of the released code from its weights, and what is refused."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import dilated_attention as da
from dilated_attention import models, reference
from dilated_attention.models import PRESETS, SlideEncoder, layers, parts, slide_pattern
from tests.models.golden import CLOSE, COORDS, SLIDES, TILES, UNION, golden, gradients, slide_encoder, small
from tests.over_ranks import changed

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


def test_segments_are_the_released_ones() -> None:
    assert slide_pattern(250000).segment_lengths == (1024, 4870, 23170, 110217, 524288)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_released_keys_and_sizes(name: str) -> None:
    with torch.device("meta"):
        model = SlideEncoder.preset(name, global_pool=False)
    sizes, keys = PRESETS[name], model.state_dict()
    assert len(keys) == 7 + 20 * sizes["depth"]
    assert keys["encoder.layers.11.ffn.fc1.weight"].shape == (4 * sizes["embed_dim"], sizes["embed_dim"])
    assert keys["patch_embed.proj.weight"].shape == (sizes["embed_dim"], sizes["in_chans"])
    assert model.encoder.layers[0].self_attn.num_heads == 16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mlp_ratio": 0}, r"embed_dim \* mlp_ratio must be 1 or more, got 0"),
        ({"pattern": "longnet"}, "pattern must be a Pattern or a DilatedPattern, got str"),
        ({"pattern": da.Pattern([da.Window(3, heads=[4])])}, "for key/value head 4, and there are 4"),
        ({"backend": "best"}, "unknown backend 'best'"),
        ({"checkpoint_activations": "no"}, "checkpoint_activations must be True or False, got 'no'"),
        ({"tile_size": 0, "pattern": models.slide_pattern()}, "tile_size must be 1 or more, got 0"),
        ({"embed_dim": 30}, "embed_dim must be a multiple of 4"),
        ({"num_heads": 5}, "embed_dim must be a multiple of num_heads"),
        ({"drop_path_rate": 2}, "drop_path_rate must be a number in"),
    ],
)
def test_options_are_checked_when_a_model_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        small(**options)


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "released", "plain"])
def test_weights_load_from_a_file(kind: str, tmp_path: Path) -> None:
    _, state, data = golden("gigapath_tiny_50")
    file = tmp_path / ("slide_encoder.safetensors" if kind == "safetensors" else "slide_encoder.pth")
    if kind == "safetensors":
        save_file(state, file)
    else:
        torch.save({"model": state} if kind == "released" else state, file)
    for path in (tmp_path, str(file)):
        model = SlideEncoder.from_pretrained(path, global_pool=True, num_heads=4, slide_ngrids=64)
        assert not model.training
        torch.testing.assert_close(model.double()(data["x"], data["coords"])[0], data["pooled"], **CLOSE)


PROJ = "patch_embed.proj.weight"
BAD: list[tuple[dict[Any, Any], str]] = [  # None: left out
    ({"norm.bias": None}, 'Missing .* "norm.bias"'),
    ({"decoder.bias": torch.ones(1)}, 'Unexpected .* "decoder.bias"'),
    ({"norm.bias": torch.ones(3)}, r"size mismatch for norm.bias: .*\[3\].*\[32\]"),
    ({"encoder.layers.0.ffn.fc1.weight": None}, "fc1.weight is missing"),
    ({PROJ: torch.ones(2, 3, 4, 4)}, r"proj.weight is \(2, 3, 4, 4\)"),
    ({PROJ: torch.ones(0, 6)}, r"proj.weight is \(0, 6\), and must be a matrix"),
    ({f"encoder.layers.{10**12}.b": torch.ones(1)}, 'Missing .* "encoder.layers.2.'),
    ({"n" * 100_000: torch.ones(1)}, "Unexpected .* ...$"),
    ({"norm.bias": Path("x")}, "more in it than tensors"),
    ({"epoch": 3}, "not a state dict"),
    *(
        ({PROJ: odd}, f"not plain tensors of numbers: {PROJ}")
        for odd in (
            torch.ones(32, 6).to_sparse(), torch.ones(32, 6, device="meta"), torch.ones(32, 6, dtype=torch.complex64),
            torch.ones(32, 6, dtype=torch.int8), torch.ones(1).expand(10**5, 10**4),
            torch.quantize_per_tensor(torch.ones(32, 6), 0.1, 0, torch.qint8),
        )
    ),
    ({3: torch.ones(1)}, "not plain tensors of numbers: 3"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), BAD)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about quantized tensors
def test_weights_that_do_not_fit_are_refused(changes: dict[Any, Any], said: str, tmp_path: Path) -> None:
    """In one line, before anything is made of them."""
    state = golden("gigapath_tiny_50")[1] | changes
    torch.save({"model": {key: x for key, x in state.items() if x is not None}}, tmp_path / "slide_encoder.pth")
    with pytest.raises(ValueError, match=said) as raised:
        SlideEncoder.from_pretrained(tmp_path, global_pool=False, num_heads=4)
    assert len(str(raised.value)) < 700
    assert "\n" not in str(raised.value)


def test_names_alone_are_no_layers() -> None:
    assert models.weights.depth({f"a.{layer}.b": torch.ones(1) for layer in range(1600)}, "a.") < 110


@pytest.mark.parametrize("ending", ["pth", "old.pth", "safetensors"])
def test_damaged_weights_are_refused(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights.{ending}"
    if ending == "safetensors":
        models.weights.save(small().state_dict(), file)
    else:
        torch.save(small().state_dict(), file, _use_new_zipfile_serialization=ending == "pth")
    whole = file.read_bytes()
    flipped = whole[:9] + bytes([whole[9] ^ 64]) + whole[10:]
    if ending == "pth":  # numbers have checksums
        flipped = whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 16]) + whole[len(whole) // 2 + 1 :]
    for content in (b"", b"no weights at all", whole[: len(whole) // 2], flipped):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"is damaged.*: .+"):
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


# --- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[41, 41], [41, 17]])
def test_a_union_is_the_oracles(sizes: list[int], tmp_path: Path) -> None:
    """The class token is seen by all; slides with padding too, and a model that was saved and loaded."""
    model = changed(small(pattern=UNION).double())
    models.weights.save(model.state_dict(), tmp_path / "w.safetensors")
    torch.set_default_dtype(torch.float64)
    again = SlideEncoder.from_pretrained(tmp_path / "w.safetensors", global_pool=False, num_heads=4, pattern=UNION)
    torch.set_default_dtype(torch.float32)
    mask = torch.arange(41) >= torch.tensor(sizes)[:, None]
    [got] = again(TILES, COORDS, padding_mask=mask if mask.any() else None)
    got.square().sum().backward()

    def oracle(pattern: Any, is_causal: bool, *more: Any) -> Any:
        return reference.attention(*more[-3:], pattern, is_causal=is_causal)

    with mock.patch.object(layers, "attend_whole", oracle):
        alone = [model(TILES[index, :size], COORDS[index, :size])[0] for index, size in enumerate(sizes)]
    torch.cat(alone).square().sum().backward()
    torch.testing.assert_close(got, torch.cat(alone), **SAME)
    torch.testing.assert_close(gradients(again), gradients(model), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("global_pool", [False, True])
@torch.no_grad()
def test_a_slide_does_not_depend_on_its_batch(global_pool: bool) -> None:
    model, data = slide_encoder("gigapath_grid_1100", global_pool)
    sizes, tiles, coords = [1100, 1, 37], data["x"][0], data["coords"][0]
    mask = torch.arange(1100) >= torch.tensor(sizes)[:, None]
    padded = torch.where(mask[..., None], torch.nan, tiles.expand(3, -1, -1))  # padding is not read
    batch = torch.stack(model(padded, coords, all_layer_embed=True, padding_mask=mask), 1)
    outputs = model(padded, coords, padding_mask=mask, per_tile=True)[0]
    for index, size in enumerate(sizes):
        alone = model(tiles[:size], coords[:size], all_layer_embed=True)
        torch.testing.assert_close(batch[index], torch.cat(alone), **SAME)
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


@pytest.mark.filterwarnings("error")
def test_a_slide_of_few_tiles_is_no_mistake() -> None:
    small(num_heads=16)(torch.zeros(1, 3, 6), torch.zeros(1, 3, 2))


@pytest.mark.parametrize("name", sorted({*models.__all__} - {"PRESETS"}))
def test_public_names_are_documented(name: str) -> None:
    """And their examples run."""
    text = getattr(models, name).__doc__
    assert text.splitlines()[0].endswith(".")
    names = {"torch": torch, "models": models, "da": da}
    examples = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert doctest.DocTestRunner().run(examples).failed == 0
