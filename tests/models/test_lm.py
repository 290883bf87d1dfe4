"""The plain language model: against one with the oracle's attention, alone, packed, over ranks and token by token."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dilated_attention as da
from dilated_attention import DilatedPattern, global_mean_for_ddp, local_positions, reference, shard_sequence
from dilated_attention.models import LMConfig, LongNetEncoder, LongNetLM, shifted, summed_loss, token_losses
from dilated_attention.models.loss import IGNORED
from dilated_attention.models.transformer import SIZES, with_far
from dilated_attention.ranks import pool
from dilated_attention.testing import error
from tests.over_ranks import changed, raised, world

PATTERN = DilatedPattern.longnet([4, 8, 16], [1, 2, 4])
UNION = da.Pattern([da.Window(3), da.Dilated(16, 4), da.Prefix(2), da.Blocks(5, [(6, 1), (2, 4)], heads=[1])])
SHAPE: dict[str, Any] = {"vocab_size": 19, "dim": 24, "depth": 2, "heads": 4, "pattern": PATTERN}
SMALL = LMConfig(**SHAPE)
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "qwen": {
        "kv_heads": 2, "head_dim": 8, "ffn": "swiglu", "ffn_dim": 20, "norm": "rms", "sub_norm": False, "qk_norm": True
    },
    "sinks": {"sinks": True, "tied": False, "kv_heads": 1, "pattern": DilatedPattern.longnet([8, 16], [2, 4])},
    "a pattern per layer": {
        "rotary_base": None, "pattern": (PATTERN, DilatedPattern.head_groups([5, 40], [1, 2]))
    },
    "unions": {
        "kv_heads": 2, "pattern": (UNION, da.Pattern([da.Global([0, 7]), da.Strided(3), da.Window(2)], counts="sum"))
    },
    "near": {"near": 1, "kv_heads": 2, "sinks": True, "pattern": (UNION, PATTERN)},
}  # fmt: skip
ALL = pytest.mark.parametrize("name", OPTIONS)
BOTH = pytest.mark.parametrize("loss", [token_losses, summed_loss])
TOKENS = 37


def small(name: str = "paper", kind: type[Any] = LongNetLM, **more: Any) -> Any:
    torch.manual_seed(0)
    return changed(kind(dataclasses.replace(SMALL, **OPTIONS[name], **more), dtype=torch.float64))


def batch(samples: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(SMALL.vocab_size, (samples, tokens), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return max(error(x, y) for x, y in zip(got, expected, strict=True)) < 1e-11


# --- one device -------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("kind", [LongNetLM, LongNetEncoder])
def test_attention_is_the_oracles(name: str, kind: type[Any]) -> None:
    """States and the gradients of every parameter."""
    model, tokens = small(name, kind), batch()
    calls, is_causal = model.config.calls, kind is LongNetLM

    def oracle(patterns: Any, *rows: Tensor) -> Any:
        return sum((reference.attention(*rows, one, is_causal=is_causal) for one in patterns), ())

    oracles = [partial(oracle, patterns) for patterns in calls]
    states = model.states(tokens, torch.arange(TOKENS), oracles)
    expected = model.head(states) if is_causal else states
    got = model(tokens)
    weight = torch.randn_like(got)
    assert error(got, expected) < 1e-12
    assert same(gradients(model, (got * weight).sum()), gradients(model, (expected * weight).sum()))


@pytest.mark.parametrize("pattern", [PATTERN, UNION, da.Pattern([da.Window(3), da.Strided(3)], counts="sum")], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_far_keys_have_a_learned_weight(pattern: da.Pattern, is_causal: bool) -> None:
    """Against one softmax with the weight of each key, which is little or much; and the gradients, also of these."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, TOKENS, 4, 8, dtype=torch.float64).unbind(0)
    q[:, 5:9] *= 40  # near keys have nearly all weight, or none
    leaves = [q, k, v, torch.tensor([-30.0, -4.0, 0.5, 8.0], dtype=torch.float64)]
    cotangents = torch.randn_like(q), torch.randn_like(q[..., 0])
    calls = dataclasses.replace(SMALL, pattern=pattern, near=1).calls[0]
    nothing = torch.zeros(2, TOKENS, dtype=torch.bool)
    nothing[1, :20] = True  # the first queries of a causal call see no key

    def ours(q: Tensor, k: Tensor, v: Tensor, far: Tensor) -> Any:
        both = [da.dilated_attention(q, k, v, x, is_causal=is_causal, key_padding_mask=nothing, return_lse=True)
                for x in calls]  # fmt: skip
        return with_far(far, *both[0], *both[1])

    def plain(q: Tensor, k: Tensor, v: Tensor, far: Tensor) -> Any:
        every, near = (reference.key_counts(x, TOKENS, 4, nothing, is_causal, 1, q)[0].sum(0) for x in calls)
        weight = near + far.sigmoid()[:, None, None] * (every - near)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
        scores = (scores + weight.clamp(min=1e-300).log()).masked_fill(every == 0, -torch.inf)
        lse = scores.logsumexp(-1).transpose(1, 2)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v), lse

    found = []
    for function in ours, plain:
        for leaf in leaves:
            leaf.requires_grad_()
        out, lse = function(*leaves)
        seen = lse > -torch.inf
        total = (out * cotangents[0]).sum() + (lse * cotangents[1])[seen].sum()
        found.append((seen, out, lse[seen], *torch.autograd.grad(total, leaves)))
    assert torch.equal(found[0][0], found[1][0])
    assert not (is_causal and found[0][0].all())
    for got, expected in zip(found[0][1:], found[1][1:], strict=True):
        assert error(got, expected) < 1e-11


def test_near_branches_that_leave_none_far_are_refused() -> None:
    for near, told in ((3, "near must be less than the number"), (0, "near must be"), (True, "near must be")):
        with pytest.raises((ValueError, TypeError), match=told):
            dataclasses.replace(SMALL, near=near)
    with pytest.raises(ValueError, match="rule 'longnet'"):
        dataclasses.replace(SMALL, pattern=DilatedPattern.torchscale([4, 8], [1, 2]), near=1)


def test_positions_are_relative() -> None:
    """The angles of a model with rotary positions depend on distances alone, a million tokens away as well."""
    model, tokens, places = small(), batch(), torch.arange(TOKENS)
    for positions in (places + 1_000_003, torch.stack([places, places + 5])):
        assert error(model(tokens, positions=positions), model(tokens)) < 1e-9


def states_and_labels(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """States, weight, and labels, some of which are ignored."""
    torch.manual_seed(0)
    states, weight = (torch.randn(*size, 6, dtype=dtype) for size in (shape, (19,)))
    return states, weight, torch.randint(19, shape).masked_fill(torch.rand(shape) < 0.2, IGNORED)


@pytest.mark.parametrize("chunk", [7, 100])
@BOTH
@pytest.mark.parametrize("wanted", [[0, 1], [0], [1]])
def test_losses_in_chunks(chunk: int, loss: Any, wanted: list[int]) -> None:
    """Values, and gradients of what wants them."""
    states, weight, labels = states_and_labels(2, 11)
    leaves = [(states, weight)[index].requires_grad_() for index in wanted]
    expected = F.cross_entropy((states @ weight.T).transpose(1, 2), labels, reduction="none")
    got, factor = loss(states, weight, labels, chunk), torch.randn(2, 11, dtype=torch.float64)
    if loss is summed_loss:
        expected, factor = expected.sum(), factor[0, 0]
    assert error(got, expected) < 1e-12
    assert same(*(list(torch.autograd.grad((x * factor).sum(), leaves)) for x in (got, expected)))
    with torch.no_grad():
        assert error(loss(states, weight, labels, chunk), expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH
def test_the_loss_in_half_precision(dtype: torch.dtype, loss: Any) -> None:
    """Against float64, beside plain PyTorch; as if it were the mean of a million tokens, with easy and hard ones."""
    torch.manual_seed(0)
    states, weight, labels = torch.randn(200, 32), torch.randn(50, 32), torch.randint(50, (200,))
    states[:50] = 0.4 * weight[labels[:50]]  # all but certain of their label

    def plain(states: Tensor, weight: Tensor, *_: Any) -> Tensor:
        logits = states @ weight.T
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")

    def found(loss: Any, kind: torch.dtype = dtype, scale: float = 1.0) -> list[Tensor]:
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in (states, weight)]
        total = loss(*leaves, labels, 64).sum()
        return [total.double(), *(x.double() for x in torch.autograd.grad(total * scale, leaves))]

    exact, theirs, got = found(plain, torch.float64), found(plain), found(loss)
    assert (got[0] - exact[0]).abs() <= 2 * (theirs[0] - exact[0]).abs()
    for ours, other, wanted in zip(got[1:], theirs[1:], exact[1:], strict=True):
        for rows in (slice(50), slice(50, None)):
            assert (ours - wanted)[rows].norm() <= 3 * (other - wanted)[rows].norm()
    assert (found(loss, scale=1e-6)[2] * 1e6 - exact[2]).norm() < 0.015 * exact[2].norm()


def test_losses_of_no_tokens_in_place_and_under_autocast() -> None:
    states, weight, labels = states_and_labels(1, 0)  # as on a rank whose shard is empty
    (dweight,) = torch.autograd.grad(token_losses(states, weight.requires_grad_(), labels).sum(), weight)
    assert not dweight.any()
    states, weight, labels = states_and_labels(5, dtype=torch.float32)
    states.requires_grad_()
    once, twice = token_losses(states, weight, labels), token_losses(states, weight, labels).mul_(2)
    assert error(*(torch.autograd.grad(x.sum(), states)[0] for x in (twice, 2 * once))) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        losses = token_losses(states, weight, labels)
    assert {losses.dtype, torch.autograd.grad(losses.sum(), states)[0].dtype} == {torch.float32}
    rounded = F.cross_entropy((states.bfloat16() @ weight.bfloat16().T).float(), labels, reduction="none")
    assert error(losses, rounded) < 1e-5


@ALL
def test_packed_documents_are_as_each_alone(name: str) -> None:
    model, tokens = small(name), batch(1)
    documents = torch.tensor([0, 5, 5, 22, TOKENS])
    together = model(tokens, cu_seqlens=documents)
    alone = [model(tokens[:, a:b]) for a, b in ((0, 5), (5, 22), (22, TOKENS))]
    assert error(together, torch.cat(alone, 1)) < 1e-12
    assert (shifted(tokens, documents) == IGNORED).nonzero()[:, 1].tolist() == [4, 21, 36]


@pytest.mark.parametrize("name", ["sinks", "unions"])
@torch.no_grad()
def test_a_pooled_embedding_leaves_padding_out(name: str) -> None:
    """Also where it is NaN, and of more tokens than half precision can count."""
    model, tokens = small(name, LongNetEncoder), batch()
    padding = torch.arange(TOKENS) >= torch.tensor([TOKENS, 20])[:, None]
    pooled = model.pooled(tokens, key_padding_mask=padding)
    for sample, length in enumerate((TOKENS, 20)):
        assert error(pooled[sample], model(tokens[sample : sample + 1, :length])[0].mean(0)) < 1e-12
    states = torch.ones(1, 70_000, 8, dtype=torch.float16)
    model.forward = lambda *_, **__: states
    assert model.pooled(states).tolist() == [[1.0] * 8]
    states[:, 5:] = torch.nan
    assert model.pooled(states, key_padding_mask=(torch.arange(70_000) >= 5).unsqueeze(0)).tolist() == [[1.0] * 8]


def test_blocks_are_compiled_once() -> None:
    """fullgraph, for all blocks together; steps that follow compile nothing anew."""
    model, tokens = small("sinks", depth=12), batch()  # more than a function may be compiled for
    expected = model(tokens)
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    for _ in range(3):
        assert error(model(tokens), expected) < 1e-12
    assert len(compiled) == 1
    other, prompts = small("sinks", depth=12), [batch(1, n)[0] for n in (3, 9)]
    for _ in range(2):  # attention with kept rows looks at positions: what is around it is compiled, for all blocks
        assert torch.equal(model.generate_tokens(prompts, 6), other.generate_tokens(prompts, 6))
    assert len(compiled) <= 1 + 2 * 2


# --- what a model is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "millions"), [*zip(SIZES, (124, 354, 757, 2647, 596), strict=True)])
def test_sizes(size: str, millions: int) -> None:
    model = LongNetLM(LMConfig.of(size, PATTERN), device="meta")
    assert round(sum(x.numel() for x in model.parameters()) / 1e6) == millions


def test_the_start_is_magnetos() -> None:
    config = LMConfig(vocab_size=100, dim=64, depth=8, heads=4, kv_heads=2, pattern=PATTERN)
    block: Any = LongNetLM(config).blocks[3]
    gain = math.sqrt(math.log(16))
    q, k, v = block.qkv.weight.split([64, 32, 32])
    for weight, expected in ((q, 1.0), (k, 1.0), (v, gain), (block.out.weight, gain), (block.up.weight, gain)):
        assert weight.std().item() == pytest.approx(expected * math.sqrt(2 / sum(weight.shape)), rel=0.1)


@ALL
def test_a_config_is_written_as_json(name: str) -> None:
    config = dataclasses.replace(SMALL, **OPTIONS[name])
    torchscale = DilatedPattern.torchscale([8], [1], mixing_gradient="detached")
    for pattern, near in ((config.pattern, config.near), (torchscale, None)):
        config = dataclasses.replace(config, pattern=pattern, near=near)
        assert LMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", ["paper", "sinks"])  # tied weights, and others
def test_a_checkpoint_is_loaded(name: str, tmp_path: Path) -> None:
    """By its name, or as the newest of its folder; weights that are one stay one."""
    model, tokens = small(name).float(), batch()
    for step, weights in ((9, {}), (10, model.state_dict())):
        torch.save({"config": model.config.to_dict(), "model": weights, "more": 1}, tmp_path / f"step-{step:08}.pt")
    for path in (tmp_path, str(tmp_path / "step-00000010.pt")):
        found = LongNetLM.from_checkpoint(path)
        assert found.config == model.config
        assert torch.equal(found(tokens), model(tokens))
        assert (found.head.weight is found.embed.weight) == model.config.tied


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    file, good = tmp_path / "step-00000001.pt", {"config": SMALL.to_dict(), "model": small().state_dict()}
    for found, says in (
        (None, "there is no checkpoint at '.*': name a file step-….pt .* or a folder"),
        ({"model": good["model"]}, "step-00000001.pt is not a checkpoint of examples/train_lm.py: it has no 'config'"),
        ({**good, "config": {"width": 3}}, "has no config of a language model: .* unexpected keyword"),
        ({**good, "config": {**good["config"], "depth": 10**12}}, "no config .* 1000000000000 layers"),
        ({**good, "model": "step-00000001.pt"}, "has no weights: its 'model' is of type str"),
        ({**good, "model": dict.fromkeys("ab", torch.zeros(1))}, "does not fit LongNetLM: Missing key"),
        ({**good, "more": Path("x")}, "has more in it than tensors, and is not read"),
    ):
        if found is not None:
            torch.save(found, file)
        with pytest.raises(ValueError, match=says):
            LongNetLM.from_checkpoint(tmp_path)


ENDS = "begin with 0, never fall, and end with 37, the number of tokens"
ROWS = r"must be \(B, n\)"
LABELS = "labels must be from 0 to 18, or -100, got "


def called(name: str, *given: Any, **options: Any) -> Any:
    """Whatever can be refused, by its name."""
    losses = {"token_losses": token_losses, "summed_loss": summed_loss}
    if name in losses:
        return losses[name](torch.zeros(3, 6), torch.zeros(19, 6), *given)
    if name == "shifted":
        return shifted(*given)
    if name == "config":
        return LMConfig(**{**SHAPE, **options})
    if name == "of":
        return LMConfig.of(*given)
    return getattr(small(), name)(*given, **options)


@pytest.mark.parametrize(
    ("name", "given", "options", "says"),
    [
        ("of", ("1T", PATTERN), {}, "unknown size '1T'"),
        ("config", (), {"heads": 5}, "dim must be a multiple of heads"),
        ("config", (), {"ffn": "relu"}, "ffn must be one of gelu, swiglu"),
        ("config", (), {"head_dim": 5}, "even head_dim"),
        ("config", (), {"rotary_base": 0.0}, "rotary_base must be a finite number above 0, or None, got 0.0"),
        ("config", (), {"pattern": (PATTERN,) * 3}, "3 patterns for 2 layers: give one"),
        ("config", (), {"kv_heads": 3}, "cannot be shared evenly"),
        ("config", (), {"depth": 0}, "depth must be 1 or more"),
        ("config", (), {"pattern": None}, "pattern must be a Pattern"),
        ("config", (), {"pattern": da.Pattern([da.Window(3, heads=[4])])}, "for key/value head 4, and there are 4"),
        ("forward", (batch(),), {"cu_seqlens": [0, 5, TOKENS]}, "one row, "),
        ("forward", (batch(),), {"positions": torch.arange(3)}, "positions must be"),
        ("forward", (batch(), batch()[:, 1:]), {}, "labels are"),
        ("forward", (batch(), batch()), {"reduction": "mean"}, "reduction must be 'none' or 'sum', got 'mean'"),
        ("forward", (batch(1),), {"cu_seqlens": [0, 9, 5, 37]}, ENDS),
        ("forward", (batch()[0],), {}, ROWS),
        ("shifted", (batch(1), torch.tensor([0, 5])), {}, ENDS),
        ("shifted", (torch.zeros(3, 24),), {}, ROWS),
        ("token_losses", (torch.tensor([3, 19, -100]),), {}, LABELS + "19"),
        ("summed_loss", (torch.tensor([3, -1, -100]),), {}, LABELS + "-1"),
        ("token_losses", (torch.tensor([3, 1, -100]), 0), {}, "chunk must be 1 or more"),
        ("generate_tokens", ([], 3), {}, r"at least one token, got \[\]"),
        ("generate_tokens", ([[1, 2], [3.0]], 3), {}, r"got \[\[1, 2\], \[3.0\]\]"),
        ("generate_tokens", (batch(), 3), {"top_k": 3}, "give a temperature"),
        ("generate_tokens", (batch(), 3), {"temperature": -1.0}, "temperature must be 0 or more"),
        ("generate_tokens", (batch(), 3), {"temperature": 1.0, "top_p": 0.0}, "top_p must be in"),
        ("generate_tokens", (batch(), 3), {"cuda_graph": True}, "needs a model on CUDA"),
        ("generate_tokens", (batch(), 3), {"stop": 19}, "stop must be a token, below the 19 of the vocabulary, got 19"),
    ],
)
def test_what_is_refused(name: str, given: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        called(name, *given, **options)


def test_labels_of_bytes_and_of_no_tokens() -> None:
    assert shifted(torch.tensor([[7, 255, 3]], dtype=torch.uint8), [0, 0, 2, 3]).tolist() == [[255, IGNORED, IGNORED]]
    assert shifted(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert small("sinks")(batch(1, 0)).shape == (1, 0, 19)  # as on a rank whose shard is empty
    compiled = torch.compile(shifted, fullgraph=True, backend="eager")
    ends = torch.tensor([0, 0, 5, TOKENS])
    assert torch.equal(compiled(batch(1), ends), shifted(batch(1), ends))


@BOTH
@pytest.mark.parametrize("by", [0, 1])
def test_second_derivatives_are_refused(loss: Any, by: int) -> None:
    """Also where the gradient that comes in is a constant, and by one input alone: torch would leave them out."""
    leaves = [torch.ones(rows, 6, requires_grad=True) for rows in (3, 19)]
    total = loss(*leaves, torch.tensor([3, 1, -100])).sum()
    (grad,) = torch.autograd.grad(total, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(grad.square().sum(), leaves[by])


# --- over ranks -------------------------------------------------------------------------------------------------


def over_ranks(name: str) -> list[str]:
    """What differs from one device, on a rank; tokens do not divide evenly."""
    group, model, encoder, tokens = world(), small(name), small(name, LongNetEncoder), batch()
    labels, places = shifted(tokens), {"positions": local_positions(TOKENS, group)}
    losses = model(tokens, labels)
    expected = gradients(model, losses.sum() / (labels != IGNORED).sum())
    shard, mine = shard_sequence(tokens, group), shard_sequence(labels, group)
    got = model(shard, mine, **places, group=group)
    grads = gradients(model, global_mean_for_ddp(got, group, mine != IGNORED))
    for grad in grads:
        torch.distributed.all_reduce(grad)
        grad /= group.size()
    documents = torch.tensor([0, 3, 30, TOKENS])
    starts = shard_sequence(da.models.document_positions(documents)[None], group)
    packed = model(shard[:1], positions=starts, cu_seqlens=documents, group=group)
    whole = model(tokens[:1], cu_seqlens=documents)
    own = {} if group.rank() else places
    right = {
        "losses": error(got, shard_sequence(losses, group)) < 1e-11,
        "gradients": same(grads, expected),
        "no positions": "local_positions" in raised(model, shard, group=group),
        # what one rank alone is refused, the others are told
        "one rank": "local_positions" in raised(model, shard, group=group, **own),
        "one rank of an encoder": "local_positions" in raised(encoder, shard, group=group, **own),
        "packed": error(packed, shard_sequence(whole, group)) < 1e-11,
        "pooled": error(encoder.pooled(shard, **places, group=group), encoder.pooled(tokens)) < 1e-11,
    }
    return [what for what, is_right in right.items() if not is_right]


@pytest.mark.parametrize(("ranks", "name"), [(2, "sinks"), (4, "qwen"), (2, "near")])
def test_losses_and_gradients_are_those_of_one_device(ranks: int, name: str) -> None:
    assert pool(ranks).run(over_ranks, name) == [[]] * ranks


# --- generation -------------------------------------------------------------------------------------------------


def greedy(model: Any, prompt: Tensor, steps: int) -> list[int]:
    """By the whole sequence, over and over."""
    tokens = prompt[None]
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "prefill"), [*[(name, 1000) for name in OPTIONS], ("paper", 6), ("sinks", 1), ("unions", 5)], ids=str
)
def test_tokens_are_those_of_the_whole_sequence(name: str, prefill: int) -> None:
    """Prompts of different lengths; together they go over more than two of the longest segments."""
    model = small(name)
    prompts = [batch(1, n)[0] for n in (3, 17, 9)]
    with torch.no_grad():
        expected = [greedy(model, prompt, 24) for prompt in prompts]
    assert model.generate_tokens([prompt.tolist() for prompt in prompts], 24, prefill=prefill).tolist() == expected


def test_generation_under_autocast() -> None:
    """In the autocast dtype, as the whole sequence: rotary positions make q and k float32 again."""
    model, prompt = small().float(), batch(1, 20)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model.generate_tokens(prompt, 12)
        logits = model(torch.cat((prompt, found), 1))[:, 19:-1].float()
    chosen = logits.gather(2, found.unsqueeze(2)).squeeze(2)
    assert (logits.amax(2) - chosen).max() < 0.05 * logits.std()  # where two tokens are almost alike, either may come


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_cuda_graph_changes_no_token(dtype: torch.dtype) -> None:
    """Layers with patterns of their own, and prompts that end at different places."""
    pattern = (PATTERN, DilatedPattern.head_groups([4, 8], [1, 2]))
    model = small(pattern=pattern).to("cuda", dtype)
    prompts = [batch(1, n)[0].cuda() for n in (3, 17, 9)]
    plain, captured = (model.generate_tokens(prompts, 50, cuda_graph=graph) for graph in (False, None))
    assert captured.tolist() == plain.tolist()
    if dtype is torch.float64:  # which our kernels do not compute in: without a graph, unless one is asked for
        with pytest.raises(ValueError, match="needs a model on CUDA that our own kernels can run"):
            model.generate_tokens(prompts, 50, cuda_graph=True)
    else:
        assert model.generate_tokens(prompts, 50, cuda_graph=True).tolist() == plain.tolist()


def test_drawing() -> None:
    model, prompt = small(), batch(2, 5)

    def drawn(**options: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        return model.generate_tokens(prompt, 20, temperature=5.0, generator=generator, **options).tolist()

    likeliest = model.generate_tokens(prompt, 20).tolist()
    assert drawn() == drawn() == drawn(top_p=1.0, top_k=19) != likeliest
    assert drawn(top_k=1) == drawn(top_p=1e-9) == likeliest


def test_a_token_that_stops() -> None:
    model, prompt = small(), batch(2, 5)
    plain = model.generate_tokens(prompt, 40)
    stop = int(plain[0, 2])
    for row, free in zip(model.generate_tokens(prompt, 40, stop=stop).tolist(), plain.tolist(), strict=True):
        end = min(len(row), [*free, stop].index(stop) + 1)
        assert row == free[:end] + [stop] * (len(row) - end)
