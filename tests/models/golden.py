"""Outputs of the released code, and models with the same weights. tests/data has them; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dilated_attention import Blocks, Dilated, DilatedPattern, Global, Pattern, Window
from dilated_attention.models import SlideEncoder

DATA = Path(__file__).parents[1] / "data"
PATTERN = DilatedPattern.torchscale([8, 24, 64], [1, 2, 4])
UNION = Pattern([Window(3), Dilated(24, 2), Global(1), Blocks(6, [(2, 5), (6, 0)], heads=[1, 3])])
CLOSE = {"atol": 1e-5, "rtol": 0.0}  # the released code runs in float32
TILES = torch.randn(2, 41, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
COORDS = torch.randint(0, 999, (2, 41, 2), generator=torch.Generator().manual_seed(1)) * 256
SLIDES = ("gigapath_tiny_50", "gigapath_tiny_1500", "gigapath_grid_1100")


def golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Config, state dict, and the other tensors, in float64: what is compared has no rounding but the released one."""
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("sd."): tensors.pop(key) for key in [*tensors] if key.startswith("sd.")}
    return config, state, {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}


def slide_encoder(name: str, global_pool: bool = False, **options: Any) -> tuple[SlideEncoder, dict[str, Tensor]]:
    """The model of a golden file in eval mode and float64, and its inputs and outputs."""
    config, state, tensors = golden(name)
    model = SlideEncoder(
        config["in_chans"], config["embed_dim"], config["depth"], config["heads"],
        slide_ngrids=config["slide_ngrids"], max_wsi_size=config["max_wsi_size"], global_pool=global_pool, **options,
    )  # fmt: skip
    model.load_state_dict(state)
    return model.double().eval(), tensors


def small(**options: Any) -> SlideEncoder:
    """A model of two small layers in eval mode, always the same."""
    torch.manual_seed(0)
    return SlideEncoder(
        **{"in_chans": 6, "embed_dim": 32, "depth": 2, "num_heads": 4, "global_pool": False} | options
    ).eval()


def gradients(model: nn.Module) -> list[Tensor]:
    return [x.grad for x in model.parameters() if x.grad is not None]
