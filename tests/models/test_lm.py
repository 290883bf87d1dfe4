"""The plain language model: against one with the oracle's attention, alone, packed, over ranks and token by token."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention import DilatedPattern, local_positions, reference, sequence_mean, shard_sequence
from dilated_attention.models import (
    LMConfig,
    LongNetEncoder,
    LongNetLM,
    document_positions,
    shifted,
    summed_loss,
    token_losses,
)
from dilated_attention.models.loss import IGNORED
from dilated_attention.models.transformer import SIZES
from dilated_attention.ranks import pool
from dilated_attention.testing import error
from tests.over_ranks import changed, raised, world

PATTERN = DilatedPattern.longnet([4, 8, 16], [1, 2, 4])
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
}  # fmt: skip
ALL = pytest.mark.parametrize("name", OPTIONS)
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
    patterns, is_causal = model.config.patterns, kind is LongNetLM

    oracles = [partial(reference.attention, pattern=pattern, is_causal=is_causal) for pattern in patterns]
    states = model.states(tokens, torch.arange(TOKENS), oracles)
    expected = model.head(states) if is_causal else states
    got = model(tokens)
    weight = torch.randn_like(got)
    assert error(got, expected) < 1e-12
    assert same(gradients(model, (got * weight).sum()), gradients(model, (expected * weight).sum()))


def test_positions_are_relative() -> None:
    """The angles of a model with rotary positions depend on distances alone, a million tokens away as well."""
    model, tokens = small(), batch()
    far = model(tokens, positions=torch.arange(TOKENS) + 1_000_003)
    assert error(far, model(tokens)) < 1e-9
    one_by_one = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS) + 5])
    assert error(model(tokens, positions=one_by_one), model(tokens)) < 1e-9


def states_and_labels(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """States and weight that want gradients, and labels, some of which are ignored."""
    torch.manual_seed(0)
    states, weight = (torch.randn(*size, 6, dtype=dtype).requires_grad_() for size in (shape, (19,)))
    return states, weight, torch.randint(19, shape).masked_fill(torch.rand(shape) < 0.2, IGNORED)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("wanted", [[0, 1], [0], [1]])
def test_losses_in_chunks(chunk: int, wanted: list[int]) -> None:
    """Values and gradients of each loss, and of their sum."""
    states, weight, labels = states_and_labels(2, 11)
    leaves = [(states, weight)[index] for index in wanted]
    for index in {0, 1} - set(wanted):
        (states, weight)[index].requires_grad_(False)
    expected = F.cross_entropy((states @ weight.T).transpose(1, 2), labels, reduction="none")
    got, total = (loss(states, weight, labels, chunk) for loss in (token_losses, summed_loss))
    assert error(got, expected) < 1e-12
    assert error(total, expected.sum()) < 1e-12
    factor = torch.randn(2, 11, dtype=torch.float64)
    assert same(*(list(torch.autograd.grad((x * factor).sum(), leaves, retain_graph=True)) for x in (got, expected)))
    assert same(*(list(torch.autograd.grad(-0.7 * x.sum(), leaves)) for x in (total, expected)))
    with torch.no_grad():
        assert torch.equal(
            summed_loss(states, weight, labels, chunk), token_losses(states, weight, labels, chunk).sum()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_in_half_precision(dtype: torch.dtype) -> None:
    """Against float64, beside plain PyTorch; as if it were the mean of a million tokens, with easy and hard ones."""
    torch.manual_seed(0)
    states, weight, labels = torch.randn(200, 32), torch.randn(50, 32), torch.randint(50, (200,))
    states[:50] = 0.4 * weight[labels[:50]]  # all but certain of their label

    def plain(states: Tensor, weight: Tensor, *_: Any) -> Tensor:
        logits = states @ weight.T
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="none")

    def found(losses: Any, kind: torch.dtype = dtype, scale: float = 1.0) -> list[Tensor]:
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in (states, weight)]
        out = losses(*leaves, labels, 64)
        return [out.double(), *(x.double() for x in torch.autograd.grad(out.sum() * scale, leaves))]

    exact, theirs, got, total = found(plain, torch.float64), found(plain), found(token_losses), found(summed_loss)
    assert (total[0] - exact[0].sum()).abs() <= 2 * (theirs[0].sum() - exact[0].sum()).abs()
    assert all(map(torch.equal, total[1:], got[1:]))
    for ours, other, wanted, most in zip(got, theirs, exact, (2, 3, 3), strict=True):
        for rows in (slice(50), slice(50, None)):
            assert (ours - wanted)[rows].norm() <= most * (other - wanted)[rows].norm()
    for loss in (token_losses, summed_loss):
        assert (found(loss, scale=1e-6)[2] * 1e6 - exact[2]).norm() < 0.015 * exact[2].norm()


def test_losses_of_no_tokens_in_place_and_under_autocast() -> None:
    states, weight, labels = states_and_labels(1, 0)  # as on a rank whose shard is empty
    for grad, x in zip(
        torch.autograd.grad(token_losses(states, weight, labels).sum(), [states, weight]), (states, weight), strict=True
    ):
        assert torch.equal(grad, torch.zeros_like(x))
    states, weight, labels = states_and_labels(5, dtype=torch.float32)
    expected = torch.autograd.grad(2 * token_losses(states, weight, labels).sum(), states)[0]
    assert error(torch.autograd.grad(token_losses(states, weight, labels).mul_(2).sum(), states)[0], expected) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        losses = token_losses(states, weight, labels)
    assert {losses.dtype, *(x.dtype for x in torch.autograd.grad(losses.sum(), [states, weight]))} == {torch.float32}
    rounded = F.cross_entropy((states.bfloat16() @ weight.bfloat16().T).float(), labels, reduction="none")
    assert error(losses, rounded) < 1e-5


def test_losses_are_those_of_the_logits_and_checkpointing_changes_nothing() -> None:
    model, tokens = small("sinks"), batch()
    labels = shifted(tokens)
    assert (labels[:, -1] == IGNORED).all()
    expected = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
    plain = model(tokens, labels)
    assert error(plain, expected) < 1e-12
    model.checkpointing = True
    again = model(tokens, labels)
    assert torch.equal(again, plain)
    assert same(gradients(model, again.mean()), gradients(model, plain.mean()))


@ALL
def test_packed_documents_are_as_each_alone(name: str) -> None:
    model, tokens = small(name), batch(1)
    documents = torch.tensor([0, 5, 5, 22, TOKENS])
    together = model(tokens, cu_seqlens=documents)
    alone = [model(tokens[:, a:b]) for a, b in ((0, 5), (5, 22), (22, TOKENS))]
    assert error(together, torch.cat(alone, 1)) < 1e-12
    assert (shifted(tokens, documents) == IGNORED).nonzero()[:, 1].tolist() == [4, 21, 36]


@torch.no_grad()
def test_a_pooled_embedding_leaves_padding_out() -> None:
    """Also where it is NaN, and of more tokens than half precision can count."""
    model, tokens = small("sinks", LongNetEncoder), batch()
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


@pytest.mark.parametrize(
    ("size", "millions"), [("125M", 124), ("350M", 354), ("760M", 757), ("2.7B", 2647), ("0.6B", 596)]
)
def test_sizes(size: str, millions: int) -> None:
    model = LongNetLM(LMConfig.of(size, PATTERN), device="meta")
    assert round(sum(x.numel() for x in model.parameters()) / 1e6) == millions
    assert set(SIZES) == {"125M", "350M", "760M", "2.7B", "0.6B"}


def test_the_start_is_magnetos() -> None:
    config = LMConfig(vocab_size=100, dim=64, depth=8, heads=4, kv_heads=2, pattern=PATTERN)
    block: Any = LongNetLM(config).blocks[3]
    gain = math.sqrt(math.log(16))
    q, k, v = block.qkv.weight.split([64, 32, 32])
    for weight, expected in ((q, 1.0), (k, 1.0), (v, gain), (block.out.weight, gain), (block.up.weight, gain)):
        rows, columns = weight.shape
        assert weight.std().item() == pytest.approx(expected * math.sqrt(2 / (rows + columns)), rel=0.1)
    assert isinstance(block.inner_norm, nn.LayerNorm)
    assert isinstance(block.ffn_inner_norm, nn.LayerNorm)


@ALL
def test_a_config_is_written_as_json(name: str) -> None:
    config = dataclasses.replace(SMALL, **OPTIONS[name])
    for pattern in (config.pattern, DilatedPattern.torchscale([8], [1], mixing_gradient="detached")):
        config = dataclasses.replace(config, pattern=pattern)
        assert LMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads": 5}, "dim must be a multiple of heads"),
        ({"ffn": "relu"}, "ffn must be one of gelu, swiglu"),
        ({"norm": "batch"}, "norm must be one of"),
        ({"head_dim": 5}, "even head_dim"),
        ({"rotary_base": 0.0}, "rotary_base must be a finite number above 0, or None, got 0.0"),
        ({"pattern": (PATTERN,) * 3}, "got 3 for 2 layers"),
        ({"kv_heads": 3}, "cannot be shared evenly"),
        ({"depth": 0}, "depth must be 1 or more"),
        ({"pattern": None}, "pattern must be a DilatedPattern"),
    ],
)
def test_a_config_is_checked(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        LMConfig(**{**SHAPE, **changes})


ENDS = "begin with 0, never fall, and end with 37, the number of tokens"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda _, __: LMConfig.of("1T", PATTERN), "unknown size '1T'"),
        (lambda model, tokens: model(tokens, cu_seqlens=[0, 5, TOKENS]), "one row, "),
        (lambda model, tokens: model(tokens, positions=torch.arange(3)), "positions must be"),
        (lambda model, tokens: model(tokens, tokens[:, 1:]), "labels are"),
        (
            lambda model, tokens: model(tokens, tokens, reduction="mean"),
            "reduction must be 'none' or 'sum', got 'mean'",
        ),
        *(
            (lambda model, tokens, ends=ends: model(tokens[:1], cu_seqlens=ends), ENDS)
            for ends in ([0, 5], [0, 9, 5, 37])
        ),
        *((lambda _, tokens, ends=ends: shifted(tokens[:1], ends), ENDS) for ends in ([1, 37], torch.tensor([0, 5]))),
        (lambda model, tokens: model(tokens[0]), r"must be \(B, n\)"),
        (lambda _, __: shifted(torch.zeros(3, 24)), r"must be \(B, n\)"),
        *(
            (
                lambda model, tokens, bad=bad, loss=loss: loss(torch.zeros(3, 6), torch.zeros(19, 6), bad[0], bad[1]),
                bad[2],
            )
            for loss in (token_losses, summed_loss)
            for bad in (
                (torch.tensor([3, 19, -100]), 8, "labels must be from 0 to 18, or -100, got 19"),
                (torch.tensor([3, -1, -100]), 8, "labels must be from 0 to 18, or -100, got -1"),
                (torch.tensor([3, 1, -100]), 0, "chunk must be 1 or more"),
                (torch.tensor([3, 1, -100]), 2.5, "chunk must be a whole number"),
            )
        ),
    ],
)
def test_what_is_refused(call: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        call(small(), batch())


def test_labels_of_bytes_and_of_no_tokens() -> None:
    assert shifted(torch.tensor([[7, 255, 3]], dtype=torch.uint8), [0, 0, 2, 3]).tolist() == [[255, IGNORED, IGNORED]]
    assert shifted(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert small("sinks")(batch(1, 0)).shape == (1, 0, 19)  # as on a rank whose shard is empty
    compiled = torch.compile(shifted, fullgraph=True, backend="eager")
    ends = torch.tensor([0, 0, 5, TOKENS])
    assert torch.equal(compiled(batch(1), ends), shifted(batch(1), ends))


@pytest.mark.parametrize("loss", [token_losses, summed_loss])
@pytest.mark.parametrize("by", [0, 1])
def test_second_derivatives_are_refused(loss: Any, by: int) -> None:
    """Also where the gradient that comes in is a constant, and by one input alone: torch would leave them out."""
    leaves = torch.ones(3, 6, requires_grad=True), torch.ones(19, 6, requires_grad=True)
    total = loss(*leaves, torch.tensor([3, 1, -100])).sum()
    (grad,) = torch.autograd.grad(total, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(grad.square().sum(), leaves[by])


# --- over ranks -------------------------------------------------------------------------------------------------


def over_ranks(name: str) -> list[str]:
    """What differs from one device, on a rank; tokens do not divide evenly."""
    group, model, tokens = world(), small(name), batch()
    labels = shifted(tokens)
    losses = model(tokens, labels)
    expected = gradients(model, losses.sum() / (labels != IGNORED).sum())
    shard, mine = shard_sequence(tokens, group), shard_sequence(labels, group)
    got = model(shard, mine, positions=local_positions(TOKENS, group), group=group)
    loss = sequence_mean(got, group, mine != IGNORED)
    grads = gradients(model, loss)
    for grad in grads:
        torch.distributed.all_reduce(grad)
        grad /= group.size()
    found = ["losses"] if error(got, shard_sequence(losses, group)) > 1e-11 else []
    found += [] if same(grads, expected) else ["gradients"]
    try:
        model(shard, group=group)
        found.append("positions")
    except ValueError as refused:
        found += [] if "local_positions" in str(refused) else ["the error"]
    own = {} if group.rank() else {"positions": local_positions(TOKENS, group)}
    for one in (model, small(name, LongNetEncoder)):  # what one rank alone is refused, the others are told
        found += [] if "local_positions" in raised(one, shard, group=group, **own) else ["an error of one rank"]
    documents = torch.tensor([0, 3, 30, TOKENS])
    places = shard_sequence(document_positions(documents)[None], group)
    packed = model(shard[:1], positions=places, cu_seqlens=documents, group=group)
    whole = model(tokens[:1], cu_seqlens=documents)
    found += [] if error(packed, shard_sequence(whole, group)) < 1e-11 else ["packed"]
    encoder = small(name, LongNetEncoder)
    pooled = encoder.pooled(shard, positions=local_positions(TOKENS, group), group=group)
    return found + ([] if error(pooled, encoder.pooled(tokens)) < 1e-11 else ["pooled"])


@pytest.mark.parametrize(("ranks", "name"), [(2, "sinks"), (4, "qwen")])
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
    ("name", "prefill"), [*[(name, 1000) for name in OPTIONS], ("paper", 6), ("sinks", 1)], ids=str
)
def test_tokens_are_those_of_the_whole_sequence(name: str, prefill: int) -> None:
    """Prompts of different lengths; together they go over more than two of the longest segments."""
    model = small(name)
    prompts = [batch(1, n)[0] for n in (3, 17, 9)]
    with torch.no_grad():
        expected = [greedy(model, prompt, 24) for prompt in prompts]
    assert model.generate_tokens(prompts, 24, prefill=prefill).tolist() == expected
    assert model.generate_tokens([prompt.tolist() for prompt in prompts], 24).tolist() == expected


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
        with pytest.raises(ValueError, match="needs our own kernels"):
            model.generate_tokens(prompts, 50, cuda_graph=True)
    else:
        assert model.generate_tokens(prompts, 50, cuda_graph=True).tolist() == plain.tolist()


def test_drawing() -> None:
    model, prompt = small(), batch(2, 5)
    drawn = [
        model.generate_tokens(
            prompt, 20, temperature=5.0, generator=torch.Generator().manual_seed(3), **options
        ).tolist()
        for options in ({}, {}, {"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1.0, "top_k": 19})
    ]
    likeliest = model.generate_tokens(prompt, 20).tolist()
    assert drawn[0] == drawn[1] == drawn[4] != likeliest
    assert drawn[2] == drawn[3] == likeliest


def test_a_token_that_stops() -> None:
    model, prompt = small(), batch(2, 5)
    plain = model.generate_tokens(prompt, 40)
    stop = int(plain[0, 2])
    found = model.generate_tokens(prompt, 40, stop=stop)
    for row, free in zip(found.tolist(), plain.tolist(), strict=True):
        end = free.index(stop) + 1 if stop in free else len(free)
        assert row[:end] == free[: min(end, len(row))]
        assert set(row[end:]) <= {stop}


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "at least one token"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, "at least one token"),
        (torch.zeros(1, 3), {}, "token ids"),
        (batch(1, 3)[0], {}, r"must be \(B, n\) token ids"),
        ("text", {}, "turn it into tokens"),
        (torch.tensor(3), {}, "at least one token"),
        ([[1, 2], [3.0]], {}, "got torch.float32"),
        (batch(1, 3), {"top_k": 3}, "give a temperature"),
        (batch(1, 3), {"temperature": -1.0}, "temperature must be 0 or more"),
        (batch(1, 3), {"temperature": 1.0, "top_p": 0.0}, "top_p must be in"),
        (batch(1, 3), {"cuda_graph": True}, "needs a model on CUDA"),
        (batch(1, 3), {"stop": 19}, "stop must be a token, below the 19 of the vocabulary, got 19"),
        (batch(1, 3), {"stop": -1}, "stop must be 0 or more, got -1"),
        (batch(1, 3), {"stop": 1.5}, "stop must be a whole number, got 1.5"),
    ],
)
def test_generation_is_checked(prompt: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        small().generate_tokens(prompt, 3, **options)
