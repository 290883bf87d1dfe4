"""In the place of nn.MultiheadAttention: layouts, fewer key heads, its causal mask, its layers and its state dicts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dilated_attention as da
from dilated_attention.nn import masks
from dilated_attention.testing import error

E, H, N, B = 24, 4, 13, 3
PATTERN = da.DilatedPattern.longnet([4, 8], [1, 2])
GROUPS = da.DilatedPattern.head_groups([4, 8], [1, 2])
CLASSES = [da.MultiheadDilatedAttention, da.ImprovedMultiheadDilatedAttention, da.RingMultiheadDilatedAttention]
TWO = [*itertools.product((True, False), (True, False))]
BY_CLASS = pytest.mark.parametrize("cls", CLASSES)


def make(cls: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    module = cls(E, H, **{"pattern": PATTERN} | options).double()
    with torch.no_grad():
        for parameter in module.parameters():  # none at the value it starts with
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(B, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def causal_mask(kind: str) -> Tensor:
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    mask = later if "bool" in kind else torch.zeros(N, N, dtype=torch.float64).masked_fill(later, -torch.inf)
    return mask.expand(B * H, N, N) if "heads" in kind else mask


def by_function(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The documented call, with projections by hand."""
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (-1, E // H))
        for x, (weight, bias) in zip((query, key, value), module._inputs(), strict=True)
    )
    out = da.dilated_attention(q, k, v, module.pattern, enable_gqa=True, **options)
    return module.out_proj(module.norm(out.flatten(2)))


# --- what is given ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*CLASSES, da.DilatedAttention, da.ImprovedDilatedAttention, da.RingDilatedAttention])
def test_a_pattern_instead_of_two_lists(cls: Any) -> None:
    first = () if "Multihead" not in cls.__name__ else (E, H)
    assert cls(*first, pattern=PATTERN).pattern == cls(*first, [4, 8], [1, 2], rule="longnet").pattern == PATTERN
    assert cls(*first, pattern=PATTERN, rule="longnet").pattern == PATTERN
    for lists, options, kind, match in (
        ((), {}, ValueError, "no pattern: give segment_lengths and dilation_rates, or pattern="),
        (([4],), {}, ValueError, "no pattern: give"),
        (([4], [1]), {"pattern": PATTERN}, ValueError, "pattern=.*: give the lists or the pattern"),
        ((), {"pattern": PATTERN, "rule": "torchscale"}, ValueError, "rule='torchscale' and pattern"),
        ((), {"pattern": "longnet"}, TypeError, "pattern must be a DilatedPattern, got str"),
    ):
        with pytest.raises(kind, match=match):
            cls(*first, *lists, **options)


@BY_CLASS
@pytest.mark.parametrize(("kv_heads", "batch_first"), [*itertools.product((None, 2, 1), (True, False))])
def test_fewer_key_heads_and_both_layouts(cls: Any, kv_heads: int | None, batch_first: bool) -> None:
    module = make(cls, num_kv_heads=kv_heads, batch_first=batch_first)
    weights = [weight for weight, _ in module._inputs()]
    assert [len(x) for x in weights] == [E, *[E * (kv_heads or H) // H] * 2]
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 9:] = True
    a, b, c = (tokens(seed) for seed in (1, 2, 3))
    for inputs in ((a, a, a), (a, b, b), (a, b, a), (a, a, b), (a, b, c)):
        leaves = {id(x): x.clone().requires_grad_() for x in inputs}
        given = [leaves[id(x)] for x in inputs]
        expected = by_function(module, *given, is_causal=True, key_padding_mask=padding)
        turned = {id(x): x if batch_first else x.transpose(0, 1) for x in leaves.values()}
        got = module(*(turned[id(x)] for x in given), is_causal=True, key_padding_mask=padding)[0]
        got = got if batch_first else got.transpose(0, 1)
        assert error(got, expected) <= 1e-12
        wanted = [*leaves.values(), *module.parameters()]
        grads = (torch.autograd.grad(x.square().sum(), wanted, retain_graph=True) for x in (got, expected))
        for ours, theirs in zip(*grads, strict=True):
            assert error(ours, theirs) <= 1e-11
    unbatched = module(tokens()[0], key_padding_mask=padding[1])[0]
    assert error(unbatched, by_function(module, *[tokens()[:1]] * 3, key_padding_mask=padding[1:2])[0]) <= 1e-12
    twin = cls(E, H, pattern=PATTERN, num_kv_heads=kv_heads, dtype=torch.float64)
    twin.load_state_dict(module.state_dict())
    other = CLASSES[1] if cls is not CLASSES[1] else CLASSES[0]
    other(E, H, pattern=PATTERN, num_kv_heads=kv_heads, dtype=torch.float64).load_state_dict(module.state_dict())
    assert ("num_kv_heads=2" in repr(module)) == (kv_heads == 2)
    assert ("batch_first=False" in repr(module)) != batch_first


def test_wrong_layouts_and_heads_are_refused() -> None:
    module, x = make(CLASSES[0], batch_first=False), tokens().transpose(0, 1)
    shapes = r"must all be \(tokens, batch, 24\) or all \(tokens, 24\), got query \(13, 3, 2"
    for inputs, mask, kind, match in (
        (x[..., 1:], None, ValueError, shapes),
        (x, torch.zeros(N, B, dtype=torch.bool), ValueError, r"must be \(batch, tokens\) = \(3, 13\), got \(13, 3\)"),
        (x, [[False] * N] * B, TypeError, "key_padding_mask must be a tensor, got list"),
    ):
        with pytest.raises(kind, match=match):
            module(inputs, key_padding_mask=mask)
    for options, kind, match in (
        ({"num_kv_heads": 3}, ValueError, "4 query heads cannot be shared evenly by 3 key/value heads"),
        (
            {"pattern": GROUPS, "num_kv_heads": 1},
            ValueError,
            "got 2 branches and 1 key/value heads",
        ),
        ({"batch_first": 0}, TypeError, "batch_first must be True or False, got 0"),
    ):
        with pytest.raises(kind, match=match):
            make(CLASSES[0], **options)


# --- the causal mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "float", "bool heads", "float heads"])
def test_the_causal_mask_says_what_is_causal_says(kind: str) -> None:
    module = make(CLASSES[0])
    got = module(tokens(), attn_mask=causal_mask(kind), is_causal=True)[0]
    assert torch.equal(got, module(tokens(), is_causal=True)[0])
    with pytest.raises(ValueError, match=r"attn_mask must be None unless .* pass is_causal=True"):
        module(tokens(), attn_mask=causal_mask(kind))
    for place, value in (((2, 5), 0), ((5, 2), 1), ((4, 4), 1)):
        wrong = causal_mask(kind).clone()
        wrong[(..., *place)] = value
        wrong = torch.nn.Parameter(wrong) if kind == "float" else wrong  # a learned bias, say
        with pytest.raises(ValueError, match=r"attn_mask is not the causal mask .*, and is_causal=True says that"):
            module(tokens(), attn_mask=wrong, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask must be \(13, 13\) or \(12, 13, 13\) like the tokens, got"):
        module(tokens(), attn_mask=causal_mask(kind)[..., :-1, :-1], is_causal=True)


def test_other_kinds_of_attn_mask_are_refused_and_a_long_one_is_taken_at_its_word() -> None:
    module, mask = make(CLASSES[0]), causal_mask("bool")
    for wrong, match in ((mask.long(), r"bool or float, got torch\.int64"), (mask.tolist(), "a tensor, got list")):
        with pytest.raises(TypeError, match=f"attn_mask must be {match}"):
            module(tokens(), attn_mask=wrong, is_causal=True)
    masks.check_causal_mask(torch.zeros(1, dtype=torch.bool).expand(5000, 5000), True, 5000, 1)
    with pytest.raises(ValueError, match="not the causal mask"):
        masks.check_causal_mask(torch.zeros(1, dtype=torch.bool).expand(4096, 4096), True, 4096, 1)


# --- a layer of PyTorch's; encoders are in test_multihead ---------------------------------------------------------


@BY_CLASS
@pytest.mark.parametrize(("batch_first", "training"), TWO)
def test_a_decoder_layer(cls: Any, batch_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    layer: Any = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    layer.self_attn = make(cls, batch_first=batch_first)
    layer.train(training)
    x, memory = tokens(1), tokens(2)
    expected = layer.norm1(x + by_function(layer.self_attn, x, x, x, is_causal=True))
    across = copy.deepcopy(layer.multihead_attn)
    across.batch_first = True
    expected = layer.norm2(expected + across(expected, memory, memory, need_weights=False)[0])
    expected = layer.norm3(expected + layer.linear2(F.relu(layer.linear1(expected))))
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        got = layer(*given, tgt_mask=mask, tgt_is_causal=True)
    assert error(got if batch_first else got.transpose(0, 1), expected) <= 1e-12


# --- its state dicts --------------------------------------------------------------------------------------------


def dense_state(separate: bool, bias: bool = True) -> tuple[nn.MultiheadAttention, dict[str, Tensor]]:
    torch.manual_seed(3)
    dense = nn.MultiheadAttention(E, H, bias=bias, batch_first=True, dtype=torch.float64)
    state = dense.state_dict()
    if bias:
        with torch.no_grad():
            dense.in_proj_bias.normal_()
            dense.out_proj.bias.normal_()
    if separate:
        state |= zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), state["in_proj_weight"].chunk(3), strict=True)
        del state["in_proj_weight"]
    return dense, state


@BY_CLASS
@pytest.mark.parametrize(("separate", "bias"), TWO)
def test_state_dicts_of_multihead_attention_load(cls: Any, separate: bool, bias: bool) -> None:
    """And one segment of all tokens is its attention."""
    dense, state = dense_state(separate, bias)
    names = list(state)
    ours = cls(E, H, [N], [1], rule="longnet", bias=bias, layer_norm=False, dtype=torch.float64)
    model = nn.ModuleDict({"attention": ours})
    result = model.load_state_dict({f"attention.{name}": x for name, x in state.items()}, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert list(state) == names, "the caller's state dict is not changed"
    ignored = torch.arange(N).expand(B, N) > 9
    as_float = torch.zeros(B, N, dtype=torch.float64).masked_fill(ignored, -torch.inf)
    for is_causal, mask, part in itertools.product((False, True), (None, ignored, as_float), (slice(None), 0)):
        x, given = tokens()[part], None if mask is None else mask[part]
        theirs = {"attn_mask": causal_mask("float" if mask is as_float else "bool") if is_causal else None}
        expected = dense(x, x, x, given, need_weights=False, is_causal=is_causal, **theirs)[0]
        assert error(ours(x, x, x, given, need_weights=False, is_causal=is_causal)[0], expected) <= 1e-12


@BY_CLASS
def test_what_a_state_dict_lacks_is_named(cls: Any) -> None:
    _, state = dense_state(separate=False)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm.weight", "norm.bias"'):
        make(cls).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*in_proj_weight"):
        make(cls, num_kv_heads=2, layer_norm=False).load_state_dict(state)
    with pytest.raises(RuntimeError, match="bias_k"):
        make(cls, layer_norm=False).load_state_dict(state | {"bias_k": torch.zeros(1, 1, E)})
