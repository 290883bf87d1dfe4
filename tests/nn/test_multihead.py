"""The modules with projections, against the same computed by hand around the oracle; in the place of
nn.MultiheadAttention: layouts, fewer key heads, its causal mask, its layers and its state dicts."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dilated_attention as da
from dilated_attention import reference
from dilated_attention.nn import masks
from dilated_attention.testing import error

TWO_CLASSES = [da.MultiheadDilatedAttention, da.ImprovedMultiheadDilatedAttention]
BOTH = pytest.mark.parametrize("cls", TWO_CLASSES)
BY_CLASS = pytest.mark.parametrize("cls", [*TWO_CLASSES, da.RingMultiheadDilatedAttention])
TWO = [*itertools.product((True, False), (True, False))]
E, H, N = 24, 4, 13
PATTERN = da.DilatedPattern.longnet([4, 8], [1, 2])


def make(cls: Any, **options: Any) -> Any:
    """A float64 module with no parameter at the value it starts with, so that none can be left out unseen."""
    torch.manual_seed(0)
    given = {"embed_dim": E, "num_heads": H, "pattern": None if "rule" in options else PATTERN, **options}
    lists = {} if given["pattern"] else {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    module = cls(**lists, **given)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.double()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (2, N)), E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padding(samples: int = 2, count: int = N) -> Tensor:
    """True at the end of the first sample only, as PyTorch's nested tensors want it."""
    mask = torch.zeros(samples, count, dtype=torch.bool)
    mask[0, -3:] = True
    return mask


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def causal_mask(kind: str = "float") -> Tensor:
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    mask = later if "bool" in kind else as_float(later)
    return mask.expand(2 * H, N, N) if "heads" in kind else mask


def by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype | None = torch.float64, **options: Any
) -> Tensor:
    """What the module should give, in ``dtype`` (None: the parameters'), by the oracle and torch.nn.functional."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(cast(x), cast(weight), None if bias is None else cast(bias))

    def cast(x: Tensor) -> Tensor:
        return x if dtype is None else x.to(dtype)

    qkv = (
        linear(x, *of_one).unflatten(-1, (-1, module.head_dim))
        for x, of_one in zip((query, key, value), module._inputs(), strict=True)
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
@pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 13), (9,)], ids=["below the segment", "not divided", "no batch"])
def test_agrees_with_the_oracle(cls: Any, rule: str, is_causal: bool, mask: str | None, shape: tuple[int, ...]) -> None:
    module, x = make(cls, rule=rule), tokens(*shape).requires_grad_()
    batch = x if len(shape) > 1 else x[None]
    ignored = None if mask is None else padding(*batch.shape[:2])
    given = as_float(ignored) if mask == "float" and ignored is not None else ignored
    out, weights = module(x, is_causal=is_causal, key_padding_mask=None if given is None else given.view(shape))
    assert weights is None
    expected = by_hand(module, batch, batch, batch, is_causal=is_causal, key_padding_mask=ignored)
    assert_same(module, out, expected.view(x.shape), x)


@BOTH
@pytest.mark.parametrize(("bias", "layer_norm"), TWO)
def test_bias_and_norm(cls: Any, bias: bool, layer_norm: bool) -> None:
    module = make(cls, bias=bias, layer_norm=layer_norm, layer_norm_eps=0.1)
    linear = [*(["q_proj", "k_proj", "v_proj"] if cls is TWO_CLASSES[0] else ["qkv_proj"]), "out_proj"]
    names = {f"{name}.{kind}" for name in linear for kind in (["weight", "bias"] if bias else ["weight"])}
    assert set(module.state_dict()) == names | ({"norm.weight", "norm.bias"} if layer_norm else set())
    x = tokens().requires_grad_()
    assert_same(module, module(x)[0], by_hand(module, x, x, x), x)


@BY_CLASS
@pytest.mark.parametrize(("kv_heads", "batch_first"), [*itertools.product((None, 2, 1), (True, False))])
def test_fewer_key_heads_both_layouts_and_different_inputs(cls: Any, kv_heads: int | None, batch_first: bool) -> None:
    module = make(cls, num_kv_heads=kv_heads, batch_first=batch_first)
    assert [len(weight) for weight, _ in module._inputs()] == [E, *[E * (kv_heads or H) // H] * 2]
    a, b, c = (tokens(seed=seed).requires_grad_() for seed in (1, 2, 3))
    turned = {id(x): x if batch_first else x.transpose(0, 1) for x in (a, b, c)}
    for inputs in ((a,), (a, a, a), (a, b), (a, b, a), (a, a, b), (a, b, c)):
        got = module(*(turned[id(x)] for x in inputs), is_causal=True, key_padding_mask=padding())[0]
        whole = [*inputs, *[inputs[-1]] * (3 - len(inputs))]  # what stands for the inputs left out
        expected = by_hand(module, *whole, is_causal=True, key_padding_mask=padding())
        used = [x for x in (a, b, c) if any(x is other for other in inputs)]
        assert_same(module, got if batch_first else got.transpose(0, 1), expected, *used, tolerance=1e-11)
    other = TWO_CLASSES[cls is not TWO_CLASSES[1]]
    for kind in (cls, other):
        twin = kind(E, H, pattern=PATTERN, num_kv_heads=kv_heads, dtype=torch.float64, batch_first=batch_first)
        twin.load_state_dict(module.state_dict())
        assert error(twin(turned[id(a)])[0], module(turned[id(a)])[0]) <= 1e-12
    assert f"num_kv_heads={kv_heads or H}, batch_first={batch_first}" in repr(module)


def test_one_product_makes_all_three() -> None:
    module, widths = make(da.ImprovedMultiheadDilatedAttention), []
    module.qkv_proj.register_forward_hook(lambda _, __, out: widths.append(out.shape[-1]))
    x = tokens()
    for inputs in ((x,), (x, x, x), (x[0],)):
        module(*inputs)
    assert widths == [3 * E] * 3


@BOTH
def test_initial_values(cls: Any) -> None:
    torch.manual_seed(0)
    module = cls(128, 4, pattern=PATTERN, gamma_init=0.5)
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
    modules = [make(cls) for cls in TWO_CLASSES]
    modules += [cls(E, H, pattern=PATTERN, device="meta", dtype=torch.float64) for cls in TWO_CLASSES]
    for module in modules:
        if next(module.parameters()).is_meta:
            module.to_empty(device="cpu")
        torch.manual_seed(3)
        module.reset_parameters()
        assert all(parameter.requires_grad for parameter in module.parameters())
        assert error(modules[0](tokens())[0], module(tokens())[0]) <= 1e-12
        assert all(map(torch.equal, modules[0]._inputs()[0], module._inputs()[0]))


@BOTH
def test_shapes_and_dtypes_on_the_meta_device(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = cls(E, H, pattern=PATTERN, device="meta", dtype=dtype)
        assert {(parameter.is_meta, parameter.dtype) for parameter in module.parameters()} == {(True, dtype)}
        x, mask = torch.empty(2, 9, E, device="meta", dtype=dtype), torch.empty(2, 9, device="meta")
        for given in (None, mask, mask.bool()):
            out = module(x, key_padding_mask=given)[0]
            assert (out.shape, out.dtype, out.device.type) == ((2, 9, E), dtype, "meta")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["to", "autocast"])
def test_half_precision(cls: Any, dtype: torch.dtype, how: str) -> None:
    """At most twice (gradients three times) as far from float64 as the same by hand in the same precision."""
    module = make(cls).to(dtype if how == "to" else torch.float32)
    x = tokens().to(dtype).to(module.out_proj.weight.dtype).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        got = module(x)[0]
        plain = by_hand(module, x, x, x, dtype=None)
    exact = by_hand(module, x, x, x)
    assert got.dtype == dtype
    floor = torch.finfo(dtype).eps / 4
    assert error(got, exact) <= max(2 * error(plain, exact), floor)
    for ours, theirs, right in zip(*(gradients(out, module, x) for out in (got, plain, exact)), strict=True):
        assert ours.dtype == right.dtype
        assert error(ours, right) <= max(3 * error(theirs, right), floor)


@pytest.mark.parametrize(("cls", "training"), zip(TWO_CLASSES, (True, False), strict=True))
def test_compiles_as_one_graph(cls: Any, training: bool) -> None:
    """In which masks are checked, too."""
    torch._dynamo.reset()
    module = make(cls, dropout=0.3).train(training)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = tokens().requires_grad_()
    for options in (
        {}, {"attn_mask": causal_mask(), "is_causal": True}, {"key_padding_mask": padding()},
        {"key_padding_mask": as_float(padding())},
    ):  # fmt: skip
        outputs = []
        for each in (module, compiled):
            torch.manual_seed(0)
            outputs.append(each(x, **options)[0])
        assert_same(module, *outputs, x)
    with pytest.raises(RuntimeError, match=r"float of 0 \(keep\) and -inf \(ignore\) only"):
        compiled(x, key_padding_mask=as_float(padding()) - 1.0)


# --- state dicts ------------------------------------------------------------------------------------------------


def other_class(cls: Any) -> Any:
    return TWO_CLASSES[1 - TWO_CLASSES.index(cls)]


@BOTH
@pytest.mark.parametrize(("bias", "layer_norm"), TWO)
def test_loads_the_other_state_dict(cls: Any, bias: bool, layer_norm: bool) -> None:
    """Inside of a model, back without the loss of a bit, and onto the meta device."""

    def model(kind: Any, **more: Any) -> nn.ModuleDict:
        return nn.ModuleDict({"attention": make(kind, bias=bias, layer_norm=layer_norm, **more)})

    source, target, back = map(model, (cls, other_class(cls), cls))
    state = source.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    target.load_state_dict(state, strict=True)
    assert state.keys() == before.keys(), "the caller's state dict is not changed"
    with torch.no_grad():
        back["attention"].out_proj.weight.zero_()
    back.load_state_dict(target.state_dict())
    for name, value in before.items():
        assert torch.equal(back.state_dict()[name], value), name
    meta = model(other_class(cls), device="meta")
    meta.load_state_dict(source.state_dict(keep_vars=True), assign=True)
    for loaded in (target, meta):
        assert error(loaded["attention"](tokens())[0], source["attention"](tokens())[0]) <= 1e-12
    storages = {parameter.untyped_storage().data_ptr() for parameter in meta.parameters() if parameter.is_leaf}
    assert len(storages) == len(list(meta.parameters())), "no two parameters share memory"


@BOTH
def test_a_bad_state_dict_is_named(cls: Any) -> None:
    state, target = make(cls).state_dict(), make(other_class(cls))
    first = "qkv_proj.weight" if cls is TWO_CLASSES[1] else "k_proj.weight"
    dense = nn.MultiheadAttention(E, H, dtype=torch.float64).state_dict()
    for module, wrong, match in (
        (target, state | target.state_dict(), r"Unexpected key.*_proj\.weight"),
        (target, {name: value for name, value in state.items() if name != first}, r"Missing key.*_proj\.weight"),
        (target, make(cls, embed_dim=2 * E).state_dict(), "size mismatch"),
        (target, dense, r'Missing key\(s\) in state_dict: "norm.weight", "norm.bias"'),
        (make(cls, num_kv_heads=2, layer_norm=False), dense, r"Unexpected key\(s\) in state_dict: .*in_proj_weight"),
        (make(cls, layer_norm=False), dense | {"bias_k": torch.zeros(1, 1, E)}, "bias_k"),
    ):
        with pytest.raises(RuntimeError, match=match):
            module.load_state_dict(wrong)


@BY_CLASS
@pytest.mark.parametrize(("separate", "bias"), TWO)
def test_state_dicts_of_multihead_attention_load(cls: Any, separate: bool, bias: bool) -> None:
    """And one segment of all tokens is its attention."""
    torch.manual_seed(3)
    dense = nn.MultiheadAttention(E, H, bias=bias, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = dense.state_dict()
    if separate:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        state |= zip(names, state.pop("in_proj_weight").chunk(3), strict=True)
    before = list(state)
    ours = cls(E, H, [N], [1], rule="longnet", bias=bias, layer_norm=False, dtype=torch.float64)
    nn.ModuleDict({"attention": ours}).load_state_dict({f"attention.{name}": x for name, x in state.items()})
    assert list(state) == before, "the caller's state dict is not changed"
    ignored = padding()
    for is_causal, mask, part in itertools.product((False, True), (None, ignored, as_float(ignored)), (slice(None), 0)):
        x, given = tokens()[part], None if mask is None else mask[part]
        theirs = {"attn_mask": causal_mask("bool" if mask is ignored else "float") if is_causal else None}
        expected = dense(x, x, x, given, need_weights=False, is_causal=is_causal, **theirs)[0]
        assert error(ours(x, x, x, given, need_weights=False, is_causal=is_causal)[0], expected) <= 1e-12


@BOTH
def test_copies_and_pickles(cls: Any) -> None:
    module = make(cls, dropout=0.1).eval()
    expected = module(tokens())[0]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(other) == repr(module)
        assert torch.equal(other(tokens())[0], expected)
        other.load_state_dict(make(other_class(cls), gamma_init=2).state_dict())  # the hook came along
        assert not torch.equal(other(tokens())[0], expected)
    assert torch.equal(module(tokens())[0], expected)


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
    unguarded = type("Unguarded", (TWO_CLASSES[0],), gates | {"_qkv_same_embed_dim": True})
    guarded = type("Guarded", (unguarded,), {guard: getattr(TWO_CLASSES[0], guard)})
    results = []
    for cls in (guarded, unguarded):
        layer = encoder_layer(cls).eval()
        with torch.no_grad():
            results.append(error(layer(tokens()), layer_by_hand(layer, tokens())))
    assert results[0] <= 1e-12
    assert results[1] > 1e-3, "without guards the shortcut runs: this test sees it"
    with pytest.raises(TypeError, match="has no in_proj_weight: use q_proj"):
        F.linear(tokens(), make(TWO_CLASSES[0]).in_proj_weight)


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
    x, mask = tokens().requires_grad_(), padding() if padded else None
    expected = x
    for each in encoder.layers:
        expected = layer_by_hand(each, expected, is_causal=is_causal, key_padding_mask=mask)

    def run(**options: Any) -> Tensor:
        out = encoder(x if batch_first else x.transpose(0, 1), src_key_padding_mask=mask, **options)
        return out if batch_first else out.transpose(0, 1)

    assert_same(encoder.train(), run(is_causal=is_causal), expected, x, tolerance=1e-11)
    encoder.eval()
    causal = causal_mask() if is_causal else None
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
        encoder(tokens(), src_key_padding_mask=padding())


@BY_CLASS
@pytest.mark.parametrize(("batch_first", "training"), TWO)
def test_a_decoder_layer(cls: Any, batch_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    layer: Any = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    layer.self_attn = make(cls, batch_first=batch_first)
    layer.train(training)
    x, memory = tokens(seed=1), tokens(seed=2)
    across = copy.deepcopy(layer.multihead_attn)
    across.batch_first = True
    expected = layer.norm1(x + by_hand(layer.self_attn, x, x, x, is_causal=True))
    expected = layer.norm2(expected + across(expected, memory, memory, need_weights=False)[0])
    expected = layer.norm3(expected + layer.linear2(F.relu(layer.linear1(expected))))
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    with torch.set_grad_enabled(training):
        got = layer(*given, tgt_mask=causal_mask(), tgt_is_causal=True)
    assert error(got if batch_first else got.transpose(0, 1), expected) <= 1e-12


# --- the causal mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "float", "bool heads", "float heads"])
def test_the_causal_mask_says_what_is_causal_says(kind: str) -> None:
    module, mask = make(TWO_CLASSES[0]), causal_mask(kind)
    got = module(tokens(), attn_mask=mask, is_causal=True)[0]
    assert torch.equal(got, module(tokens(), is_causal=True)[0])
    wrong = [(mask[..., :-1, :-1], r"attn_mask must be \(13, 13\) or \(8, 13, 13\) like the tokens, got")]
    for place, value in (((2, 5), 0), ((5, 2), 1), ((4, 4), 1)):
        changed = mask.clone()
        changed[(..., *place)] = value
        changed = nn.Parameter(changed) if kind == "float" else changed  # a learned bias, say
        wrong.append((changed, r"attn_mask is not the causal mask .*, and is_causal=True says that"))
    for given, match in wrong:
        with pytest.raises(ValueError, match=match):
            module(tokens(), attn_mask=given, is_causal=True)


def test_a_long_causal_mask_is_taken_at_its_word() -> None:
    masks.check_causal_mask(torch.zeros(1, dtype=torch.bool).expand(5000, 5000), True, 5000, 1)
    with pytest.raises(ValueError, match="not the causal mask"):
        masks.check_causal_mask(torch.zeros(1, dtype=torch.bool).expand(4096, 4096), True, 4096, 1)


# --- errors -----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"embed_dim": 18}, ValueError, "embed_dim must be a multiple of num_heads, got 18 and 4"),
        ({"embed_dim": 0}, ValueError, "embed_dim must be 1 or more, got 0"),
        ({"embed_dim": 20.0}, TypeError, "embed_dim must be a whole number, got 20.0"),
        ({"num_heads": True}, TypeError, "num_heads must be a whole number, got True"),
        ({"num_heads": 1, "rule": "head_groups"}, ValueError, "needs .* got 2 branches and 1 key/value heads"),
        ({"num_kv_heads": 3}, ValueError, "4 query heads cannot be shared evenly by 3 key/value heads"),
        ({"dropout": 1.5}, ValueError, r"must be a number in \[0, 1\], got 1.5"),
        ({"bias": 0.1}, TypeError, "bias must be True or False, got 0.1"),
        ({"layer_norm": 1e-5}, TypeError, "layer_norm must be True or False, got 1e-05"),
        ({"batch_first": 0}, TypeError, "batch_first must be True or False, got 0"),
        ({"layer_norm_eps": -1e-5}, ValueError, "layer_norm_eps must be a finite number of 0 or more, got -1e-05"),
        ({"gamma_init": float("inf")}, ValueError, "gamma_init must be a finite number of 0 or more, got inf"),
        ({"dtype": torch.int64}, TypeError, "dtype must be float64, .* got torch.int64"),
        ({"pattern": None}, ValueError, "no pattern: give segment_lengths and dilation_rates, or pattern="),
        ({"segment_lengths": [4]}, ValueError, "pattern=.*: give the lists or the pattern"),
        ({"rule": "torchscale"}, ValueError, "rule='torchscale' and pattern"),
        ({"pattern": "longnet"}, TypeError, "pattern must be a DilatedPattern, got str"),
    ],
)
def test_constructor_errors(cls: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    if options.get("rule") == "head_groups":
        options = {**options, "pattern": None, "segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    with pytest.raises(kind, match=message):
        cls(**{"embed_dim": E, "num_heads": H, "pattern": PATTERN} | options)


WRONG_MASK = as_float(padding())
WRONG_MASK[1, 4] = -1e9
ONLY = r"float of 0 \(keep\) and -inf \(ignore\) only, got"
X, MASK = tokens(), padding()


@BOTH
@pytest.mark.parametrize(
    ("inputs", "options", "kind", "match"),
    [
        ((X, X, X), {"need_weights": True}, ValueError, "need_weights must be False, got True"),
        ((X,), {"attn_mask": causal_mask()}, ValueError, r"attn_mask must be None unless .* pass is_causal=True"),
        ((X,), {"attn_mask": MASK.long(), "is_causal": True}, ValueError, r"attn_mask must be \(13, 13\) or"),
        ((X,), {"attn_mask": causal_mask().long(), "is_causal": True}, TypeError, r"bool or float, got torch\.int64"),
        ((X,), {"attn_mask": [[0]], "is_causal": True}, TypeError, "attn_mask must be a tensor, got list"),
        ((X, X[:, :8]), {}, ValueError, r"got key \(2, 8, 24\) and query \(2, 13, 24\): .* equal lengths; to decode, "),
        ((X[..., 1:],), {}, ValueError, r"must all be \(batch, tokens, 24\) or all .* got query \(2, 13, 23\)"),
        ((X.numpy(),), {}, TypeError, "query must be a tensor, got ndarray"),
        ((X, X[0]), {}, ValueError, r"must all be .* got key \(13, 24\) and query \(2, 13, 24\)"),
        ((X[None],), {}, ValueError, r"must all be .* got query \(1, 2, 13, 24\)"),
        ((X,), {"key_padding_mask": WRONG_MASK}, ValueError, f"{ONLY} -1000000000.0"),
        ((X,), {"key_padding_mask": as_float(MASK).masked_fill(MASK, torch.nan)}, ValueError, f"{ONLY} nan"),
        ((X,), {"key_padding_mask": MASK.long()}, TypeError, r"key_padding_mask must be bool .* got torch.int64"),
        ((X,), {"key_padding_mask": MASK[:, :8]}, ValueError, r"must be \(batch, tokens\) = \(2, 13\), got \(2, 8\)"),
        ((X[0],), {"key_padding_mask": MASK}, ValueError, r"must be \(batch, tokens\) = \(1, 13\), got \(1, 2, 13\)"),
        ((X[0],), {"key_padding_mask": [True]}, TypeError, "key_padding_mask must be a tensor, got list"),
    ],
)
def test_errors_of_the_call(cls: Any, inputs: Any, options: dict[str, Any], kind: type[Exception], match: str) -> None:
    """Before it projects."""
    module = make(cls)
    module._project = lambda *_: pytest.fail("it projected first")
    with pytest.raises(kind, match=match):
        module(*inputs, **options)


def test_wrong_layouts_are_refused() -> None:
    module, x = make(TWO_CLASSES[0], batch_first=False), tokens().transpose(0, 1)
    with pytest.raises(
        ValueError, match=r"must all be \(tokens, batch, 24\) or all \(tokens, 24\), got query \(13, 2, 2"
    ):
        module(x[..., 1:])
    with pytest.raises(ValueError, match=r"must be \(batch, tokens\) = \(2, 13\), got \(13, 2\)"):
        module(x, key_padding_mask=padding().T)
