"""The modules with projections, against the same computed by hand around the oracle, and in PyTorch's own layers."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention import dilated_attention, reference
from dilated_attention.compat import ImprovedMultiheadDilatedAttention
from dilated_attention.nn import MultiheadDilatedAttention
from dilated_attention.testing import error

CLASSES = [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention]
BOTH = pytest.mark.parametrize("cls", CLASSES)
RULES = pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
TWO = [*itertools.product((True, False), (True, False))]
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


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def given(mask: Tensor | None, kind: str | None, shape: tuple[int, ...]) -> Tensor | None:
    """A mask of these tokens as PyTorch's modules take it."""
    return None if mask is None else (as_float(mask) if kind == "float" else mask).view(shape)


def by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype | None = torch.float64, **options: Any
) -> Tensor:
    """What the module should give, in ``dtype`` (None: the parameters'), by the oracle and torch.nn.functional."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(cast(x), cast(weight), None if bias is None else cast(bias))

    def cast(x: Tensor) -> Tensor:
        return x if dtype is None else x.to(dtype)

    if isinstance(module, ImprovedMultiheadDilatedAttention):
        bias = module.qkv_proj.bias
        thirds = zip(module.qkv_proj.weight.chunk(3), [None] * 3 if bias is None else bias.chunk(3), strict=True)
    else:
        thirds = ((x.weight, x.bias) for x in (module.q_proj, module.k_proj, module.v_proj))
    qkv = (
        linear(x, *third).unflatten(-1, (module.num_heads, module.head_dim))
        for x, third in zip((query, key, value), thirds, strict=True)
    )
    out = reference.attention(*qkv, module.pattern, dtype=dtype, **options)[0].flatten(2)
    if isinstance(module.norm, nn.LayerNorm):
        out = F.layer_norm(out, (E,), cast(module.norm.weight), cast(module.norm.bias), module.norm.eps)
    return linear(out, module.out_proj.weight, module.out_proj.bias)


def gradients(out: Tensor, module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return list(torch.autograd.grad(out, [*inputs, *module.parameters()], dout, retain_graph=True))


def assert_same(module: nn.Module, got: Tensor, expected: Tensor, *inputs: Tensor, tolerance: float = 1e-12) -> None:
    """Outputs and the gradients of all inputs and parameters."""
    assert error(got, expected) <= tolerance
    names = [*(f"input {i}" for i in range(len(inputs))), *(name for name, _ in module.named_parameters())]
    for name, a, b in zip(names, *(gradients(x, module, *inputs) for x in (got, expected)), strict=True):
        assert error(a, b) <= tolerance, f"gradient of {name}"


# --- the computation --------------------------------------------------------------------------------------------


@BOTH
@RULES
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 13), (9,)], ids=["below the segment", "not divided", "no batch"])
def test_agrees_with_the_oracle(cls: Any, rule: str, is_causal: bool, mask: str | None, shape: tuple[int, ...]) -> None:
    module = make(cls, rule=rule)
    x = tokens(*shape).requires_grad_()
    batch = x if len(shape) > 1 else x[None]
    ignored = None if mask is None else padding(*batch.shape[:2])
    out, weights = module(x, is_causal=is_causal, key_padding_mask=given(ignored, mask, shape))
    assert weights is None
    expected = by_hand(module, batch, batch, batch, is_causal=is_causal, key_padding_mask=ignored)
    assert_same(module, out, expected.view(x.shape), x)


@BOTH
@pytest.mark.parametrize(("bias", "layer_norm"), TWO)
def test_bias_and_norm(cls: Any, bias: bool, layer_norm: bool) -> None:
    module = make(cls, bias=bias, layer_norm=layer_norm, layer_norm_eps=0.1)
    linear = [*(["q_proj", "k_proj", "v_proj"] if cls is MultiheadDilatedAttention else ["qkv_proj"]), "out_proj"]
    names = {f"{name}.{kind}" for name in linear for kind in (["weight", "bias"] if bias else ["weight"])}
    assert set(module.state_dict()) == names | ({"norm.weight", "norm.bias"} if layer_norm else set())
    x = tokens(2, 9).requires_grad_()
    assert_same(module, module(x)[0], by_hand(module, x, x, x), x)
    assert module.norm.eps == 0.1 if layer_norm else isinstance(module.norm, nn.Identity)


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_three_different_inputs(cls: Any, bias: bool) -> None:
    module = make(cls, bias=bias)
    q, k, v = (tokens(2, 9, seed=seed).requires_grad_() for seed in (1, 2, 3))
    for inputs, whole in (
        ((q, k, v), (q, k, v)), ((q, q, v), (q, q, v)), ((q, k, q), (q, k, q)),
        ((q, k), (q, k, k)), ((q, None, v), (q, q, v)),  # what stands for the inputs left out
    ):  # fmt: skip
        used = [x for x in (q, k, v) if any(x is other for other in inputs)]
        assert_same(module, module(*inputs)[0], by_hand(module, *whole), *used)
    assert torch.equal(module(q)[0], module(q, q, q)[0])


def test_one_product_makes_all_three() -> None:
    module = make(ImprovedMultiheadDilatedAttention)
    widths = []
    module.qkv_proj.register_forward_hook(lambda _, __, out: widths.append(out.shape[-1]))
    x = tokens(2, 9)
    for inputs in ((x,), (x, x, x), (x[0],)):
        module(*inputs)
    assert widths == [3 * E] * 3


@BOTH
def test_is_the_function_and_drops_in_training(cls: Any) -> None:
    module = make(cls, dropout=0.4, backend="eager")
    x = tokens(2, 13)

    def seeded(seed: int, attention: Any = module) -> Tensor:
        torch.manual_seed(seed)
        return attention(x)[0]

    def function(x: Tensor) -> tuple[Tensor]:
        p = 0.4 if module.training else 0.0
        attended = dilated_attention(*module._project(x, x, x), module.pattern, dropout_p=p, backend="eager")
        return (module.out_proj(module.norm(attended.flatten(2))),)

    expected = seeded(1, function)
    assert torch.equal(seeded(1), expected)
    assert not torch.equal(seeded(2), expected)
    module.eval()
    assert torch.equal(seeded(1), seeded(1, function))
    assert error(seeded(1), by_hand(module, x, x, x)) <= 1e-12


# --- parameters -------------------------------------------------------------------------------------------------


@BOTH
def test_attributes(cls: Any) -> None:
    module = cls(E, H, LENGTHS, RATES, dropout=0.25, rule="torchscale", backend="eager")
    assert (module.embed_dim, module.num_heads, module.head_dim, module.dropout) == (E, H, E // H, 0.25)
    for part in ("embed_dim=20", "num_heads=4", "torchscale", "[4, 8]", "[1, 2]", "dropout=0.25", "backend='eager'"):
        assert part in repr(module)


@BOTH
def test_initial_values(cls: Any) -> None:
    torch.manual_seed(0)
    module = cls(128, 4, LENGTHS, RATES, gamma_init=0.5)
    out = module.out_proj.weight, module.out_proj.bias
    for (weight, bias), gain in zip((*module._inputs(), out), (1.0, 1.0, 0.5, 0.5), strict=True):
        deviation = gain * (2 / (128 + 128)) ** 0.5
        assert abs(weight.std().item() / deviation - 1) < 0.03  # 128**2 draws: 0.03 is more than five sigma
        assert weight.abs().max() > 3 * deviation, "normal, not uniform"
        assert not bias.any()
    assert torch.equal(module.norm.weight, torch.ones(128))
    assert not module.norm.bias.any()


def test_one_seed_gives_both_the_same_parameters() -> None:
    """All of them, whatever they were before, and on the meta device there were none."""
    modules = [make(cls) for cls in CLASSES]
    modules += [cls(E, H, LENGTHS, RATES, device="meta", dtype=torch.float64).to_empty(device="cpu") for cls in CLASSES]
    for module in modules:
        torch.manual_seed(3)
        module.reset_parameters()
        assert module.norm.bias.eq(0).all()
        assert all(parameter.requires_grad for parameter in module.parameters())
    x = tokens(2, 9)
    for module in modules[1:]:
        for ours, theirs in zip(modules[0]._inputs(), module._inputs(), strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert torch.equal(modules[0].out_proj.weight, module.out_proj.weight)
        assert error(modules[0](x)[0], module(x)[0]) <= 1e-12


@BOTH
def test_shapes_and_dtypes_on_the_meta_device(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = cls(E, H, LENGTHS, RATES, device="meta", dtype=dtype)
        assert {(parameter.is_meta, parameter.dtype) for parameter in module.parameters()} == {(True, dtype)}
        x, mask = torch.empty(2, 9, E, device="meta", dtype=dtype), torch.empty(2, 9, device="meta")
        for given_mask in (None, mask, mask.bool()):
            out = module(x, key_padding_mask=given_mask)[0]
            assert (out.shape, out.dtype, out.device.type) == ((2, 9, E), dtype, "meta")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["to", "autocast"])
def test_half_precision(cls: Any, dtype: torch.dtype, how: str) -> None:
    """At most twice (gradients three times) as far from float64 as the same by hand in the same precision."""
    module = make(cls, rule="longnet").to(dtype if how == "to" else torch.float32)
    x = tokens(2, 13).to(dtype).to(module.out_proj.weight.dtype).requires_grad_()
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
@pytest.mark.parametrize(("bias", "layer_norm"), TWO)
def test_loads_the_other_state_dict(cls: Any, bias: bool, layer_norm: bool) -> None:
    """Inside of a model, and back without the loss of a bit."""

    def model(kind: Any) -> nn.ModuleDict:
        module = kind(E, H, LENGTHS, RATES, bias=bias, layer_norm=layer_norm, dtype=torch.float64)
        return nn.ModuleDict({"embed": nn.Linear(E, E), "attention": module})

    source, target, back, own = map(model, (cls, other_class(cls), cls, cls))
    source["attention"] = make(cls, bias=bias, layer_norm=layer_norm)
    state = source.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    result = target.load_state_dict(state, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert state.keys() == before.keys(), "the caller's state dict is not changed"
    back.load_state_dict(target.state_dict())
    own.load_state_dict(state)
    for name, value in before.items():
        assert torch.equal(back.state_dict()[name], value), name
    x = tokens(2, 9)
    assert error(target["attention"](x)[0], source["attention"](x)[0]) <= 1e-12
    assert torch.equal(own["attention"](x)[0], source["attention"](x)[0])


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
    state, target = make(cls).state_dict(), make(other_class(cls))
    first = "qkv_proj.weight" if cls is ImprovedMultiheadDilatedAttention else "k_proj.weight"
    incomplete = {name: value for name, value in state.items() if name != first}
    for wrong, match in (
        (state | target.state_dict(), r"Unexpected key.*_proj\.weight"),
        (incomplete, r"Missing key.*_proj\.weight"),
        (make(cls, embed_dim=2 * E).state_dict(), "size mismatch"),
    ):
        with pytest.raises(RuntimeError, match=match):
            target.load_state_dict(wrong)


@BOTH
def test_copies_and_pickles(cls: Any) -> None:
    module = make(cls, dropout=0.1, rule="longnet").eval()
    x = tokens(2, 9)
    expected = module(x)[0]
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert type(other) is cls
        assert repr(other) == repr(module)
        assert torch.equal(other(x)[0], expected)
        other.load_state_dict(make(other_class(cls)).state_dict())  # the hook came along, and works on the copy
        assert not torch.equal(other(x)[0], expected)
    assert torch.equal(module(x)[0], expected)


# --- inside PyTorch's layers ------------------------------------------------------------------------------------


def encoder_layer(cls: Any, norm_first: bool = False, batch_first: bool = True, **options: Any) -> Any:
    """Of PyTorch's own attention without a class."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.0, "dtype": torch.float64}
    layer: Any = nn.TransformerEncoderLayer(E, H, batch_first=batch_first, norm_first=norm_first, **sizes)
    layer.self_attn = layer.self_attn if cls is None else make(cls, batch_first=batch_first, **options)
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


@pytest.mark.parametrize("guard", ["in_proj_bias", "_qkv_same_embed_dim", "in_proj_weight"])
def test_each_guard_alone_keeps_the_dense_shortcut_away(guard: str) -> None:
    """PyTorch may change the order in which it looks at these; any one of them must do."""
    dense = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    gates = {name: getattr(dense, name) for name in ("in_proj_bias", "in_proj_weight", "merge_masks")}
    unguarded = type("Unguarded", (MultiheadDilatedAttention,), gates | {"_qkv_same_embed_dim": True})
    guarded = type("Guarded", (unguarded,), {guard: getattr(MultiheadDilatedAttention, guard)})
    x, results = tokens(2, 13), []
    for cls in (guarded, unguarded):
        layer = encoder_layer(cls).eval()
        with torch.no_grad():
            results.append(error(layer(x), layer_by_hand(layer, x)))
    assert results[0] <= 1e-12
    assert results[1] > 1e-3, "without guards the shortcut runs: this test sees it"
    with pytest.raises(TypeError, match="has no in_proj_weight: use q_proj"):
        F.linear(x, make(MultiheadDilatedAttention).in_proj_weight)


@BOTH
@pytest.mark.parametrize(
    ("replaced", "norm_first", "batch_first"),
    [("before", False, True), ("before", True, True), ("before", False, False), ("after", False, True)],
)
@pytest.mark.parametrize(("padded", "is_causal"), TWO)
def test_encoder(cls: Any, replaced: str, norm_first: bool, batch_first: bool, padded: bool, is_causal: bool) -> None:
    """Replaced after the encoder was built, only in_proj_weight keeps it from handing over nested tensors."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        layer = encoder_layer(cls if replaced == "before" else None, norm_first, batch_first)
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

    def run(**options: Any) -> Tensor:
        out = encoder(x if batch_first else x.transpose(0, 1), src_key_padding_mask=mask, **options)
        return out if batch_first else out.transpose(0, 1)

    assert_same(encoder.train(), run(is_causal=is_causal), expected, x, tolerance=1e-11)
    assert_same(encoder.eval(), run(is_causal=is_causal), expected, x, tolerance=1e-11)
    causal = nn.Transformer.generate_square_subsequent_mask(13, dtype=torch.float64) if is_causal else None
    for context in (torch.no_grad, torch.inference_mode):  # only now would PyTorch take its dense shortcut
        for options in ({"is_causal": is_causal}, {"mask": causal, "is_causal": is_causal}, {"mask": causal}):
            with context():  # of a mask without a word it finds out itself
                assert error(run(**options), expected) <= 1e-11


@BOTH
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(cls: Any) -> None:
    """A dense first layer makes nn.TransformerEncoder hand nested tensors to the dilated one behind it."""
    encoder = nn.TransformerEncoder(encoder_layer(None), 2).eval()
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


# --- torch.compile ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "training"), zip(CLASSES, (True, False), strict=True))
def test_compiles_as_one_graph(cls: Any, training: bool) -> None:
    """In which masks are checked, too."""
    torch._dynamo.reset()
    module = make(cls, dropout=0.3).train(training)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, mask = tokens(2, 13).requires_grad_(), padding(2, 13)
    causal = nn.Transformer.generate_square_subsequent_mask(13, dtype=torch.float64)
    for options in (
        {}, {"is_causal": True}, {"attn_mask": causal, "is_causal": True},
        {"key_padding_mask": mask}, {"key_padding_mask": as_float(mask)},
    ):  # fmt: skip
        outputs = []
        for each in (module, compiled):
            torch.manual_seed(0)
            outputs.append(each(x, **options)[0])
        assert_same(module, *outputs, x)
    with pytest.raises(RuntimeError, match=r"float of 0 \(keep\) and -inf \(ignore\) only"):
        compiled(x, key_padding_mask=as_float(mask) - 1.0)


def test_encoder_layer_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    layer = encoder_layer(ImprovedMultiheadDilatedAttention)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = tokens(2, 13).requires_grad_(), padding(2, 13)
    expected = layer_by_hand(layer, x, key_padding_mask=mask)
    assert_same(layer, compiled(x, src_key_padding_mask=mask), expected, x)
    layer.eval()
    with torch.no_grad():
        assert error(compiled(x, src_key_padding_mask=mask), expected) <= 1e-12


# --- errors -----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"embed_dim": 18}, ValueError, "embed_dim must be a multiple of num_heads, got 18 and 4"),
        ({"embed_dim": 0}, ValueError, "embed_dim must be 1 or more, got 0"),
        ({"embed_dim": 20.0}, TypeError, "embed_dim must be a whole number, got 20.0"),
        ({"num_heads": 0}, ValueError, "num_heads must be 1 or more, got 0"),
        ({"num_heads": True}, TypeError, "num_heads must be a whole number, got True"),
        ({"num_heads": 1}, ValueError, "head_groups needs .* got 2 branches and 1 key/value heads"),
        ({"segment_lengths": [4]}, ValueError, "1 entries and dilation_rates 2"),
        ({"dropout": 1.5}, ValueError, r"must be a number in \[0, 1\], got 1.5"),
        ({"bias": 0.1}, TypeError, "bias must be True or False, got 0.1"),
        ({"layer_norm": 1e-5}, TypeError, "layer_norm must be True or False, got 1e-05"),
        ({"layer_norm_eps": -1e-5}, ValueError, "layer_norm_eps must be a finite number of 0 or more, got -1e-05"),
        ({"gamma_init": float("inf")}, ValueError, "gamma_init must be a finite number of 0 or more, got inf"),
        ({"dtype": torch.int64}, TypeError, "dtype must be float64, .* got torch.int64"),
        ({"rule": "fixed"}, ValueError, "unknown rule 'fixed': use one of longnet"),
        ({"backend": "fast"}, ValueError, "unknown backend 'fast': use one of auto"),
    ],
)
def test_constructor_errors(cls: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"embed_dim": E, "num_heads": H, "segment_lengths": LENGTHS, "dilation_rates": RATES}
    with pytest.raises(kind, match=message):
        cls(**good | options)


@BOTH
def test_errors_of_the_call(cls: Any) -> None:
    """Before it projects."""
    module = make(cls)
    module._project = lambda *_: pytest.fail("it projected first")
    x, mask = tokens(2, 9), padding(2, 9)
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    wrong_mask = as_float(mask)
    wrong_mask[1, 4] = -1e9
    only = r"float of 0 \(keep\) and -inf \(ignore\) only, got"
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((x, x, x), {"need_weights": True}, ValueError, "need_weights must be False, got True"),
        ((x,), {"attn_mask": causal}, ValueError, r"attn_mask must be None unless .* pass is_causal=True"),
        ((x, x[:, :8]), {}, ValueError, r"got key \(2, 8, 20\) and query \(2, 9, 20\): .* equal lengths; to decode, "),
        ((x[..., 1:],), {}, ValueError, r"must all be .* got query \(2, 9, 19\)"),
        ((x.numpy(),), {}, TypeError, "query must be a tensor, got ndarray"),
        ((x, x[0]), {}, ValueError, r"must all be .* got key \(9, 20\) and query \(2, 9, 20\)"),
        ((x[None],), {}, ValueError, r"must all be .* got query \(1, 2, 9, 20\)"),
        ((x,), {"key_padding_mask": wrong_mask}, ValueError, f"{only} -1000000000.0"),
        ((x,), {"key_padding_mask": as_float(mask).masked_fill(mask, torch.nan)}, ValueError, f"{only} nan"),
        ((x,), {"key_padding_mask": mask.long()}, TypeError, r"key_padding_mask must be bool .* got torch.int64"),
        ((x,), {"key_padding_mask": mask[:, :8]}, ValueError, r"must be \(batch, tokens\) = \(2, 9\), got \(2, 8\)"),
        ((x[0],), {"key_padding_mask": mask}, ValueError, r"must be \(batch, tokens\) = \(1, 9\), got \(1, 2, 9\)"),
    ]
    for inputs, options, kind, match in wrong:
        with pytest.raises(kind, match=match):
            module(*inputs, **options)
