"""Models that mix kinds of layers, run as they are: the same as with "eager" attention, in every way to call them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    Cohere2Config,
    DynamicCache,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    ModernBertConfig,
    Olmo3Config,
    StaticCache,
)

from dilated_attention import Dense, Dilated, Pattern, Window
from dilated_attention.integrations.transformers import DilatedCache, register, set_pattern
from dilated_attention.integrations.transformers.grid import grid_mask
from dilated_attention.testing import error
from tests import table
from tests.integrations import hf

NEAR = 1e-5  # in float32, in which "eager" takes its softmax
SHAPE = {**hf.SHAPE, "num_hidden_layers": 3}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": hf.CONFIGS["llama"],
    "gpt2": hf.CONFIGS["gpt2"],
    "qwen3": (
        hf.CONFIGS["qwen3"][0], {**SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mistral": (hf.CONFIGS["mistral"][0], {**SHAPE, "sliding_window": 5}),
    "gemma3": (Gemma3TextConfig, {**SHAPE, "sliding_window": 5, "layer_types": MIXED}),
    "gpt_oss": (GptOssConfig, {**SHAPE, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "olmo3": (Olmo3Config, {**SHAPE, "sliding_window": 2, "layer_types": MIXED}),
    "cohere2": (Cohere2Config, {**SHAPE, "sliding_window": 16, "layer_types": MIXED}),
    "llama4": (
        Llama4TextConfig, {
            **SHAPE, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "no_rope_layers": [1, 0, 1],
            "num_local_experts": 2, "num_experts_per_tok": 1, "floor_scale": 8,
        },
    ),
    "chunks": (
        Llama4TextConfig, {
            **SHAPE, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "no_rope_layers": [1, 1, 1],
            "num_local_experts": 2, "num_experts_per_tok": 1,
        },
    ),
    "encoder": (
        hf.CONFIGS["qwen3"][0], {
            **SHAPE, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "is_causal": False,
        },
    ),
    "modernbert": (
        ModernBertConfig, {
            **{name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")},
            "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2,
        },
    ),
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:Llama4TextAttention does not pass")
DECODERS = [name for name in CONFIGS if name not in ("modernbert", "encoder")]


def config_of(name: str, **changes: Any) -> Any:
    kind, shape = CONFIGS[name]
    return kind(**{**shape, **changes})


def made(config: Any) -> Any:
    register()
    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if config.model_type in ("modernbert", "distilbert") else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="dilated", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


@functools.cache
def model_of(name: str) -> Any:
    return made(config_of(name))


def batch(name: str, kind: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a call, and which of its tokens count."""
    if kind == "packed":
        given = hf.packed()
        if name in ("gpt_oss", "encoder"):  # which do not give their masks position_ids, and mix the documents
            given["cu_seq_lens_q"] = torch.tensor([0, *hf.LENGTHS]).cumsum(0)
        mask = torch.ones_like(given["input_ids"])
    else:
        given = {"input_ids": hf.tokens()} if kind == "none" else hf.batch(kind)
        mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    if "llama4" in CONFIGS[name][0].model_type and kind != "packed":  # it counts columns
        given.pop("position_ids", None)
    if name == "modernbert":
        given.pop("use_cache", None)
    return given, mask.bool()


def as_eager(name: str, run: Any) -> tuple[Any, Any]:
    """What a function of the model gives with "dilated" and with "eager"."""
    model, found = model_of(name), []
    for attention in ("eager", "dilated"):
        model.set_attn_implementation(attention)
        found.append(run(model))
    return found[1], found[0]


def separately(model: Any, given: dict[str, Any]) -> Tensor:
    """The logits of documents, each alone."""
    rows = torch.split(given["input_ids"], hf.LENGTHS, 1)
    return torch.cat([model(row, use_cache=False).logits for row in rows], 1)


# --- one pass ---------------------------------------------------------------------------------------------------

PASSES = table.Path({
    "name": tuple(CONFIGS), "kind": ("none", "left", "right", "middle", "packed"), "checkpointing": (False, True),
})  # fmt: skip


@pytest.mark.parametrize("case", [*table.dealt(PASSES, "passes")], ids=lambda case: "-".join(map(str, case.values())))
def test_logits_and_gradients(case: dict[str, Any]) -> None:
    name, (given, mask) = case["name"], batch(case["name"], case["kind"])
    weight = torch.randn(*mask.shape, hf.VOCABULARY, generator=torch.Generator().manual_seed(2)) * mask.unsqueeze(2)

    def run(model: Any) -> tuple[Tensor, ...]:
        if case["checkpointing"]:
            model.train().gradient_checkpointing_enable()
        is_apart = "cu_seq_lens_q" in given and model.config._attn_implementation == "eager"
        logits = separately(model, given) if is_apart else model(**given).logits
        found = torch.autograd.grad((logits * weight).sum(), list(model.parameters()), allow_unused=True)
        model.eval().gradient_checkpointing_disable()
        return logits[mask], *(x for x in found if x is not None)

    found, wanted = as_eager(name, run)
    assert len(found) == len(wanted) > 10
    assert max(map(error, found, wanted)) < NEAR


# --- caches -----------------------------------------------------------------------------------------------------

CACHED = table.Path({
    "name": tuple(DECODERS), "kind": ("none", "left", "right", "middle"), "cache": tuple(hf.CACHES),
    "cuts": ((5, 6, 15, 16, 17, 20), (17, 18, 19, 20), (1, 2, 3, 13, 20)),
})  # fmt: skip


def cache_of(kind: Any, model: Any) -> Any:
    return kind(model.config) if kind is DilatedCache else hf.cache_of(kind, model)


@pytest.mark.parametrize(
    "case",
    [*table.dealt(CACHED, "cached")],
    ids=lambda x: f"{x['name']}-{x['kind']}-{x['cache'].__name__}",
)
@torch.no_grad()
def test_chunks_with_a_cache(case: dict[str, Any]) -> None:
    """Any number of tokens at a time."""
    name, (given, mask) = case["name"], batch(case["name"], case["kind"])
    has_local = name not in ("llama", "gpt2")

    def run(model: Any) -> Tensor:
        eager, logits = model.config._attn_implementation == "eager", []
        cache = cache_of(StaticCache if eager and case["cache"] is DilatedCache else case["cache"], model)
        for start, stop in zip((0, *case["cuts"]), case["cuts"], strict=False):
            part = {key: value[:, start:stop] for key, value in given.items()}
            if "attention_mask" in given:
                part["attention_mask"] = given["attention_mask"][:, :stop]
            logits.append(model(**part, past_key_values=cache).logits)
        return torch.cat(logits, 1)[mask]

    if case["cache"] is DilatedCache and case["kind"] == "middle" and has_local:
        with pytest.raises(ValueError, match="no padding between tokens in windows and chunks: pad on the left"):
            as_eager(name, run)
        return
    assert error(*as_eager(name, run)) < NEAR


@pytest.mark.parametrize("cache", ["dynamic", "static", "dilated"])
@pytest.mark.parametrize("name", ["gemma3", "llama4", "gpt_oss"])
def test_beams(name: str, cache: str) -> None:
    """Of prompts that are padded on the left, far beyond the windows."""
    given = hf.batch("left", junk=hf.PAD)
    options = {"num_beams": 3, "max_new_tokens": 14, "do_sample": False, "attention_mask": given["attention_mask"]}

    def run(model: Any) -> Tensor:
        more: dict[str, Any] = {"use_cache": False}
        if model.config._attn_implementation == "dilated":
            more = {"past_key_values": DilatedCache(model.config)} if cache == "dilated" else {}
            more |= {"cache_implementation": "static"} if cache == "static" else {}
        return model.generate(given["input_ids"], **options, **more)

    assert torch.equal(*as_eager(name, run))


@torch.no_grad()
def test_a_cache_keeps_the_rows_of_windows_and_grows_elsewhere() -> None:
    model, rows = model_of("gemma3"), []
    model.set_attn_implementation("dilated")
    cache = DilatedCache(model.config)
    for _ in range(30):
        model(torch.tensor([[7]]), past_key_values=cache)
        rows.append([layer.kept.rows[0].shape[3] for layer in cache.layers])
    assert rows[-1][0] == rows[-1][2] == 5
    assert rows[-1][1] >= 29


def test_windows_of_one_token_are_no_documents() -> None:
    model = made(config_of("mistral", sliding_window=1))
    found = model(hf.tokens(), use_cache=False).logits
    model.set_attn_implementation("eager")
    assert error(found, model(hf.tokens(), use_cache=False).logits) < NEAR


EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {  # values have fewer channels than keys
        "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, **EXPERTS,
    },
    "qwen2_moe": {"num_experts": 2, "shared_expert_intermediate_size": 8, **EXPERTS},  # makes masks for windows of 0
    "moshi": {"sliding_window": 5, "ffn_dim": 48},  # the cache drops rows, and the mask does not say so
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:MoshiAttention does not pass")
@pytest.mark.parametrize("name", OTHERS)
def test_models_with_ways_of_their_own(name: str) -> None:
    model, given, found = made(AutoConfig.for_model(name, **{**SHAPE, **OTHERS[name]})), hf.batch("left"), []
    options: Any = {"attention_mask": given["attention_mask"], "max_new_tokens": 4, "do_sample": False}
    for attention in ("eager", "dilated"):
        model.set_attn_implementation(attention)
        written = model.generate(given["input_ids"], **options, output_logits=True, return_dict_in_generate=True)
        found.append(torch.stack(written.logits))
    assert error(found[1], found[0]) < NEAR


# --- patterns of some layers ------------------------------------------------------------------------------------


def test_a_pattern_for_the_layers_of_one_type() -> None:
    """The others stay what they are, also where patterns are set one after the other."""
    config = set_pattern(config_of("qwen3", max_window_layers=2), Pattern([Window(3)]), layers="full_attention")
    assert [one and one["branches"] for one in config.dilated_pattern] == [[{"kind": "window", "left": 3}]] * 2 + [None]
    plain = made(config_of("qwen3", use_sliding_window=False))
    model = made(config)
    for last in (Window(4), Dilated(7)):
        set_pattern(plain, [Pattern([Window(3)])] * 2 + [Pattern([last])])
        assert error(model(hf.tokens()).logits, plain(hf.tokens()).logits) < NEAR
        set_pattern(model, [Pattern([Dilated(7)])], layers="sliding_attention")
    with pytest.raises(ValueError, match="no layer is of type 'chunked_attention': use one of full_attention, sliding"):
        set_pattern(config, hf.PATTERN, layers="chunked_attention")


def test_windows_that_were_replaced_need_a_cache_that_keeps_all() -> None:
    model = made(set_pattern(config_of("mistral"), hf.PATTERN))
    wanted = model(hf.tokens(), use_cache=False).logits
    with torch.no_grad():
        cache = DilatedCache(model.config)
        found = [model(part, past_key_values=cache).logits for part in hf.tokens().split(5, 1)]
    assert error(torch.cat(found, 1), wanted) < NEAR
    cache = DynamicCache(config=model.config)
    model(hf.tokens()[:, :8], past_key_values=cache)
    hf.refused(model, "a cache that drops its first rows", input_ids=hf.tokens()[:, 8:], past_key_values=cache)


def test_a_folder_is_run_as_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from the user, again and again, and with an error where the library is not there."""
    model = made(set_pattern(config_of("gemma3"), hf.PATTERN, layers="full_attention"))
    wanted = model(hf.tokens()).logits
    for _ in range(3):
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "dilated"
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert error(model(hf.tokens()).logits, wanted) < NEAR
    for kind, config in (("eager", AutoConfig.from_pretrained(tmp_path)), ("dilated", model.config)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation=kind)
        assert (error(loaded(hf.tokens()).logits, wanted) < NEAR) == (kind == "dilated")
    monkeypatch.delitem(AttentionInterface._global_mapping, "dilated")
    with pytest.raises(ValueError, match='attn_implementation="dilated"` is not supported'):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_of_a_model_that_sees_pictures_the_decoder_alone_is_switched(tmp_path: Path) -> None:
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen |= {"image_size": 28, "patch_size": 14}
    text = {**config_of("gemma3").to_dict(), "vocab_size": hf.VOCABULARY}
    config = Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4)
    register()
    model = AutoModelForImageTextToText.from_config(config).eval()
    plain = model(hf.tokens()).logits
    for pattern in (Pattern([Dense()]), hf.PATTERN):
        set_pattern(model, pattern, layers="full_attention")
        model.save_pretrained(tmp_path)
        model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
        kinds = [part._attn_implementation for part in (model.config.text_config, model.config.vision_config)]
        assert kinds == ["dilated", "sdpa"]
        assert (error(model(hf.tokens()).logits, plain) < NEAR) == (pattern != hf.PATTERN)
    pictures = {"input_ids": torch.full((1, 4), config.image_token_id), "pixel_values": torch.zeros(1, 3, 28, 28)}
    found = AutoModelForImageTextToText.from_config(config, attn_implementation="dilated")  # its other part, too
    hf.refused(found, "with pictures, attn_implementation=.*text_config", **pictures)
    tokens = hf.tokens().masked_fill(hf.tokens() < 5, config.image_token_id)
    hf.refused(model, "dilated attention cannot honour", input_ids=tokens, token_type_ids=(hf.tokens() < 5).long())


def test_a_model_that_runs_otherwise_is_switched_by_its_pattern() -> None:
    config = config_of("llama")
    model = AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == "sdpa"
    set_pattern(model, hf.PATTERN)
    assert model.config._attn_implementation == "dilated"
    assert AutoModelForCausalLM.from_config(set_pattern(config, hf.PATTERN)).config._attn_implementation == "dilated"


# --- what cannot be honoured ------------------------------------------------------------------------------------


def test_layers_without_a_number_share_a_pattern() -> None:
    """They got the first of a list."""
    shape = {"vocab_size": hf.VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    model = made(set_pattern(AutoConfig.for_model("distilbert", **shape), [hf.PATTERN, Pattern([Dense()])]))
    hf.refused(model, "DistilBertSelfAttention does not say which layer it is in: set the same pattern for all")
    found = []
    for pattern in (hf.PATTERN, [hf.PATTERN] * 2):
        set_pattern(model, pattern)
        found.append(model(hf.tokens()).logits)
    assert error(*found) < NEAR


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="cuts or changes its mask by itself"):  # as DeepSeek V3.2 does
        grid_mask(1, 4, 4, config=config_of("llama"))[:, 0]
    hf.refused(made(Gemma2Config(**SHAPE, sliding_window=5)), "cannot honour soft caps")
    hf.refused(made(config_of("gemma3", use_bidirectional_attention=True)), "cannot honour mask functions")
    hf.refused(model_of("gpt_oss"), "pass cu_seq_lens_q", **hf.packed())
    hf.refused(made(config_of("gpt2", add_cross_attention=True)), "takes no cross-attention")
    with pytest.raises(
        ValueError, match="layers of type 'conv' have no pattern, and no room in DilatedCache: use Dynamic"
    ):
        DilatedCache(Lfm2Config(**{**SHAPE, "layer_types": ["conv", "full_attention", "conv"]}))
