"""Fine-tuning a slide encoder as published: learning rates that fall towards the first layer, warm-up, cosine."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from dilated_attention.models.slide import SlideEncoder


def parameter_groups(
    module: nn.Module, lr: float, *, layer_decay: float = 0.95, weight_decay: float = 0.05
) -> list[dict[str, Any]]:
    """Groups the trainable parameters of a module that has a slide encoder in it, for an optimizer.

    With d layers, layer i (from 0) gets the rate ``lr * layer_decay ** (d - i)``, the class token
    ``lr * layer_decay ** (d + 1)``, and all else ``lr``, as published. Biases and norms have no weight decay.

    Examples:
        >>> model = models.SlideEncoder(24, 32, 2, 4, global_pool=True)
        >>> sorted({group["lr"] for group in models.parameter_groups(model, 1.0, layer_decay=0.5)})
        [0.125, 0.25, 0.5, 1.0]
    """
    encoders = [part for part in module.modules() if isinstance(part, SlideEncoder)]
    if len(encoders) != 1:
        raise ValueError(f"the module must have one SlideEncoder in it, got {len(encoders)} in {type(module).__name__}")
    parts = [encoders[0].cls_token], *(layer.parameters() for layer in encoders[0].encoder.layers)
    depths = {parameter: depth for depth, part in enumerate(parts) for parameter in part}
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups.setdefault((depths.get(parameter, len(parts)), parameter.ndim > 1), []).append(parameter)
    return [
        {"params": groups[depth, decays], "lr": lr * layer_decay ** (len(parts) - depth),
         "weight_decay": weight_decay if decays else 0.0}
        for depth, decays in sorted(groups)
    ]  # fmt: skip


def finetuning(
    module: nn.Module, steps_per_epoch: int, *, epochs: int = 5, warmup_epochs: int = 1, base_lr: float = 0.002,
    min_lr: float = 1e-6, batch_size: int = 1, accumulation: int = 32, layer_decay: float = 0.95,
    weight_decay: float = 0.05,
) -> tuple[AdamW, LambdaLR]:  # fmt: skip
    """Makes the optimizer and the schedule of Prov-GigaPath's recipe for fine-tuning.

    Call ``optimizer.step()`` and ``schedule.step()`` once every ``accumulation`` batches. The highest rate is
    ``base_lr * batch_size * accumulation / 256``. It is reached over the warm-up, and falls as half a cosine to
    ``min_lr``. The recipe also has ``dropout=0.1, drop_path_rate=0.0``, and takes entry 11 of ``all_layer_embed=True``:
    the class token after 11 of the 12 layers. ``steps_per_epoch``, of the optimizer, is the number of batches //
    accumulation; ``layer_decay`` and ``weight_decay`` are those of `parameter_groups`.

    Examples:
        >>> model = models.SlideEncoder(24, 32, 2, 4, global_pool=True)
        >>> optimizer, schedule = models.finetuning(model, steps_per_epoch=10)
    """
    if not 0 <= warmup_epochs < epochs or steps_per_epoch < 1:
        raise ValueError(
            f"a schedule needs 0 <= warmup_epochs < epochs and steps_per_epoch >= 1, got {warmup_epochs=}, {epochs=} "
            f"and {steps_per_epoch=}"
        )
    lr = base_lr * batch_size * accumulation / 256
    if not 0 <= min_lr <= lr or lr == 0:
        raise ValueError(f"the highest rate, {lr:g}, must be above 0 and at least {min_lr=}: change {base_lr=}")
    optimizer = AdamW(parameter_groups(module, lr, layer_decay=layer_decay, weight_decay=weight_decay), lr=lr)

    def factor(step: int) -> float:
        epoch = step / steps_per_epoch
        if epoch < warmup_epochs:
            return epoch / warmup_epochs
        done = min(1.0, (epoch - warmup_epochs) / (epochs - warmup_epochs))
        return (min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * done))) / lr

    return optimizer, LambdaLR(optimizer, factor)
