"""explain(): which backend and kernel a call would run, and why no other. Computes nothing.

Legend as in `functional`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from dilated_attention.backends.choose import BACKENDS, Backend, choose, why_not
from dilated_attention.backends.problem import Inputs
from dilated_attention.blocks import plan
from dilated_attention.call import ON_DEVICE, CuSeqlens
from dilated_attention.context_parallel import ContextParallel, Over
from dilated_attention.pattern import Pattern
from dilated_attention.resolve import Options, cu_seqlens_on_host, resolve


@dataclass(frozen=True, slots=True)
class Explanation:
    """Tells what a call would run, and for everything else why it does not.

    Args:
        backend: the backend of the forward pass.
        kernel: its kernel, in words.
        why_not: for each other backend, the reasons why it does not run.
        backward: the backend and kernel of the backward pass, or "none: ..." with the reasons.

    Examples:
        >>> x = torch.randn(1, 64, 4, 8)
        >>> told = da.explain(x, x, x, da.DilatedPattern.longnet([16, 64], [1, 4]), backend="eager")
        >>> told.backend
        'eager'
        >>> told.why_not["triton"]
        [...]
    """

    backend: Backend
    kernel: str
    why_not: dict[str, list[str]]
    backward: str

    def __str__(self) -> str:
        lines = [f"runs: {self.backend}, kernel: {self.kernel}", f"backward: {self.backward}"]
        lines += [f"not {name}: {'; '.join(reasons)}" for name, reasons in self.why_not.items()]
        return "\n".join(lines)


def explain(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, is_causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, key_padding_mask: Tensor | None = None,
    query_offset: int | Tensor | None = None, enable_gqa: bool = False, backend: Backend = "auto",
    group: Over = None, cu_seqlens: CuSeqlens | None = None,
) -> Explanation:  # fmt: skip
    """Tells which backend and kernel `dilated_attention` with these arguments runs, and why no other.

    It takes the arguments of :func:`dilated_attention`, except ``heads`` and ``return_lse``. The forward and the
    backward pass may run different ones; the reasons are those of the forward pass. Over a ``group`` it speaks of this
    rank, and asks no other.

    Examples:
        >>> x = torch.randn(1, 64, 4, 8)
        >>> print(da.explain(x, x, x, da.DilatedPattern.longnet([16, 64], [1, 4])))
        runs: ...
    """
    ranks = 1 if group is None else ContextParallel.of(group).process_group().size()
    offset, positions = (None, query_offset) if isinstance(query_offset, Tensor) else (query_offset, None)
    options = Options(
        pattern, is_causal, scale, dropout_p, enable_gqa, backend, query_offset=offset, decodes=group is None,
        in_parts=ranks > 1,
    )  # fmt: skip
    packed = None if cu_seqlens is None else cu_seqlens_on_host(cu_seqlens)
    call = resolve(Inputs(query, key, value, key_padding_mask, None, positions, packed), options)
    choice = choose(call)
    # positions that a tensor holds are not read: the last ones are used instead
    placed = call._replace(start=call.keys - call.queries) if call.start == ON_DEVICE else call
    rows = {min(block.queries.rows, block.keys.rows) for block in plan(placed).blocks} or {call.queries}
    reasons = BACKENDS[backend].unsupported(call, True) if backend != "auto" and call.is_decode else []
    if reasons:
        backward = f"none: {'; '.join(reasons)}"
    else:
        after = choose(call, backward=True)
        backward = f"{after.name}, kernel: {after.describe(rows)}"
    return Explanation(cast(Backend, choice.name), choice.describe(rows), why_not(choice, call), backward)
