"""What is asked of the machine before a command starts: a dtype, a device, a file or a folder that can be written."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention import charts

if TYPE_CHECKING:
    import torch

    from dilated_attention.advice import Workload

DTYPES = ("float64", "float32", "bfloat16", "float16")


class Refused(Exception):  # noqa: N818 - it says what happened
    """What the user asked for cannot be done. The message is one line that says why and what to do."""


@contextmanager
def refusing() -> Iterator[None]:
    """Around the checking of arguments only: a ValueError in here is the user's, elsewhere it is a fault of ours."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    except OSError as error:  # a name that is too long, for example
        raise Refused(f"{error.strerror or error}: {str(error.filename)[:60]!r}") from error


def dtype(option: str, text: str) -> torch.dtype:
    import torch

    name = text.lower().replace("fp", "float").replace("bf1", "bfloat1")
    if name not in DTYPES:
        raise ValueError(f"{option} must be one of {', '.join(DTYPES)}, got {text!r}")
    found: torch.dtype = getattr(torch, name)
    return found


def device(option: str, text: str) -> torch.device:
    """cpu, or a CUDA device that is there; "" is cuda, if there is one."""
    import torch

    text = text or ("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", text)
    if not found:
        raise ValueError(f"{option} must be cpu, cuda or cuda:0, got {text!r}")
    if text != "cpu":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(found[1] or 0) >= there:
            raise ValueError(f"{option} is {text}, and torch {torch.__version__} sees {there} CUDA devices: use cpu")
    return torch.device(text)


def file(option: str, path: Path, endings: tuple[str, ...]) -> Path:
    """A file that can be written, whose name says what it is."""
    if path.suffix.lower() not in endings:
        raise ValueError(f"{option} must end in {', '.join(endings)}, got {str(path)!r}")
    if path.is_dir():
        raise ValueError(f"{option} must be a file, and {path} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: make it, or name another file with {option}")
    charts.writable(path.parent, option)
    return path


def workload(given: Namespace) -> Workload:
    """What `suggest` and `plan` are about; `suggest` has no speeds."""
    from dilated_attention.advice import Workload

    speeds = [getattr(given, name) for name in ("latency", "bandwidth", "flops_per_second") if name in given]
    kind = dtype("--dtype", given.dtype)
    shape = (given.tokens, given.heads, given.head_dim, given.kv_heads, given.ranks, given.batch)
    return Workload(*shape, kind, given.causal, *speeds)
