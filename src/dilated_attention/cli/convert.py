"""Convert weights: a slide encoder to safetensors, or a dense language model to a pattern.

Only tensors are read: no code in the file runs. A file that exists is not
overwritten. With --pattern, SOURCE is a checkpoint of examples/train_lm.py, or
a folder of a Hugging Face decoder; its weights stay as they are.

Example: dilated-attention convert slide_encoder.pth slide_encoder.safetensors
Example: dilated-attention convert runs/dense sparse.pt --pattern pattern.json
"""

from __future__ import annotations

import io
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from dilated_attention.cli import options
from dilated_attention.cli.options import option
from dilated_attention.show import charts

OPTIONS = (
    option("source", "SOURCE", "The released slide_encoder.pth; or a language model.", Path),
    option("target", "TARGET", "A new file that ends in .safetensors, or in .pt for a checkpoint of "
           "examples/train_lm.py; or a new folder for a Hugging Face decoder.", Path),
    option("--pattern", "FILE", "What `fit` wrote: one pattern, or a list of one per layer.", Path),
)  # fmt: skip


def run(given: Namespace) -> None:
    source, target = given.source, given.target
    is_folder = (source / "config.json").is_file()
    with options.refusing():
        if given.pattern is None:
            options.file("TARGET", target, (".safetensors",))
            if not source.is_file():
                raise ValueError(f"there is no file {source}")
        elif not is_folder:
            options.file("TARGET", target, (".pt",))
        elif not [*source.glob("*.safetensors"), *source.glob("*.bin")]:
            raise ValueError(f"{source} has a config.json, and no weights (*.safetensors)")
        if target.exists():
            raise ValueError(f"{target} exists already: name another file, or remove it")
        if given.pattern is not None:
            (_folder if is_folder else _checkpoint)(source, target, options.patterns(given.pattern))
        else:
            from dilated_attention.models import SlideEncoder, weights

            SlideEncoder.from_pretrained(source, num_heads=1, global_pool=False)  # raises if they do not fit
            weights.save(weights.read(source)[0], target)
    print(f"written: {target}")


def _checkpoint(source: Path, target: Path, pattern: Any) -> None:
    import torch

    from dilated_attention.models import LMConfig, weights

    found, content = weights.checkpoint(source)[0], io.BytesIO()
    config = LMConfig.from_dict({**found["config"], "pattern": pattern})
    torch.save({**found, "config": config.to_dict()}, content)
    charts.write(target, content.getvalue())


def _folder(source: Path, target: Path, pattern: Any) -> None:
    """The same files, and the pattern in the config."""
    auto = charts.library("transformers", "models of Hugging Face need", "models")
    from dilated_attention.integrations.transformers import register, set_pattern

    register()
    config = set_pattern(auto.AutoConfig.from_pretrained(source, local_files_only=True), pattern)
    part = target.with_name(f".half-written-{target.name}")
    shutil.copytree(source, part)
    config.save_pretrained(part)
    os.replace(part, target)
