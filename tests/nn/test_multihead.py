"""The modules with projections, against the same computed by hand around the oracle, and in PyTorch's own layers."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention import (
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    dilated_attention,
    reference,
)
from dilated_attention.testing import TOLERANCE, error

CLASSES = [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention]
BOTH = pytest.mark.parametrize("cls", CLASSES)
RULES = pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
E, H = 20, 4
LENGTHS, RATES = [4, 8], [1, 2]


def make(cls: Any, **options: Any) -> Any:
    """A float64 module with no parameter at the value it starts with, so that none can be left out unseen."""
    torch.manual_seed(0)
    module = cls(**{"embed_dim": E, "num_heads": H, "segment_lengths": LENGTHS, "dilation_rates": RATES} | options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module if "dtype" in options else module.double()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padding(samples: int, count: int) -> Tensor:
    """True at the end of the first sample only, as PyTorch's nested tensors want it."""
    mask = torch.zeros(samples, count, dtype=torch.bool)
    mask[0, -3:] = True
    return mask


def as_float(mask: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)


def by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype | None = torch.float64, **options: Any
) -> Tensor:
    """What the module should give, in ``dtype`` (None: the parameters'), by the oracle and torch.nn.functional."""

    def cast(x: Tensor | None) -> Tensor | None:
        return x if x is None or dtype is None else x.to(dtype)

    if isinstance(module, ImprovedMultiheadDilatedAttention):
        weights = module.qkv_proj.weight.chunk(3)
        biases = (None,) * 3 if module.qkv_proj.bias is None else module.qkv_proj.bias.chunk(3)
    else:
        linears = (module.q_proj, module.k_proj, module.v_proj)
        weights, biases = [x.weight for x in linears], [x.bias for x in linears]
    q, k, v = (
        F.linear(cast(x), cast(w), cast(b)).unflatten(-1, (module.num_heads, module.head_dim))
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    out = reference.attention(q, k, v, module.pattern, dtype=dtype, **options)[0].flatten(2)
    if isinstance(module.norm, nn.LayerNorm):
        out = F.layer_norm(out, (E,), cast(module.norm.weight), cast(module.norm.bias), module.norm.eps)
    return F.linear(out, cast(module.out_proj.weight), cast(module.out_proj.bias))


def gradients(out: Tensor, module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return list(torch.autograd.grad(out, [*inputs, *module.parameters()], dout, retain_graph=True))


def assert_same(module: nn.Module, got: Tensor, expected: Tensor, *inputs: Tensor, tolerance: float = 1e-12) -> None:
    """Outputs and the gradients of all inputs and parameters."""
    assert got.shape == expected.shape
    assert error(got, expected) <= tolerance
    names = [*(f"input {i}" for i in range(len(inputs))), *(name for name, _ in module.named_parameters())]
    pairs = zip(names, gradients(got, module, *inputs), gradients(expected, module, *inputs), strict=True)
    for name, a, b in pairs:
        assert error(a, b) <= tolerance, f"gradient of {name}"


# --- the computation --------------------------------------------------------------------------------------------


@BOTH
@RULES
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("count", [3, 13], ids=["below the segment", "not divided"])
def test_agrees_with_the_oracle(cls: Any, rule: str, is_causal: bool, mask: str | None, count: int) -> None:
    module = make(cls, rule=rule)
    x = tokens(2, count).requires_grad_()
    ignored = None if mask is None else padding(2, count)
    given = as_float(ignored) if mask == "float" and ignored is not None else ignored
    out, weights = module(x, is_causal=is_causal, key_padding_mask=given)
    assert weights is None
    expected = by_hand(module, x, x, x, is_causal=is_causal, key_padding_mask=ignored)
    assert_same(module, out, expected, x)


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_bias_and_norm(cls: Any, bias: bool, layer_norm: bool) -> None:
    module = make(cls, bias=bias, layer_norm=layer_norm, layer_norm_eps=0.1)
    names = {name.split(".")[-1] for name, _ in module.named_parameters() if not name.startswith("norm")}
    assert names == ({"weight", "bias"} if bias else {"weight"})
    x = tokens(2, 9).requires_grad_()
    assert_same(module, module(x)[0], by_hand(module, x, x, x), x)
    if layer_norm:
        assert module.norm.eps == 0.1
    else:
        assert isinstance(module.norm, nn.Identity)


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_three_different_inputs(cls: Any, bias: bool) -> None:
    module = make(cls, bias=bias)
    query, key, value = (tokens(2, 9, seed=seed).requires_grad_() for seed in (1, 2, 3))
    assert_same(module, module(query, key, value)[0], by_hand(module, query, key, value), query, key, value)
    assert_same(module, module(query, query, value)[0], by_hand(module, query, query, value), query, value)
    assert_same(module, module(query, key, query)[0], by_hand(module, query, key, query), query, key)
    # what stands for the inputs left out
    assert_same(module, module(query, key)[0], by_hand(module, query, key, key), query, key)
    assert_same(module, module(query, value=value)[0], by_hand(module, query, query, value), query, value)
    assert torch.equal(module(query)[0], module(query, query, query)[0])


def test_one_product_makes_all_three() -> None:
    module = make(ImprovedMultiheadDilatedAttention)
    widths = []
    module.qkv_proj.register_forward_hook(lambda _, __, out: widths.append(out.shape[-1]))
    x = tokens(2, 9)
    for inputs in ((x,), (x, x, x), (x[0],)):
        module(*inputs)
    assert widths == [3 * E] * 3


@BOTH
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_one_sample_without_a_batch(cls: Any, mask: str | None) -> None:
    module = make(cls)
    x = tokens(9).requires_grad_()
    ignored = None if mask is None else padding(1, 9)
    given = None if ignored is None else (as_float(ignored) if mask == "float" else ignored)[0]
    expected = by_hand(module, x[None], x[None], x[None], key_padding_mask=ignored)[0]
    assert_same(module, module(x, key_padding_mask=given)[0], expected, x)
    assert_same(module, module(x, x.clone())[0], by_hand(module, x[None], x[None], x[None])[0], x)


@BOTH
@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager"])
def test_is_the_function(cls: Any, backend: str) -> None:
    module = make(cls, layer_norm=False, backend=backend, rule="longnet")
    x = tokens(2, 13)
    q, k, v = module._project(x, x, x)
    expected = module.out_proj(dilated_attention(q, k, v, module.pattern, backend=backend).flatten(2))
    assert torch.equal(module(x)[0], expected)


@BOTH
def test_dropout_is_for_training(cls: Any) -> None:
    module = make(cls, dropout=0.4)
    x = tokens(2, 13)

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return module(x)[0]

    module.train()
    torch.manual_seed(1)
    attended = dilated_attention(*module._project(x, x, x), module.pattern, dropout_p=0.4)
    expected = module.out_proj(module.norm(attended.flatten(2)))
    assert torch.equal(seeded(1), expected)
    assert torch.equal(seeded(1), expected)
    assert not torch.equal(seeded(2), expected)
    module.eval()
    assert error(seeded(1), by_hand(module, x, x, x)) <= 1e-12


@BOTH
def test_training_lowers_the_loss(cls: Any) -> None:
    module = make(cls, dropout=0.1)
    x = tokens(4, 11)
    target = x.roll(1, dims=1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x, is_causal=True)[0], target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@BOTH
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("batched", [True, False])
def test_one_full_segment_is_multihead_attention(cls: Any, is_causal: bool, mask: str | None, batched: bool) -> None:
    dense = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    module = make(cls, segment_lengths=[9], dilation_rates=[1], layer_norm=False)
    with torch.no_grad():
        for ours, name in ((0, "weight"), (1, "bias")):
            getattr(dense, f"in_proj_{name}").copy_(torch.cat([third[ours] for third in module._inputs()]))
            getattr(dense.out_proj, name).copy_(getattr(module.out_proj, name))
    x = tokens(2, 9) if batched else tokens(9)
    ignored = None if mask is None else (padding(2, 9) if batched else padding(1, 9)[0])
    given = as_float(ignored) if mask == "float" and ignored is not None else ignored
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64) if is_causal else None
    ignored_as_float = None if ignored is None else as_float(ignored)
    expected, _ = dense(x, x, x, ignored_as_float, need_weights=False, attn_mask=causal, is_causal=is_causal)
    got, _ = module(x, x, x, given, need_weights=False, attn_mask=None, is_causal=is_causal)
    assert error(got, expected) <= 1e-12


# --- parameters -------------------------------------------------------------------------------------------------


@BOTH
def test_attributes(cls: Any) -> None:
    module = cls(E, H, LENGTHS, RATES, dropout=0.25, rule="torchscale", backend="eager")
    assert (module.embed_dim, module.num_heads, module.head_dim, module.dropout) == (E, H, E // H, 0.25)
    shown = repr(module)
    for part in ("embed_dim=20", "num_heads=4", "torchscale", "[4, 8]", "[1, 2]", "dropout=0.25", "backend='eager'"):
        assert part in shown


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_names_of_the_parameters(cls: Any, bias: bool) -> None:
    inputs = ["q_proj", "k_proj", "v_proj"] if cls is MultiheadDilatedAttention else ["qkv_proj"]
    expected = {f"{name}.weight" for name in (*inputs, "out_proj", "norm")} | {"norm.bias"}
    expected |= {f"{name}.bias" for name in (*inputs, "out_proj")} if bias else set()
    assert set(cls(E, H, LENGTHS, RATES, bias=bias).state_dict()) == expected


@BOTH
def test_initial_values(cls: Any) -> None:
    torch.manual_seed(0)
    module = cls(128, 4, LENGTHS, RATES, gamma_init=0.5)
    (q, k, v), out = module._inputs(), (module.out_proj.weight, module.out_proj.bias)
    for (weight, bias), gain in ((q, 1.0), (k, 1.0), (v, 0.5), (out, 0.5)):
        deviation = gain * (2 / (128 + 128)) ** 0.5
        assert abs(weight.std().item() / deviation - 1) < 0.03  # 128**2 draws: 0.03 is more than five sigma
        assert weight.abs().max() > 3 * deviation, "normal, not uniform"
        assert not bias.any()
    assert torch.equal(module.norm.weight, torch.ones(128))
    assert not module.norm.bias.any()


def test_one_seed_gives_both_the_same_parameters() -> None:
    modules = [make(cls, gamma_init=0.5) for cls in CLASSES]
    for module in modules:
        torch.manual_seed(3)
        module.reset_parameters()
    for ours, theirs in zip(modules[0]._inputs(), modules[1]._inputs(), strict=True):
        assert torch.equal(ours[0], theirs[0])
    assert torch.equal(modules[0].out_proj.weight, modules[1].out_proj.weight)
    x = tokens(2, 9)
    assert error(modules[0](x)[0], modules[1](x)[0]) <= 1e-12


@BOTH
def test_reset_parameters_resets_all_of_them(cls: Any) -> None:
    fresh = cls(E, H, LENGTHS, RATES).double()
    module = make(cls)
    for each in (fresh, module):
        torch.manual_seed(4)
        each.reset_parameters()
    assert module.norm.bias.eq(0).all()
    for (name, a), (_, b) in zip(fresh.named_parameters(), module.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert b.requires_grad


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_and_device_of_the_parameters(cls: Any, dtype: torch.dtype) -> None:
    module = cls(E, H, LENGTHS, RATES, device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert module(tokens(2, 9).to(dtype))[0].dtype == dtype


@BOTH
def test_meta_device(cls: Any) -> None:
    module = cls(E, H, LENGTHS, RATES, device="meta", dtype=torch.float64)
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(5)
    module.reset_parameters()
    other = make(cls)
    torch.manual_seed(5)
    other.reset_parameters()
    assert torch.equal(module(tokens(2, 9))[0], other(tokens(2, 9))[0])


@BOTH
def test_shapes_on_the_meta_device(cls: Any) -> None:
    module = cls(E, H, LENGTHS, RATES, device="meta")
    x = torch.empty(2, 9, E, device="meta")
    for mask in (None, torch.empty(2, 9, device="meta"), torch.empty(2, 9, device="meta", dtype=torch.bool)):
        out = module(x, key_padding_mask=mask)[0]
        assert (out.shape, out.device.type) == ((2, 9, E), "meta")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["to", "autocast"])
def test_half_precision(cls: Any, dtype: torch.dtype, how: str) -> None:
    """At most twice (gradients three times) as far from float64 as the same by hand in the same precision."""
    module = make(cls, rule="longnet").float()
    x = tokens(2, 13).to(dtype)
    if how == "to":
        module = module.to(dtype)
    else:
        x = x.float()
    x.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        got = module(x)[0]
        plain = by_hand(module, x, x, x, dtype=None)
    exact = by_hand(module, x, x, x)
    assert got.dtype == dtype
    floor = torch.finfo(dtype).eps / 4
    assert error(got, exact) <= max(2 * error(plain, exact), floor)
    grads = [gradients(out, module, x) for out in (got, plain, exact)]
    for ours, theirs, right in zip(*grads, strict=True):
        assert ours.dtype == right.dtype
        assert error(ours, right) <= max(3 * error(theirs, right), floor)


# --- state dicts ------------------------------------------------------------------------------------------------


def other_class(cls: Any) -> Any:
    return CLASSES[1 - CLASSES.index(cls)]


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_loads_the_other_state_dict(cls: Any, bias: bool, layer_norm: bool) -> None:
    source = make(cls, bias=bias, layer_norm=layer_norm)
    target = other_class(cls)(E, H, LENGTHS, RATES, bias=bias, layer_norm=layer_norm, dtype=torch.float64)
    state = source.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    result = target.load_state_dict(state, strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    x = tokens(2, 9)
    assert error(target(x)[0], source(x)[0]) <= 1e-12
    assert state.keys() == before.keys(), "the caller's state dict is not changed"
    # and back, without the loss of a bit
    back = cls(E, H, LENGTHS, RATES, bias=bias, layer_norm=layer_norm, dtype=torch.float64)
    back.load_state_dict(target.state_dict())
    for name, value in back.state_dict().items():
        assert torch.equal(value, before[name]), name
    own = cls(E, H, LENGTHS, RATES, bias=bias, layer_norm=layer_norm, dtype=torch.float64)
    own.load_state_dict(state)
    assert torch.equal(own(x)[0], source(x)[0])


@BOTH
def test_loads_the_other_state_dict_inside_a_model(cls: Any) -> None:
    def model(kind: Any, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        for layer in layers:
            layer.self_attn = kind(E, H, LENGTHS, RATES)
        return nn.ModuleDict({"embed": nn.Linear(E, E), "body": nn.Sequential(*layers)}).double()

    source, target = model(cls, 0), model(other_class(cls), 1)
    x = tokens(2, 9)
    assert not torch.allclose(source["body"](x), target["body"](x))
    result = target.load_state_dict(source.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert error(target["body"](x), source["body"](x)) <= 1e-12


@BOTH
def test_loads_the_other_state_dict_onto_meta(cls: Any) -> None:
    source = make(cls)
    target = other_class(cls)(E, H, LENGTHS, RATES, device="meta", dtype=torch.float64)
    target.load_state_dict(source.state_dict(keep_vars=True), assign=True)
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in target.parameters())
    x = tokens(2, 9)
    assert error(target(x)[0], source(x)[0]) <= 1e-12
    storages = {parameter.untyped_storage().data_ptr() for parameter in target.parameters()}
    assert len(storages) == len(list(target.parameters())), "no two parameters share memory"


@BOTH
def test_a_bad_state_dict_is_named(cls: Any) -> None:
    state = make(cls).state_dict()
    target = make(other_class(cls))
    both = {**state, **target.state_dict()}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*_proj\.weight"):
        target.load_state_dict(both)
    first = "qkv_proj.weight" if cls is ImprovedMultiheadDilatedAttention else "k_proj.weight"
    incomplete = {name: value for name, value in state.items() if name != first}
    with pytest.raises(RuntimeError, match=r"Missing key.*_proj\.weight"):
        target.load_state_dict(incomplete)
    with pytest.raises(RuntimeError, match="size mismatch"):
        target.load_state_dict(make(cls, embed_dim=2 * E).state_dict())


@BOTH
def test_saved_state_dict(cls: Any) -> None:
    source = make(cls)
    saved = io.BytesIO()
    torch.save(source.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    x = tokens(2, 9)
    for kind in CLASSES:
        target = kind(E, H, LENGTHS, RATES, dtype=torch.float64)
        target.load_state_dict(state)
        assert error(target(x)[0], source(x)[0]) <= 1e-12


@BOTH
def test_copies_and_pickles(cls: Any) -> None:
    module = make(cls, dropout=0.1, rule="longnet").eval()
    x = tokens(2, 9)
    expected = module(x)[0]
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    state = make(other_class(cls)).state_dict()
    loaded = torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert type(other) is cls
        assert repr(other) == repr(module)
        assert torch.equal(other(x)[0], expected)
        other.load_state_dict(state)  # the hook came along, and works on the copy
        assert not torch.equal(other(x)[0], expected)
    assert torch.equal(module(x)[0], expected)


# --- inside PyTorch's layers ------------------------------------------------------------------------------------


def encoder_layer(cls: Any, norm_first: bool = False, dropout: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        E, H, 16, dropout=dropout, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    layer.self_attn = make(cls, **options)
    return layer


def layer_by_hand(layer: Any, x: Tensor, **options: Any) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        return by_hand(layer.self_attn, x, x, x, **options)

    def feed(x: Tensor) -> Tensor:
        return layer.linear2(F.relu(layer.linear1(x)))

    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + feed(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return layer.norm2(x + feed(x))


@BOTH
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_encoder_layer(cls: Any, norm_first: bool, is_causal: bool, padded: bool) -> None:
    layer = encoder_layer(cls, norm_first)
    x = tokens(2, 13).requires_grad_()
    mask = padding(2, 13) if padded else None
    options: dict[str, Any] = {"src_key_padding_mask": mask, "is_causal": is_causal}
    expected = layer_by_hand(layer, x, is_causal=is_causal, key_padding_mask=mask)
    assert_same(layer, layer.train()(x, **options), expected, x)
    assert_same(layer, layer.eval()(x, **options), expected, x)
    with torch.no_grad():  # only now would PyTorch take its dense shortcut
        assert error(layer(x, **options), expected) <= 1e-12
    with torch.inference_mode():
        assert error(layer(x.detach(), **options), expected) <= 1e-12


@BOTH
def test_encoder_layer_without_a_batch(cls: Any) -> None:
    layer = encoder_layer(cls).eval()
    x, mask = tokens(9), padding(1, 9)
    expected = layer_by_hand(layer, x[None], key_padding_mask=mask)[0]
    with torch.no_grad():
        assert error(layer(x, src_key_padding_mask=mask[0]), expected) <= 1e-12


@pytest.mark.parametrize("guard", ["in_proj_bias", "_qkv_same_embed_dim", "in_proj_weight"])
def test_each_guard_alone_keeps_the_dense_shortcut_away(guard: str) -> None:
    """PyTorch may change the order in which it looks at these; any one of them must do."""
    dense = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    open_gates = {
        "in_proj_bias": dense.in_proj_bias,
        "in_proj_weight": dense.in_proj_weight,
        "_qkv_same_embed_dim": True,
        "merge_masks": dense.merge_masks,
    }
    unguarded = type("Unguarded", (MultiheadDilatedAttention,), open_gates)
    guarded = type("Guarded", (unguarded,), {guard: getattr(MultiheadDilatedAttention, guard)})
    x = tokens(2, 13)
    results = []
    for cls in (guarded, unguarded):
        layer = encoder_layer(cls).eval()
        with torch.no_grad():
            results.append(error(layer(x), layer_by_hand(layer, x)))
    assert results[0] <= 1e-12
    assert results[1] > 1e-3, "without guards the shortcut runs: this test sees it"


@BOTH
@pytest.mark.parametrize("replaced", ["before", "after"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_encoder(cls: Any, replaced: str, padded: bool, is_causal: bool) -> None:
    """Replaced after the encoder was built, only in_proj_weight keeps it from handing over nested tensors."""
    torch.manual_seed(0)
    layer: Any = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    if replaced == "before":
        layer.self_attn = make(cls)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        encoder = nn.TransformerEncoder(layer, 2)
    if replaced == "after":
        assert encoder.use_nested_tensor
        for each in encoder.layers:
            each.self_attn = make(cls)
    x = tokens(2, 13).requires_grad_()
    mask = padding(2, 13) if padded else None
    expected = x
    for each in encoder.layers:
        expected = layer_by_hand(each, expected, is_causal=is_causal, key_padding_mask=mask)
    options: dict[str, Any] = {"src_key_padding_mask": mask, "is_causal": is_causal}
    assert_same(encoder, encoder.train()(x, **options), expected, x, tolerance=1e-11)
    assert_same(encoder, encoder.eval()(x, **options), expected, x, tolerance=1e-11)
    with torch.no_grad():
        assert error(encoder(x, **options), expected) <= 1e-11


@BOTH
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(cls: Any) -> None:
    """A dense first layer makes nn.TransformerEncoder hand nested tensors to the dilated one behind it."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64), 2
    ).eval()
    encoder.layers[1].self_attn = make(cls)
    with torch.no_grad(), pytest.raises(ValueError, match="enable_nested_tensor=False"):
        encoder(tokens(2, 13), src_key_padding_mask=padding(2, 13))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_encoder_layer_on_a_gpu(cls: Any, backend: str) -> None:
    layer = encoder_layer(cls, backend=backend).cuda()
    x, mask = tokens(2, 13).cuda().requires_grad_(), padding(2, 13).cuda()
    expected = layer_by_hand(layer, x, key_padding_mask=mask)
    assert_same(layer, layer(x, src_key_padding_mask=mask), expected, x)
    layer = layer.eval().bfloat16()
    with torch.no_grad():
        out = layer(x.bfloat16(), src_key_padding_mask=mask)
    assert error(out, expected) < 0.05  # a few rounding steps; dense attention would be off by much more


def test_in_proj_weight_cannot_be_used() -> None:
    module = make(MultiheadDilatedAttention)
    with pytest.raises(TypeError, match="has no in_proj_weight: use q_proj"):
        F.linear(tokens(2, 9), module.in_proj_weight)


# --- torch.compile ----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_compiles_as_one_graph(cls: Any, training: bool) -> None:
    torch._dynamo.reset()
    module = make(cls, dropout=0.3).train(training)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = tokens(2, 13).requires_grad_()
    for options in ({}, {"is_causal": True}, {"key_padding_mask": padding(2, 13)}):
        outputs = []
        for each in (module, compiled):
            torch.manual_seed(0)
            outputs.append(each(x, **options)[0])
        assert_same(module, *outputs, x)


@BOTH
def test_a_float_mask_is_checked_in_the_graph_too(cls: Any) -> None:
    torch._dynamo.reset()
    module = make(cls)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, mask = tokens(2, 9), padding(2, 9)
    assert error(compiled(x, key_padding_mask=as_float(mask))[0], module(x, key_padding_mask=mask)[0]) <= 1e-12
    with pytest.raises(RuntimeError, match=r"float of 0 \(keep\) and -inf \(ignore\) only"):
        compiled(x, key_padding_mask=as_float(mask) - 1.0)


@BOTH
def test_encoder_layer_compiles_as_one_graph(cls: Any) -> None:
    torch._dynamo.reset()
    layer = encoder_layer(cls)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = tokens(2, 13).requires_grad_(), padding(2, 13)
    assert_same(layer, compiled(x, src_key_padding_mask=mask), layer(x, src_key_padding_mask=mask), x)
    layer.eval()
    with torch.no_grad():
        expected = layer_by_hand(layer, x, key_padding_mask=mask)
        assert error(compiled(x, src_key_padding_mask=mask), expected) <= 1e-12


# --- errors -----------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@BOTH
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"embed_dim": 18}, ValueError, "embed_dim must be a multiple of num_heads, got 18 and 4"),
        ({"embed_dim": 3}, ValueError, "embed_dim must be a multiple of num_heads, got 3 and 4"),
        ({"embed_dim": 0}, ValueError, "embed_dim must be 1 or more, got 0"),
        ({"embed_dim": 20.0}, TypeError, "embed_dim must be a whole number, got 20.0"),
        ({"num_heads": 0}, ValueError, "num_heads must be 1 or more, got 0"),
        ({"num_heads": -4}, ValueError, "num_heads must be 1 or more, got -4"),
        ({"num_heads": True}, TypeError, "num_heads must be a whole number, got True"),
        ({"num_heads": 1}, ValueError, "head_groups deals 2 branches to 1 key/value heads"),
        ({"segment_lengths": []}, ValueError, "segment_lengths is empty"),
        ({"segment_lengths": [4]}, ValueError, "1 entries and dilation_rates 2"),
        ({"segment_lengths": [4, -8]}, ValueError, "segment_lengths must be 1 or more, got -8"),
        ({"dilation_rates": [1, 2.5]}, TypeError, "every entry of dilation_rates must be a whole number, got 2.5"),
        ({"dropout": -0.1}, ValueError, r"must be a number in \[0, 1\], got -0.1"),
        ({"dropout": 1.5}, ValueError, r"must be a number in \[0, 1\], got 1.5"),
        ({"dropout": NAN}, ValueError, r"must be a number in \[0, 1\], got nan"),
        ({"bias": 0.1}, TypeError, "bias must be True or False, got 0.1"),
        ({"layer_norm": 1e-5}, TypeError, "layer_norm must be True or False, got 1e-05"),
        ({"layer_norm_eps": -1e-5}, ValueError, "layer_norm_eps must be a finite number of 0 or more, got -1e-05"),
        ({"layer_norm_eps": NAN}, ValueError, "layer_norm_eps must be a finite number of 0 or more, got nan"),
        ({"gamma_init": -1.0}, ValueError, "gamma_init must be a finite number of 0 or more, got -1.0"),
        ({"gamma_init": INF}, ValueError, "gamma_init must be a finite number of 0 or more, got inf"),
        ({"dtype": torch.int64}, TypeError, "dtype must be float64, .* got torch.int64"),
        ({"dtype": torch.complex64}, TypeError, "dtype must be float64, .* got torch.complex64"),
        ({"rule": "fixed"}, ValueError, "unknown rule 'fixed': use one of longnet"),
        ({"backend": "fast"}, ValueError, "unknown backend 'fast': use one of auto"),
    ],
)
def test_constructor_errors(cls: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"embed_dim": E, "num_heads": H, "segment_lengths": LENGTHS, "dilation_rates": RATES}
    cls(**good)
    with pytest.raises(kind, match=message):
        cls(**good | options)


@BOTH
def test_one_head_runs_all_branches_of_longnet(cls: Any) -> None:
    module = make(cls, num_heads=1, rule="longnet")
    x = tokens(2, 9)
    assert error(module(x)[0], by_hand(module, x, x, x)) <= TOLERANCE[torch.float64]


@BOTH
def test_errors_of_the_call(cls: Any) -> None:
    module = make(cls)
    x = tokens(2, 9)
    with pytest.raises(ValueError, match="need_weights must be False, got True"):
        module(x, x, x, need_weights=True)
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attn_mask must be None: .* pass is_causal=True"):
        module(x, attn_mask=causal)
    with pytest.raises(ValueError, match=r"key is \(2, 8, 20\) and query \(2, 9, 20\): .* equal lengths; to decode, "):
        module(x, x[:, :8])
    with pytest.raises(ValueError, match=r"must all be .* got query \(2, 9, 19\)$"):
        module(x[..., 1:])
    with pytest.raises(TypeError, match="query must be a tensor, got ndarray"):
        module(x.detach().numpy())
    with pytest.raises(ValueError, match=r"must all be .* got key \(9, 20\) and query \(2, 9, 20\)"):
        module(x, x[0])
    with pytest.raises(ValueError, match=r"must all be .* got query \(1, 2, 9, 20\)"):
        module(x[None])


@BOTH
def test_errors_of_the_mask(cls: Any) -> None:
    module = make(cls)
    x, mask = tokens(2, 9), padding(2, 9)
    for value in (1.0, -1e9, INF, NAN):
        wrong = as_float(mask)
        wrong[1, 4] = value
        with pytest.raises(ValueError, match=rf"float of 0 \(keep\) and -inf \(ignore\) only, got {value}"):
            module(x, key_padding_mask=wrong)
    with pytest.raises(TypeError, match=r"key_padding_mask must be bool .* got torch.int64"):
        module(x, key_padding_mask=mask.long())
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(2, 9\) like the tokens, got \(2, 8\)"):
        module(x, key_padding_mask=mask[:, :8])
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(9,\) like the tokens, got \(2, 9\)"):
        module(x[0], key_padding_mask=mask)
