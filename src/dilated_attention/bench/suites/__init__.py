"""The suites by name. Each module has `steps(session)`, which plans it for a device and its dtypes."""

from __future__ import annotations

from dilated_attention.bench.steps import Session, Step
from dilated_attention.bench.suites import copies, improved, optimisations, profile, quick, ring, scaling

_MODULES = {
    "quick": quick,
    "copies": copies,
    "improved": improved,
    "ring": ring,
    "profile": profile,
    "scaling": scaling,
    "optimisations": optimisations,
}
ALL = [name for name in _MODULES if name != "quick"]
SUITES = {
    **{name: (module.__doc__ or "").splitlines()[0] for name, module in _MODULES.items()},
    "all": f"All of {', '.join(ALL)}.",
}


def steps_of(name: str, session: Session) -> list[Step]:
    steps: list[Step] = _MODULES[name].steps(session)
    return steps
