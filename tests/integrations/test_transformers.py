"""attn_implementation="dilated": every way to call a decoder gives what each sample gives alone, or is refused."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache, Lfm2Config, StaticCache

import dilated_attention.integrations.transformers.attention as adapter
from dilated_attention import reference
from dilated_attention.checks import DilatedAttentionWarning
from dilated_attention.integrations.transformers import DilatedCache, set_pattern
from dilated_attention.integrations.transformers.grid import grid_mask
from dilated_attention.models.transformer import written
from dilated_attention.testing import error
from tests.integrations import hf

MODELS = pytest.mark.parametrize("name", hf.CONFIGS)
TWO = pytest.mark.parametrize("name", ["llama", "longnet"])
KINDS = pytest.mark.parametrize("kind", hf.CACHES)
MASK = torch.ones(3, 20, dtype=torch.int64)
ENDS = torch.tensor([0, *hf.LENGTHS]).cumsum(0)


# --- one forward pass -------------------------------------------------------------------------------------------


@MODELS
def test_a_sample_alone_is_the_oracles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, called = hf.expected(name), []

    def oracle(inputs: Any, options: Any, *_: Any, **__: Any) -> Any:
        called.append(options.pattern)
        return reference.attention(*inputs[:3], options.pattern, is_causal=options.is_causal, scale=options.scale)

    monkeypatch.setattr(adapter.functional, "attend", oracle)
    assert error(found, hf.expected(name)) < hf.CLOSE
    assert called == [*hf.patterns_of(name)] * len(hf.LENGTHS)


@MODELS
@pytest.mark.parametrize("how", ["right", "left", "middle", "position_ids", "cu_seq_lens"])
@torch.no_grad()
def test_padding_and_packed_documents(name: str, how: str) -> None:
    given, rows = hf.batch(how) if how in ("right", "left", "middle") else hf.packed(), 1
    if how == "cu_seq_lens":
        given |= {"cu_seq_lens_q": ENDS.int(), "cu_seq_lens_k": ENDS.int(), "max_length_q": 20, "max_length_k": 20}
    if how == "position_ids":
        rows = 2
        given |= {key: given[key].expand(rows, -1) for key in ("input_ids", "position_ids")}
    mask = given.get("attention_mask", torch.ones(rows, sum(hf.LENGTHS)))
    assert error(hf.model_of(name)(**given).logits[mask.bool()], hf.expected(name).repeat(rows, 1)) < hf.CLOSE


@pytest.mark.parametrize("given", [{**hf.batch("left"), "use_cache": False}, hf.packed()], ids=["left", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(given: Any, checkpointing: bool) -> None:
    """Of every parameter, for the summed losses of all samples."""
    model = hf.made(hf.config_of()).train()
    weight = torch.randn(sum(hf.LENGTHS), 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = given.get("attention_mask", torch.ones(1, sum(hf.LENGTHS))).bool()

    def gradients(logits: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((logits * weight).sum(), list(model.parameters()))

    wanted = gradients(torch.cat([model(row, use_cache=False).logits[0] for row in hf.alone()]))
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert max(map(error, gradients(model(**given).logits[mask]), wanted)) < hf.CLOSE


def test_dropout_drops_and_sinks_are_honoured() -> None:
    model, inputs = hf.made(hf.config_of(attention_dropout=0.5)).train(), hf.batch("left")
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    plain = model.eval()(**inputs).logits
    none, some = (model(**inputs, s_aux=torch.full((4,), x, dtype=torch.float64)).logits for x in (-1e9, 0.0))
    assert error(none, plain) < hf.CLOSE
    assert error(some, plain) > 1e-3


# --- generation -------------------------------------------------------------------------------------------------

NEW = 30  # with the prompts, more than three of the longest segments
OPTIONS: dict[str, Any] = {
    "none": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}, "dilated": {},
}  # fmt: skip


def generated(model: Any, given: Tensor, cache: str = "none", **more: Any) -> list[list[int]]:
    more = {"attention_mask": torch.ones_like(given), "max_new_tokens": NEW, **OPTIONS[cache], **more}
    if cache == "dilated":
        more["past_key_values"] = DilatedCache(model.config)
    found: list[list[int]] = model.generate(given, do_sample=False, **more)[:, given.shape[1] :].tolist()
    return found


@functools.cache
def greedy(name: str, **more: Any) -> list[list[int]]:
    """What each sample goes on with alone, without a cache."""
    return [generated(hf.model_of(name), row, **more)[0] for row in hf.alone()]


@pytest.mark.parametrize(
    ("name", "cache", "beams"),
    [
        *itertools.product(("llama", "longnet"), OPTIONS, [{}]),
        *(("gpt2", "dilated", {}), ("mistral", "dynamic", {})),
        *(("llama", cache, {"num_beams": 3, "max_new_tokens": 12}) for cache in ("dilated", "static")),
    ],
)
def test_left_padded_prompts_go_on_as_each_alone(name: str, cache: str, beams: dict[str, int]) -> None:
    given = hf.batch("left", junk=hf.PAD)
    got = generated(hf.model_of(name), given["input_ids"], cache, attention_mask=given["attention_mask"], **beams)
    assert got == greedy(name, **beams)
    assert len(set(got[0])) > 5  # not the same token over and over


@pytest.mark.parametrize(
    ("cache", "how"), [("dynamic", "prompt lookup"), ("dilated", "prompt lookup"), ("dilated", "assistant")]
)
def test_assisted_chunks(cache: str, how: str) -> None:
    model, more = hf.model_of(), {"prompt_lookup_num_tokens": 3}
    if how == "assistant":  # which is right now and then
        more = {"assistant_model": copy.deepcopy(model)}
        with torch.no_grad():
            for index, parameter in enumerate(more["assistant_model"].parameters()):
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    assert generated(model, hf.tokens()[:1], cache, **more) == greedy("llama")[:1]


@pytest.mark.parametrize("side", ["left", "right"])
@KINDS
@torch.no_grad()
def test_chunks_of_a_padded_batch(kind: Any, side: str) -> None:
    """Any number of tokens at a time, by hand; padding is where it is."""
    model, given, logits = hf.model_of(), hf.batch(side), []
    cache = hf.cache_of(kind, model)
    for start, stop in ((0, 5), (5, 6), (6, 17), (17, 20)):
        part = {key: value[:, start:stop] for key, value in given.items()}
        part["attention_mask"] = given["attention_mask"][:, :stop]
        logits.append(model(**part, past_key_values=cache).logits)
    assert error(torch.cat(logits, 1)[given["attention_mask"].bool()], hf.expected()) < hf.CLOSE


# --- compilation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", *(pytest.param(x, marks=pytest.mark.slow) for x in ("padded", "packed"))])
@torch.no_grad()
def test_torch_compile(kind: str) -> None:
    """fullgraph, but for packed documents, whose number is in the data."""
    model, given, step = hf.made(hf.config_of()), hf.packed() if kind == "packed" else hf.batch("left"), {}
    torch.compiler.reset()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        assert "sort" not in graph.code, "for a GPU, a sort of some hundred tokens is compiled for minutes"
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=kind != "packed")
    wanted = model(**{**given, "use_cache": False}).logits
    if kind == "static":
        step = {"past_key_values": hf.cache_of(StaticCache, model), "attention_mask": given["attention_mask"]}
        model(**{key: value[:, :19] for key, value in given.items()}, past_key_values=step["past_key_values"])
        given, wanted = {key: value[:, 19:] for key, value in given.items()}, wanted[:, 19:]
    assert error(compiled(**given | step).logits, wanted) < hf.CLOSE


@pytest.mark.slow
def test_compiled_generation() -> None:
    model = hf.made(hf.config_of(pattern=(hf.PATTERN, hf.OTHER)))
    model.forward = torch.compile(model.forward, backend="eager")
    assert generated(model, hf.tokens()[:1], "dilated", max_new_tokens=6) == [greedy("llama")[0][:6]]
    torch.compiler.reset()


# --- what cannot be honoured ------------------------------------------------------------------------------------


NO_CACHE = {"use_cache": False}
ODD = torch.tensor([[*range(0, 20, 2), *range(1, 20, 2)]])
OWN = "needs a mask of its own mask function"
EACH = "has 20 tokens, cached and new, and attention_mask .* has 25: give attention_mask one column per token"


@TWO
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"softcap": 30.0}, "soft caps"),
        ({"indices": torch.zeros(3, 20, 4)}, "sparse attention by an indexer"),
        ({"attention_mask": torch.ones(3, 1, 20, 20, dtype=torch.bool)}, OWN),
        ({**hf.packed(), "cu_seq_lens_q": ENDS, "use_cache": True}, "leave attention_mask out, and pass use_cache="),
        ({**hf.packed(), "use_cache": True}, "must grow by 1"),
        ({**hf.packed(), "attention_mask": torch.ones(1, 40, dtype=torch.int64)}, "must grow by 1"),
        ({"position_ids": torch.tensor([[*range(10), *range(15, 25)]]), **NO_CACHE}, "must begin at 0 in each packed"),
        ({"position_ids": ODD, "use_cache": True}, "must grow by 1"),
        ({"cu_seq_lens_q": torch.tensor([0, 60]), **NO_CACHE}, "one row of packed tokens"),
        (
            {**hf.packed(), "position_ids": torch.arange(40)[None], "cu_seq_lens_q": ENDS},
            "pass them with cu_seq_lens_q",
        ),
        ({**hf.packed(), "cu_seq_lens_q": ENDS[[0, 1, 3]]}, "must begin at 0 in each packed document"),
        ({**hf.packed(), "cu_seq_lens_q": ENDS + ENDS // 40}, "end with 40, the number of tokens"),
        ({"cu_seq_lens_k": ENDS}, "cu_seq_lens_k must be the same"),
        ({**hf.packed(), "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS[[0, 3]]}, "cu_seq_lens_k must be the same"),
        ({"attention_mask": MASK[:1]}, r"attention_mask must be \(3, tokens\), got \(1, 20\)"),
        ({"attention_mask": MASK[:, :19]}, "19 columns, and there are 0 tokens in the cache and 20 new ones"),
        ({"attention_mask": torch.ones(3, 25), **NO_CACHE}, EACH),
        ({"attention_mask": torch.ones(3, 25)}, "25 columns, .* 0 .* and 20 new ones: it must have a column for each"),
    ],
)
@torch.no_grad()
def test_calls_that_are_refused(name: str, given: dict[str, Any], says: str) -> None:
    hf.refused(hf.model_of(name), says, **given)


def test_models_whose_first_layer_is_of_another_kind_or_tells_less(monkeypatch: pytest.MonkeyPatch) -> None:
    hf.refused(hf.model_of("gpt2"), "cannot honour output_attentions", output_attentions=True)
    model, attention = hf.made(hf.config_of()), AttentionInterface()["dilated"]
    silent: Any = lambda *given, position_ids=None, **more: attention(*given, **more)  # noqa: E731
    monkeypatch.setitem(AttentionInterface._global_mapping, "dilated", silent)
    with pytest.warns(DilatedAttentionWarning, match="LlamaAttention does not pass position_ids on"):
        model(hf.tokens())
    shape = {key: value for key, value in hf.SHAPE.items() if key != "head_dim"}
    mixed = hf.made(set_pattern(Lfm2Config(**shape, layer_types=["conv", "full_attention"]), hf.PATTERN))
    hf.refused(mixed, "must grow by 1", position_ids=ODD, attention_mask=MASK)


@KINDS
@torch.no_grad()
def test_a_mask_of_another_width_is_refused(kind: Any) -> None:
    """Of the new tokens alone, or too wide; and nothing has happened to the cache."""
    model = hf.model_of()
    cache = hf.cache_of(kind, model)
    model(hf.tokens()[:, :15], past_key_values=cache)
    step = {"input_ids": hf.tokens()[:, 15:], "past_key_values": cache}
    for mask in (MASK[:, 15:], *(() if kind is StaticCache else (torch.ones(3, 21),))):
        says = f"{mask.shape[1]} columns, and there are 15 tokens in the cache and 5 new ones: it must have a column"
        hf.refused(model, says, attention_mask=mask, **step)
    wanted = model(hf.tokens(), use_cache=False).logits[:, 15:]
    assert error(model(**step, attention_mask=MASK).logits, wanted) < hf.CLOSE


@KINDS
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("side", [None, "left"])
@torch.no_grad()
def test_positions_go_on_after_the_cache(kind: Any, n: int, side: str | None) -> None:
    """Also those of a single token, and of samples with padding, whose positions count real tokens, or all columns."""
    model, mask = hf.model_of(), MASK if side is None else hf.batch(side)["attention_mask"]
    place, logits = torch.arange(20, 20 + n).expand(3, -1), []
    counted = place - 20 + mask.sum(1, keepdim=True)
    for positions in (counted, place, counted + 4):
        cache = hf.cache_of(kind, model)
        before = None if positions is place else (mask.cumsum(1) - 1).clamp(min=0)
        model(hf.tokens(), mask, before, past_key_values=cache)
        more = {
            "input_ids": hf.tokens()[:, :n], "attention_mask": F.pad(mask, (0, n), value=1), "position_ids": positions,
            "past_key_values": cache,
        }  # fmt: skip
        if positions is counted or positions is place:
            logits.append(model(**more).logits)
        else:
            hf.refused(model, "and go on after those in the cache", **more)
    assert error(*logits) < 1e-5  # rotary positions are relative, in float32


@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product(("llama", "longnet"), (DynamicCache, DilatedCache)), ("longnet", StaticCache)]
)
@torch.no_grad()
def test_a_cache_that_is_filled_by_half_is_refused(name: str, kind: Any) -> None:
    """As after an error, or a key that was pressed, between two layers."""
    model = hf.model_of(name)
    cache = hf.cache_of(kind, model)
    model(hf.tokens()[:, :5], past_key_values=cache)
    layers = model.lm.blocks if name == "longnet" else model.model.layers
    hook = layers[1].register_forward_pre_hook(mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(hf.tokens()[:, 5:8], past_key_values=cache)
    hook.remove()
    says = (
        "hold different numbers of tokens"
        if name == "longnet"
        else "a layer has 7 tokens, .* has 10: .* call reset\\(\\)"
    )
    hf.refused(model, says, input_ids=hf.tokens()[:, 8:10], past_key_values=cache)


def test_checkpointing_that_leaves_a_filled_cache_out_is_refused() -> None:
    """transformers warns, and takes the cache away from its layers, not from the mask."""
    model = hf.made(hf.config_of()).train()
    cache = hf.cache_of(DynamicCache, model)
    model(hf.tokens()[:, :5], past_key_values=cache)
    model.gradient_checkpointing_enable()
    says = "with gradient checkpointing, train without one"
    hf.refused(model, says, input_ids=hf.tokens()[:, 5:], past_key_values=cache)


def test_a_config_with_too_many_patterns() -> None:
    config = hf.config_of()
    for count in (0, 3):
        config.dilated_pattern = [written(hf.PATTERN)] * count  # as one that was loaded may be
        hf.refused(hf.made(config), f"{count} patterns for 2 layers: give one for all, or a list")
        with pytest.raises(ValueError, match=f"{count} patterns for 2 layers"):
            set_pattern(hf.config_of(), [hf.PATTERN] * count)


@TWO
@torch.no_grad()
def test_saved_with_the_pattern_that_was_set_last(name: str, tmp_path: Path) -> None:
    """In safetensors, and loaded by the Auto classes, with a tied weight once."""
    model = hf.made(hf.config_of(name, (hf.PATTERN, hf.OTHER)))
    set_pattern(model, (hf.UNION, hf.PATTERN))
    given = {"input_ids": hf.tokens(), "use_cache": False}
    logits = model(**given).logits
    assert error(logits, hf.model_of(name)(**given).logits) > 1e-3
    model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    options = {} if name == "longnet" else {"attn_implementation": "dilated"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    assert (type(again), again.dtype) == (type(model), torch.float64)
    assert again.config.dilated_pattern == model.config.dilated_pattern
    assert error(again(**given).logits, logits) < hf.CLOSE
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == (name == "longnet")


@pytest.mark.parametrize("kind", ["mpt", "bloom", "codegen"])
def test_models_that_compute_attention_by_themselves_are_refused(kind: str) -> None:
    """They would add the grid to their scores, and see the future."""
    config = AutoConfig.for_model(kind)
    with pytest.raises(ValueError, match=r"dilated attention cannot run in \w+ForCausalLM: this model computes"):
        set_pattern(config, hf.PATTERN)
    with pytest.raises(ValueError, match="this model computes attention by itself"):
        grid_mask(1, 4, 4, config=config)
