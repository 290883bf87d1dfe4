"""Our kernels on a GPU, where the table of cases leaves something out: every tile, length, weights, races, what runs,
long caches, and the fused merge (whose cases of every shape are in triton_kernels/fuse_cases.py).

Nearly all the time goes into compiling, on one core: `run_gpu.py` runs several processes at once.
With TRITON_INTERPRET=1 the device is the CPU: ``-k "fp32 or fp16"`` tries the logic of small cases there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, Pattern, Window, dilated_attention, explain, merge, reference, testing
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
    captured,
    free_memory,  # noqa: F401
    gradients,
    hold,
    make_mask,
    make_qkv,
    normal,
    poisoned,
    same_bits,
)

longnet, torchscale, head_groups = DilatedPattern.longnet, DilatedPattern.torchscale, DilatedPattern.head_groups

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("always_nested")]
pytest.importorskip("triton")
from dilated_attention.backends.triton import fuse  # noqa: E402 -- which needs triton

# --- every tile that can be picked ------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """What the three kernels are compiled with for one kind of call, and where: only there were they measured."""

    name: str
    dtype: str
    head_dim: int
    is_causal: bool
    form: str
    configs: tuple[TileConfig, ...]  # in the order of dispatch.KERNELS
    capability: str = ""
    masked: bool = False


FORMS = [
    ("", False),
    ("", True),
    ("nested", False),
    ("nested", True),
    ("dense", False),
    ("apart", False),
    ("band", False),
]  # fmt: skip -- short?


def make_tiles() -> list[Tiles]:
    found = []
    for size, is_causal, form in itertools.product(dispatch.SMALL, (False, True), ("", "nested")):
        about, defaults = (size, is_causal, form), tuple(dispatch.DEFAULTS[kernel, size] for kernel in dispatch.KERNELS)
        found += [Tiles("defaults", dtype, *about, defaults) for dtype in ("bf16", "fp16")]
        found.append(Tiles("small", "fp16", *about, (dispatch.SMALL[size],) * 3))
        found.append(Tiles("without_tensor_cores", "fp32", *about, (dispatch.WITHOUT_TENSOR_CORES[size],) * 3))
    for (capability, measured), size, is_causal, (form, short) in itertools.product(
        dispatch.measured().items(), dispatch.SMALL, (False, True), FORMS
    ):
        own, other = (
            [measured["tiles"].get(dispatch.key(kernel, size, is_causal, *kind)) for kernel in dispatch.KERNELS]
            for kind in ((form, short), (form if form == "nested" else "", False))
        )
        if any(own):
            defaults = [dispatch.DEFAULTS[kernel, size] for kernel in dispatch.KERNELS]
            chosen = tuple(TileConfig(*(x or y or z)) for x, y, z in zip(own, other, defaults, strict=True))
            for dtype, masked in (("bf16", False), ("fp16", False), ("bf16", True)):
                name = "measured short" if short else "measured"
                found.append(Tiles(name, dtype, size, is_causal, form, chosen, capability, masked))
    return found


@pytest.mark.parametrize("tiles", make_tiles(), ids=lambda tiles: "-".join(map(str, tiles[:5] + tiles[6:])))
def test_every_tile(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tiles are compiled wrongly on some devices: none is picked that was not seen to be right."""
    if tiles.capability not in ("", dispatch.device_class(torch.device(DEVICE))):
        pytest.skip(f"measured on {tiles.capability}")
    monkeypatch.setattr(dispatch, "config", lambda kernel, *_: tiles.configs[dispatch.KERNELS.index(kernel)])
    pattern, heads, dropout_p = {
        "nested": (longnet([512, 1024, 2048], [1, 2, 4]), (2, 2), 0.0),
        "dense": (head_groups([512], [1]), (4, 2), 0.2),
        "apart": (torchscale([512, 2048], [1, 3]), (4, 2), 0.2),  # a launch for each branch
        "band": (Pattern([Window(300)]), (4, 2), 0.2),
        "": (head_groups([512, 1024], [1, 2]), (4, 2), 0.2),  # several sections in one launch
    }[tiles.form]
    chosen = Call(pattern, tiles.is_causal, dropout_p=dropout_p * tiles.masked, backend="triton")
    for tokens in (2048, 2048 + 300) if tiles.capability else (2048 + 300,):  # all tiles full, and not
        qkv = make_qkv(1, tokens, heads[0], tiles.head_dim, kv_heads=heads[1], dtype=DTYPES[tiles.dtype])
        dout, dlse = gradients(qkv[0])
        mask = make_mask(1, tokens) if tiles.masked else None
        seed = torch.tensor(2**40 + 7, device=DEVICE) if chosen.drops else None
        with poisoned():
            call, inputs = chosen.of(qkv[0], qkv[1], mask, 0), Inputs(*qkv, mask, seed)
            out, lse = run.forward(call, inputs)
            got = Results(out, lse, *run.backward(call, inputs, out, lse, dout, dlse))
        exact = {"is_causal": tiles.is_causal, "key_padding_mask": mask, "dropout_p": chosen.dropout_p, "seed": seed}
        hold(got, qkv, pattern, dout, dlse, **exact)


# --- length -----------------------------------------------------------------------------------------------------


@pytest.mark.large
def test_workspace() -> None:
    """Beyond what a call returns it needs little more than the rows' statistics."""
    leaves = [x.requires_grad_() for x in make_qkv(1, 262144, 12, 64, dtype=BF16)]
    attention, device = attend(PATTERN), torch.device(DEVICE)
    with torch.no_grad():
        forward = probes.peak_bytes(lambda: attention(*leaves), device)
    out, lse = attention(*leaves)
    dout, _ = gradients(out)
    backward = probes.peak_bytes(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device)
    for peak, results in ((forward, [out, lse]), (backward, leaves)):
        assert peak is not None
        assert peak - sum(x.nbytes for x in results) <= 0.25 * sum(x.nbytes for x in results if x is not lse)


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
    hold_forward((q, k, v), longnet(widths, [1, 2][: len(widths)]), is_causal)


@pytest.mark.parametrize("size", [1e8, 1e20, 1e30])
def test_large_values(size: float) -> None:
    """Sums of large values with weights far above 1 must not overflow where their mean does not."""
    q, _, v = make_qkv(1, 300, 2, 64, dtype=BF16)
    for factor in (0.5, 2.0, 4.0):
        hold_forward((q, -factor * q, v * size), longnet([300], [1]), False)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["query", "key"])
def test_bad_numbers_reach_only_the_rows_that_see_them(which: str, bad: float, is_causal: bool) -> None:
    q, k, v = make_qkv(1, 700, 2, 64, dtype=BF16)
    (q if which == "query" else k)[0, 300, 1, 5] = bad
    pattern = longnet([128, 256], [1, 2])
    out, _ = hold_forward((q, k, v), pattern, is_causal)
    assert out[:, :, 0].isfinite().all()
    assert out[0, :256].isfinite().all()
    assert out[0, 512:].isfinite().all()
    assert bad == bad or out[0, 300, 1].isnan().all()


# --- the same bits again ----------------------------------------------------------------------------------------

REPEATS = 250
RACES = {
    "nested": (longnet([512, 1024, 2048], [1, 2, 4]), 4096, (4, 4), 64, {}),
    "nested causal": (longnet([512, 1024, 2048], [1, 2, 4]), 4099, (4, 4), 64, {"is_causal": True}),
    "nested fp16": (longnet([256, 1024], [1, 4]), 2048, (8, 8), 128, {"dtype": torch.float16}),
    "grouped": (longnet([512, 1024], [1, 2]), 3000, (8, 2), 64, {}),
    "several launches": (longnet([512, 768, 2048], [1, 3, 4]), 4001, (4, 4), 64, {}),
    "torchscale": (torchscale([512, 1448, 4096], [1, 2, 4]), 3001, (4, 4), 64, {"masked": True}),
    "head groups": (head_groups([512, 1024, 2048], [1, 2, 4]), 4100, (6, 6), 128, {}),
    "dropout": (longnet([512, 1024], [1, 2]), 2049, (4, 2), 64, {"dropout_p": 0.2}),
    "fp32": (longnet([256, 512], [1, 2]), 1025, (4, 4), 64, {"dtype": torch.float32}),
    "wide heads": (longnet([256, 512], [1, 2]), 1025, (4, 4), 256, {"is_causal": True}),
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
    pattern = longnet([64, 128], [1, 2])
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
        same_bits(*([x for _, x in found.items()] for found in (one, two)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [2000, 65536 + 9])
@pytest.mark.parametrize("rates", [[1, 2], [1]])
def test_what_explain_says_is_what_runs(head_dim: int, tokens: int, rates: list[int]) -> None:
    """One launch forward and two backward, and nothing else, where our kernels run."""
    pattern = longnet([512, 1024][: len(rates)], rates)
    qkv = [x.requires_grad_() for x in make_qkv(1, tokens, 4, head_dim, dtype=BF16)]
    told, out = explain(*qkv, pattern), dilated_attention(*qkv, pattern)
    dout, _ = gradients(out)
    calls = {
        "forward": lambda: dilated_attention(*qkv, pattern),
        "dkdv": lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True),
    }
    calls["dkdv"]()
    for (name, call), backend, launches in zip(calls.items(), (told.backend, told.backward), (1, 2), strict=True):
        names = {name for name, _, _ in probes.kernel_times(call, torch.device(DEVICE))}
        ours = any(kernel.startswith(f"{name}_kernel") for kernel in names)
        assert ours == backend.startswith("triton"), names
        assert len(names) == launches or not ours, names


# --- decoding ---------------------------------------------------------------------------------------------------

TOKENS = 509
PAPER = longnet([32, 64, 256], [1, 2, 4])
PATTERN = longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


def check_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, position: int) -> None:
    """One query, head by head, in float64 from the pattern's own list of keys."""
    tokens, heads, dim = k.shape[1:]
    for head in range(heads):
        keys = PATTERN.keys(position, head, num_tokens=tokens, num_heads=heads, is_causal=True)
        index = torch.tensor(keys, device=q.device)
        scores = k[0, index, head].double() @ q[0, 0, head].double() / math.sqrt(dim)
        exact = torch.softmax(scores, 0) @ v[0, index, head].double()
        assert (out[0, 0, head].double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("position", [0, 2047, 2048, 65535, 40000, 32768])
def test_a_long_cache(position: int) -> None:
    """The same bits every time."""
    q, k, v = make_qkv(1, 65536, 12, 64, dtype=BF16)
    outs = [dilated_attention(q[:, :1], k, v, PATTERN, is_causal=True, query_offset=position) for _ in range(10)]
    check_rows(outs[0], q, k, v, position)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_offsets_beyond_32_bits() -> None:
    """More than 2**31 elements from the first row to the last that is read; nothing else is even set."""
    tokens, heads, dim = 1 << 21, 16, 128
    q = torch.randn(1, 1, heads, dim, device=DEVICE, dtype=BF16)
    k, v = (torch.empty(1, tokens, heads, dim, device=DEVICE, dtype=BF16) for _ in range(2))
    assert k.numel() > 2**31
    for x in (k, v):
        x[:, -32768:].normal_()
    check_rows(dilated_attention(q, k, v, PATTERN, is_causal=True), q, k, v, tokens - 1)


@pytest.mark.parametrize("masked", [False, True])
def test_a_captured_graph_follows_the_positions(masked: bool) -> None:
    q, k, v = make_qkv(2, TOKENS, 4, 64, dtype=BF16)
    q, at = q[:, :1].contiguous(), torch.tensor([5, 9], device=DEVICE)
    given = {"is_causal": True, "key_padding_mask": make_mask(2, TOKENS) if masked else None, "return_lse": True}

    def step() -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PAPER, query_offset=at, **given)

    graph, (out, lse) = captured(step)
    for first, second in ((5, 9), (31, 32), (508, 0), (256, 300)):
        at.copy_(torch.tensor([first, second]))
        q.normal_()
        graph.replay()
        same_bits((out, lse), step())


# --- the fused merge --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 40_000])
def test_fused_rows_far_apart(rows: int) -> None:
    """Few rows far apart, where the offsets within a block pass 2^31, and many, where only those between blocks do."""
    step = (5 * 2**29 // (rows - 1) // 64 + 1) * 64  # 5 GiB in all
    storage = torch.zeros((rows - 1) * step + 64, dtype=BF16, device=DEVICE)
    target = storage.as_strided((1, rows, 1, 64), (0, step, 64, 1))
    lse = normal((rows - 1) * step // 64 + 1).as_strided((1, rows, 1), (0, step // 64, 1))
    part = normal(1, rows, 1, 64, dtype=BF16)
    fuse.put_(target, part, add=True)
    assert torch.equal(target, part)
    exact, exact_lse, part_lse = part.float(), lse.clone(), lse.flip(1)
    merge.merge_(exact, exact_lse, part.flip(1).float(), part_lse)
    fuse.merge_(target, lse, part.flip(1), part_lse, first=False)
    torch.testing.assert_close(target.float(), exact, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=1e-6)
    target.zero_()
    assert not storage.any()  # nothing was written anywhere else
