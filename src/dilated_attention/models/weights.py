"""Weights on disk: found, read without running any code in them, and loaded strictly."""

from __future__ import annotations

import os
import pickle
import re
import struct
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dilated_attention.show.charts import library, write

RELEASED = "slide_encoder.pth"  # what the released repositories call it
FILES = ("slide_encoder.safetensors", RELEASED)
HUB = "hf_hub:"
ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
STEPS = "step-????????.pt"  # what examples/train_lm.py calls its checkpoints: the newest is the largest
# what torch and safetensors raise for files that are damaged, or made to look like weights
DAMAGED = (
    AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError, OverflowError, RuntimeError, TypeError,
    ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
State = dict[str, Tensor]
File = str | os.PathLike[str]
Source = Mapping[str, Tensor] | File  # of weights
Model = TypeVar("Model", bound=nn.Module)


def located(path_or_hub_id: File) -> Path:
    """The file: as named, or in the folder named, or downloaded into the hub's cache where a hub id is given.

    A hub id is ``hf_hub:org/name``, or ``org/name`` where no such file is here, nor a folder ``org``: that would be a
    path with a slip of the pen.
    """
    text, path = os.fspath(path_or_hub_id), Path(path_or_hub_id)
    for file in (path, *(path / name for name in FILES)):
        if file.is_file():
            return file
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.endswith(ENDINGS)
    if not text.startswith(HUB) and (not is_id or path.parent.is_dir()):
        folder = f"a folder with {' or '.join(FILES)}"
        raise ValueError(f"there are no weights at {text!r}: name a file, {folder}, or a hub id (hf_hub:org/name)")
    try:
        return Path(_optional("huggingface_hub").hf_hub_download(text.removeprefix(HUB), RELEASED))
    except (OSError, ValueError) as error:  # no connection, no such repository, or no access to it
        raise ValueError(f"{text.removeprefix(HUB)} could not be downloaded from the hub: {short(error)}") from error


def _optional(name: str) -> Any:
    return library(name, "these weights need", "models")


def short(text: object) -> str:
    """One line, also of what a file says of itself."""
    return textwrap.shorten(str(text), 300, placeholder=" ...")


def read(source: Source) -> tuple[State, str]:
    """The state dict given or in a file, where it may be under the key `model`; and its name."""
    found: Any = source
    said = "the state dict"
    if not isinstance(source, Mapping):
        said = str(source)
        found = (_safetensors if said.endswith(".safetensors") else unpickled)(Path(source))
        found = found.get("model", found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError(f"{said} is not a state dict: it must hold names and tensors, at its top or under 'model'")
    for name, x in found.items():
        is_plain = x.layout is torch.strided and x.is_floating_point() and not x.is_meta
        # the second: numbers that are there, not one that is shown many times
        if not (isinstance(name, str) and is_plain and x.numel() * x.element_size() <= x.untyped_storage().nbytes()):
            raise ValueError(short(f"{said} has weights that are not plain tensors of numbers: {name!s:.80}"))
    return dict(found), said


def checkpoint(path: File) -> tuple[Mapping[str, Any], str]:
    """What a checkpoint of examples/train_lm.py holds, and its name: a file, or the newest one in a folder."""
    named = Path(path)
    file = max(named.glob(STEPS), default=named)
    if not file.is_file():
        wanted = "a file step-….pt that examples/train_lm.py wrote, or a folder with such files"
        raise ValueError(f"there is no checkpoint at {str(named)!r}: name {wanted}")
    found = unpickled(file, mmap=True)
    if not isinstance(found, Mapping) or not {"config", "model"} <= found.keys():
        raise ValueError(f"{file} is not a checkpoint of examples/train_lm.py: it has no 'config' and 'model'")
    return found, str(file)


def unpickled(path: Path, **options: Any) -> Any:
    """What a file of torch.save holds, read without running code, and compared with the checksums in it."""
    try:
        if zipfile.is_zipfile(path):  # torch writes checksums, and does not look at them
            with zipfile.ZipFile(path) as archive:
                if wrong := archive.testzip():
                    raise OSError(f"wrong checksum of {wrong}")
        return torch.load(path, map_location="cpu", weights_only=True, **options)
    except DAMAGED as error:
        other = re.search(r"Unsupported (?:global|class)[^\n]*|GLOBAL \S+", str(error))
        if other:
            raise ValueError(f"{path} has more in it than tensors, and is not read: {short(other[0])}") from error
        reason = short((str(error) or type(error).__name__).splitlines()[0])
        raise ValueError(f"{path} is damaged or incomplete, or no file of torch.save: {reason}") from error


def _safetensors(path: Path) -> Any:
    try:
        return _optional("safetensors.torch").load_file(path)
    except (_optional("safetensors").SafetensorError, *DAMAGED) as error:
        raise ValueError(f"{path} is damaged, or no .safetensors file: {short(error)}") from error


def matrix(state: State, name: str, said: str) -> tuple[int, int]:
    """The shape of a weight from which the sizes of a model are read."""
    shape = tuple(state[name].shape) if name in state else ()
    if len(shape) != 2 or 0 in shape:
        what = f"is {shape}, and must be a matrix" if name in state else "is missing"
        raise ValueError(f"{said} has no weights of such a model: {name} {what}")
    return shape


def depth(state: State, prefix: str) -> int:
    """The number of layers, of 16 weights each or more: names alone are cheap, and layers take time to make."""
    found = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    return min(len(found), 1 + len(state) // 16)


def load(make: Callable[[], Model], state: State, said: str) -> Model:
    """The model that ``make`` makes, with exactly these weights, or one error that lists all that is wrong."""
    kind: Any = {"device": torch.get_default_device(), "dtype": torch.get_default_dtype()}
    with torch.device("meta"):  # the weights given are the only ones that are made
        model = make()
    try:
        model.load_state_dict({name: x.to(**kind, copy=True) for name, x in state.items()}, assign=True)
    except RuntimeError as error:
        _, _, wrong = str(error).partition(":")
        raise ValueError(f"{said} does not fit {type(model).__name__}: {short(wrong)}") from error
    return model


def save(state: Mapping[str, Tensor], path: Path) -> None:
    """A new .safetensors file: the whole of it or none, never over another file."""
    if path.exists():
        raise ValueError(f"{path} exists already: name another file, or remove it")
    alone = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}
    write(path, _optional("safetensors.torch").save(alone))
