"""Our kernels on a GPU, where the table of cases leaves something out: every tile, length, weights, races, what runs.

Nearly all the time goes into compiling, on one core: `run_gpu.py` runs several processes at once.
With TRITON_INTERPRET=1 the device is the CPU: ``-k "fp32 or fp16"`` tries the logic of small cases there.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends import run
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.triton import dispatch
from dilated_attention.backends.triton.dispatch import TileConfig
from dilated_attention.bench import probes
from dilated_attention.call import Call
from dilated_attention.testing import Results
from tests.on_gpu import (
    BF16,
    DEVICE,
    DTYPES,
    attend,
    bits,
    free_memory,  # noqa: F401
    gradients,
    hold,
    hold_parts,
    make_mask,
    make_qkv,
    needs,
    poisoned,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("always_nested")]
pytest.importorskip("triton")


# --- every tile that can be picked ------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """What the three kernels are compiled with for one kind of call, and where: only there were they measured."""

    name: str
    dtype: str
    head_dim: int
    is_causal: bool
    nested: bool
    configs: tuple[TileConfig, ...]  # in the order of dispatch.KERNELS
    capability: str | None = None
    masked: bool = False
    kind: str = ""

    @property
    def id(self) -> str:
        flags = {"causal": self.is_causal, "nested": self.nested, "masked": self.masked, self.kind: True}
        return "-".join([self.name, self.dtype, f"d{self.head_dim}", *(w for w, is_on in flags.items() if w and is_on)])


def measured_key(kernel: str, size: int, is_causal: bool, nested: bool, kind: str) -> str:
    flags = {" causal": is_causal, " nested": nested, f" {kind}": bool(kind)}
    return f"{kernel} {size}" + "".join(word for word, is_on in flags.items() if is_on)


KINDS = ("", "short", "dense", "apart")


def make_tiles() -> list[Tiles]:
    found = []
    for flags in itertools.product((False, True), (False, True)):
        for size, dtype in itertools.product(dispatch.SMALL, ("bf16", "fp16")):
            defaults = tuple(dispatch.DEFAULTS[kernel, size] for kernel in dispatch.KERNELS)
            found.append(Tiles("defaults", dtype, size, *flags, defaults))
        for size, config in dispatch.SMALL.items():
            found.append(Tiles("small", "fp16", size, *flags, (config,) * 3))
        for size, config in dispatch.WITHOUT_TENSOR_CORES.items():
            found.append(Tiles("without_tensor_cores", "fp32", size, *flags, (config,) * 3))
        for capability, size, kind in itertools.product(dispatch.measured(), dispatch.SMALL, KINDS):
            tiles = dispatch.measured()[capability]["tiles"]
            keys = {
                kernel: [measured_key(kernel, size, *flags, given) for given in (kind, "")]
                for kernel in dispatch.KERNELS
            }
            if any(first in tiles for first, _ in keys.values()):
                chosen = tuple(
                    TileConfig(*tiles.get(first, tiles.get(second, dispatch.DEFAULTS[kernel, size])))
                    for kernel, (first, second) in keys.items()
                )
                name = f"measured_on_{capability}"
                for dtype, masked in (("bf16", False), ("fp16", False), ("bf16", True)):
                    found.append(Tiles(name, dtype, size, *flags, chosen, capability, masked, kind))
    return found


@pytest.mark.parametrize("tiles", make_tiles(), ids=lambda tiles: tiles.id)
def test_every_tile(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tiles are compiled wrongly on some devices: none is picked that was not seen to be right."""
    if tiles.capability is not None and tiles.capability != dispatch.device_class(torch.device(DEVICE)):
        pytest.skip(f"measured on {tiles.capability}")

    def picked(kernel: str, *_: Any) -> TileConfig:
        return tiles.configs[dispatch.KERNELS.index(kernel)]

    monkeypatch.setattr("dilated_attention.backends.triton.dispatch.config", picked)
    pattern, heads, dropout_p = DilatedPattern.longnet([512, 1024, 2048], [1, 2, 4]), (2, 2), 0.0
    if not tiles.nested:  # several sections in one launch
        pattern, heads, dropout_p = DilatedPattern.head_groups([512, 1024], [1, 2]), (4, 2), 0.2 * tiles.masked
    if tiles.kind == "dense":
        pattern = DilatedPattern.head_groups([512], [1])
    if tiles.kind == "apart":  # a launch for each branch
        pattern = DilatedPattern.torchscale([512, 2048], [1, 3])
    chosen = Call(pattern, tiles.is_causal, dropout_p=dropout_p, backend="triton")
    for tokens in (2048, 2048 + 300) if tiles.capability else (2048 + 300,):  # all tiles full, and not
        qkv = make_qkv(1, tokens, heads[0], tiles.head_dim, kv_heads=heads[1], dtype=DTYPES[tiles.dtype])
        dout, dlse = gradients(qkv[0])
        mask = make_mask(1, tokens) if tiles.masked else None
        seed = torch.tensor(2**40 + 7, device=DEVICE) if dropout_p else None
        with poisoned():
            call, inputs = chosen.of(qkv[0], qkv[1], mask, 0), Inputs(*qkv, mask, seed)
            out, lse = run.forward(call, inputs)
            got = Results(out, lse, *run.backward(call, inputs, out, lse, dout, dlse))
        exact = {"is_causal": tiles.is_causal, "key_padding_mask": mask, "dropout_p": dropout_p, "seed": seed}
        hold(got, qkv, pattern, dout, dlse, **exact)


# --- length -----------------------------------------------------------------------------------------------------

LONG: dict[str, Any] = {
    "nested": (DilatedPattern.longnet([512, 1024, 2048], [1, 2, 4]), (4, 4), 64),
    "not nested": (DilatedPattern.longnet([1024, 2048], [2, 3]), (4, 2), 64),
    "head groups": (DilatedPattern.head_groups([256, 512, 2048], [1, 2, 4]), (6, 3), 128),
    "torchscale": (DilatedPattern.torchscale([1024, 2048], [1, 3]), (4, 4), 64),
    "long segments": (DilatedPattern.longnet([1024, 2048, 8192], [1, 2, 8]), (2, 2), 64),
}


@pytest.mark.large
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("is_causal", [False, True])
def test_many_periods(name: str, is_causal: bool) -> None:
    needs(30)
    pattern, (heads, kv_heads), head_dim = LONG[name]
    qkv = make_qkv(2, 2**17 + 1000, heads, head_dim, kv_heads=kv_heads, dtype=BF16)
    dout, dlse = gradients(qkv[0])
    got = testing.run(attend(pattern, is_causal=is_causal), qkv, dout, dlse)
    hold_parts(got, qkv, pattern, dout, dlse, is_causal=is_causal)


@pytest.mark.large
def test_workspace() -> None:
    """Beyond what a call returns it needs little more than the rows' statistics."""
    pattern = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
    qkv = make_qkv(1, 262144, 12, 64, dtype=BF16)
    leaves = [x.requires_grad_() for x in qkv]
    dout, _ = gradients(qkv[0])
    attention, device = attend(pattern), torch.device(DEVICE)
    with torch.no_grad():
        forward = probes.peak_bytes(lambda: attention(*qkv), device)
    out, lse = attention(*leaves)
    backward = probes.peak_bytes(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device)
    assert forward is not None
    assert backward is not None
    assert forward - out.nbytes - lse.nbytes <= 0.25 * out.nbytes
    assert backward - sum(x.nbytes for x in qkv) <= 0.25 * sum(x.nbytes for x in qkv)


# --- weights relative to the row's own key ----------------------------------------------------------------------

SCORES = ("moderate", 4.0, 6.0, 9.0, 30.0)  # by 5.5 to 6.5 some are 2^100 times as heavy, by 9 beyond float32


def hold_forward(qkv: tuple[Tensor, ...], pattern: DilatedPattern, is_causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse, held against the oracle's; NaN must be where it is there."""
    with torch.no_grad():
        got = attend(pattern, is_causal=is_causal)(*qkv)
        exact = reference.attention(*qkv, pattern, is_causal=is_causal)
        plain = reference.attention(*qkv, pattern, is_causal=is_causal, dtype=None)
    for name, x, y, z in zip(("out", "lse"), got, exact, plain, strict=True):
        assert torch.equal(x.isnan(), y.isnan()), f"{name} is NaN elsewhere"
        x, y, z = (a.masked_fill(y.isnan(), 0.0) for a in (x, y, z.masked_fill(z.isnan(), 0.0)))
        assert testing.error(x, y) <= testing.limits({"out": y}, {"out": z}, qkv[0].dtype)["out"], name
        # plain PyTorch rounds large scores: ours are products of rounded numbers, summed in float32
        assert testing.error(x, y) < (1e-2 if name == "out" else 1e-4), name
    return got


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("widths", [[256, 512], [700]], ids=["nested", "single"])
def test_scores_far_above_the_own_one(scores: str | float, is_causal: bool, widths: list[int]) -> None:
    """Keys that look away from their own query: the weights relative to it overflow, for some or for all tiles."""
    q, k, v = make_qkv(1, 700, 3, 64, dtype=BF16)
    k = 3 * k if isinstance(scores, str) else -scores * q
    hold_forward((q, k, v), DilatedPattern.longnet(widths, [1, 2][: len(widths)]), is_causal)


@pytest.mark.parametrize("size", [1e8, 1e20, 1e30])
def test_large_values(size: float) -> None:
    """Sums of large values with weights far above 1 must not overflow where their mean does not."""
    q, _, v = make_qkv(1, 300, 2, 64, dtype=BF16)
    for factor in (0.5, 2.0, 4.0):
        hold_forward((q, -factor * q, v * size), DilatedPattern.longnet([300], [1]), False)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["query", "key"])
def test_bad_numbers_reach_only_the_rows_that_see_them(which: str, bad: float, is_causal: bool) -> None:
    q, k, v = make_qkv(1, 700, 2, 64, dtype=BF16)
    (q if which == "query" else k)[0, 300, 1, 5] = bad
    pattern = DilatedPattern.longnet([128, 256], [1, 2])
    out, _ = hold_forward((q, k, v), pattern, is_causal)
    assert out[:, :, 0].isfinite().all()
    assert out[0, :256].isfinite().all()
    assert out[0, 512:].isfinite().all()
    assert bad == bad or out[0, 300, 1].isnan().all()


# --- the same bits again ----------------------------------------------------------------------------------------

REPEATS = 250
RACES: dict[str, Any] = {
    "nested": (DilatedPattern.longnet([512, 1024, 2048], [1, 2, 4]), 4096, (4, 4), 64, {}),
    "nested causal": (DilatedPattern.longnet([512, 1024, 2048], [1, 2, 4]), 4099, (4, 4), 64, {"is_causal": True}),
    "nested fp16": (DilatedPattern.longnet([256, 1024], [1, 4]), 2048, (8, 8), 128, {"dtype": torch.float16}),
    "grouped": (DilatedPattern.longnet([512, 1024], [1, 2]), 3000, (8, 2), 64, {}),
    "several launches": (DilatedPattern.longnet([512, 768, 2048], [1, 3, 4]), 4001, (4, 4), 64, {}),
    "torchscale": (DilatedPattern.torchscale([512, 1448, 4096], [1, 2, 4]), 3001, (4, 4), 64, {"masked": True}),
    "head groups": (DilatedPattern.head_groups([512, 1024, 2048], [1, 2, 4]), 4100, (6, 6), 128, {}),
    "dropout": (DilatedPattern.longnet([512, 1024], [1, 2]), 2049, (4, 2), 64, {"dropout_p": 0.2}),
    "fp32": (DilatedPattern.longnet([256, 512], [1, 2]), 1025, (4, 4), 64, {"dtype": torch.float32}),
    "wide heads": (DilatedPattern.longnet([256, 512], [1, 2]), 1025, (4, 4), 256, {"is_causal": True}),
}


@pytest.mark.parametrize("name", RACES)
def test_no_race(name: str) -> None:
    """Every repeat gives the same bits, wherever its results lie and whatever was there."""
    pattern, tokens, (heads, kv_heads), head_dim, given = RACES[name]
    options = dict(given)
    mask = make_mask(1, tokens) if options.pop("masked", False) else None
    qkv = make_qkv(1, tokens, heads, head_dim, kv_heads=kv_heads, dtype=options.pop("dtype", BF16))
    dout, dlse = gradients(qkv[0])
    draw = random.Random(0)
    first, differing = None, torch.zeros((), dtype=torch.int64, device=DEVICE)
    for repeat in range(REPEATS):
        torch.manual_seed(7)
        with poisoned() if repeat % 2 else contextlib.nullcontext():
            held = [torch.empty(draw.randrange(1, 2**21), device=DEVICE) for _ in range(3)]
            got = testing.run(attend(pattern, key_padding_mask=mask, **options), qkv, dout, dlse)
        del held
        first = first or got
        for (_, x), (_, y) in zip(got.items(), first.items(), strict=True):
            differing += (bits(x) != bits(y)).any()
    assert first is not None
    assert not any(x.isnan().any() for _, x in first.items())
    assert differing.item() == 0


# --- what runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def exact_float32() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("is_causal", [False, True])
def test_float32_is_exact_unless_the_user_wants_speed(is_causal: bool) -> None:
    """Both of torch's ways to ask for TF32 are followed; neither may make a call raise."""
    pattern = DilatedPattern.longnet([64, 128], [1, 2])
    qkv = make_qkv(1, 300, 2, 64)
    dout, dlse = gradients(qkv[0])
    exact = testing.oracle(qkv, pattern, dout, dlse, is_causal=is_causal)

    def run() -> Results:
        return testing.run(attend(pattern, is_causal=is_causal), qkv, dout, dlse)

    before = run()
    testing.assert_exact(before, exact)
    torch.set_float32_matmul_precision("high")
    fast = run()
    torch.set_float32_matmul_precision("highest")
    for name, found in testing.errors(fast, exact).items():
        assert testing.TOLERANCE[torch.float32] < found < 1e-2, name
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    again = run()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for one, two in ((again, fast), (run(), before)):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(one.items(), two.items(), strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [2000, 65536 + 9])
def test_what_explain_says_is_what_runs(head_dim: int, tokens: int) -> None:
    for pattern in (DilatedPattern.longnet([512, 1024], [1, 2]), DilatedPattern.longnet([512], [1])):
        qkv = [x.requires_grad_() for x in make_qkv(1, tokens, 4, head_dim, dtype=BF16)]
        told = explain(*qkv, pattern)
        out = dilated_attention(*qkv, pattern)
        dout, _ = gradients(out)

        def backward(out: Tensor = out, dout: Tensor = dout, leaves: list[Tensor] = qkv) -> None:
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

        backward()
        device = torch.device(DEVICE)
        forwards = {
            name for name, _, _ in probes.kernel_times(lambda q=qkv, p=pattern: dilated_attention(*q, p), device)
        }
        backwards = {name for name, _, _ in probes.kernel_times(backward, device)}
        assert any(name.startswith("forward_kernel") for name in forwards) == (told.backend == "triton"), forwards
        assert any(name.startswith("dkdv_kernel") for name in backwards) == told.backward.startswith("triton"), (
            backwards
        )
        assert len(forwards) == 1 or told.backend != "triton", forwards  # one launch, and nothing else
        assert len(backwards) == 2 or not told.backward.startswith("triton"), backwards
