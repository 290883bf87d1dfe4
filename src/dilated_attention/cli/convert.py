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
    with options.refusing():
        options.file("TARGET", given.target, (".safetensors",))
    from dilated_attention.models import SlideEncoder, weights

    with options.refusing():
        source = weights.located(given.source, takes_plain_ids=False)
        SlideEncoder.from_pretrained(source, num_heads=1, global_pool=False)  # raises if they do not fit
        weights.save(weights.read(source)[0], given.target)
    print(f"written: {given.target}")
