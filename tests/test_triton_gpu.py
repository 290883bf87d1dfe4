"""Our kernels on a GPU, where the table of cases leaves something out: every tile, sizes, races, graphs, what runs.

Nearly all the time goes into compiling, on one core: `run_gpu.py` runs several processes at once.
With TRITON_INTERPRET=1 the device is the CPU: ``-k "fp32 or fp16"`` tries the logic of small cases there.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, explain, reference, testing
from dilated_attention.backends import run
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.triton import configs, table
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.configs import Config
from dilated_attention.backends.triton.nesting import form_of
from dilated_attention.bench import probes
from dilated_attention.call import Call
from dilated_attention.functional import drawn_seed
from dilated_attention.testing import Results

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("always_nested")]

pytest.importorskip("triton")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GIB = 2**30


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Everything that is allocated and not written holds NaN: torch does so for deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2 * GIB:
        torch.cuda.empty_cache()


def make_qkv(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return testing.make_qkv(*args, device=DEVICE, **kwargs)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Drawn in its own dtype: by way of float32 it would take three times the memory."""
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=dtype)


def gradients(q: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """dout and dlse for these queries."""
    return normal(*q.shape, seed=seed, dtype=q.dtype), normal(*q.shape[:3], seed=seed + 1)


def make_mask(kind: str, samples: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        mask = torch.rand(samples, tokens, generator=generator) < 0.3
        mask[-1] |= samples > 1  # a sample with nothing to see
    else:
        mask = torch.arange(tokens) >= torch.randint(1, tokens + 1, (samples, 1), generator=generator)
    return mask.to(DEVICE)


def attend(pattern: DilatedPattern, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    given = {"enable_gqa": True, "return_lse": True, "backend": "triton", **options}
    return lambda query, key, value: dilated_attention(query, key, value, pattern, **given)


def check(
    qkv: tuple[Tensor, ...],
    pattern: DilatedPattern,
    *,
    lse_gradient: bool = True,
    dropout_p: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> None:
    """As `testing.check`, with our kernels, in poisoned memory, and with dropout too."""
    dout, dlse = gradients(qkv[0], seed)
    given = dlse if lse_gradient else None
    exact = dict(options)
    if dropout_p:
        torch.manual_seed(seed)
        exact |= {"dropout_p": dropout_p, "seed": drawn_seed(torch.device(DEVICE))}
        torch.manual_seed(seed)  # the call draws the same seed
    with poisoned():
        got = testing.run(attend(pattern, dropout_p=dropout_p, **options), qkv, dout, given)
    hold(got, qkv, pattern, dout, given, **exact)


def hold(
    got: Results, qkv: tuple[Tensor, ...], pattern: DilatedPattern, dout: Tensor, dlse: Tensor | None, **options: Any
) -> None:
    plain = None
    if qkv[0].dtype not in testing.TOLERANCE:
        plain = testing.oracle(qkv, pattern, dout, dlse, dtype=None, **options)
    testing.assert_exact(got, testing.oracle(qkv, pattern, dout, dlse, **options), plain)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (16, 16), (40, 8)])
@pytest.mark.parametrize("rule", ["longnet", "torchscale"])
def test_numbers_of_heads(heads: tuple[int, int], rule: str) -> None:
    qkv = make_qkv(2, 129, heads[0], 64, kv_heads=heads[1], dtype=torch.float16)
    check(qkv, DilatedPattern.of(rule, [64, 128], [1, 4]))


# --- every tile that can be picked ------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """What the three kernels are compiled with for one kind of call, and where: only there were they measured."""

    name: str
    dtype: str
    head_dim: int
    is_causal: bool
    nested: bool
    configs: tuple[Config, ...]  # in the order of configs.KERNELS
    capability: str | None = None
    masked: bool = False
    dense: bool = False

    @property
    def id(self) -> str:
        flags = {"causal": self.is_causal, "nested": self.nested, "masked": self.masked, "dense": self.dense}
        return "-".join([self.name, self.dtype, f"d{self.head_dim}", *(word for word, is_on in flags.items() if is_on)])


def measured_key(kernel: str, size: int, is_causal: bool, nested: bool, kind: str) -> str:
    flags = {" causal": is_causal, " nested": nested, f" {kind}": bool(kind)}
    return f"{kernel} {size}" + "".join(word for word, is_on in flags.items() if is_on)


KINDS = ("", "short", "dense")


def make_tiles() -> list[Tiles]:
    found = []
    for flags in itertools.product((False, True), (False, True)):
        for size, dtype in itertools.product(configs.SMALL, ("bf16", "fp16")):
            defaults = tuple(configs.DEFAULTS[kernel, size] for kernel in configs.KERNELS)
            found.append(Tiles("defaults", dtype, size, *flags, defaults))
        for size, config in configs.SMALL.items():
            found.append(Tiles("small", "fp16", size, *flags, (config,) * 3))
        for size, config in configs.WITHOUT_TENSOR_CORES.items():
            found.append(Tiles("without_tensor_cores", "fp32", size, *flags, (config,) * 3))
        for capability, size, kind in itertools.product(configs.measured(), configs.SMALL, KINDS):
            tiles = configs.measured()[capability]["tiles"]
            keys = {
                kernel: [measured_key(kernel, size, *flags, given) for given in (kind, "")]
                for kernel in configs.KERNELS
            }
            if any(first in tiles for first, _ in keys.values()):
                chosen = tuple(
                    Config(*tiles.get(first, tiles.get(second, configs.DEFAULTS[kernel, size])))
                    for kernel, (first, second) in keys.items()
                )
                name = "_".join(filter(None, ("measured_on", capability, kind)))
                for dtype, masked in (("bf16", False), ("fp16", False), ("bf16", True)):
                    found.append(Tiles(name, dtype, size, *flags, chosen, capability, masked, kind == "dense"))
    return found


@pytest.mark.parametrize("tiles", make_tiles(), ids=lambda tiles: tiles.id)
def test_every_tile(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tiles are compiled wrongly on some devices: none is picked that was not seen to be right."""
    if tiles.capability is not None and tiles.capability != configs.device_class(torch.device(DEVICE)):
        pytest.skip(f"measured on {tiles.capability}")

    def picked(kernel: str, *_: Any) -> Config:
        return tiles.configs[configs.KERNELS.index(kernel)]

    monkeypatch.setattr("dilated_attention.backends.triton.configs.config", picked)
    pattern, heads, dropout_p = DilatedPattern.longnet([512, 1024, 2048], [1, 2, 4]), (2, 2), 0.0
    if not tiles.nested:  # several sections in one launch
        pattern, heads, dropout_p = DilatedPattern.head_groups([512, 1024], [1, 2]), (4, 2), 0.2 * tiles.masked
    if tiles.dense:
        pattern = DilatedPattern.head_groups([512], [1])
    chosen = Call(pattern, tiles.is_causal, dropout_p=dropout_p, backend="triton")
    for tokens in (2048, 2048 + 300) if tiles.capability else (2048 + 300,):  # all tiles full, and not
        qkv = make_qkv(1, tokens, heads[0], tiles.head_dim, kv_heads=heads[1], dtype=DTYPES[tiles.dtype])
        dout, dlse = gradients(qkv[0])
        mask = make_mask("random", 1, tokens) if tiles.masked else None
        seed = torch.tensor(2**40 + 7, device=DEVICE) if dropout_p else None
        with poisoned():
            call, inputs = chosen.of(qkv[0], qkv[1], mask, 0), Inputs(*qkv, mask, seed)
            out, lse = run.forward(call, inputs)
            got = Results(out, lse, *run.backward(call, inputs, out, lse, dout, dlse))
        exact = {"is_causal": tiles.is_causal, "key_padding_mask": mask, "dropout_p": dropout_p, "seed": seed}
        hold(got, qkv, pattern, dout, dlse, **exact)


def test_every_measured_tile_is_tested() -> None:
    for capability, found in configs.measured().items():
        tested = {config for tiles in make_tiles() if tiles.capability == capability for config in tiles.configs}
        assert {Config(*numbers) for numbers in found["tiles"].values()} <= tested
        flags = itertools.product(configs.KERNELS, configs.SMALL, *[(False, True)] * 2, KINDS)
        assert set(found["tiles"]) <= {measured_key(*each) for each in flags}


# --- size -------------------------------------------------------------------------------------------------------


def needs(gib: int) -> None:
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free device memory")


def hold_parts(
    got: Results,
    qkv: tuple[Tensor, ...],
    pattern: DilatedPattern,
    dout: Tensor,
    dlse: Tensor,
    period: int,
    **options: Any,
) -> None:
    """The first period, one in the middle, and the last whole one with the tail: each is the same call on its own."""
    tokens = dout.shape[1]
    last = tokens // period - 1
    for first, end in ((0, period), (last // 3 * period, (last // 3 + 1) * period), (last * period, tokens)):
        part = slice(first, end)
        own = tuple(x[:, part].contiguous() for x in qkv)
        inside = Results(*(x[:, part] for _, x in got.items()))
        hold(inside, own, pattern, dout[:, part].contiguous(), dlse[:, part].contiguous(), **options)


@pytest.mark.large
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_long_sequence(dtype: str, is_causal: bool) -> None:
    """Thousands of whole tiles."""
    needs(30)
    qkv = make_qkv(1, 8192 + 7, 2, 64, dtype=DTYPES[dtype])
    check(qkv, DilatedPattern.longnet([1024, 2048, 8192], [1, 2, 8]), is_causal=is_causal)


MANY_PERIODS = {
    "nested": (DilatedPattern.longnet([512, 1024, 2048], [1, 2, 4]), (4, 4), 64),
    "not nested": (DilatedPattern.longnet([1024, 2048], [2, 3]), (4, 2), 64),
    "head groups": (DilatedPattern.head_groups([256, 512, 2048], [1, 2, 4]), (6, 3), 128),
    "torchscale": (DilatedPattern.torchscale([1024, 2048], [1, 3]), (4, 4), 64),
}


@pytest.mark.large
@pytest.mark.parametrize("name", MANY_PERIODS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_many_periods(name: str, is_causal: bool) -> None:
    needs(30)
    pattern, (heads, kv_heads), head_dim = MANY_PERIODS[name]
    qkv = make_qkv(2, 2**17 + 1000, heads, head_dim, kv_heads=kv_heads, dtype=torch.bfloat16)
    dout, dlse = gradients(qkv[0])
    got = testing.run(attend(pattern, is_causal=is_causal), qkv, dout, dlse)
    hold_parts(got, qkv, pattern, dout, dlse, 2048, is_causal=is_causal)


@pytest.mark.large
@pytest.mark.parametrize("rule", ["longnet", "head_groups"])
def test_more_elements_than_32_bits_count(rule: str) -> None:
    tokens, heads, dim = 2**20 + 600, 16, 160
    assert tokens * heads * dim > 2**31
    needs(55)
    pattern = DilatedPattern.of(rule, [512, 1024], [1, 4])
    qkv = tuple(normal(1, tokens, heads, dim, seed=seed, dtype=torch.bfloat16) for seed in (1, 2, 3))
    dout = normal(1, heads, tokens, dim, seed=4, dtype=torch.bfloat16).transpose(1, 2)  # strided
    dlse = normal(1, tokens, heads, seed=5)
    got = testing.run(attend(pattern), qkv, dout, dlse)
    hold_parts(got, qkv, pattern, dout, dlse, 1024)


def fused_projection(tokens: int, heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k, v as views of one (1, N, 3, H, D): far apart."""
    return normal(1, tokens, 3, heads, dim, dtype=torch.bfloat16).unbind(2)


@pytest.mark.large
def test_views_of_a_projection_with_more_elements_than_32_bits_count() -> None:
    tokens, heads, dim = 2**20 + 600, 8, 128
    assert tokens * 3 * heads * dim > 2**31
    needs(45)
    pattern, qkv = DilatedPattern.longnet([512, 1024], [1, 4]), fused_projection(tokens, heads, dim)
    dout, dlse = gradients(qkv[0], 4)
    got = testing.run(attend(pattern, is_causal=True), qkv, dout, dlse)
    hold_parts(got, qkv, pattern, dout, dlse, 1024, is_causal=True)


@pytest.mark.large
def test_rows_of_a_tile_further_apart_than_32_bits_count() -> None:
    """Each of the two heads is plain attention among its 64 rows; all other rows have nothing to see."""
    tokens, rate, dim = 2**20, 2**14, 128
    needs(40)
    qkv = tuple(x[:, :, :2] for x in fused_projection(tokens, 8, dim))
    assert 63 * rate * qkv[0].stride(1) > 2**31
    dout, dlse = gradients(qkv[0], 4)
    got = testing.run(attend(DilatedPattern.longnet([tokens], [rate])), qkv, dout, dlse)
    alone = DilatedPattern.longnet([tokens // rate], [1])
    seen = torch.zeros(1, tokens, 2, dtype=torch.bool, device=DEVICE)
    for head in (0, 1):
        rows = [x[:, head::rate, head : head + 1].contiguous() for x in (*qkv, dout, dlse)]
        part = Results(*(x[:, head::rate, head : head + 1] for _, x in got.items()))
        hold(part, tuple(rows[:3]), alone, rows[3], rows[4])
        seen[:, head::rate, head] = True
    assert got.lse is not None
    assert (got.lse[~seen] == -torch.inf).all()
    for name in ("out", "dq", "dk", "dv"):
        assert not getattr(got, name)[~seen].any(), name


@pytest.mark.large
def test_workspace() -> None:
    """Beyond what a call returns it needs little more than the rows' statistics."""
    pattern = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
    qkv = make_qkv(1, 262144, 12, 64, dtype=torch.bfloat16)
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

SCORES = ("moderate", 4.0, 5.0, 6.0, 7.0, 9.0, 30.0)  # by 5.5 to 6.5 some are 2^100 times as heavy, by 9 beyond float32


def hold_forward(qkv: tuple[Tensor, ...], pattern: DilatedPattern, is_causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse, held against the oracle's; NaN must be where it is there."""
    with torch.no_grad():
        got = attend(pattern, is_causal=is_causal)(*qkv)
        exact = reference.attention(*qkv, pattern, is_causal=is_causal)
        plain = reference.attention(*qkv, pattern, is_causal=is_causal, dtype=None)
    for name, x, y, z in zip(("out", "lse"), got, exact, plain, strict=True):
        assert torch.equal(x.isnan(), y.isnan()), f"{name} is NaN elsewhere"
        x, y, z = (a.masked_fill(y.isnan(), 0.0) for a in (x, y, z.masked_fill(z.isnan(), 0.0)))
        assert testing.error(x, y) <= 2 * testing.plain_error(z, y, qkv[0].dtype), name
        # plain PyTorch rounds large scores: ours are products of rounded numbers, summed in float32
        assert testing.error(x, y) < (1e-2 if name == "out" else 1e-4), name
    return got


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("widths", [[256, 512], [700]], ids=["nested", "single"])
def test_scores_far_above_the_own_one(scores: str | float, is_causal: bool, widths: list[int]) -> None:
    """Keys that look away from their own query: the weights relative to it overflow, for some or for all tiles."""
    q, k, v = make_qkv(1, 700, 3, 64, dtype=torch.bfloat16)
    k = 3 * k if isinstance(scores, str) else -scores * q
    hold_forward((q, k, v), DilatedPattern.longnet(widths, [1, 2][: len(widths)]), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_row_with_scores_far_above_its_own(is_causal: bool) -> None:
    pattern = DilatedPattern.longnet([512, 1024], [1, 2])
    q, k, v = make_qkv(1, 1100, 2, 64, dtype=torch.bfloat16)
    before = attend(pattern, is_causal=is_causal)(q, k, v)
    q[0, 300, 1] = -30 * k[0, 300, 1]
    after = hold_forward((q, k, v), pattern, is_causal)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :, 0], y[:, :, 0])
        assert torch.equal(x[:, 512:, 1], y[:, 512:, 1])  # the row's tile is in the first segment


@pytest.mark.parametrize("size", [1e8, 1e20, 1e30])
def test_large_values(size: float) -> None:
    """Sums of large values with weights far above 1 must not overflow where their mean does not."""
    q, _, v = make_qkv(1, 300, 2, 64, dtype=torch.bfloat16)
    for factor in (0.5, 2.0, 4.0):
        hold_forward((q, -factor * q, v * size), DilatedPattern.longnet([300], [1]), False)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["query", "key"])
def test_bad_numbers_reach_only_the_rows_that_see_them(which: str, bad: float, is_causal: bool) -> None:
    q, k, v = make_qkv(1, 700, 2, 64, dtype=torch.bfloat16)
    (q if which == "query" else k)[0, 300, 1, 5] = bad
    pattern = DilatedPattern.longnet([128, 256], [1, 2])
    out, _ = hold_forward((q, k, v), pattern, is_causal)
    assert out[:, :, 0].isfinite().all()
    assert out[0, :256].isfinite().all()
    assert out[0, 512:].isfinite().all()
    assert bad == bad or out[0, 300, 1].isnan().all()


@pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_no_branch(rule: str, dtype: str) -> None:
    """Such rows give 0 and -inf whatever they hold: if our kernels fill them in, and (nested) if a fill does."""
    for widths, rates in (([128, 256], [3, 5]), ([48, 240], [3, 6])):
        pattern = DilatedPattern.of(rule, widths, rates)
        covered = pattern.coverage(301, 4).to(DEVICE)
        qkv = make_qkv(2, 301, 4, 64, dtype=DTYPES[dtype])
        qkv = tuple(x.masked_fill(~covered[None, :, :, None], torch.nan) for x in qkv)
        dout, dlse = torch.ones_like(qkv[0]), torch.ones(2, 301, 4, device=DEVICE)
        with poisoned():
            got = testing.run(attend(pattern), qkv, dout, dlse)
        assert got.lse is not None
        assert (got.lse[:, ~covered] == -torch.inf).all()
        for name, x in got.items():
            assert x[:, covered].isfinite().all(), name
            assert name == "lse" or (x[:, ~covered] == 0).all(), name


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


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("name", RACES)
def test_no_race(name: str) -> None:
    """Every repeat gives the same bits, wherever its results lie and whatever was there."""
    pattern, tokens, (heads, kv_heads), head_dim, given = RACES[name]
    options = dict(given)
    mask = make_mask("random", 1, tokens) if options.pop("masked", False) else None
    qkv = make_qkv(1, tokens, heads, head_dim, kv_heads=kv_heads, dtype=options.pop("dtype", torch.bfloat16))
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


# --- around the function ----------------------------------------------------------------------------------------

CALLS: dict[str, Any] = {
    "nested": (DilatedPattern.longnet([32, 64], [1, 2]), {}),
    "causal": (DilatedPattern.longnet([32, 48], [1, 3]), {"is_causal": True}),
    "head groups": (DilatedPattern.head_groups([32, 64], [1, 3]), {}),
    "masked": (DilatedPattern.torchscale([32, 64], [1, 3]), {"masked": True}),
    "dropout": (DilatedPattern.longnet([32, 64], [1, 2]), {"dropout_p": 0.2}),
}
each_call = pytest.mark.parametrize("name", CALLS)


def make_call(name: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor], Tensor, Tensor]:
    """The call, its inputs, and gradients for its results."""
    pattern, given = CALLS[name]
    options = dict(given)
    mask = make_mask("random", 2, 75) if options.pop("masked", False) else None
    leaves = list(make_qkv(2, 75, 4, 64, kv_heads=2, dtype=torch.bfloat16))
    dout, dlse = gradients(leaves[0])
    if name == "dropout":  # see same_pairs_kept
        leaves[2].fill_(1.0)
        dlse.zero_()
        dout.zero_()[:, ROW] = 1.0
    return attend(pattern, key_padding_mask=mask, **options), [x.requires_grad_() for x in leaves], dout, dlse


ROW = 40


def same_pairs_kept(out: Tensor, dv: Tensor) -> None:
    """With values of 1, and a gradient for one row alone, dv is that row's weights: they add up to its out."""
    samples, _, kv_heads, dim = dv.shape
    kept = out[:, ROW].float().view(samples, kv_heads, -1, dim).sum(2)
    torch.testing.assert_close(dv.float().sum(1), kept, rtol=0.015, atol=0.0)


@each_call
def test_compiled(name: str) -> None:
    attention, leaves, dout, dlse = make_call(name)
    torch._dynamo.reset()
    results = []
    for function in (attention, torch.compile(attention, fullgraph=True)):
        torch.manual_seed(3)
        out, lse = function(*leaves)
        results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))))
    if name == "dropout":  # compiled code draws other numbers
        assert torch.equal(results[0][1], results[1][1])
        for found in results:
            same_pairs_kept(found[0], found[-1])
        return
    for which, (x, y) in enumerate(zip(*results, strict=True)):
        assert torch.equal(bits(x), bits(y)), which


@each_call
def test_compiled_into_graphs(name: str) -> None:
    """A table that is made in the compiler's first run must not lie in the memory of its graphs."""
    attention, leaves, dout, dlse = make_call(name)
    torch._dynamo.reset()
    CACHE.forget(leaves[0].device)
    before = len(CACHE.pinned)
    compiled = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out, lse = compiled(*leaves)
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        results = [x.detach().clone() for x in (out, lse, *grads)]
    assert len(CACHE.pinned) > before, "no graph was made"
    out, lse = attention(*leaves)
    expected = (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse)))
    for which, (x, y) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(bits(x), bits(y)) or (name == "dropout" and which != 1), which
    if name == "dropout":
        same_pairs_kept(results[0], results[-1])


def captured(work: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


def copy_new_queries_and_keys(leaves: list[Tensor], seed: int) -> None:
    with torch.no_grad():
        for x, new in zip(
            leaves[:2], make_qkv(2, 75, 4, 64, kv_heads=2, dtype=torch.bfloat16, seed=seed), strict=False
        ):
            x.copy_(new)


@each_call
@pytest.mark.parametrize("backward", [False, True])
def test_captured_in_a_cuda_graph(name: str, backward: bool) -> None:
    attention, leaves, dout, dlse = make_call(name)

    def work() -> tuple[Tensor, ...]:
        if not backward:
            with torch.no_grad():
                return attention(*leaves)
        results = attention(*leaves)
        return *results, *torch.autograd.grad(results, leaves, (dout, dlse))

    graph, results = captured(work)
    for seed in (8, 9):
        copy_new_queries_and_keys(leaves, seed)
        graph.replay()
        got = [x.detach().clone() for x in results]
        if name == "dropout":
            graph.replay()
            assert not torch.equal(results[0], got[0]), "every replay drops the same pairs"
            assert torch.equal(results[1], got[1])
            if backward:
                same_pairs_kept(results[0], results[-1])
            continue
        for which, (x, y) in enumerate(zip(got, work(), strict=True)):
            assert torch.equal(bits(x), bits(y.detach())), which


def test_a_cuda_graph_outlives_other_calls() -> None:
    """A graph reads the tables of its capture: calls of many other shapes must not drop them."""
    attention, leaves, _, _ = make_call("nested")
    with torch.no_grad():
        expected = attention(*leaves)
        graph, results = captured(lambda: attention(*leaves))
        for tokens in range(1, 20):
            x = leaves[0][:1, :1, :2].expand(1, tokens, 2, 64)
            attend(DilatedPattern.longnet([tokens], [1]))(x, x, x)
        for _ in range(2):  # as where tables of other calls take too much room: dropped, and then free
            CACHE.forget(leaves[0].device)
        gc.collect()
        with torch.cuda.stream(table.stream_of_tables(leaves[0].device)):
            held = [torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in [64] * 2000 + [1000] * 1000]
        torch.cuda.synchronize()
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(bits(x), bits(y))
    del held


@each_call
def test_no_host_synchronisation(name: str) -> None:
    attention, leaves, dout, dlse = make_call(name)

    def step() -> None:
        torch.autograd.grad(attention(*leaves), leaves, (dout, dlse))

    for _ in range(2):  # tables and kernels
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
def test_deterministic_algorithms_repeat_every_bit(rule: str) -> None:
    pattern = DilatedPattern.of(rule, [128, 1024], [1, 4])
    qkv = make_qkv(2, 1000, 6, 64, kv_heads=3, dtype=torch.bfloat16)
    dout, dlse = gradients(qkv[0])
    with poisoned():
        told = explain(*qkv, pattern, enable_gqa=True)
        assert told.backend == "triton"
        assert told.backward.startswith("triton")
        one, two = (testing.run(attend(pattern, backend="auto"), qkv, dout, dlse) for _ in range(2))
    for (name, x), (_, y) in zip(one.items(), two.items(), strict=True):
        assert torch.equal(bits(x), bits(y)), name
    hold(one, qkv, pattern, dout, dlse)


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
    for (name, x), (_, y), (_, z), (_, w) in zip(
        again.items(), fast.items(), run().items(), before.items(), strict=True
    ):
        assert torch.equal(x, y), name
        assert torch.equal(z, w), name


# --- what "auto" picks ------------------------------------------------------------------------------------------


def expected_backend(pattern: DilatedPattern, tokens: int, head_dim: int, is_causal: bool, backward: bool) -> str:
    """What was measured to be faster; where nothing was, ours if branches share work and heads are small."""
    form, rows = form_of(pattern, is_causal), 4 * tokens
    library = configs.prefers_library(torch.device(DEVICE), head_dim, is_causal, form, backward, rows)
    if library is None:
        library = not (form == "nested" and head_dim <= 64)
    return "sdpa" if library else "triton"


FORMS = {
    "nested": DilatedPattern.longnet([512, 1024], [1, 2]),
    "dense": DilatedPattern.longnet([512], [1]),
    "apart": DilatedPattern.torchscale([512, 1024], [1, 2]),
    "": DilatedPattern.head_groups([512, 1024], [1, 2]),
}


@pytest.mark.parametrize("head_dim", [40, 64, 128, 200])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_auto_picks_what_was_measured_to_be_faster(head_dim: int, form: str, is_causal: bool) -> None:
    pattern = FORMS[form]
    assert form_of(pattern, is_causal) == form
    for tokens in (1000, 32768, 65536, 65537, 131072, 2**20):
        x, exact = (
            torch.empty(1, dtype=dtype, device=DEVICE).expand(1, tokens, 4, head_dim)
            for dtype in (torch.bfloat16, torch.float32)
        )
        told = explain(x, x, x, pattern, is_causal=is_causal)
        assert told.backend == expected_backend(pattern, tokens, head_dim, is_causal, False), tokens
        assert told.backward.split(",")[0] == expected_backend(pattern, tokens, head_dim, is_causal, True), tokens
        mask = torch.zeros(1, tokens, dtype=torch.bool, device=DEVICE)
        for given in ({"key_padding_mask": mask}, {"dropout_p": 0.1}):
            assert explain(x, x, x, pattern, is_causal=is_causal, **given).backend == "triton"
        assert explain(exact, exact, exact, pattern, is_causal=is_causal).backend == "sdpa"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [2000, 65536 + 9])
def test_what_explain_says_is_what_runs(head_dim: int, tokens: int) -> None:
    for pattern in (DilatedPattern.longnet([512, 1024], [1, 2]), DilatedPattern.longnet([512], [1])):
        qkv = [x.requires_grad_() for x in make_qkv(1, tokens, 4, head_dim, dtype=torch.bfloat16)]
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
