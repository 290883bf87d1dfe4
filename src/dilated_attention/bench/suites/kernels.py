"""How near the kernels come to dense ones, and what is around them: long calls, short calls, compiled steps.

Case A has many tokens, B a wide head, and C is so short that Python matters. Beside them is the dense kernel on the
same tokens cut into segments of 2048 rows: what a branch would cost if dilation cost nothing.

Legend: q, k, v, out (B, N, H, D); times in milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention.bench import baselines, probes
from dilated_attention.bench import implementations as known
from dilated_attention.bench.run import Attention, Call, forward, forward_backward
from dilated_attention.bench.session import Session, Step
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import BOTH
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
FIRST_CALL = """
import time, torch, dilated_attention as da
q = torch.randn(1, 8192, 8, 64, device={device!r}, dtype={dtype}, requires_grad=True)
pattern = da.DilatedPattern.of({rule!r}, (2048, 4096, 8192), (1, 2, 4))
torch.ones(1, device={device!r}).sum().item()
began = time.perf_counter()
da.dilated_attention(q, q, q, pattern).sum().backward()
q.grad.sum().item()
print(time.perf_counter() - began)
"""


def steps(session: Session) -> list[Step]:
    found = []
    for _, setting in cases(session):
        dense = "dense cuDNN" if session.on_cuda else known.DENSE
        beside = known.named(dense, "head_groups, auto")  # one branch of rate 1 is the same operation
        compared = (
            session.comparing(SUITE, known.named(*WHICH), setting),
            session.comparing(SUITE, beside, segments(setting)),
        )
        found += [Step(partial(_fastest_first, part.run), part.seconds) for part in compared]
    return [*found, Step(profile_table), Step(first_calls, 40.0), Step(short_calls, 60.0), Step(block_table, 120.0)]


def cases(session: Session) -> Iterator[tuple[str, Setting]]:
    """On a CPU only the short one. C comes first: it is mostly Python, so nothing large may run before it."""
    for name in "CAB" if session.on_cuda else "C":
        tokens, pattern, heads, dim = CASES[name]
        for causal in (False, True):
            yield name, session.setting(tokens, pattern, heads=heads, head_dim=dim, causal=causal)


def segments(setting: Setting) -> Setting:
    """The same tokens as separate samples of 2048, which is dense attention for every rule."""
    return replace(setting, tokens=ROWS, lengths=(ROWS,), rates=(1,), samples=setting.tokens // ROWS)


def _fastest_first(run: Callable[[Session], None], session: Session) -> None:
    with sdpa_kernel(FASTEST, set_priority=True):
        run(session)


# --- tables -------------------------------------------------------------------------------------------------------


def profile_table(session: Session) -> None:
    """Where one forward + backward spends its time, by kernel."""
    session.pace.step("the kernels of each case", 5.0)
    rows = []
    for case, setting in cases(session):
        for name in () if setting.causal else OURS:
            if session.is_exact(name, setting):
                call = known.named(name)[0].build(setting).call(BOTH)
                call()
                kernels = probes.kernel_times(call, session.device)[:8]
                rows += [[case, name, kernel[:100], count, ms] for kernel, count, ms in kernels]
    note = "The eight longest of each; forward + backward, not causal."
    columns = ["case", "implementation", "kernel", "launches", "ms"]
    session.table(SUITE, "The kernels of one forward and backward pass", note, columns, rows)


def first_calls(session: Session) -> None:
    """Forward and backward in a fresh process without compiled kernels."""
    session.pace.step("first calls", 40.0)
    rows = []
    for rule in ("head_groups", "longnet"):
        code = FIRST_CALL.format(device=str(session.device), dtype=session.dtypes[0], rule=rule)
        with tempfile.TemporaryDirectory() as cache:
            path = os.pathsep.join(filter(None, sys.path))
            caches = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": path}
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=True)
        rows.append([rule, float(done.stdout)])
    note = "Case C; seconds of the first forward + backward in a new process, with empty caches of kernels."
    session.table(SUITE, "The first call", note, ["rule", "s"], rows)


def short_calls(session: Session) -> None:
    """Case C in every way in which a model may call it, beside dense attention called in the same way."""
    _, setting = next(cases(session))
    ours = partial(dilated_attention, pattern=setting.pattern("head_groups"))
    rows: list[list[Any]] = []

    def add(name: str, how: str, attention: Attention, change: Callable[[Call], Call] = lambda call: call) -> None:
        session.pace.step(f"short calls: {name}, {how}", 6.0)
        passes = forward(attention, setting.qkv()), forward_backward(attention, setting.qkv(), setting.dout())
        rows.append([name, how, *(session.time({"": change(call)})[""].median for call in passes)])

    if session.is_exact("head_groups, auto", setting):
        beside = {"head_groups, auto": ours, known.DENSE: baselines.dense, "autograd alone": nothing}
        for (name, attention), mode in product(beside.items(), modes(session)):
            add(name, mode, compiled(attention, mode, setting.qkv()))
        with torch.autograd.set_multithreading_enabled(False):
            add("head_groups, auto", "eager, autograd without its thread", ours)
        if session.on_cuda:
            add("head_groups, auto", "CUDA graph", ours, graphed)
    columns = ["attention", "how", "forward ms", "forward + backward ms"]
    session.table(SUITE, "Short calls", f"Case C: {setting}.", columns, rows)


def block_table(session: Session) -> None:
    """A transformer block of 768 columns at 8,192 tokens, causal, compiled as a whole."""
    setting = session.setting(8192, CASES["C"][1], heads=12, causal=True)
    rows = []
    if session.is_exact("longnet, auto", setting):
        ours = partial(dilated_attention, pattern=setting.pattern("longnet"), is_causal=True)
        beside: dict[str, Attention] = {
            "longnet, auto": ours,
            known.DENSE: partial(baselines.dense, is_causal=True),
            "none": nothing,
        }
        x, dout = setting.qkv()[0].flatten(2), setting.dout().flatten(2)
        for (name, attention), mode in product(beside.items(), modes(session)):
            session.pace.step(f"a transformer block: {name}, {mode}", 13.0)
            block = TimedBlock(attention, setting.heads, setting.head_dim).to(setting.device, setting.dtype)
            both = forward_backward(compiled(block, mode, [x]), [x], dout, block.parameters())
            rows.append([name, mode, session.time({"": both})[""].median])
    note = f"{setting}; forward + backward of norm, projections, attention, norm and a feed-forward layer of 3072."
    session.table(SUITE, "A transformer block", note, ["attention", "mode", "ms"], rows)


class TimedBlock(nn.Module):
    def __init__(self, attention: Attention, heads: int, dim: int) -> None:
        super().__init__()
        width = heads * dim
        self.attention, self.shape = attention, (3, heads, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, self.shape).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


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


def graphed(call: Call) -> Call:
    """The kernels without Python."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's thread warms up on the stream that it will be captured on
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = call()

    def replay(kept: Any = kept) -> None:  # what the graph writes must stay allocated
        graph.replay()

    return replay
