"""LongNetForCausalLM: the plain model under another roof."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache, Trainer, TrainingArguments

from dilated_attention.checks import DilatedAttentionWarning
from dilated_attention.integrations.transformers import (
    DilatedCache,
    LongNetConfig,
    LongNetForCausalLM,
    register,
    set_pattern,
)
from dilated_attention.models import LMConfig
from dilated_attention.testing import error
from tests.integrations.hf import LENGTHS, OTHER, PAD, PATTERN, alone, batch, packed, stop_before, tokens
from tests.over_ranks import changed

PLAIN = LMConfig(
    vocab_size=40, dim=32, depth=2, heads=4, kv_heads=2, pattern=(PATTERN, OTHER), sinks=True, ffn="swiglu"
)
CLOSE = 1e-11
ROOM = {"max_cache_len": 30}
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}


@functools.cache
def model() -> Any:
    register()
    torch.manual_seed(0)
    return changed(LongNetForCausalLM(LongNetConfig.of(PLAIN)).double()).eval()


def expected() -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model().lm(row)[0] for row in alone()])


@pytest.mark.parametrize(
    "config", [PLAIN, LMConfig.of("0.6B", PATTERN), LMConfig.of("125M", PATTERN)], ids=["a", "b", "c"]
)
def test_a_config_is_the_plain_one(config: LMConfig, tmp_path: Path) -> None:
    theirs = LongNetConfig.of(config)
    theirs.save_pretrained(tmp_path)
    register()
    assert AutoConfig.from_pretrained(tmp_path).plain() == config
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)["model_type"] == "longnet"
    assert '"group' not in text
    assert LongNetConfig().plain().patterns[0].segment_lengths[-1] == 32768


def test_saved_and_loaded(tmp_path: Path) -> None:
    """In safetensors, by the Auto classes, with the tied weight once."""
    model().save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LongNetForCausalLM)
    assert loaded.lm.head.weight is loaded.lm.embed.weight
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded.eval()(tokens(), use_cache=False).logits, model()(tokens(), use_cache=False).logits)


def test_what_a_checkpoint_lacks_is_drawn(tmp_path: Path) -> None:
    smaller = LMConfig(vocab_size=40, dim=32, depth=2, heads=4, kv_heads=2, pattern=PATTERN, ffn="swiglu")
    small = LongNetForCausalLM(LongNetConfig.of(smaller))
    small.save_pretrained(tmp_path)
    config = LongNetConfig.of(PLAIN)
    loaded: Any = LongNetForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(loaded.lm.blocks[1].up.weight, small.lm.blocks[1].up.weight)
    assert torch.equal(loaded.lm.blocks[1].sink, torch.zeros(4))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_loss(side: str) -> None:
    """Nor does the last padding token predict the first real one; gradients or not."""
    net, given = model(), batch(side)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    wanted = sum(net(row, labels=row, num_items_in_batch=1).loss for row in alone()) / (sum(LENGTHS) - len(LENGTHS))
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert error(net(**given, labels=labels).loss, wanted) < CLOSE
    if side == "right":  # the columns of a mask that is as long as a cache begin with those of the tokens
        cache = StaticCache(config=net.config, max_cache_len=30)
        long = torch.nn.functional.pad(given["attention_mask"], (0, 30 - labels.shape[1]))
        with torch.no_grad():
            found = net(given["input_ids"], long, past_key_values=cache, labels=labels).loss
        assert error(found, wanted) < CLOSE
        with torch.no_grad():  # also those of later tokens, which begin where the cache ended
            alike = [kind(config=net.config, **room) for kind, room in ((DynamicCache, {}), (StaticCache, ROOM))]
            for cache in alike:
                net(given["input_ids"][:, :3], given["attention_mask"][:, :3], past_key_values=cache)
            rest = given["input_ids"][:, 3:], given["attention_mask"]
            one, two = (net(*rest, past_key_values=cache, labels=labels[:, 3:]).loss for cache in alike)
        assert error(two, one) < CLOSE
    counted = int((labels[:, 1:] != -100).sum())  # as a trainer does
    assert error(net(**given, labels=labels, num_items_in_batch=2 * counted).loss * 2, wanted) < CLOSE


def test_packed_documents() -> None:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    with torch.no_grad():
        wanted = sum(model()(row, labels=row, num_items_in_batch=1).loss for row in alone())
        found = model()(**packed(), labels=packed()["input_ids"]).loss  # no document predicts the next one
        assert error(found * (sum(LENGTHS) - len(LENGTHS)), wanted) < CLOSE
        bare = {**packed(), "position_ids": None}
        torch.compiler.reset()
        compiled = torch.compile(model(), backend="aot_eager", fullgraph=True)
        assert error(compiled(**bare, cu_seq_lens_q=ends).logits[0], expected()) < CLOSE
        with pytest.raises(ValueError, match="never fall"):
            compiled(**bare, cu_seq_lens_q=ends[[0, 2, 1, 3]])


def test_generate() -> None:
    """As the plain model, on our cache; as an assistant on one that keeps all, as it is cropped by several tokens."""
    given = batch("left", junk=PAD)
    inputs = {key: given[key] for key in ("input_ids", "attention_mask")}
    found = model().generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found.sequences[:, 20:], model().lm.generate_tokens([row[0] for row in alone()], 20))
    assert isinstance(found.past_key_values, DilatedCache)
    torch.manual_seed(7)
    assistant = LongNetForCausalLM(LongNetConfig.of(PLAIN)).double().eval()
    wanted = model().generate(tokens()[:1], use_cache=False, **GREEDY)
    assert torch.equal(model().generate(tokens()[:1], assistant_model=assistant, **GREEDY), wanted)


def test_a_pattern_that_is_set_later(tmp_path: Path) -> None:
    """It is the model's from then on, also when saved."""
    register()
    torch.manual_seed(0)
    mine = changed(LongNetForCausalLM(LongNetConfig.of(PLAIN)).double()).eval()
    set_pattern(mine, PATTERN)
    with torch.no_grad():
        found = mine(tokens()).logits
    assert mine.lm.config.patterns == (PATTERN, PATTERN)
    assert error(found, model()(tokens()).logits.detach()) > 1e-3
    mine.save_pretrained(tmp_path)
    again = LongNetForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert error(again(tokens()).logits.detach(), found) < CLOSE


def test_the_loss() -> None:
    """Labels are shifted, or come shifted; a count of the whole batch may be given."""
    ids, net = tokens(), model()
    labels = ids.clone()
    labels[0, 5] = -100
    shift = F.pad(labels[:, 1:], (0, 1), value=-100)
    wanted = F.cross_entropy(net.lm(ids).flatten(0, 1), shift.flatten())
    plain = net(ids, labels=labels)
    assert plain.logits is None
    assert error(plain.loss, wanted) < CLOSE
    assert error(net(ids, shift_labels=shift).loss, wanted) < CLOSE
    count = int((shift != -100).sum())
    assert error(net(ids, labels=labels, num_items_in_batch=2 * count).loss * 2, wanted) < CLOSE
    grads = torch.autograd.grad(plain.loss, list(net.parameters()))
    net.gradient_checkpointing_enable()
    assert net.is_gradient_checkpointing
    again = torch.autograd.grad(net(ids, labels=labels).loss, list(net.parameters()))
    net.gradient_checkpointing_disable()
    assert not net.lm.checkpointing
    assert max(error(x, y) for x, y in zip(again, grads, strict=True)) < CLOSE


def test_embeddings_and_some_logits() -> None:
    net, ids = model(), tokens()
    with torch.no_grad():
        whole = net(ids).logits
        embedded = net.get_input_embeddings()(ids)
        assert error(net(inputs_embeds=embedded).logits, whole) < CLOSE
        assert error(net(ids, logits_to_keep=2).logits, whole[:, -2:]) < CLOSE
        assert error(net(ids, logits_to_keep=torch.tensor([3, 7])).logits, whole[:, [3, 7]]) < CLOSE


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "no hidden states"),
        ({"is_causal": False}, "is for causal decoders"),
        ({"dropout": 0.5}, "LongNet takes no dropout"),
        ({"scaling": 1.0}, "LongNet takes no scaling"),
        ({"s_aux": torch.zeros(4)}, "LongNet takes no s_aux"),
        ({"cu_seq_lens_k": torch.tensor([0, 20])}, "cu_seq_lens_k came without cu_seq_lens_q"),
        (
            {"attention_mask": torch.ones(3, 25)},
            "25 columns, .* 0 .* and 20 new ones: it must have a column for each",
        ),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "either input_ids or inputs_embeds"),
        ({"position_ids": torch.arange(0, 40, 2)[None], "use_cache": False}, "jump to another number than 0"),
        ({"position_ids": torch.arange(20).flip(0), "use_cache": False}, "jump to another number than 0"),
        ({"position_ids": torch.arange(19)[None]}, r"position_ids must be \(batch, tokens\) = \(3, 20\)"),
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
        ({"input_ids": tokens()[0]}, r"use input_ids\[None\] for one row"),
        ({"input_ids": tokens().to(torch.uint8)}, r"use .*input_ids.long\(\) for another dtype"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 31)}, r"\(batch, tokens, 32\)"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=says):
        model()(**{"input_ids": tokens(), **given})


def test_hidden_states_by_the_config_are_refused() -> None:
    mine = LongNetForCausalLM(LongNetConfig.of(PLAIN))
    mine.config.output_hidden_states = True
    with pytest.raises(ValueError, match="no hidden states"):
        mine(tokens())
    mine(tokens(), output_hidden_states=False)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, DilatedCache, None])
def test_checkpointing_leaves_a_cache_out(kind: Any) -> None:
    """As transformers does: computed again, a layer would give the cache its tokens once more."""
    net, ids = LongNetForCausalLM(LongNetConfig.of(PLAIN)).double(), tokens()
    wanted = torch.autograd.grad(net(ids, labels=ids).loss, list(net.parameters()))
    net.gradient_checkpointing_enable()
    given: dict[str, Any] = {"use_cache": True}
    if kind is not None:
        room = ROOM if kind is StaticCache else {}
        given = {"past_key_values": kind(config=net.config, **room)}
    with pytest.warns(DilatedAttentionWarning, match="gradient checkpointing leaves the cache out"):
        found = net(ids, labels=ids, **given)
    assert found.past_key_values is None
    got = torch.autograd.grad(found.loss, list(net.parameters()))
    assert max(error(x, y) for x, y in zip(got, wanted, strict=True)) < CLOSE
    if kind is not None:
        with torch.no_grad():  # nothing is computed again
            net(ids[:, :5], **given)
        with pytest.raises(ValueError, match="leave past_key_values out"):
            net(ids[:, 5:], **given)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, DilatedCache])
@pytest.mark.parametrize("start", [0, 5])
@torch.no_grad()
def test_a_cache_that_is_filled_by_half_is_refused(kind: Any, start: int) -> None:
    room = ROOM if kind is StaticCache else {}
    cache = kind(config=model().config, **room)
    if start:
        model()(tokens()[:, :start], past_key_values=cache)
    stop_before(model().lm.blocks[1], model(), tokens()[:, start:8], past_key_values=cache)
    with pytest.raises(ValueError, match=f"hold from {start} to 8 tokens: .* make a new cache"):
        model()(tokens()[:, 8:9], past_key_values=cache)


def test_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="LongNet always uses dilated attention"):
        LongNetForCausalLM(LongNetConfig(attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="every layer"):
        model().gradient_checkpointing_enable(every_n_layers=2)


def test_blocks_are_compiled_once() -> None:
    deep = LongNetForCausalLM(LongNetConfig.of(replace(PLAIN, depth=12, pattern=PLAIN.patterns[0]))).eval()
    compiled, ids = [], torch.randint(PLAIN.vocab_size, (2, 20))

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    with torch.no_grad():
        expected = deep(ids, use_cache=False).logits
        torch.compiler.reset()
        for block in deep.lm.blocks:
            block.compile(fullgraph=True, backend=backend)
        assert error(deep(ids, use_cache=False).logits, expected) < 1e-5
    assert len(compiled) == 1


def test_a_trainer_evaluates(tmp_path: Path) -> None:
    """With the loss of the labels, and logits if it is not told to leave them out."""
    net = LongNetForCausalLM(LongNetConfig.of(PLAIN))
    ids = torch.randint(PLAIN.vocab_size, (20,))
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    for more in ({}, {"label_names": ["labels"]}):
        arguments = TrainingArguments(str(tmp_path), **options, **more)
        found = Trainer(net, arguments, eval_dataset=[{"input_ids": ids, "labels": ids}] * 2).evaluate()
        assert found["eval_loss"] == pytest.approx(net(ids[None], labels=ids[None]).loss.item(), rel=1e-5)
