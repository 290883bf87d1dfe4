"""DilatedCache: what is kept, and every operation of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from dilated_attention.integrations.transformers import DilatedCache
from dilated_attention.integrations.transformers.config import ALL
from dilated_attention.integrations.transformers.grid import Grid
from dilated_attention.testing import error
from tests.integrations import hf


class Pair:
    """The same calls with a cache that keeps everything, and with ours."""

    def __init__(self, name: str = "llama", **given: Tensor) -> None:
        self.model = hf.model_of(name)
        self.caches = DynamicCache(config=self.model.config), DilatedCache(self.model.config)
        self.mask = given.pop("attention_mask", torch.ones_like(given["input_ids"]))
        self.run(given["input_ids"], self.mask)

    def run(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """The next tokens, and the check."""
        if mask is None:
            self.mask = torch.cat((self.mask, torch.ones_like(ids)), 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"input_ids": ids, "attention_mask": self.mask, "position_ids": positions}
        with torch.no_grad():
            wanted, got = (self.model(**given, past_key_values=cache).logits for cache in self.caches)
        counted = self.mask[:, -ids.shape[1] :].bool()
        assert error(got[counted], wanted[counted]) < hf.CLOSE
        assert self.caches[0].get_seq_length() == self.caches[1].get_seq_length()

    def both(self, name: str, *args: Any) -> None:
        for cache in self.caches:
            getattr(cache, name)(*args)

    def crop(self, count: int) -> None:
        self.both("crop", -count)
        self.mask = self.mask[:, : self.mask.shape[1] - count]


def more(samples: int, count: int, seed: int = 5) -> Tensor:
    return torch.randint(1, 40, (samples, count), generator=torch.Generator().manual_seed(seed))


PADDED = pytest.mark.parametrize(
    "given",
    [hf.batch("left"), {"input_ids": hf.tokens()}, {"name": "qwen3", **hf.batch("left")}],
    ids=["padded", "alike", "union"],
)


@PADDED
@pytest.mark.parametrize("samples", [[2, 0, 0], [1]], ids=str)
def test_samples_are_chosen_and_repeated(given: dict[str, Any], samples: list[int]) -> None:
    for operation in ("reorder_cache", "batch_select_indices"):
        pair, index = Pair(**given), torch.tensor(samples)
        pair.both(operation, index)
        pair.mask = pair.mask[index]
        pair.run(more(len(samples), 1))
        pair.both("batch_repeat_interleave", 2)
        pair.mask = pair.mask.repeat_interleave(2, 0)
        for count in (1, 3, 1):
            pair.run(more(2 * len(samples), count))


@PADDED
@pytest.mark.parametrize("tokens_to_remove", [1, 4, 6])
def test_the_last_chunk_can_be_cropped(given: dict[str, Any], tokens_to_remove: int) -> None:
    """Exactly, over the border of a segment as well, and again and again."""
    pair = Pair(**given)
    pair.run(more(3, 1))
    for _ in range(4):
        pair.run(more(3, 6))
        pair.crop(tokens_to_remove)
        pair.run(more(3, 2, seed=8))
    pair.crop(0)
    pair.run(more(3, 1))
    with pytest.raises(ValueError, match="can forget the last 1 tokens, and not 2"):
        pair.caches[1].crop(-2)
    with pytest.raises(ValueError, match="minus the number of tokens"):
        pair.caches[1].crop(5)


@PADDED
def test_a_single_token_can_be_cropped(given: dict[str, Any]) -> None:
    """Its row was written already. Another token comes in its place, or several, at every place of a segment."""
    pair = Pair(**given)
    for at in range(20):
        pair.run(more(3, 1))
        pair.crop(1)
        pair.run(more(3, 1 + at % 3 // 2, seed=8))


def test_reset() -> None:
    pair = Pair(**hf.batch("left"))
    pair.both("reset")
    assert pair.caches[1].get_seq_length() == pair.caches[1].nbytes == 0
    pair.mask = torch.ones(2, 0, dtype=torch.int64)
    pair.run(more(2, 11))
    pair.run(more(2, 1))


def test_memory_is_flat_after_the_longest_segment() -> None:
    """At most the sum of w / r rows per key/value head. A single token is not held beside them."""
    model = hf.model_of()
    cache, sizes = DilatedCache(model.config), []
    assert len(cache) == 2
    with torch.no_grad():
        for _ in range(50):
            model(more(1, 1), past_key_values=cache)
            sizes.append(cache.nbytes)
    row = 2 * 8 * 8  # k and v, of 8 numbers in float64
    branches = [*hf.PATTERN.branches_for(2), *hf.OTHER.branches_for(2)]
    kept = sum(-(-one.length // one.rate) * len(one.members) for one in branches)
    assert sizes[20:] == [row * kept] * 30
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] / 3


@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    says = r"has DilatedPattern.longnet\(.*that of the cache DilatedPattern.head_gr"
    hf.refused(hf.model_of(), says, past_key_values=DilatedCache(hf.config_of(pattern=hf.OTHER)))


def test_what_is_refused() -> None:
    model = hf.made(hf.config_of())
    hf.refused(model, "no gradients", past_key_values=DilatedCache(model.config))
    with torch.no_grad():
        hf.refused(model, "must grow by 1", **hf.packed() | {"past_key_values": DilatedCache(model.config)})
        cache = DilatedCache(model.config)
        model.set_attn_implementation("sdpa")
        model(hf.tokens(), past_key_values=cache)
        with pytest.raises(RuntimeError, match='attn_implementation="dilated" only'):
            model(hf.tokens()[:, :1], past_key_values=cache)


@pytest.mark.parametrize("count", [1, 4])
@torch.no_grad()
def test_another_number_of_samples_is_refused(count: int) -> None:
    """Before anything happens: the cache goes on."""
    pair = Pair(input_ids=hf.tokens())
    says = r"holds 3 samples, and this call has 1: call reset\(\)"
    hf.refused(pair.model, says, input_ids=more(1, count), past_key_values=pair.caches[1])
    pair.run(more(3, count))


LEFT, ONES = hf.batch("left")["attention_mask"], torch.ones(3, 20)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("then", "now"), [(LEFT, None), (ONES, LEFT)])
@torch.no_grad()
def test_another_mask_of_earlier_tokens_is_refused(then: Any, now: Any, count: int) -> None:
    cache = DilatedCache(hf.model_of().config)
    hf.model_of()(hf.tokens(), attention_mask=then, past_key_values=cache)
    now = None if now is None else F.pad(now, (0, count), value=1)
    says = "other real tokens before this call than DilatedCache kept"
    hf.refused(hf.model_of(), says, input_ids=more(3, count), attention_mask=now, past_key_values=cache)


@torch.no_grad()
def test_a_mask_is_compared_after_a_crop() -> None:
    """Also where no token of the last chunk is left."""
    pair = Pair(**hf.batch("left"))
    pair.run(more(3, 4))
    pair.crop(4)
    pair.run(more(3, 1))
    hf.refused(pair.model, "other real tokens before", input_ids=more(3, 1), past_key_values=pair.caches[1])


@pytest.mark.parametrize("name", ["llama", "longnet"])
@torch.no_grad()
def test_a_used_cache_says_what_to_do(name: str) -> None:
    """Before another text, of any length."""
    model, ids = hf.model_of(name), hf.tokens()[:1]
    cache = DilatedCache(model.config)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    for count in (20, 5):
        with pytest.raises(ValueError, match=r"before another text, call reset\(\) on the cache"):
            model.generate(ids[:, :count], past_key_values=cache, max_new_tokens=4, do_sample=False)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False), first)


def test_a_second_attention_on_the_same_tokens_is_refused() -> None:
    """Its rows would take the place of the first one's."""
    layer = DilatedCache(hf.config_of()).layers[0]
    rows = torch.randn(1, 2, 5, 8)
    keys, values = (x.transpose(1, 2) for x in layer.update(rows, rows))
    layer.attend(keys, keys, values, Grid(5, 5, ALL), None)
    with pytest.raises(RuntimeError, match="no model with two attentions in a layer"):
        layer.attend(keys, keys, values, Grid(5, 5, ALL), None)
