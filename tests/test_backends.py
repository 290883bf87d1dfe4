"""Backends on single dense problems, against attention written out; and how one is chosen.

Legend as in `backends.problem`: q, out (b, L, h, D); k, v (b, L, hk, D); lse, dlse (b, L, h).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, explain, testing
from dilated_attention.backends import choose, eager, sdpa
from dilated_attention.backends.problem import Limits, Masking
from dilated_attention.call import Call, accumulate_dtype, compute_dtype
from tests.cases import leaves

BACKENDS = {"sdpa": sdpa, "eager": eager}
PATTERN = DilatedPattern.longnet([8, 16], [1, 3])
CPU = torch.device("cpu")


def call_for(x: Tensor, *, causal: bool = False, padding: bool = False, dropout: bool = False) -> Call:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool) if padding else None
    return Call(PATTERN, causal, dropout_p=0.5 if dropout else 0.0).of(x, x, mask, 0)


def written_out(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bihj", q, k) * masking.scale
    if masking.is_causal:
        position = torch.arange(q.shape[1])
        scores = scores.masked_fill((position > position[:, None])[None, :, None], -math.inf)
    if masking.padding is not None:
        padding = masking.padding.repeat_interleave(group, 2).transpose(1, 2)
        scores = scores.masked_fill(padding[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("bihj,bjhd->bihd", weights, v), lse


def dilated(samples: int, rows: int, heads: int, dim: int, seed: int) -> Tensor:
    """A strided view such as blocks are: every third row and every second head of something larger."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(samples, 3 * rows, 2 * heads, dim, generator=generator, dtype=torch.float64)
    return whole[:, 1::3, ::2]


PROBLEMS = [*itertools.product(BACKENDS, (1, 2, 3, 33), ((1, 1), (4, 4), (6, 2)), (False, True), ("none", "some"))]
PROBLEMS += [(name, 9, (4, 4), False, "by head") for name in BACKENDS]


@pytest.mark.parametrize(("name", "rows", "heads", "is_causal", "mask"), PROBLEMS, ids=str)
def test_one_dense_problem(name: str, rows: int, heads: tuple[int, int], is_causal: bool, mask: str) -> None:
    """On a diagonal of offsets the heads of one problem see different tokens, so their padding may differ."""
    module = BACKENDS[name]
    q, dout = (dilated(3, rows, heads[0], 8, seed) for seed in (0, 3))
    k, v = (dilated(3, rows, heads[1], 8, seed) for seed in (1, 2))
    padding = None
    if mask != "none":
        hidden = torch.rand(3, rows, heads[1], generator=torch.Generator().manual_seed(rows)) < 0.4
        hidden[0] = True
        padding = hidden if mask == "by head" else hidden[..., :1].expand(-1, -1, heads[1])
    masking = Masking(0.3, is_causal, padding)
    inputs = leaves(q, k, v)
    out, lse = written_out(*inputs, masking)
    empty = lse == -math.inf

    asked = call_for(q, causal=is_causal, padding=padding is not None)
    got, got_lse = module.forward(module.kernels(asked, False), q, k, v, masking)
    assert testing.error(got, out.detach()) < 1e-12
    assert testing.error(got_lse, lse.detach()) < 1e-12
    assert (got[empty] == 0).all()

    send = dout[..., 0].masked_fill(empty, 0.0)
    expected = torch.autograd.grad((out, lse.masked_fill(empty, 0.0)), inputs, (dout, send))
    given = lse.detach().masked_fill(empty, math.inf)  # as a backward is given it
    grads = module.backward(module.kernels(asked, True), dout, q, k, v, out.detach(), given, send, masking)
    for grad, wanted in zip(grads, expected, strict=True):
        assert testing.error(grad, wanted) < 1e-12


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backward_takes_merged_out_and_lse(name: str) -> None:
    """Two halves of the keys, each given the out and lse of all of them, give the gradients of all of them."""
    module = BACKENDS[name]
    q, dout = dilated(2, 6, 2, 4, 0), dilated(2, 6, 2, 4, 5)
    k, v = dilated(2, 12, 2, 4, 1), dilated(2, 12, 2, 4, 2)
    masking = Masking(0.5)
    inputs = leaves(q, k, v)
    out, lse = written_out(*inputs, masking)
    expected = torch.autograd.grad(out, inputs, dout)
    kernels = module.kernels(call_for(q), True)
    halves = [
        module.backward(kernels, dout, q, k[:, part], v[:, part], out.detach(), lse.detach(), None, masking)
        for part in (slice(0, 6), slice(6, 12))
    ]
    assert testing.error(halves[0][0] + halves[1][0], expected[0]) < 1e-12
    for i in (1, 2):
        assert testing.error(torch.cat([half[i] for half in halves], 1), expected[i]) < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1, 7, 50, 300, 5000])
def test_tiles_cover_every_row_once_stay_small_and_change_nothing(
    size: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "TILE_ELEMENTS", {"cpu": size})
    q, k = torch.zeros(5, 11, 2, 1), torch.zeros(5, 11, 1, 1)
    seen = torch.zeros(5, 11, dtype=torch.int64)
    for samples, rows, keys in eager._tiles(q, k, Masking(1.0, is_causal)):
        part = q[samples, rows]
        seen[samples, rows] += 1
        assert keys == slice(0, rows.stop if is_causal else 11)
        assert part.shape[0] * part.shape[1] * 2 * 11 <= max(size, 2 * 11)
    assert (seen == 1).all()
    qkv = testing.make_qkv(3, 37, 4, 8, kv_heads=2, dtype=torch.float64)
    mask = torch.rand(3, 37, generator=torch.Generator().manual_seed(0)) < 0.3
    testing.check(qkv, PATTERN, is_causal=is_causal, key_padding_mask=mask, backend="eager")


def test_head_dims_that_a_kernel_must_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA kernels want multiples of 8; the same padding, asked for on a CPU."""
    monkeypatch.setattr(sdpa, "limits", lambda call: Limits(pad=8))
    for head_dim in (1, 3, 8, 20):
        qkv = testing.make_qkv(2, 37, 4, head_dim, kv_heads=2, dtype=torch.float64)
        testing.check(qkv, PATTERN, backend="sdpa")


def test_blocks_too_short_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes no single row leaves it to a few products."""
    monkeypatch.setattr(sdpa, "_kernel_for", lambda rows, kernels: kernels[0] if rows >= 2 else None)
    for tokens in (1, 2, 17):  # 17: a tail of one
        testing.check(testing.make_qkv(2, tokens, 4, 8, dtype=torch.float64), PATTERN, backend="sdpa")


# --- the choice -------------------------------------------------------------------------------------------------


def test_a_request_by_name_never_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    choose.choose.cache_clear()
    monkeypatch.setattr(sdpa, "_reasons", lambda kernel, call: ["it is Sunday", "it is raining"])
    qkv = testing.make_qkv(2, 20, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'sdpa' cannot run this call: .*it is Sunday.*it is raining"):
        dilated_attention(*qkv, PATTERN, backend="sdpa")
    told = explain(*qkv, PATTERN)
    assert told.backend == "eager"
    assert told.why_not["sdpa/flash on CPU"] == ["it is Sunday", "it is raining"]
    testing.check(qkv, PATTERN)  # auto runs on
    choose.choose.cache_clear()


def test_auto_takes_the_first_that_can_and_every_reason_is_a_sentence() -> None:
    x = torch.zeros(1, 8, 2, 4)
    asked = call_for(x, dropout=True)
    assert [choose.choose(call).name for call in (call_for(x), asked)] == ["sdpa", "eager"]
    for name, module in BACKENDS.items():
        choice = choose.choose(call_for(x)._replace(backend=name))
        assert choice.module is module
        assert choice.kernels
    reasons = sdpa.unsupported(asked, False)
    assert reasons
    assert all(len(reason.split()) > 3 for reason in reasons)
    assert eager.unsupported(asked, False) == []
    elsewhere = asked._replace(device=torch.device("meta"))
    assert "no such kernels for device 'meta'" in sdpa.unsupported(elsewhere, False)[0]
    assert choose.choose(elsewhere).name == "eager"


def test_settings_of_torch_are_part_of_the_call() -> None:
    x = torch.zeros(1, 8, 2, 4)
    before = call_for(x)
    assert not before.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert call_for(x).deterministic
        assert call_for(x) != before
    finally:
        torch.use_deterministic_algorithms(False)


# --- small parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_keys(is_causal: bool) -> None:
    padding = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool).unsqueeze(2)
    got = Masking(1.0, is_causal, padding).rows_without_keys(4)
    for sample, row in itertools.product(range(3), range(4)):
        visible = padding[sample, : row + 1] if is_causal else padding[sample]
        assert got[sample, row].item() == visible.all().item()
    assert Masking(1.0, is_causal).rows_without_keys(4) is None


def test_accumulators_and_half_precision_where_it_is_fast() -> None:
    assert accumulate_dtype(torch.float64) is torch.float64
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert accumulate_dtype(dtype) is torch.float32
    for dtype in (torch.float64, torch.float32):
        assert compute_dtype(dtype, CPU) is dtype
    assert compute_dtype(torch.float16, CPU) is torch.float32
    assert compute_dtype(torch.bfloat16, CPU) in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_torch_is_asked_as_for_training_wherever_it_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some GPUs a kernel has no backward pass for some head dims; torch tells that only with gradients enabled."""
    asked = []

    def check(params: Any) -> bool:
        asked.append(torch.is_grad_enabled() and params.query.requires_grad)
        return False

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(sdpa.cuda_backends, f"can_use_{name}_attention", check)
    with torch.no_grad():
        (why,) = sdpa._refusals(name, CPU, torch.bfloat16, 208, False)
    assert f"can_use_{name}_attention refuses torch.bfloat16 with head_dim 208" in why
    assert asked == [True]
