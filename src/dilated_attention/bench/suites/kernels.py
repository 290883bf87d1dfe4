"""How near the kernels come to dense ones, and what is around them: long calls, short calls.

Case A has many tokens, B a wide head, and C is so short that Python matters. Beside them is the dense kernel on the
same tokens cut into segments of 2048 rows: what a branch would cost if dilation cost nothing.

Legend: q, k, v, out (B, N, H, D); times in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention.bench import baselines, probes
from dilated_attention.bench import implementations as known
from dilated_attention.bench.run import Attention, Call, forward, forward_backward, graphed
from dilated_attention.bench.session import Row, Session, Step, Table
from dilated_attention.bench.setting import BOTH, Setting
from dilated_attention.functional import dilated_attention
from dilated_attention.testing import error

SUITE = "kernels"
WIDE = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
CASES = {  # tokens, lengths and rates, heads, head dim
    "A": (1 << 20, WIDE, 12, 64),
    "B": (1 << 17, ((2048, 8192, 32768), (1, 4, 16)), 16, 128),
    "C": (1 << 13, ((2048, 4096, 8192), (1, 2, 4)), 8, 64),
}
OURS = ("head_groups, auto", "longnet, auto")
WHICH = (*OURS, known.GATHER, known.RELEASED, f"{known.RELEASED}, cuDNN")
ROWS = 2048
# fastest first: what public SDPA, and with it copy and gather, chooses from; nothing is switched off
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MODES = ("eager", "default", "reduce-overhead")


def steps(session: Session) -> list[Step]:
    found = []
    for _, setting in cases(session):
        dense = "dense cuDNN" if session.on_cuda else known.DENSE
        beside = known.named(dense, "head_groups, auto")  # one branch of rate 1 is the same operation
        for which, where in ((known.named(*WHICH), setting), (beside, segments(setting))):
            step = session.comparing(SUITE, which, where)
            found.append(step._replace(run=partial(_fastest_first, step.run)))
    note = "The eight longest of each; forward + backward, not causal."
    columns = ["case", "implementation", "kernel", "launches", "ms"]
    kernels = Table(SUITE, "The kernels of one forward and backward pass", note, columns)
    columns = ["attention", "how", "forward ms", "forward + backward ms"]
    short = Table(SUITE, "Short calls", f"Case C: {next(cases(session))[1]}.", columns)
    return [
        *found,
        session.adding(kernels, "the kernels of each case", partial(kernels_of_cases, session)),
        session.adding(short, "short calls", partial(short_calls, session)),
    ]


def cases(session: Session) -> Iterator[tuple[str, Setting]]:
    """On a CPU only the short one. C comes first: it is mostly Python, so nothing large may run before it."""
    for name in "CAB" if session.on_cuda else "C":
        tokens, pattern, heads, dim = CASES[name]
        for causal in (False, True):
            yield name, session.setting(tokens, pattern, heads=heads, head_dim=dim, causal=causal)


def segments(setting: Setting) -> Setting:
    """The same tokens as separate samples of 2048, which is dense attention for every rule."""
    return replace(setting, tokens=ROWS, lengths=(ROWS,), rates=(1,), samples=setting.tokens // ROWS)


def _fastest_first(run: Callable[[], None]) -> None:
    with sdpa_kernel(FASTEST, set_priority=True):
        run()


# --- tables -------------------------------------------------------------------------------------------------------


def kernels_of_cases(session: Session) -> Iterator[Row]:
    """Where one forward + backward spends its time, by kernel."""
    for (case, setting), name in product(cases(session), OURS):
        if not setting.causal and session.is_exact(name, setting):
            call = known.named(name)[0].build(setting).call(BOTH)
            call()
            for kernel, count, ms in probes.kernel_times(call, session.device)[:8]:
                yield [case, name, kernel[:100], count, ms]


def short_calls(session: Session) -> Iterator[Row]:
    """Case C in every way in which a model may call it, beside dense attention called in the same way."""
    _, setting = next(cases(session))
    ours = partial(dilated_attention, pattern=setting.pattern("head_groups"))
    if not session.is_exact("head_groups, auto", setting):
        return

    def timed(name: str, how: str, attention: Attention, change: Callable[[Call], Call] = lambda call: call) -> Row:
        passes = forward(attention, setting.qkv()), forward_backward(attention, setting.qkv(), setting.dout())
        return [name, how, *(session.time({"": change(call)})[""].median for call in passes)]

    beside = {"head_groups, auto": ours, known.DENSE: baselines.dense, "autograd alone": nothing}
    for (name, attention), mode in product(beside.items(), modes(session)):
        yield timed(name, mode, compiled(attention, mode, setting.qkv()))
    with torch.autograd.set_multithreading_enabled(False):
        yield timed("head_groups, auto", "eager, autograd without its thread", ours)
    if session.on_cuda:
        yield timed("head_groups, auto", "CUDA graph", ours, graphed)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What autograd and the launch of one small kernel cost."""
    return q + k + v


def modes(session: Session) -> Sequence[str]:
    return MODES if session.on_cuda else MODES[:1]  # on a CPU, compiling takes minutes


def compiled(attention: Any, mode: str, inputs: Sequence[Tensor]) -> Any:
    """One that gives another result than the same uncompiled, which was checked, stops the run."""
    if mode == "eager":
        return attention
    torch._dynamo.reset()
    made: Any = torch.compile(attention, fullgraph=True, mode=mode)
    right, found = (_results(one, inputs) for one in (attention, made))
    off = max(error(x, y.double()) for x, y in zip(found, right, strict=True))
    if not off < 5 * probes.row_limit(right[0]):
        raise RuntimeError(f"compiled with mode {mode}, a call is off by {off:.1e}")
    return made


def _results(attention: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output without gradients, and with them, and the gradients; copied, as a graph's next replay writes them."""
    with torch.no_grad():
        plain = attention(*inputs).clone()
    given = [x.detach().requires_grad_() for x in inputs]
    out = attention(*given)
    return [plain, out.detach().clone(), *(x.clone() for x in torch.autograd.grad(out.square().mean(), given))]
