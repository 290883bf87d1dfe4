"""LongNetForCausalLM: the plain model under another roof."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, Trainer, TrainingArguments

from dilated_attention.checks import DilatedAttentionWarning
from dilated_attention.integrations.transformers import DilatedCache, LongNetConfig, LongNetForCausalLM, register
from dilated_attention.models import LMConfig
from dilated_attention.testing import error
from tests.integrations import hf

PLAIN = LMConfig(
    vocab_size=40, dim=32, depth=2, heads=4, kv_heads=2, pattern=(hf.PATTERN, hf.OTHER), sinks=True, ffn="swiglu"
)
LABELS = sum(hf.LENGTHS) - len(hf.LENGTHS)
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": hf.PAD}


def model() -> Any:
    return hf.model_of("longnet")


def fresh() -> Any:
    register()
    return LongNetForCausalLM(LongNetConfig.of(PLAIN)).double()


@pytest.mark.parametrize(
    "config", [PLAIN, LMConfig.of("0.6B", hf.PATTERN), replace(PLAIN, pattern=(hf.UNION, hf.OTHER))], ids="abc"
)
def test_a_config_is_the_plain_one(config: LMConfig, tmp_path: Path) -> None:
    LongNetConfig.of(config).save_pretrained(tmp_path)
    register()
    assert AutoConfig.from_pretrained(tmp_path).plain() == config
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "longnet"
    assert LongNetConfig().plain().patterns[0].segment_lengths[-1] == 32768
    with pytest.raises(ValueError, match="near: a transformers class has no learned weights"):
        LongNetConfig.of(replace(PLAIN, pattern=hf.UNION, near=1))


def test_what_a_checkpoint_lacks_is_drawn(tmp_path: Path) -> None:
    small = LongNetForCausalLM(LongNetConfig.of(replace(PLAIN, sinks=False)))
    small.save_pretrained(tmp_path)
    loaded: Any = LongNetForCausalLM.from_pretrained(tmp_path, config=LongNetConfig.of(PLAIN))
    assert torch.equal(loaded.lm.blocks[1].up.weight, small.lm.blocks[1].up.weight)
    assert torch.equal(loaded.lm.blocks[1].sink, torch.zeros(4))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_padding_has_no_loss(side: str, mode: Any) -> None:
    """Nor does the last padding token predict the first real one."""
    net, given = model(), hf.batch(side)
    ids, mask = given["input_ids"], given["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    counted = int((labels[:, 1:] != -100).sum())  # as a trainer does
    wanted = sum(net(row, labels=row, num_items_in_batch=1).loss for row in hf.alone()) / LABELS
    with mode():
        assert error(net(**given, labels=labels).loss, wanted) < hf.CLOSE
        assert error(net(**given, labels=labels, num_items_in_batch=2 * counted).loss * 2, wanted) < hf.CLOSE


@torch.no_grad()
def test_packed_documents() -> None:
    ends = torch.tensor([0, *hf.LENGTHS]).cumsum(0)
    wanted = sum(model()(row, labels=row, num_items_in_batch=1).loss for row in hf.alone())
    found = model()(**hf.packed(), labels=hf.packed()["input_ids"]).loss  # no document predicts the next one
    assert error(found * LABELS, wanted) < hf.CLOSE
    torch.compiler.reset()
    compiled, bare = torch.compile(model(), backend="aot_eager", fullgraph=True), {**hf.packed(), "position_ids": None}
    assert error(compiled(**bare, cu_seq_lens_q=ends).logits[0], hf.expected("longnet")) < hf.CLOSE
    hf.refused(compiled, "never fall", **bare, cu_seq_lens_q=ends[[0, 2, 1, 3]])


def test_generate() -> None:
    """As the plain model, on our cache; as an assistant on one that keeps all, as it is cropped by several tokens."""
    given = hf.batch("left", junk=hf.PAD)
    del given["position_ids"]
    found = model().generate(**given, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found.sequences[:, 20:], model().lm.generate_tokens([row[0] for row in hf.alone()], 20))
    assert isinstance(found.past_key_values, DilatedCache)
    torch.manual_seed(7)
    wanted = model().generate(hf.tokens()[:1], use_cache=False, **GREEDY)
    assert torch.equal(model().generate(hf.tokens()[:1], assistant_model=fresh().eval(), **GREEDY), wanted)


def test_the_loss() -> None:
    """Labels are shifted, or come shifted; a count of the whole batch may be given."""
    ids, net = hf.tokens(), model()
    labels = ids.clone()
    labels[0, 5] = -100
    shift = F.pad(labels[:, 1:], (0, 1), value=-100)
    wanted = F.cross_entropy(net.lm(ids).flatten(0, 1), shift.flatten())
    plain = net(ids, labels=labels)
    assert plain.logits is None
    count = int((shift != -100).sum())
    for loss in (
        plain.loss, net(ids, shift_labels=shift).loss, net(ids, labels=labels, num_items_in_batch=2 * count).loss * 2,
    ):  # fmt: skip
        assert error(loss, wanted) < hf.CLOSE


def test_embeddings_and_some_logits() -> None:
    net, ids = model(), hf.tokens()
    with torch.no_grad():
        whole = net(ids).logits
        embedded = net.get_input_embeddings()(ids)
        assert error(net(inputs_embeds=embedded).logits, whole) < hf.CLOSE
        assert error(net(ids, logits_to_keep=2).logits, whole[:, -2:]) < hf.CLOSE
        assert error(net(ids, logits_to_keep=torch.tensor([3, 7])).logits, whole[:, [3, 7]]) < hf.CLOSE


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"output_hidden_states": True}, "cannot honour output_hidden_states"),
        ({"scaling": 1.0}, "cannot honour scaling"),
        ({"is_causal": False}, "is_causal is False, and the mask of this model is not"),
        ({"sliding_window": 4}, "cannot honour sliding_window"),
        ({"s_aux": torch.zeros(4)}, "cannot honour s_aux"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "either input_ids or inputs_embeds"),
        ({"position_ids": torch.arange(20).flip(0), "use_cache": False}, "must begin at 0 in each packed document"),
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
        ({"input_ids": hf.tokens()[0]}, r"tokens must be \(B, n\)"),
    ],
)
@torch.no_grad()
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    hf.refused(model(), says, **given)


def test_hidden_states_by_the_config_are_refused() -> None:
    mine = fresh()
    mine.config.output_hidden_states = True
    hf.refused(mine, "cannot honour output_hidden_states")
    mine(hf.tokens(), output_hidden_states=False)


@pytest.mark.parametrize("kind", [*hf.CACHES, None])
def test_checkpointing_leaves_a_cache_out(kind: Any) -> None:
    """As transformers does: computed again, a layer would give the cache its tokens once more."""
    net, ids = fresh(), hf.tokens()
    wanted = torch.autograd.grad(net(ids, labels=ids).loss, list(net.parameters()))
    net.gradient_checkpointing_enable()
    assert net.is_gradient_checkpointing
    given = {"use_cache": True} if kind is None else {"past_key_values": hf.cache_of(kind, net)}
    with pytest.warns(DilatedAttentionWarning, match="gradient checkpointing leaves the cache out"):
        found = net(ids, labels=ids, **given)
    assert found.past_key_values is None
    assert max(map(error, torch.autograd.grad(found.loss, list(net.parameters())), wanted)) < hf.CLOSE
    if kind is not None:
        with torch.no_grad():  # nothing is computed again
            net(ids[:, :5], **given)
        hf.refused(net, "leave past_key_values out", input_ids=ids[:, 5:], **given)
    net.gradient_checkpointing_disable()
    assert not net.lm.checkpointing


def test_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="LongNet always uses dilated attention"):
        LongNetForCausalLM(LongNetConfig(attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="every layer"):
        model().gradient_checkpointing_enable(every_n_layers=2)


def test_a_trainer_evaluates(tmp_path: Path) -> None:
    """With the loss of the labels, and logits if it is not told to leave them out."""
    net = LongNetForCausalLM(LongNetConfig.of(PLAIN))
    ids = torch.randint(PLAIN.vocab_size, (20,))
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    for more in ({}, {"label_names": ["labels"]}):
        arguments = TrainingArguments(str(tmp_path), **options, **more)
        found = Trainer(net, arguments, eval_dataset=[{"input_ids": ids, "labels": ids}] * 2).evaluate()
        assert found["eval_loss"] == pytest.approx(net(ids[None], labels=ids[None]).loss.item(), rel=1e-5)
