"""Choosing a pattern for a dense model: what is measured, the greedy choice, and models from disk."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from dilated_attention import (
    Dense,
    Dilated,
    DilatedPattern,
    Pattern,
    Prefix,
    Strided,
    Window,
    attention_mass,
    dilated_attention,
    reference,
)
from dilated_attention.integrations.stored import Plain, stored
from dilated_attention.integrations.transformers import LongNetConfig, LongNetForCausalLM, register, set_pattern
from dilated_attention.models import LMConfig, LongNetLM, fitting
from dilated_attention.models.transformer import written
from dilated_attention.testing import error

ALL = Pattern([Dense()])
N = 96
SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
TOKENS = torch.randint(256, (2, N), generator=torch.Generator().manual_seed(0))


def lm(pattern: Any = ALL, **changes: Any) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(
        LMConfig(**{"vocab_size": 257, "dim": 32, "depth": 2, "heads": 4, "kv_heads": 2, "pattern": pattern, **changes})
    )


def saved(kind: str, folder: Path, pattern: Any = ALL) -> Path:
    torch.manual_seed(0)
    if kind == "longnet file":
        model = lm(pattern)
        torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, folder / "step-00000001.pt")
    elif kind == "longnet":
        LongNetForCausalLM(set_pattern(LongNetConfig(**SHAPE), pattern)).save_pretrained(folder)
    else:
        register()
        gpt2 = {"vocab_size": 300, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}
        config = LlamaConfig(**SHAPE) if kind == "llama" else GPT2Config(**gpt2)
        AutoModelForCausalLM.from_config(set_pattern(config, pattern)).save_pretrained(folder)
    return folder


KINDS = ("longnet file", "longnet", "llama", "gpt2")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_from_disk_says_what_it_said_and_what_it_would_say_with_another_pattern(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "near").mkdir()
    near = Pattern([Window(3), Prefix(2)])
    model, other = stored(saved(kind, tmp_path)), stored(saved(kind, tmp_path / "near", near))
    assert (model.patterns, other.patterns) == ((ALL, ALL), (near, near))
    with torch.no_grad():
        whole = model.model(TOKENS)
        whole = whole if isinstance(whole, Tensor) else whole.logits
        places = torch.tensor([3, 50])
        torch.testing.assert_close(model.logits(TOKENS, places), whole[:, places], rtol=1e-4, atol=1e-5)
        wanted = torch.nn.functional.cross_entropy(whole[:, :-1].mT, TOKENS[:, 1:], reduction="none")
        torch.testing.assert_close(model.losses(TOKENS), wanted, rtol=1e-4, atol=1e-5)
    seen: list[Any] = []

    def look(layer: int, heads: int, attend: Any) -> Any:
        seen.append((layer, heads))
        return attend(near)

    torch.testing.assert_close(model.losses(TOKENS, look), other.losses(TOKENS), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.losses(TOKENS, lambda *_: None), wanted, rtol=1e-4, atol=1e-5)
    assert seen == [(layer, 4 if kind == "gpt2" else 2) for layer in (0, 1)]
    assert error(other.losses(TOKENS), wanted) > 1e-3


class Shown:
    """A model whose only layer attends with these. Its loss is linear, or how far it is from dense attention."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, slope: Tensor | None = None) -> None:
        self.given, self.slope, self.patterns = (q, k, v), slope, (ALL,)

    def attend(self, pattern: Pattern) -> tuple[Tensor, Tensor]:
        options: Any = {"is_causal": True, "scale": 0.5, "enable_gqa": True, "return_lse": True}
        return dilated_attention(*self.given, pattern, **options)

    def losses(self, row: Tensor, look: Any) -> Tensor:
        out, lse = look(0, self.given[1].shape[2], self.attend) or self.attend(ALL)
        if self.slope is None:
            return (out - self.attend(ALL)[0]).square().sum((2, 3))
        return (out * self.slope).sum((2, 3)) + 3 * lse.sum(2)


def test_masses_and_changes_are_those_by_hand() -> None:
    torch.manual_seed(0)
    q, k, v, slope = torch.randn(1, N, 4, 8), torch.randn(1, N, 2, 8), torch.randn(1, N, 2, 8), torch.randn(1, N, 4, 8)
    options = [(Window(9), Prefix(2)), (Dilated(N, 4),), (Dense(),)]
    model, given = Shown(q, k, v, slope), {"is_causal": True, "scale": 0.5}
    mass, lost = fitting.masses(model, TOKENS[:1], options), fitting.changes(model, TOKENS[:1], 0.5, options, [0])
    dense = reference.attention(q, k, v, ALL, **given)
    for at, option in enumerate(options):
        wanted = attention_mass(q.double(), k.double(), Pattern(option), enable_gqa=True, **given).mean((0, 1))
        torch.testing.assert_close(mass[0, at], wanted.view(2, 2).mean(1), rtol=1e-5, atol=1e-6)
        out, lse = (x - y for x, y in zip(reference.attention(q, k, v, Pattern(option), **given), dense, strict=True))
        change = (slope * out).sum(3) + 3 * lse
        wanted = change.square().sum((0, 1)).view(2, 2).sum(1)
        torch.testing.assert_close(lost[0, at], wanted, rtol=1e-4, atol=1e-6)


def test_heads_that_matter_to_nothing_stay_narrow() -> None:
    """The second of three layers writes nothing, so nothing depends on it."""
    model = Plain(lm(depth=3))
    with torch.no_grad():
        model.model.blocks[1].out.weight.zero_()
    found = fitting.fit(model, TOKENS, 0.3)
    least = fitting.share_of(Pattern(fitting.menu(N)[0]), N, 1)
    assert found.shares[1] == [pytest.approx(least)] * 2
    assert found.kept[1] == [1.0, 1.0]
    assert 0 < min(found.kept[0]) < 1


def three_heads(n: int = 256) -> Shown:
    """One looks at near tokens; one takes a mean of all, whose values hardly differ; one looks back at a far token
    now and then, and else at the first one, whose value is 0."""
    dim = 16
    torch.manual_seed(0)
    angle = torch.arange(n)[:, None] * torch.logspace(0, -2, dim // 2)
    place = torch.cat((angle.cos(), angle.sin()), 1)  # near ones are alike
    q, k, v = torch.zeros(1, n, 3, dim), torch.zeros(1, n, 3, dim), torch.randn(1, n, 3, dim)
    q[0, :, 0] = k[0, :, 0] = 3 * place
    v[0, :, 1] = 1 + 0.1 * v[0, :, 1]
    k[0, 0, 2, 0], q[0, :, 2, 0], v[0, 0, 2] = 9, 9, 0
    for query in range(150, n, 25):
        q[0, query, 2], k[0, query - 130, 2] = 0, 0
        q[0, query, 2, query % 8 + 1] = k[0, query - 130, 2, query % 8 + 1] = 9
    return Shown(q, k, v)


def test_the_head_that_reads_far_tokens_stays_full() -> None:
    """By mass it is the one that takes a mean of all, though that loses next to nothing."""
    by_loss = fitting.fit(three_heads(), torch.zeros(1, 256), 0.5)
    assert [share >= 1 for share in by_loss.shares[0]] == [False, False, True]
    by_mass = fitting.fit(three_heads(), torch.zeros(1, 256), 0.5, by="mass")
    assert [share >= 1 for share in by_mass.shares[0]] == [False, True, False]
    for found in (by_loss, by_mass):
        assert found.patterns[0].pairs(256, 3, is_causal=True) <= 0.5 * 3 * 256 * 257 / 2


def test_each_head_pays_for_its_own_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "menu", lambda n: [(Window(3),), (Dilated(n, 16), Window(3))])
    found = fitting.fit(three_heads(241), torch.zeros(1, 241), 0.5, "mass")
    assert len(found.patterns[0].branches) == 2
    assert found.share == pytest.approx(fitting.share_of(found.patterns[0], 241, 3), rel=1e-9)


# --- the choice -------------------------------------------------------------------------------------------------


def test_the_choice_takes_what_gains_most_for_its_cost() -> None:
    cost, lost = torch.tensor([1.0, 2.0, 8.0]), torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.1, 0.05], [1.0, 1.0, 1.0]])
    cost = cost.expand(3, 3)
    assert fitting.choose(cost, lost, 3) == [0, 0, 0]
    assert fitting.choose(cost, lost, 4) == [0, 1, 0]  # 0.4 for 1
    assert fitting.choose(cost, lost, 10) == [1, 1, 0]  # 0.8 for 7 does not fit
    assert fitting.choose(cost, lost, 11) == [2, 1, 0]
    assert fitting.choose(cost, lost, 100) == [2, 2, 0]  # what gains nothing is not bought


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_keeps_to_its_room_and_is_near_the_best(seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    cost = torch.tensor([0.1, 0.2, 0.3, 0.5, 1.0]) * torch.rand(5, 1, generator=drawn).add(0.5)
    kept = torch.rand(5, 5, generator=drawn).sort(1).values
    every = list(itertools.product(range(5), repeat=5))
    for room in (0.8, 1.0, 2.0, 4.0):
        found = fitting.choose(cost, 1 - kept, room)
        assert float(cost[range(5), found].sum()) <= room + 1e-6
        value = float(kept[range(5), found].sum())
        best = max(
            float(kept[range(5), some].sum()) for some in every if float(cost[range(5), list(some)].sum()) <= room
        )
        assert value >= 0.85 * best


def test_heads_that_see_the_same_share_a_branch() -> None:
    pattern = fitting.joined([(Window(3), Prefix(4)), (Dense(),), (Window(3), Prefix(4), Strided(8))])
    assert pattern == Pattern(
        [Window(3, heads=[0, 2]), Prefix(4, heads=[0, 2]), Dense(heads=[1]), Strided(8, heads=[2])]
    )
    assert fitting.joined([(Window(3),)] * 2) == Pattern([Window(3)])


@pytest.mark.parametrize("by", ["loss", "mass"])
def test_a_fit_keeps_to_its_budget_and_leaves_layers_with_a_pattern_alone(by: str) -> None:
    own = DilatedPattern.longnet([32, 96], [1, 4])
    model = Plain(lm((ALL, own, DilatedPattern.longnet([4096], [1])), depth=3))
    shares: list[float] = []
    found = fitting.fit(model, TOKENS, 0.4, by, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert found.patterns[1] == own
    pairs, dense = (
        sum(x.pairs(N, 4, num_kv_heads=2, is_causal=True) for x in some) for some in (found.patterns, [ALL] * 3)
    )
    assert 0.3 < pairs / dense <= 0.4
    assert found.share == pytest.approx(pairs / dense)
    for layer in (0, 2):
        mass = attention_masses(model, layer, found.patterns[layer])
        torch.testing.assert_close(torch.tensor(found.mass[layer]).double(), mass, rtol=1e-5, atol=1e-6)
    assert (
        LMConfig.from_dict(model.model.config.to_dict() | {"pattern": written(found.patterns)}).patterns
        == found.patterns
    )
    config = set_pattern(LlamaConfig(**{**SHAPE, "num_hidden_layers": 3}), written(found.patterns))
    assert config.dilated_pattern == written(found.patterns)


def attention_masses(model: Any, wanted: int, pattern: Pattern) -> Tensor:
    found: list[Tensor] = []

    def look(layer: int, _: int, attend: Any) -> None:
        if layer == wanted:
            found.append((attend(pattern)[1] - attend(ALL)[1]).exp().mean((0, 1)))

    with torch.no_grad():
        model.losses(TOKENS, look)
    return found[0].view(2, -1).mean(1).double()


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="no layer sees all of 96 tokens"):
        fitting.fit(Plain(lm(Pattern([Window(3)]))), TOKENS, 0.5)
    for n in (94, 96):  # what is said is enough
        with pytest.raises(ValueError, match=rf"--budget must be at least 0\.1\d* in {n} tokens") as refused:
            fitting.fit(three_heads(n), torch.zeros(1, n), 0.01)
        fitting.fit(three_heads(n), torch.zeros(1, n), float(str(refused.value).split()[5]))
    with pytest.raises(ValueError, match="a vocabulary of 100 has no bytes"):
        Plain(lm(vocab_size=100))
