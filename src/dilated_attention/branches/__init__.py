"""The kinds of branches that a pattern is made of, one file each; `base` says what a kind has to define."""

from dilated_attention.branches.base import Branch
from dilated_attention.branches.blocks import Blocks, Dense
from dilated_attention.branches.dilated import Dilated
from dilated_attention.branches.prefix import Global, Prefix
from dilated_attention.branches.strided import Strided
from dilated_attention.branches.window import Window

__all__ = ["KINDS", "Blocks", "Branch", "Dense", "Dilated", "Global", "Prefix", "Strided", "Window"]

KINDS: dict[str, type[Branch]] = {
    kind.kind: kind for kind in (Dilated, Window, Strided, Prefix, Global, Blocks, Dense)
}  # a new kind is a file and a name here
