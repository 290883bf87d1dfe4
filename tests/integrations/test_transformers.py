"""attn_implementation="dilated": every way to call a decoder gives what each sample gives alone, or is refused."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, DynamicCache, Lfm2Config, StaticCache

import dilated_attention.integrations.transformers.attention as adapter
from dilated_attention import reference
from dilated_attention.checks import DilatedAttentionWarning
from dilated_attention.integrations.transformers import DilatedCache, register, set_pattern
from dilated_attention.integrations.transformers.grid import grid_mask
from dilated_attention.testing import error
from tests.integrations.hf import (
    CONFIGS,
    LENGTHS,
    OTHER,
    PAD,
    PATTERN,
    SHAPE,
    alone,
    batch,
    config_of,
    made,
    model_of,
    packed,
    real,
    stop_before,
    tokens,
)

MODELS = pytest.mark.parametrize("name", CONFIGS)
SLOW = pytest.mark.slow
CLOSE = 1e-11


def expected(name: str) -> Tensor:
    """The logits of each sample alone."""
    with torch.no_grad():
        return torch.cat([model_of(name)(row, use_cache=False).logits[0] for row in alone()])


# --- one forward pass -------------------------------------------------------------------------------------------


@MODELS
def test_a_sample_alone_is_the_oracles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, called = expected(name), []

    def oracle(q: Tensor, k: Tensor, v: Tensor, *, pattern: Any, is_causal: bool, scale: float, **_: Any) -> Any:
        called.append(pattern)
        return reference.attention(q, k, v, pattern, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(adapter.functional, "attend", oracle)
    assert error(found, expected(name)) < CLOSE
    assert called == [PATTERN, OTHER] * len(LENGTHS)


@MODELS
@pytest.mark.parametrize("side", ["right", "left", "middle"])
def test_padding(name: str, side: str) -> None:
    given = batch(side)
    with torch.no_grad():
        logits = model_of(name)(**given).logits
    assert error(real(logits, given["attention_mask"]), expected(name)) < CLOSE


@MODELS
@pytest.mark.parametrize("told", [False, True], ids=["position_ids", "cu_seq_lens"])
def test_packed_documents(name: str, told: bool) -> None:
    given = packed()
    if told:
        ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 20, "max_length_k": 20}
    with torch.no_grad():
        logits = model_of(name)(**given).logits
    assert error(logits[0], expected(name)) < CLOSE


@pytest.mark.parametrize("given", ["left", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(given: str, checkpointing: bool) -> None:
    """Of every parameter, for the summed losses of all samples."""
    model = made(config_of()).train()
    parameters = list(model.parameters())
    weight = torch.randn(sum(LENGTHS), 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    each = torch.cat([model(row, use_cache=False).logits[0] for row in alone()])
    wanted = torch.autograd.grad((each * weight).sum(), parameters)
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = packed() if given == "packed" else {**batch(given), "use_cache": False}
    logits = model(**inputs).logits
    logits = logits[0] if given == "packed" else real(logits, inputs["attention_mask"])
    got = torch.autograd.grad((logits * weight).sum(), parameters)
    assert max(error(x, y) for x, y in zip(got, wanted, strict=True)) < CLOSE


def test_dropout_drops_and_sinks_are_honoured() -> None:
    model = made(config_of(attention_dropout=0.5)).train()
    inputs = batch("left")
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.eval()
    plain = model(**inputs).logits
    assert error(model(**inputs, s_aux=torch.full((4,), -1e9, dtype=torch.float64)).logits, plain) < CLOSE
    assert error(model(**inputs, s_aux=torch.zeros(4, dtype=torch.float64)).logits, plain) > 1e-3


# --- generation -------------------------------------------------------------------------------------------------

NEW = 30  # with the prompts, more than three of the longest segments
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
CACHES: dict[str, dict[str, Any]] = {
    "none": {"use_cache": False},
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "dilated": {},
}


def options(cache: str, model: Any) -> dict[str, Any]:
    return {"past_key_values": DilatedCache(model.config)} if cache == "dilated" else CACHES[cache]


@functools.cache
def greedy(name: str) -> list[list[int]]:
    """What each sample goes on with alone, without a cache."""
    return torch.cat([generated(model_of(name), row, use_cache=False) for row in alone()]).tolist()


def generated(model: Any, given: Tensor, **more: Any) -> Tensor:
    found: Tensor = model.generate(given, **{"attention_mask": torch.ones_like(given), **GREEDY, **more})
    return found[:, given.shape[1] :]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *itertools.product(("llama", "longnet"), CACHES),
        ("gpt2", "dilated"),
        ("qwen3", "dilated"),
        ("mistral", "dynamic"),
    ],
)
def test_left_padded_prompts_go_on_as_each_alone(name: str, cache: str) -> None:
    model, given = model_of(name), batch("left", junk=PAD)
    got = generated(model, given["input_ids"], attention_mask=given["attention_mask"], **options(cache, model))
    assert got.tolist() == greedy(name)
    assert len(set(got[0].tolist())) > 5  # not the same token over and over


@pytest.mark.parametrize("cache", ["dynamic", "dilated", "static"])
def test_beams_of_left_padded_prompts_are_those_of_each_alone(cache: str) -> None:
    model, given = model_of(), batch("left", junk=PAD)
    wanted = [generated(model, row, num_beams=3, use_cache=False, max_new_tokens=12)[0].tolist() for row in alone()]
    mask = given["attention_mask"]
    got = generated(
        model, given["input_ids"], attention_mask=mask, num_beams=3, max_new_tokens=12, **options(cache, model)
    )
    assert got.tolist() == wanted


@pytest.mark.parametrize(
    ("cache", "how"), [("dynamic", "prompt lookup"), ("dilated", "prompt lookup"), ("dilated", "assistant")]
)
def test_assisted_chunks(cache: str, how: str) -> None:
    model, given = model_of(), tokens()[:1]
    more: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if how == "assistant":
        more = {"assistant_model": changed_a_little(model)}
    assert generated(model, given, **more, **options(cache, model)).tolist() == greedy("llama")[:1]


def changed_a_little(model: Any) -> Any:
    """A model that is right now and then."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for index, parameter in enumerate(other.parameters()):
            noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=torch.Generator().manual_seed(index))
            parameter.add_(0.02 * noise)
    return other


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, DilatedCache])
def test_chunks_of_a_padded_batch(kind: Any, side: str) -> None:
    """Any number of tokens at a time, by hand; padding is where it is."""
    model, given = model_of(), batch(side)
    cache = kind(config=model.config, max_cache_len=30) if kind is StaticCache else kind(config=model.config)
    logits = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 17), (17, 20)):
            part = {key: value[:, start:stop] for key, value in given.items()}
            part["attention_mask"] = given["attention_mask"][:, :stop]
            logits.append(model(**part, past_key_values=cache).logits)
    assert error(real(torch.cat(logits, 1), given["attention_mask"]), expected("llama")) < CLOSE


# --- compilation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", pytest.param("padded", marks=SLOW), pytest.param("packed", marks=SLOW)])
def test_torch_compile(kind: str) -> None:
    """fullgraph, but for packed documents, whose number is in the data."""
    model = made(config_of())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=kind != "packed")
    given = packed() if kind == "packed" else batch("left")
    with torch.no_grad():
        if kind != "static":
            assert error(compiled(**given).logits, model(**given).logits) < CLOSE
            return
        cache = StaticCache(config=model.config, max_cache_len=30)
        model(**{key: value[:, :19] for key, value in given.items()}, past_key_values=cache)
        step = {key: value if key == "attention_mask" else value[:, 19:] for key, value in given.items()}
        logits = compiled(**step, past_key_values=cache).logits
        assert error(logits, model(**given, use_cache=False).logits[:, 19:]) < CLOSE


MASK = torch.ones(3, 20, dtype=torch.int64)
ODD = torch.tensor([[*range(0, 20, 2), *range(1, 20, 2)]])
LATE = torch.tensor([[*range(10), *range(15, 25)]])


# --- what cannot be honoured ------------------------------------------------------------------------------------

ENDS = torch.tensor([0, 20, 33, 40])


def refused(model: Any, says: str, **given: Any) -> None:
    with pytest.raises(ValueError, match=says):
        model(**({"input_ids": tokens()} | given))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("mistral", {"sliding_window": 4}, "sliding-window or chunked layers"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "sliding-window"),
        ("llama", {"is_causal": False}, "bidirectional"),
    ],
)
def test_configs_that_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    refused(made(config_of(name, **changes)), says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"head_mask": torch.ones(4)}, "head masks"),
        ({"softcap": 30.0}, "soft caps"),
        ({"attention_mask": torch.ones(3, 1, 20, 20, dtype=torch.bool)}, "needs one that its own mask function made"),
        *(
            (
                {"attention_mask": torch.ones(3, 1, n, 20, dtype=torch.int64)},
                "needs one that its own mask function made",
            )
            for n in (1, 2, 3, 20)  # as many rows as a grid may have, and as many as tokens
        ),
        ({"indices": torch.zeros(3, 20, 4)}, "sparse attention by an indexer"),
        ({**packed(), "cu_seq_lens_q": ENDS, "use_cache": True}, "without a cache: leave attention_mask out, and pass"),
        ({**packed(), "use_cache": True}, "must grow by 1"),
        ({**packed(), "attention_mask": torch.ones(1, 40, dtype=torch.int64)}, "must grow by 1"),
        ({"position_ids": LATE, "use_cache": False}, "another number than 0"),
        ({"position_ids": ODD, "use_cache": True}, "must grow by 1"),
        ({"cu_seq_lens_q": torch.tensor([0, 60]), "use_cache": False}, "one row of packed tokens"),
        (
            {**packed(), "position_ids": None, "cu_seq_lens_q": ENDS},
            "numbers all documents as one, so pass position_ids",
        ),
        ({**packed(), "cu_seq_lens_q": ENDS[[0, 1, 3]]}, "position_ids and cu_seq_lens_q differ"),
        ({**packed(), "cu_seq_lens_q": ENDS[1:]}, "cu_seq_lens_q must begin with 0"),
        ({**packed(), "cu_seq_lens_q": ENDS + ENDS // 40}, "end with 40, the number of tokens"),
        ({**packed(), "cu_seq_lens_q": ENDS[[0, 2, 1, 3]]}, "never fall"),
        ({"attention_mask": MASK[:1]}, "must be .batch, tokens., and the batch has 3, got .1, 20."),
        ({"attention_mask": MASK[:, :19]}, "19 columns, and there are 0 tokens in the cache and 20 new ones"),
        (
            {"attention_mask": torch.ones(3, 25), "use_cache": False},
            "has 20 tokens, cached and new, and attention_mask .* has 25: give attention_mask one column per token",
        ),
        (
            {"attention_mask": torch.ones(3, 25)},
            "25 columns, .* 0 .* and 20 new ones: it must have a column for each",
        ),
        ({"cu_seq_lens_k": ENDS}, "cu_seq_lens_k came without cu_seq_lens_q"),
        (
            {"attention_mask": torch.ones(3, 25).tril(20), "use_cache": False},
            "has 20 tokens, cached and new, and attention_mask .* has 25: give attention_mask one column per token",
        ),
        (
            {**packed(), "cu_seq_lens_q": torch.tensor([0, 20, 40]), "cu_seq_lens_k": torch.tensor([0, 40])},
            "cu_seq_lens_q and cu_seq_lens_k differ",
        ),
    ],
)
def test_calls_that_are_refused(given: dict[str, Any], says: str) -> None:
    refused(model_of(), says, **given)


def test_models_whose_first_layer_is_of_another_kind_or_tells_less() -> None:
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    mixed = made(set_pattern(Lfm2Config(**shape, layer_types=["conv", "full_attention"]), PATTERN))
    refused(mixed, "must grow by 1", position_ids=ODD, attention_mask=MASK)
    refused(model_of("gpt2"), "output_attentions", output_attentions=True)  # which it does not tell its attention


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, DilatedCache])
@torch.no_grad()
def test_a_mask_of_another_width_is_refused(kind: Any) -> None:
    """Of the new tokens alone, or too wide; and nothing has happened to the cache."""
    model = model_of()
    cache = kind(config=model.config, **({"max_cache_len": 30} if kind is StaticCache else {}))
    model(tokens()[:, :15], past_key_values=cache)
    step = {"input_ids": tokens()[:, 15:], "past_key_values": cache}
    for mask in (MASK[:, 15:], *(() if kind is StaticCache else (torch.ones(3, 21), torch.ones(3, 21).tril(18)))):
        says = f"{mask.shape[1]} columns, and there are 15 tokens in the cache and 5 new ones: it must have a column"
        refused(model, says, attention_mask=mask, **step)
    wanted = model(tokens(), use_cache=False).logits[:, 15:]
    assert error(model(**step, attention_mask=MASK).logits, wanted) < CLOSE


@pytest.mark.parametrize("kind", [DynamicCache, DilatedCache, StaticCache])
@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_positions_go_on_after_the_cache(kind: Any, n: int) -> None:
    """Also those of a single token, and of samples with padding, whose positions count real tokens, or all columns."""
    model, given = model_of(), batch("left")
    room = {"max_cache_len": 40} if kind is StaticCache else {}
    for padded, off in ((False, -1), (True, -1), (False, 4), (True, 4)):
        prompt = given if padded else {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens())}
        cache = kind(config=model.config, **room)
        model(**prompt, past_key_values=cache)
        more = {
            "input_ids": tokens()[:, :n], "past_key_values": cache,
            "attention_mask": torch.cat((prompt["attention_mask"], torch.ones(3, n, dtype=torch.int64)), 1),
        }  # fmt: skip
        before = prompt["attention_mask"].sum(1, keepdim=True) + off
        with pytest.raises(ValueError, match="and go on after those in the cache"):
            model(**more, position_ids=before + torch.arange(n))
    cache = kind(config=model.config, **room)
    model(**{key: value for key, value in given.items() if key != "position_ids"}, past_key_values=cache)
    model(**more | {"past_key_values": cache})


@pytest.mark.parametrize("kind", [DynamicCache, DilatedCache])
@pytest.mark.parametrize("start", [0, 5])
@torch.no_grad()
def test_a_cache_that_is_filled_by_half_is_refused(kind: Any, start: int) -> None:
    """As after an error, or a key that was pressed, between two layers."""
    model = made(config_of())
    for mask in (None, batch("left")["attention_mask"]):
        cache = kind(config=model.config)
        given = {} if mask is None else {"attention_mask": mask[:, :start]}
        if start:
            model(tokens()[:, :start], **given, past_key_values=cache)
        given = {} if mask is None else {"attention_mask": mask[:, : start + 3]}
        stop_before(model.model.layers[1], model, tokens()[:, start : start + 3], **given, past_key_values=cache)
        given = {} if mask is None else {"attention_mask": mask[:, : start + 5]}
        says = f"a layer has {start + 2} tokens, cached and new, and .* has {start + 5}: .* make a new cache"
        refused(model, says, input_ids=tokens()[:, start + 3 : start + 5], **given, past_key_values=cache)


def test_checkpointing_that_leaves_a_filled_cache_out_is_refused() -> None:
    """transformers warns, and takes the cache away from its layers, not from the mask."""
    model = made(config_of()).train()
    cache = DynamicCache(config=model.config)
    model(tokens()[:, :5], past_key_values=cache)
    model.gradient_checkpointing_enable()
    refused(model, "checkpointing left the cache out", input_ids=tokens()[:, 5:], past_key_values=cache)


def test_a_model_that_does_not_tell_of_positions() -> None:
    """Nobody could check them, so there is a warning."""
    model = made(config_of())
    told = AttentionInterface()["dilated"]

    def untold(*args: Any, position_ids: Any = None, **options: Any) -> Any:
        return told(*args, **options)

    AttentionInterface.register("dilated", untold)
    try:
        with pytest.warns(DilatedAttentionWarning, match="LlamaAttention does not tell its attention of position_ids"):
            model(tokens())
    finally:
        AttentionInterface.register("dilated", told)


def test_compiled_generation() -> None:
    model = made(config_of(pattern=(PATTERN, OTHER)))
    wanted = generated(model, tokens()[:1], use_cache=False, max_new_tokens=6)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generated(model, tokens()[:1], max_new_tokens=6, **options("dilated", model)), wanted)
    torch.compiler.reset()


def test_a_config_without_a_pattern_or_with_too_many() -> None:
    kind, shape = CONFIGS["llama"]
    refused(made(kind(**shape)), "no dilated_pattern: call set_pattern")
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"{count} patterns, and the model 2 layers: give one, or one per layer"):
            config_of(pattern=[PATTERN] * count)
        config = config_of()
        config.dilated_pattern = [config.dilated_pattern] * count  # as one that was loaded may be
        refused(made(config), f"{count} patterns, and the model 2 layers")
    with pytest.raises(ValueError, match="has 0 patterns: give one"):
        set_pattern(object(), [])


def test_the_pattern_is_saved_with_the_config(tmp_path: Any) -> None:
    config = config_of(pattern=(PATTERN, OTHER))
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path).dilated_pattern == config.dilated_pattern
    model = made(config_of())
    before = model(tokens()).logits
    set_pattern(model, OTHER)
    assert error(model(tokens()).logits, before) > 1e-3


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match="too old"):
        register()


@pytest.mark.parametrize("kind", ["mpt", "bloom", "codegen"])
def test_models_that_compute_attention_by_themselves_are_refused(kind: str) -> None:
    """They would add the grid to their scores, and see the future."""
    config = AutoConfig.for_model(kind)
    with pytest.raises(ValueError, match=r"dilated attention cannot run in \w+ForCausalLM: this model computes"):
        set_pattern(config, PATTERN)
    with pytest.raises(ValueError, match="this model computes attention by itself"):
        grid_mask(1, 4, 4, config=config)
