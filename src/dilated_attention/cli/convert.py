"""Convert the weights of a slide encoder to safetensors.

Only tensors are read: no code in the file runs. A file that exists is not
overwritten.

Example: dilated-attention convert slide_encoder.pth slide_encoder.safetensors
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from dilated_attention.cli import options
from dilated_attention.cli.options import option

OPTIONS = (
    option("source", type=Path, metavar="SOURCE", help="The released slide_encoder.pth."),
    option("target", type=Path, metavar="TARGET", help="A new file that ends in .safetensors."),
)


def run(given: Namespace) -> None:
    source, target = given.source, given.target
    with options.refusing():
        options.file("TARGET", target, (".safetensors",))
        if not source.is_file():
            raise ValueError(f"there is no file {source}")
        if target.exists():
            raise ValueError(f"{target} exists already: name another file, or remove it")
    from dilated_attention.models import SlideEncoder, weights

    with options.refusing():
        SlideEncoder.from_pretrained(source, num_heads=1, global_pool=False)  # raises if they do not fit
        weights.save(weights.read(source)[0], target)
    print(f"written: {target}")
