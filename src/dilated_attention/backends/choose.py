"""Which backend runs a call, and why no other does.

A backend is a module in this folder and a row of BACKENDS. No file outside this folder names one. It says what it can
do:

    unsupported(call, backward)   why it cannot run the call, one sentence each; empty: it can
    preference(call, backward)    (whether it is a first choice where it can run, and why; "" where there is no reason)
    kernels(call, backward)       those of its kernels that can run the call, first choice first
    why_not(call)                 {kernel: why it cannot run}, forward; only where the backend has a choice of them,
    describe(kernels, rows)       as this: which of them run blocks of so many rows, for people

A backend that computes block by block has, in the layout (b, L, heads, D),

    limits(call)                              what one call of its kernels takes
    forward(kernels, problem)                 -> (out, lse)
    backward(kernels, problem, results)       -> (dq, dk, dv)

where out and lse in the backward pass are the final, merged ones, which makes each block's gradients exact, and lse is
+inf for rows without keys: their weights exp(s - inf) are 0 then, not NaN. A backend that takes calls whole has

    forward_call(call, inputs)                -> (out, lse)
    backward_call(call, inputs, results)      -> (dq, dk, dv)
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from dilated_attention.backends import eager, sdpa, triton
from dilated_attention.call import Call

Backend = Literal["auto", "triton", "sdpa", "eager"]
NAMES: tuple[Backend, ...] = get_args(Backend)
BACKENDS: dict[str, ModuleType] = {"triton": triton, "sdpa": sdpa, "eager": eager}


class Choice(NamedTuple):
    """A backend and those of its kernels that can run the call, first choice first."""

    name: str
    module: ModuleType
    kernels: tuple[Any, ...]
    is_whole: bool  # it takes calls whole, not block by block

    def describe(self, rows: set[int]) -> str:
        """Which kernels run blocks of so many rows."""
        return str(self.module.describe(self.kernels, rows) if hasattr(self.module, "describe") else self.kernels[0])


@functools.lru_cache(maxsize=1024)
def choose(call: Call, backward: bool = False) -> Choice:
    """What runs the call. A backend asked for by name runs or raises, and does not give way to another.

    One exception, told by explain(): sdpa computes a block of one row itself where no kernel left takes it.
    """
    name = call.backend
    if name == "auto":
        able = [name for name, module in BACKENDS.items() if not module.unsupported(call, backward)]
        name = max(able, key=lambda name: BACKENDS[name].preference(call, backward)[0])  # the first of those
    module = BACKENDS[name]
    reasons = module.unsupported(call, backward)
    if reasons:
        raise ValueError(f"backend {name!r} cannot run this call: {'; '.join(reasons)}. Use backend='auto'")
    return Choice(name, module, module.kernels(call, backward), hasattr(module, "forward_call"))


def why_not(choice: Choice, call: Call) -> dict[str, list[str]]:
    """For every backend and kernel that does not run: why."""
    later = f"it could run, but {choice.name} ({choice.kernels[0]}) was chosen"
    reasons: dict[str, list[str]] = {}
    because: list[str] = []
    for name, module in BACKENDS.items():
        kernels, whole = module.why_not(call) if hasattr(module, "why_not") else {}, module.unsupported(call, False)
        reasons |= {f"{name}/{kernel}": why for kernel, why in kernels.items()} or {name: whole}
        because += [] if whole else filter(None, module.preference(call, False)[1:])
    if because and call.backend == "auto":
        later += f" ({'; '.join(because)})"
    runs = {choice.name, f"{choice.name}/{choice.kernels[0]}"}
    return {name: why or [later] for name, why in reasons.items() if name not in runs}
