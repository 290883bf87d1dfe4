"""Which backend runs a call: a short table, and every reason why another one does not."""

from __future__ import annotations

from types import ModuleType

from dilated_attention.backends import eager, sdpa
from dilated_attention.backends.problem import Request

BACKENDS: dict[str, ModuleType] = {"sdpa": sdpa, "eager": eager}  # fastest first
NAMES = ("auto", *BACKENDS)


def choose(name: str, request: Request) -> ModuleType:
    """The module that runs the call. A backend asked for by name runs or raises; it never gives way to another."""
    if name == "auto":
        return next(module for module in BACKENDS.values() if not module.unsupported(request))
    reasons = BACKENDS[name].unsupported(request)
    if reasons:
        raise ValueError(f"backend {name!r} cannot run this call: {'; '.join(reasons)}. Use backend='auto'")
    return BACKENDS[name]


def why_not(chosen: str, request: Request) -> dict[str, list[str]]:
    """For every kernel that does not run: why."""
    reasons: dict[str, list[str]] = {}
    running = BACKENDS[chosen].kernel(request)
    for name, module in BACKENDS.items():
        later = [f"it could run, but {chosen} ({running}) comes first on this device"]
        if module is sdpa:
            for kernel, why in sdpa.why_not(request).items():
                if not (chosen == "sdpa" and running.startswith(kernel)):
                    reasons[f"sdpa/{kernel}"] = why or later
            if not sdpa.why_not(request):
                reasons["sdpa"] = sdpa.unsupported(request)
        elif name != chosen:
            reasons[name] = module.unsupported(request) or later
    return reasons
