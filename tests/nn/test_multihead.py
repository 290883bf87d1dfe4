"""The modules with projections, against the same computed by hand around the oracle; in the place of
nn.MultiheadAttention: layouts, fewer key heads, its causal mask, its layers and its state dicts."""

from __future__ import annotations

import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dilated_attention as da
from dilated_attention import reference, testing
from dilated_attention.testing import error
from tests.over_ranks import changed

PLAIN, FUSED = da.MultiheadDilatedAttention, da.ImprovedMultiheadDilatedAttention
OTHER = {PLAIN: FUSED, FUSED: PLAIN, da.RingMultiheadDilatedAttention: FUSED}
BOTH = pytest.mark.parametrize("cls", [PLAIN, FUSED])
BY_CLASS = pytest.mark.parametrize("cls", OTHER)
TWO = [*itertools.product((True, False), (True, False))]
E, H, N = 24, 4, 13
LISTS: dict[str, Any] = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
PATTERN = da.DilatedPattern.longnet(**LISTS)


def make(cls: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return changed(cls(**{"embed_dim": E, "num_heads": H, "rule": "longnet", **LISTS, **options})).double()


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


def turned(module: Any, x: Tensor) -> Tensor:
    """From the layout of a module to (B, N, E), or back."""
    return x if module.batch_first else x.transpose(0, 1)


def by_hand(module: Any, *inputs: Tensor, dtype: torch.dtype | None = torch.float64, **options: Any) -> Tensor:
    """What the module should give, in ``dtype`` (None: the parameters'), by the oracle and torch.nn.functional."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(*(y if y is None or dtype is None else y.to(dtype) for y in (x, weight, bias)))

    given = [*inputs, *[inputs[-1]] * (3 - len(inputs))]  # what stands for the inputs left out
    qkv = (linear(x, *of_one) for x, of_one in zip(given, module._inputs(), strict=True))
    heads = (x.unflatten(-1, (-1, module.head_dim)) for x in qkv)
    out = reference.attention(*heads, module.pattern, dtype=dtype, **options)[0].flatten(2)
    if isinstance(module.norm, nn.LayerNorm):
        weight, bias = (x.to(out.dtype) for x in module.norm.parameters())
        out = F.layer_norm(out, (E,), weight, bias, module.norm.eps)
    return linear(out, module.out_proj.weight, module.out_proj.bias)


def by_oracle(model: Any, *given: Tensor, **options: Any) -> Tensor:
    """What PyTorch's layers give around the oracle, in training mode, in which they take no shortcut."""

    def forward(self: Any, *inputs: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False, **_: Any):
        mask = None if key_padding_mask is None else key_padding_mask == -torch.inf
        inputs = [turned(self, x) for x in inputs]
        return turned(self, by_hand(self, *inputs, is_causal=is_causal, key_padding_mask=mask)), None

    with mock.patch.object(PLAIN, "forward", forward):
        return model.train()(*given, **options)


def gradients(out: Tensor, module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs and parameters."""
    leaves = dict([*enumerate(inputs), *module.named_parameters()])
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    found = torch.autograd.grad(out, [*leaves.values()], dout, retain_graph=True)
    return {"out": out} | {f"d{name}": x for name, x in zip(leaves, found, strict=True)}


def assert_same(module: nn.Module, got: Tensor, expected: Tensor, *inputs: Tensor, tolerance: float = 1e-12) -> None:
    wanted = gradients(expected, module, *inputs)
    for name, x in gradients(got, module, *inputs).items():
        assert error(x, wanted[name]) <= tolerance, name


# --- the computation --------------------------------------------------------------------------------------------


@BY_CLASS
@pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
@pytest.mark.parametrize(("kv_heads", "batch_first"), [*itertools.product((None, 2), (True, False))])
@pytest.mark.parametrize(("is_causal", "mask"), [(True, "bool"), (False, "float"), (False, None)])
def test_agrees_with_the_oracle(
    cls: Any, rule: str, kv_heads: int | None, batch_first: bool, is_causal: bool, mask: str | None
) -> None:
    """With different inputs, fewer key heads, both layouts, and without a batch."""
    module = make(cls, rule=rule, num_kv_heads=kv_heads, batch_first=batch_first)
    a, b, c = (tokens(seed=seed).requires_grad_() for seed in (1, 2, 3))
    turned_to = {x: turned(module, x) for x in (a, b, c)}
    ignored = None if mask is None else padding()
    given = as_float(ignored) if mask == "float" else ignored
    every = ((a, a, a), (a, b), (a, b, a), (a, a, b), (a, b, c), (a,))
    for inputs in every if rule == "longnet" else every[4:]:  # which are the same goes by no rule
        got, weights = module(*(turned_to[x] for x in inputs), is_causal=is_causal, key_padding_mask=given)
        expected = by_hand(module, *inputs, is_causal=is_causal, key_padding_mask=ignored)
        assert_same(module, turned(module, got), expected, *dict.fromkeys(inputs), tolerance=1e-11)
        assert weights is None
    alone = module(a[0], is_causal=is_causal, key_padding_mask=None if given is None else given[0])[0]
    assert error(alone, expected[0]) <= 1e-12
    assert [len(weight) for weight, _ in module._inputs()] == [E, *[E * (kv_heads or H) // H] * 2]
    assert f"num_kv_heads={kv_heads or H}, batch_first={batch_first}" in repr(module)
    twin = make(OTHER[cls], rule=rule, num_kv_heads=kv_heads, gamma_init=2)
    twin.load_state_dict(module.state_dict())
    assert error(twin(a)[0], turned(module, module(turned_to[a])[0])) <= 1e-12


def test_initial_values() -> None:
    """Those of one seed, whatever they were before; on the meta device there were none."""
    torch.manual_seed(3)
    drawn = [nn.init.xavier_normal_(torch.empty(E, E).double(), gain) for gain in (1.0, 1.0, 0.5, 0.5)]
    for cls, device in itertools.product((PLAIN, FUSED), ("cpu", "meta")):
        module = make(cls, gamma_init=0.5, device=device)
        if device == "meta":
            module.to_empty(device="cpu")
        torch.manual_seed(3)
        module.reset_parameters()
        weights, biases = zip(*module._inputs(), module.out_proj.parameters(), strict=True)
        assert all(map(torch.equal, weights, drawn))
        assert not any(map(torch.any, (*biases, module.norm.bias, module.norm.weight - 1)))
        assert all(parameter.requires_grad for parameter in module.parameters())


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["to", "autocast"])
def test_half_precision(cls: Any, dtype: torch.dtype, how: str) -> None:
    """At most twice (gradients three times) as far from float64 as the same by hand in the same precision."""
    module = make(cls).to(dtype if how == "to" else torch.float32)
    x = tokens().to(dtype).to(module.out_proj.weight.dtype).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        results = module(x)[0], by_hand(module, x, dtype=None)
    assert results[0].dtype == dtype
    exact, got, plain = (gradients(out, module, x) for out in (by_hand(module, x), *results))
    limits = testing.limits(exact, plain, dtype)
    for name, value in got.items():
        assert error(value, exact[name]) <= limits[name], name


@pytest.mark.parametrize(("cls", "training"), [(PLAIN, True), (FUSED, False)])
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


@BOTH
@pytest.mark.parametrize(("bias", "layer_norm"), TWO)
def test_loads_the_other_state_dict(cls: Any, bias: bool, layer_norm: bool) -> None:
    """Inside of a model, and onto the meta device."""

    def model(kind: Any, **more: Any) -> nn.ModuleDict:
        return nn.ModuleDict({"a": make(kind, bias=bias, layer_norm=layer_norm, layer_norm_eps=0.1, **more)})

    x, source, target, meta = tokens(), *map(model, (cls, OTHER[cls])), model(OTHER[cls], device="meta")
    assert_same(source, expected := source["a"](x)[0], by_hand(source["a"], x))
    state = source.state_dict()
    assert len(state) == (4 if cls is PLAIN else 2) * (1 + bias) + 2 * layer_norm
    target.load_state_dict(state)
    assert state.keys() == source.state_dict().keys(), "the caller's state dict is not changed"
    meta.load_state_dict(source.state_dict(keep_vars=True), assign=True)
    for loaded in (target, meta):
        assert error(loaded["a"](x)[0], expected) <= 1e-12
    storages = {parameter.untyped_storage().data_ptr() for parameter in meta.parameters()}
    assert len(storages) == len(list(meta.parameters())), "no two parameters share memory"


@BOTH
def test_a_bad_state_dict_is_named(cls: Any) -> None:
    state, target = make(cls).state_dict(), make(OTHER[cls])
    first = "qkv_proj.weight" if cls is FUSED else "k_proj.weight"
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
    dense = changed(nn.MultiheadAttention(E, H, bias=bias, batch_first=True, dtype=torch.float64))
    state = dense.state_dict()
    if separate:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        state |= zip(names, state.pop("in_proj_weight").chunk(3), strict=True)
    before = list(state)
    ours = make(cls, segment_lengths=[N], dilation_rates=[1], bias=bias, layer_norm=False)
    nn.ModuleDict({"attention": ours}).load_state_dict({f"attention.{name}": x for name, x in state.items()})
    assert list(state) == before, "the caller's state dict is not changed"
    for is_causal, mask, part in itertools.product((False, True), (padding(), as_float(padding())), (slice(None), 0)):
        x = tokens()[part]
        given = (x, x, x, mask[part], False, causal_mask() if is_causal else None)
        expected = dense(*given, is_causal=is_causal)[0]
        assert error(ours(*given, is_causal=is_causal)[0], expected) <= 1e-12


# --- inside PyTorch's layers ------------------------------------------------------------------------------------


def layer_of(cls: Any, kind: Any = nn.TransformerEncoderLayer, batch_first: bool = True, **options: Any) -> Any:
    """With PyTorch's own attention if there is no class."""
    torch.manual_seed(0)
    layer: Any = kind(E, H, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64, **options)
    layer.self_attn = layer.self_attn if cls is None else make(cls, batch_first=batch_first)
    return layer


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
        layer = layer_of(cls if replaced == "before" else None, batch_first=batch_first, norm_first=norm_first)
        encoder = nn.TransformerEncoder(layer, 2)
    if replaced == "after":
        assert encoder.use_nested_tensor
        for each in encoder.layers:
            each.self_attn = make(cls)
    options = {"src_key_padding_mask": padding() if padded else None}
    x = turned(encoder.layers[0].self_attn, tokens()).requires_grad_()
    expected = by_oracle(encoder, x, is_causal=is_causal, **options)
    assert_same(encoder, encoder(x, is_causal=is_causal, **options), expected, x, tolerance=1e-11)
    encoder.eval()
    causal = causal_mask() if is_causal else None
    for context in (torch.no_grad, torch.inference_mode):  # only now would PyTorch take its dense shortcut
        for more in ({"is_causal": is_causal}, {"mask": causal, "is_causal": is_causal}, {"mask": causal}):
            with context():  # of a mask without a word it finds out itself
                assert error(encoder(x, **options, **more), expected) <= 1e-11


@BOTH
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(cls: Any) -> None:
    """A dense first layer makes nn.TransformerEncoder hand nested tensors to the dilated one behind it."""
    encoder = nn.TransformerEncoder(layer_of(None), 2).eval()
    encoder.layers[1].self_attn = make(cls)
    with torch.no_grad(), pytest.raises(ValueError, match="enable_nested_tensor=False"):
        encoder(tokens(), src_key_padding_mask=padding())


@BY_CLASS
@pytest.mark.parametrize(("batch_first", "training"), TWO)
def test_a_decoder_layer(cls: Any, batch_first: bool, training: bool) -> None:
    layer = layer_of(cls, nn.TransformerDecoderLayer, batch_first)
    given = [turned(layer.self_attn, tokens(seed=seed)) for seed in (1, 2)]
    causal = {"tgt_mask": causal_mask(), "tgt_is_causal": True}
    expected = by_oracle(layer, *given, **causal)
    with torch.set_grad_enabled(training):
        assert error(layer.train(training)(*given, **causal), expected) <= 1e-12


# --- the causal mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "float", "bool heads", "float heads"])
def test_the_causal_mask_says_what_is_causal_says(kind: str) -> None:
    module, mask = make(PLAIN), causal_mask(kind)
    got = module(tokens(), attn_mask=mask, is_causal=True)[0]
    assert torch.equal(got, module(tokens(), is_causal=True)[0])
    for place, value in (((2, 5), 0), ((5, 2), 1), ((4, 4), 1)):
        wrong = mask.clone()
        wrong[(..., *place)] = value
        wrong = nn.Parameter(wrong) if kind == "float" else wrong  # a learned bias, say
        with pytest.raises(ValueError, match=r"attn_mask is not the causal mask .*, and is_causal=True says that"):
            module(tokens(), attn_mask=wrong, is_causal=True)


# --- errors -----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 18}, "embed_dim must be a multiple of num_heads, got 18 and 4"),
        ({"embed_dim": 20.0}, "embed_dim must be a whole number, got 20.0"),
        ({"num_heads": 1, "rule": None}, "head_groups needs .* got 2 branches and 1 key/value heads"),
        ({"num_kv_heads": 3}, "4 query heads cannot be shared evenly by 3 key/value heads"),
        ({"dropout": 1.5}, r"dropout must be a number in \[0, 1\], got 1.5"),
        ({"batch_first": 0}, "batch_first must be True or False, got 0"),
        ({"layer_norm_eps": -1e-5}, "layer_norm_eps must be a finite number of 0 or more, got -1e-05"),
        ({"dtype": torch.int64}, "dtype must be float64, .* got torch.int64"),
        ({"dilation_rates": None}, "no pattern: give segment_lengths and dilation_rates, or pattern="),
        ({"pattern": PATTERN}, "says segment_lengths, dilation_rates and rule: leave these out"),
    ],
)
def test_constructor_errors(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(cls, **options)


WRONG_MASK = as_float(padding())
WRONG_MASK[1, 4] = -1e9
ONLY = r"float of 0 \(keep\) and -inf \(ignore\) only"
X, MASK = tokens(), padding()


@BOTH
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"need_weights": True}, "need_weights must be False, got True"),
        ({"is_causal": 1}, "is_causal must be True or False, got 1"),
        ({"attn_mask": causal_mask()}, r"attn_mask must be None unless .* pass is_causal=True"),
        ({"attn_mask": MASK, "is_causal": True}, r"must be \(13, 13\) or \(8, 13, 13\) like the tokens"),
        ({"attn_mask": causal_mask().long(), "is_causal": True}, "bool or float, got .*torch.int64"),
        ({"key": X[:, :8]}, r"got key \(2, 8, 24\) and query \(2, 13, 24\): .* equal lengths; to decode, "),
        ({"query": X[..., 1:]}, r"must all be \(batch, tokens, 24\) or all .* got query \(2, 13, 23\)"),
        ({"query": X.numpy()}, "query must be a tensor, got ndarray"),
        ({"query": X[None]}, r"must all be .* got query \(1, 2, 13, 24\)"),
        ({"key_padding_mask": WRONG_MASK}, ONLY),
        ({"key_padding_mask": MASK.long()}, r"key_padding_mask must be bool .* got torch.int64"),
        ({"key_padding_mask": MASK[:, :8]}, r"must be \(batch, tokens\) = \(2, 13\), got \(2, 8\)"),
        ({"query": X[0], "key_padding_mask": MASK}, r"must be \(batch, tokens\) = \(1, 13\), got \(1, 2, 13\)"),
    ],
)
def test_errors_of_the_call(cls: Any, given: dict[str, Any], message: str) -> None:
    """Before it projects."""
    module = make(cls)
    module._project = lambda *_: pytest.fail("it projected first")
    with pytest.raises((TypeError, ValueError), match=message):
        module(**{"query": X} | given)


def test_there_is_no_packed_weight() -> None:
    with pytest.raises(TypeError, match="has no in_proj_weight: use q_proj"):
        F.linear(X, make(PLAIN).in_proj_weight)
