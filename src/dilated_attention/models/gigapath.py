"""The names and arguments of Prov-GigaPath's own module, for programs that call it: they change one import."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from dilated_attention.models import weights
from dilated_attention.models.slide import SlideEncoder
from dilated_attention.show.charts import write


class LongNetViT(SlideEncoder):
    """A `SlideEncoder` that takes what callers of the released code pass.

    Coordinates in half precision are taken with a warning, since some pass them scaled to 0 to 1000.
    """

    takes_half_coords = True


def create_model(
    pretrained: weights.File, model_arch: str, in_chans: int, local_dir: weights.File | None = None, **kwargs: Any,
) -> LongNetViT:  # fmt: skip
    """Makes a released model by its name, in training mode as the released code gives it: call ``.eval()``.

    Args:
        pretrained: a file or folder with weights; a hub id, which downloads into the hub's cache; or ``""`` for fresh
            weights. Where there is no such file, it raises; the released code goes on with fresh weights.
        model_arch: a key of `dilated_attention.models.PRESETS`, such as "gigapath_slide_enc12l768d".
        in_chans: channels of a tile's features.
        local_dir: also copy a downloaded file into this folder, if it has no file of that name.
        kwargs: those of `SlideEncoder`; ``global_pool`` is False by default, as released.
    """
    make = partial(LongNetViT.preset, model_arch, in_chans=in_chans, **{"global_pool": False, **kwargs})
    if not os.fspath(pretrained):
        return make()
    path = weights.located(pretrained)
    model = weights.load(make, *weights.read(path))
    if local_dir is not None and not Path(pretrained).exists():
        target = Path(local_dir) / weights.RELEASED
        if not target.exists():
            write(target, path.read_bytes())
    return model
