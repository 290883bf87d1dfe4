"""Training: dropout where the released code has it, checkpointing, layer decay, and LoRA."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from dilated_attention.models import SlideEncoder, finetuning, parameter_groups, positions
from dilated_attention.models.layers import Sequences, drop_path
from tests.models.golden import COORDS, PATTERN, TILES, gradients, small
from tests.over_ranks import changed


def trained(**options: Any) -> SlideEncoder:
    """In float64, with small segments and all dropout on."""
    return changed(small(pattern=PATTERN, dropout=0.3, drop_path_rate=0.5, **options).double()).train()


# --- train mode ---------------------------------------------------------------------------------------------------


def released_forward(model: SlideEncoder, tiles: Tensor, cells: Tensor, p: float, rates: list[float]) -> Tensor:
    """The released order of what is random, written out: the same seed gives the same numbers."""

    def dropped(x: Tensor, rate: float) -> Tensor:
        x = F.dropout(x, p)
        return x if rate == 0 else x * x.new_empty(len(x), 1, 1).bernoulli_(1 - rate).div_(1 - rate)

    x = model.patch_embed(tiles) + positions.embedded(cells, model.embed_dim, 1000, tiles)
    x = F.dropout(torch.cat([model.cls_token.expand(len(x), -1, -1), x], 1), p)
    for layer, rate in zip(model.encoder.layers, rates, strict=True):
        x = x + dropped(layer.self_attn(layer.self_attn_layer_norm(x), Sequences()), rate)
        x = x + dropped(layer.ffn(layer.final_layer_norm(x)), rate)
    return model.norm(model.encoder.layer_norm(x))[:, 0]


def test_train_mode_is_the_released_one() -> None:
    model, found = trained(), []
    for forward in (
        lambda: model(TILES, COORDS)[0],
        lambda: released_forward(model, TILES, COORDS // 256, 0.3, [0, 0.5]),
    ):
        torch.manual_seed(7)
        out = forward()
        found.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)])
    torch.testing.assert_close(*found, atol=1e-11, rtol=1e-11)
    assert not torch.equal(found[0][0], model.eval()(TILES, COORDS)[0])


def test_packed_slides_are_dropped_one_by_one() -> None:
    torch.manual_seed(0)
    rows = Sequences((0, 4, 5, 12, 30))
    kept = [slide.unique().tolist() for slide in rows.apart(drop_path(torch.ones(1, 30, 2), 0.5, rows))]
    assert [0.0] in kept
    assert [2.0] in kept
    assert all(len(numbers) == 1 for numbers in kept)


@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_changes_nothing(packed: bool) -> None:
    found = []
    mask = (torch.arange(41) >= torch.tensor([41, 17])[:, None]) if packed else None
    for checkpoint in (False, True):
        model = trained(checkpoint_activations=checkpoint)
        torch.manual_seed(3)
        layers = model(TILES, COORDS, True, padding_mask=mask)
        sum(x.square().sum() for x in layers).backward()
        found.append((torch.stack(layers), gradients(model)))
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


# --- the recipe -----------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self, encoder: SlideEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.embed_dim, 3)


def test_rates_fall_towards_the_first_layer() -> None:
    model = Classifier(small(depth=3))
    groups = parameter_groups(model, 1.0, layer_decay=0.5)
    rate = {id(x): (group["lr"], group["weight_decay"]) for group in groups for x in group["params"]}
    assert len(rate) == len(list(model.parameters()))
    for name, wanted in {
        "encoder.cls_token": (0.5**4, 0.05),
        "encoder.encoder.layers.0.ffn.fc1.weight": (0.5**3, 0.05),
        "encoder.encoder.layers.2.self_attn.q_proj.bias": (0.5, 0.0),
        "head.weight": (1.0, 0.05),
    }.items():
        assert rate[id(model.get_parameter(name))] == wanted
    model.encoder.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model, 1.0)) == 2
    with pytest.raises(ValueError, match="one SlideEncoder"):
        parameter_groups(model.head, 1.0)


def test_the_published_schedule() -> None:
    optimizer, schedule = finetuning(Classifier(small()), 10, epochs=5, warmup_epochs=1)
    lr = 0.002 * 32 / 256
    for step in range(51):
        warm = lr * step / 10
        late = 1e-6 + (lr - 1e-6) * (1 + math.cos(math.pi * (step - 10) / 40)) / 2
        assert optimizer.param_groups[-1]["lr"] == pytest.approx(warm if step < 10 else late)
        optimizer.step()
        schedule.step()
    for options, says in (({"epochs": 1}, "a schedule needs"), ({"base_lr": 0.0}, "the highest rate, 0, must be")):
        with pytest.raises(ValueError, match=says):
            finetuning(Classifier(small()), 10, **options)


def test_lora_finds_its_modules_by_name() -> None:
    adapted = get_peft_model(small(), LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc1"]))
    adapted(TILES.float(), COORDS)[0].sum().backward()
    trainable = [x for x in adapted.parameters() if x.requires_grad]
    assert len(trainable) == 2 * 2 * 3  # two matrices for each of three modules in two layers
    assert all(x.grad is not None for x in trainable)
    assert len({group["lr"] for group in parameter_groups(adapted, 1.0)}) == 2  # by layer


def test_the_example_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "examples" / "finetune_slides.py"
    monkeypatch.setattr(sys, "argv", [str(example)])
    made = runpy.run_path(str(example))
    torch.manual_seed(0)
    model = made["Classifier"](SlideEncoder(16, 32, 2, 4, dropout=0.1, drop_path_rate=0.0, global_pool=False), 2)
    assert made["train"](model.train(), made["noise"](24), 4, 2) < 0.5
