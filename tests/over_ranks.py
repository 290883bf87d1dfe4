"""What tests over ranks share. A rank imports this file: it stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def changed(module: Module) -> Module:
    """No parameter is at the value it starts with, so that none can be left out unseen."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
    return module


def raised(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The error as text: ranks give it back, as it has to arrive on every one of them."""
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@contextmanager
def noted_calls(names: Iterable[str]) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """The calls of these functions of torch.distributed: which, and with what."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def noted(name: str) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append((name, args))
            return function(*args, **options)

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, noted(name)))
        yield calls


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
