"""The attention kernels against the oracle, where the table of cases leaves something out: sizes of tiles, numbers,
tables and launches. Run by test_triton: in Triton's interpreter, and on a GPU if there is one.

The interpreter takes milliseconds a tile, so heads, samples and tiles are few here. Tiles are 32 x 32 in float32 and
64 x 32 in float16 there. All memory that nobody wrote holds NaN.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import Blocks, DilatedPattern, Pattern, dilated_attention, functional, testing
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.triton import dispatch, launch, table
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.dispatch import TileConfig
from dilated_attention.backends.triton.whole_call import Prepared
from dilated_attention.resolve import Options
from dilated_attention.testing import Results
from tests.cases import INTERPRETED
from tests.on_gpu import DEVICE, gradients, hold, make_mask, poisoned, same_bits

longnet, torchscale = DilatedPattern.longnet, DilatedPattern.torchscale

FULL, HALF = torch.float32, torch.float16
DTYPES = [FULL, HALF] if INTERPRETED else [FULL, HALF, torch.bfloat16]  # the interpreter knows no bfloat16
SEED = {"seed": torch.tensor(0x0123456789ABCDEF, device=DEVICE)}
NAN = math.nan
ONE = longnet([16], [1])
NESTED = longnet([16, 32], [1, 2])

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of -inf - -inf and 0 * inf
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),  # torch's, of its own first backward
    pytest.mark.usefixtures("always_nested"),
]


@pytest.fixture(autouse=True)
def filled_memory() -> Iterator[None]:
    with poisoned():
        assert torch.empty(4, device=DEVICE).isnan().all()
        yield


def make(
    tokens: int, heads: int = 2, kv_heads: int | None = None, dim: int = 16, samples: int = 1, **given: Any
) -> Any:
    return testing.make_qkv(samples, tokens, heads, dim, kv_heads=kv_heads, device=DEVICE, **given)


def run(
    qkv: tuple[Tensor, ...], pattern: DilatedPattern, dout: Tensor, dlse: Tensor | None = None,
    key_padding_mask: Tensor | None = None, seed: Tensor | None = None, **options: Any,
) -> Results:  # fmt: skip
    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = Options(pattern, enable_gqa=True, backend="triton", **options)
        return functional.attend(Inputs(*x, key_padding_mask, seed), chosen)

    return testing.run(attention, qkv, dout, dlse)


def check(qkv: tuple[Tensor, ...], pattern: DilatedPattern, **options: Any) -> None:
    """By the rule of `testing`."""
    dout, dlse = gradients(qkv[0])
    hold(run(qkv, pattern, dout, dlse, **options), qkv, pattern, dout, dlse, **options)


def prepared_launches(monkeypatch: pytest.MonkeyPatch) -> list[launch.Launch]:
    """A list that gets each launch when it is prepared."""
    made = []
    prepare = launch.Launch
    monkeypatch.setattr(launch, "Launch", lambda *given: made.append(prepare(*given)) or made[-1])
    return made


# --- every kind of call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 130])
def test_lengths_around_tile_sizes(dtype: torch.dtype, tokens: int) -> None:
    check(make(tokens, 1, dtype=dtype), longnet([256], [1]), is_causal=tokens % 2 == 0)


@pytest.mark.parametrize(
    ("dim", "dtype", "rule", "is_causal", "options"),
    [
        (33, FULL, "longnet", True, {}),
        (40, HALF, "head_groups", False, {}),
        (48, DTYPES[-1], "torchscale", True, {}),
        (48, FULL, "torchscale", False, {"key_padding_mask": make_mask(1, 75), "dropout_p": 0.3, **SEED}),
        (96, DTYPES[-1], "longnet", False, {}),
        (160, DTYPES[-1], "head_groups", True, {}),
    ],
)
def test_rows_in_two_parts(dim: int, dtype: torch.dtype, rule: str, is_causal: bool, options: dict[str, Any]) -> None:
    """Head dims that are padded to the next power of two otherwise; grouped heads, gaps, several launches."""
    check(make(75, 4, 2, dim, dtype=dtype), DilatedPattern.of(rule, [64, 50], [2, 3]), is_causal=is_causal, **options)


def test_every_tensor_has_strides_of_its_own() -> None:
    """Though a call before was the same but for them."""
    qkv, other = make(19), make(19, layout="transposed")
    for which in (3, 0, 1, 2):
        check((*qkv[:which], *other[which : which + 1], *qkv[which + 1 :]), NESTED)


def test_everything_dropped() -> None:
    qkv = make(37)
    got = run(qkv, ONE, gradients(qkv[0])[0], dropout_p=1.0, **SEED)
    assert not any(x.any() for x in (got.out, got.dq, got.dk, got.dv))


@pytest.mark.parametrize(
    ("rule", "held", "options"),
    [
        ("longnet", (2, 4), {"dropout_p": 0.3, **SEED}),
        ("torchscale", (1, 3), {"is_causal": True}),
        ("head_groups", (2, 4), {"dropout_p": 0.9, **SEED}),
    ],
)
def test_some_of_the_heads(rule: str, held: tuple[int, int], options: dict[str, Any]) -> None:
    """Offsets and dropout go by the head's number among all."""
    pattern, qkv = DilatedPattern.of(rule, [20, 40], [1, 4]), make(23, 10, 5)
    dout, dlse = gradients(qkv[0])
    exact = testing.oracle(qkv, pattern, dout, dlse, **options)
    kv, mine = slice(*held), slice(2 * held[0], 2 * held[1])
    q, k, v = (x[:, :, heads] for x, heads in zip(qkv, (mine, kv, kv), strict=True))
    got = run((q, k, v), pattern, dout[:, :, mine], dlse[:, :, mine], heads=(held[0], 5), **options)
    parts = [x[:, :, kv if name in ("dk", "dv") else mine] for name, x in exact.items()]
    testing.assert_exact(got, Results(*parts))


# --- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_scores(is_causal: bool) -> None:
    """Up to some hundreds: nothing overflows, and the error is that of rounding them once."""
    q, k, v = make(35, 1)
    check((8 * q, 8 * k, v), longnet([32], [1]), scale=1.0, is_causal=is_causal)


def test_very_low_scores_where_others_have_zero_keys() -> None:
    """A row without zero keys is not measured from their score: exp2(-score) would be inf."""
    q, k, v = make(35, 1)
    q[..., 0], k[..., 0] = 24.0, -24.0
    check((q, k, v), torchscale([32], [1]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_keys_send_nothing_back(is_causal: bool) -> None:
    """Not even NaN."""
    mask = torch.arange(37, device=DEVICE)[None] < 20
    qkv, given = make(37, 2, 1), {"is_causal": is_causal, "key_padding_mask": mask}
    _, lse = dilated_attention(*qkv, ONE, enable_gqa=True, return_lse=True, backend="triton", **given)
    empty = lse == -math.inf
    assert empty.any()
    dout, dlse = gradients(qkv[0])
    clean, dirty = (run(qkv, ONE, dout.masked_fill(empty.unsqueeze(-1), x), dlse, **given) for x in (0.0, NAN))
    same_bits(*([x for _, x in found.items()] for found in (clean, dirty)))


@pytest.mark.parametrize(("widths", "tokens", "is_causal"), [([8, 7], 29, True), ([48, 80], 90, False)])
def test_rows_in_no_branch_are_not_read(widths: list[int], tokens: int, is_causal: bool) -> None:
    pattern, qkv = longnet(widths, [3, 5]), make(tokens)
    covered = pattern.coverage(tokens, 2).to(DEVICE)
    dout, dlse = gradients(qkv[0])
    q, k, v, dout = (x.masked_fill(~covered[None, :, :, None], NAN) for x in (*qkv, dout))
    got = run((q, k, v), pattern, dout, dlse, is_causal=is_causal)
    assert got.lse is not None
    assert torch.equal(got.lse.isfinite(), covered[None])
    assert torch.equal(got.lse == -math.inf, ~covered[None])
    for x in (got.out, got.dq, got.dk, got.dv):
        assert (x[:, ~covered] == 0).all()
        assert x[:, covered].isfinite().all()


@pytest.mark.parametrize(("samples", "tokens"), [(0, 5), (2, 0)])
def test_nothing_to_do(samples: int, tokens: int) -> None:
    got = run(make(tokens, samples=samples), ONE, torch.empty(samples, tokens, 2, 16, device=DEVICE))
    assert got.out.shape == got.dk.shape == (samples, tokens, 2, 16)


def test_listed_blocks_beyond_the_sequence() -> None:
    out = dilated_attention(*make(20), Pattern([Blocks(64, [(3, 3)])]), backend="triton")
    assert (out == 0).all()


def test_several_launches_sum_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to half precision in between, five branches would have twice the error."""
    prepare, seen = launch.prepare, []
    monkeypatch.setattr(launch, "prepare", lambda *given: seen.append(given[5]) or prepare(*given))
    for pattern in (ONE, longnet([16, 30], [1, 1])):
        assert dilated_attention(*make(20, 1, dtype=HALF), pattern, backend="triton").dtype is HALF
    assert seen == [HALF, FULL, FULL]


# --- other tiles, other tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (32, 16), (16, 64), (64, 64)])
def test_tile_sizes(rows: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(dispatch, "config", lambda *_: used.append(1) or TileConfig(rows, keys, 4, 1))
    check(make(70, 1), longnet([66, 132], [1, 2]), is_causal=rows != keys)
    assert len(used) >= 3  # forward, and the two of the backward pass; a GPU is asked about more than once


@pytest.mark.parametrize("is_causal", [False, True])
def test_tables_in_64_bits(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for tensors so large that no test can hold them."""
    make_table, seen = launch.table, []

    def wide(demand: table.Demand) -> launch.Table:
        assert make_table(demand).tiles.dtype is torch.int32
        found = make_table(demand._replace(widest_stride=2**31))
        seen.append(found.tiles.dtype)
        return found

    monkeypatch.setattr(launch, "table", wide)
    check(make(53, 2, 1), longnet([40, 80], [1, 2]), is_causal=is_causal)
    check(make(37, 2), torchscale([32], [2]), is_causal=is_causal, dropout_p=0.3, **SEED)
    assert len(seen) >= 6
    assert set(seen) == {torch.int64}


WHOLE = {  # one launch
    "nested": longnet([48, 96], [1, 2]),
    "gaps": longnet([50], [2]),
    "zero_keys": torchscale([50], [2]),
    "head_groups": DilatedPattern.head_groups([30, 48], [1, 2]),
}


@pytest.mark.parametrize(
    ("name", "is_causal", "size"),
    [("nested", True, 40.0), ("gaps", False, 40.0), ("zero_keys", True, 40.0), ("head_groups", False, 40.0),
     ("nested", False, 1.0), ("zero_keys", False, 1.0)],
)  # fmt: skip
def test_without_a_running_maximum(name: str, is_causal: bool, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights relative to the row's own key; where one is beyond 2^100 the tile starts over with the maximum."""
    constants, made = launch.Constants, prepared_launches(monkeypatch)
    monkeypatch.setattr(launch, "Constants", lambda *x: constants(*x)._replace(SHIFTED=True))  # not for bfloat16 alone
    q, k, v = make(60)
    q[:, 30:50] *= size
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * math.log2(math.e)
    above = scores - scores.diagonal(dim1=2, dim2=3).unsqueeze(-1)
    assert (above.max() > 130).item() == (size > 1)
    check((q, k, v), WHOLE[name], is_causal=is_causal, scale=1.0)
    assert len(made) >= 3  # forward, and the two of the backward pass, which a GPU compiles ahead
    assert all(one.given[-1].SHIFTED for one in made)


# --- launches that are kept -------------------------------------------------------------------------------------


def test_launches_are_prepared_once_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made, device = prepared_launches(monkeypatch), make(1)[0].device

    def call(tokens: int) -> Tensor:
        return dilated_attention(*make(tokens), ONE, backend="triton")

    first, each = call(20), CACHE.nbytes[device]
    assert each > 0
    assert torch.equal(call(20), first)
    call(21)
    assert len(made) == len(CACHE.kept) == 2
    monkeypatch.setattr(CACHE, "most_bytes", 4 * each)
    for tokens in range(22, 29):
        call(tokens)
        assert len(CACHE.kept) <= 4
        assert CACHE.nbytes[device] <= 4 * each
        made.clear()
        call(tokens - 1)  # the oldest go, not the last ones
        assert not made
    assert torch.equal(call(20), first)
    assert made


def test_a_backward_pass_goes_by_the_flags_of_its_own_time() -> None:
    """It repeats every bit if the flag says so by then, whatever it said in the forward pass."""
    torch.set_deterministic_debug_mode("default")
    leaves = [x.requires_grad_() for x in make(17, 1)]
    out = dilated_attention(*leaves, ONE)
    assert len(CACHE.kept) == 0
    torch.set_deterministic_debug_mode("error")
    out.sum().backward()
    assert len(CACHE.kept) == 1


def test_threads_prepare_a_launch_once() -> None:
    """Two of the same would each be launched, and one dropped while a kernel reads its table."""
    made = []

    def slowly() -> Prepared:
        time.sleep(0.1)
        made.append(Prepared((), torch.float32, False))
        return made[-1]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: CACHE.get((torch.device(DEVICE), "like"), slowly), range(4)))
    assert len(made) == 1
    assert all(one is made[0] for one in found)


def test_what_is_dropped_is_free_only_when_the_device_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = make(1)[0].device
    made = prepared_launches(monkeypatch)
    dilated_attention(*make(40), ONE, backend="triton")
    alive = [weakref.ref(one) for one in made]
    made.clear()
    assert len(alive) == len(CACHE.kept) == 1
    CACHE.forget(device)
    assert len(CACHE.kept) == 0
    assert CACHE.nbytes[device] == 0
    assert all(one() is not None for one in alive)
    CACHE.forget(device)
    assert all(one() is None for one in alive)


def test_a_sign_that_is_still_to_be_turned() -> None:
    """Kernels read the numbers that lie in memory."""

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = dilated_attention(*leaves, ONE, backend="triton")
        return out, *torch.autograd.grad(out, leaves, tensors[3])

    tensors = [*make(17, 1), make(17, 1)[1]]
    expected = results(*tensors)
    for which, x in enumerate(tensors):
        turned = torch._neg_view(-x)
        assert turned.is_neg()
        same_bits(results(*tensors[:which], turned, *tensors[which + 1 :]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_which_all_scores_are_minus_infinity(dtype: torch.dtype) -> None:
    """Such keys weigh nothing, also where a row's first keys are all like that. (Gradients are NaN: 0 * inf.)"""
    query, key, value = make(128, 1, dtype=dtype)
    query[..., 0] = 1.0
    key[:, :100, :, 0] = -torch.inf
    out = dilated_attention(query, key, value, longnet([128], [1]), backend="triton")
    q, k, v = (x.double().transpose(1, 2) for x in (query, key[:, 100:], value[:, 100:]))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert testing.error(out, exact) < max(5e-6, 2 * torch.finfo(dtype).eps)
