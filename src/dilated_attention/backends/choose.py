"""Which backend runs a call: a short table, and every reason why another one does not."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from dilated_attention.backends import eager, sdpa, triton
from dilated_attention.backends.problem import Request

Backend = Literal["auto", "triton", "sdpa", "eager"]
NAMES: tuple[Backend, ...] = get_args(Backend)
BACKENDS: dict[str, ModuleType] = {"triton": triton, "sdpa": sdpa, "eager": eager}


class Choice(NamedTuple):
    """A backend and those of its kernels that can run the call, first choice first."""

    name: str
    module: ModuleType
    kernels: tuple[Any, ...]


@functools.lru_cache(maxsize=1024)
def choose(name: str, request: Request) -> Choice:
    """What runs the call. A backend asked for by name runs or raises, and does not give way to another.

    One exception, told by explain(): sdpa computes a block of one row itself where no kernel left takes it.
    """
    if name == "auto":
        name = next(name for name in _order(request) if not BACKENDS[name].unsupported(request))
    reasons = BACKENDS[name].unsupported(request)
    if reasons:
        raise ValueError(f"backend {name!r} cannot run this call: {'; '.join(reasons)}. Use backend='auto'")
    return Choice(name, BACKENDS[name], BACKENDS[name].kernels(request))


def _order(request: Request) -> tuple[str, ...]:
    """Fastest first: our kernels, unless the library's were measured to be faster."""
    if not triton.unsupported(request) and not triton.is_preferred(request):
        return ("sdpa", "triton", "eager")
    return ("triton", "sdpa", "eager")


def why_not(choice: Choice, request: Request) -> dict[str, list[str]]:
    """For every backend and kernel that does not run: why."""
    running = f"{choice.name} ({choice.kernels[0]})"
    reasons = {"triton": triton.unsupported(request)}
    reasons |= {f"sdpa/{kernel}": why for kernel, why in sdpa.why_not(request).items()} or {
        "sdpa": sdpa.unsupported(request)
    }
    reasons["eager"] = eager.unsupported(request)
    later = [f"it could run, but {running} was chosen"]
    if not triton.unsupported(request):
        later[0] += f" ({triton.because(request)})"
    runs = f"sdpa/{choice.kernels[0]}" if choice.name == "sdpa" else choice.name
    return {name: why or later for name, why in reasons.items() if name != runs}
