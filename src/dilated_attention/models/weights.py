"""Weights on disk: found, read without running any code in them, and loaded strictly."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention.charts import library, write

FILE = "slide_encoder.pth"  # what the released repositories call it
FILES = ("slide_encoder.safetensors", FILE)
HUB = "hf_hub:"
ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
State = dict[str, Tensor]


def located(path_or_hub_id: str | os.PathLike[str], *, takes_plain_ids: bool = True) -> Path:
    """The file: as named, or in the folder named, or downloaded into the hub's cache where a hub id is given.

    A hub id is ``hf_hub:org/name``, or with ``takes_plain_ids`` also ``org/name`` where no such file is here, nor a
    folder ``org``: that would be a path with a slip of the pen.
    """
    text = os.fspath(path_or_hub_id)
    path = Path(text)
    if path.is_dir():
        there = [path / name for name in FILES if (path / name).is_file()]
        if not there:
            raise ValueError(f"the folder {text} has neither {' nor '.join(FILES)}: name the file with the weights")
        return there[0]
    if path.is_file():
        return path
    is_id = takes_plain_ids and re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.endswith(ENDINGS)
    if not text.startswith(HUB) and (not is_id or path.parent.is_dir()):
        raise ValueError(f"there are no weights at {text!r}: name a file, a folder, or a hub id (hf_hub:org/name)")
    try:
        return Path(_optional("huggingface_hub").hf_hub_download(text.removeprefix(HUB), FILE))
    except (OSError, ValueError) as error:  # no connection, no such repository, or no access to it
        reason = " ".join(str(error).split())
        raise ValueError(f"{text.removeprefix(HUB)} could not be downloaded from the hub: {reason}") from error


def _optional(name: str) -> Any:
    return library(name, "these weights need", "models")


def read(path: Path) -> State:
    """The state dict in a .safetensors file, or in a .pth file alone or under the key `model`."""
    if path.suffix == ".safetensors":
        try:
            found: Any = _optional("safetensors.torch").load_file(path)
        except _optional("safetensors").SafetensorError as error:
            raise ValueError(f"{path} is damaged, or no .safetensors file: {error}") from error
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, OSError, KeyError, RuntimeError) as error:
            other = re.search(r"Unsupported (?:global|class)[^\n]*|GLOBAL \S+", str(error))
            if other:
                raise ValueError(f"{path} has more in it than tensors, and is not read: {other[0]}") from error
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path} is damaged or incomplete, or no file of torch.save: {reason}") from error
        if isinstance(found, Mapping) and isinstance(found.get("model"), Mapping):
            found = found["model"]
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError(f"{path} is not a state dict: it must hold names and tensors, at its top or under 'model'")
    return dict(found)


def check(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Raise unless these are exactly the model's weights, in the right shapes; one error lists all that is wrong."""
    wanted = model.state_dict()
    missing, unexpected = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(x.shape)}"
        for name, x in wanted.items()
        if name in state and state[name].shape != x.shape
    ]
    problems = (("missing: ", missing), ("unexpected: ", unexpected), ("of another shape: ", shapes))
    said = "; ".join(label + _some(names) for label, names in problems if names)
    if said:
        raise ValueError(f"{source} does not fit {type(model).__name__}: {said}")


def load(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """The weights into the model, or an error."""
    check(model, state, source)
    model.load_state_dict(dict(state))


def save(state: Mapping[str, Tensor], path: Path) -> None:
    """A new .safetensors file: the whole of it or none, never over another file."""
    if path.exists():
        raise ValueError(f"{path} exists already: name another file, or remove it")
    alone = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}
    write(path, _optional("safetensors.torch").save(alone))


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
