"""Generation with kept rows: the prompt in chunks, then token by token, in a CUDA graph where there is one.

Legend: tokens (B, n); logits (B, V); at (B,) the position of the next token of each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention.checks import check_int
from dilated_attention.models.transformer import Trunk
from dilated_attention.pattern import Pattern
from dilated_attention.resolve import computed_dtype
from dilated_attention.streaming.kv_cache import KVCache
from dilated_attention.streaming.slots import Slot

Prompts = Tensor | Sequence[Tensor | Sequence[int]]  # one each, perhaps of different lengths
BEGIN = 256  # the token before the first byte of a text, for a model of bytes
WARM = 3  # steps before a CUDA graph is captured: kernels are compiled and memory is found
LOOK = 16  # steps after which the host looks whether all samples have ended


class Decoder:
    """A model with its kept rows, and the buffers of a step. It has seen nothing yet."""

    def __init__(self, model: Any, tokens: Tensor, room: int) -> None:
        """``room``: of how many tokens the longest sample will be."""
        self.model, config, weight = model, model.config, model.embed.weight
        like = weight.new_empty(len(tokens), 0, config.kv_heads, config.head_dim, dtype=computed_dtype(weight))
        self.kept = [[KVCache(pattern, like, room) for pattern in calls] for calls in config.calls]
        self.every = [kept for layer in self.kept for kept in layer]
        self.at, self.token = tokens.new_zeros(len(tokens)), tokens.new_zeros(len(tokens), 1)  # the input of a step
        self.logits = torch.empty(0)  # its output
        self.count: Tensor | None = None  # of a chunk of the prompt: the real tokens of each sample
        self.slots: dict[Pattern, list[Slot]] = {}  # of a step's tokens
        self.graph: torch.cuda.CUDAGraph | None = None

    def attend_each(self, layer: list[KVCache], *rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for kept in layer for x in self.attend(kept, *rows))

    def attend(self, kept: KVCache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        backend = self.model.backend
        if self.count is None:  # a step: its token is kept at once
            return kept.attend(q, k, v, self.at, backend=backend, slots=self.slots[kept.pattern])
        found = kept.attend(q, k, v, self.at, self.count, backend=backend)
        kept.keep(k, v, self.at, self.count)
        return found

    def states(self, tokens: Tensor) -> Any:
        positions = self.at.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        return self.model.states(
            tokens, positions, [partial(self.attend_each, layer) for layer in self.kept], apart=True
        )

    def prefill(self, tokens: Tensor, lengths: Tensor, chunk: int) -> None:
        """Take the prompts, padded at their ends; the logits are those after the last token of each."""
        last: Any = 0.0
        for part in torch.split(tokens, chunk, dim=1):
            self.count = (lengths - self.at).clamp(0, part.shape[1])
            found = self.states(part)[torch.arange(len(tokens), device=tokens.device), (self.count - 1).clamp(min=0)]
            last = torch.where((self.count > 0).unsqueeze(1), found, last)
            self.at += self.count
        self.count = None
        self.logits = self.model.head(last)

    def step(self) -> None:
        """One token per sample. In place, as a CUDA graph needs it."""
        for kept in {kept.pattern: kept for kept in self.every}.values():  # once for all layers that are alike
            self.slots[kept.pattern] = kept.slots(self.at)
        logits = self.model.head(self.states(self.token)[:, -1])
        self.at += 1
        self.logits.copy_(logits)

    def advance(self, token: Tensor, captures: bool) -> None:
        """The step with these tokens. ``captures``: as a CUDA graph, which is captured the first time."""
        if captures and self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()  # nothing runs yet
        self.token.copy_(token)
        (self.step if self.graph is None else self.graph.replay)()


@torch.no_grad()
def generate_tokens(
    model: Trunk, prompt: Prompts, max_new_tokens: int, *, temperature: float = 0.0,
    top_k: int | None = None, top_p: float | None = None, stop: int | None = None,
    generator: torch.Generator | None = None, prefill: int = 32_768, cuda_graph: bool | None = None,
) -> Tensor:  # fmt: skip
    """Generates up to ``max_new_tokens`` tokens for each prompt.

    It returns the new tokens alone, (B, max_new_tokens), or fewer columns if all samples have ended. Memory does not
    grow with the length: a layer keeps only the key and value rows that later tokens can see.

    Args:
        model: a LongNetLM.
        prompt: (B, n) token ids, or a list of 1-D tensors or lists of different lengths.
        max_new_tokens: how many tokens each sample gets at most.
        temperature: 0 takes the likeliest token; others divide the logits before a token is drawn.
        top_k, top_p: draw among the k likeliest tokens, or those whose probabilities add up to top_p.
        stop: the token that ends a sample; the rest of its row is that token again.
        generator: the random generator for drawing tokens.
        prefill: how many tokens of the prompt are taken at a time.
        cuda_graph: whether a step is captured as a CUDA graph; by default on CUDA, where our own kernels can run.

    Examples:
        >>> pattern = da.DilatedPattern.longnet([64, 256], [1, 4])
        >>> model = models.LongNetLM(models.LMConfig(vocab_size=256, dim=32, depth=2, heads=4, pattern=pattern))
        >>> models.generate.generate_tokens(model, torch.randint(256, (2, 100)), 5, temperature=1.0, top_k=10).shape
        torch.Size([2, 5])
    """
    tokens, lengths = padded(prompt, model.embed.weight.device)
    steps = check_int("max_new_tokens", max_new_tokens)
    if stop is not None and check_int("stop", stop, least=0) >= model.embed.num_embeddings:
        raise ValueError(f"stop must be a token, below the {model.embed.num_embeddings} of the vocabulary, got {stop}")
    choose = chooser(temperature, top_k, top_p, generator)
    decoder = Decoder(model, tokens, tokens.shape[1] + steps)
    captures = tokens.is_cuda and all(kept.is_on_device(model.config.heads, model.backend) for kept in decoder.every)
    if cuda_graph and not captures:
        raise ValueError("cuda_graph=True needs a model on CUDA that our own kernels can run: see da.explain()")
    captures = captures and cuda_graph is not False
    decoder.prefill(tokens, lengths, check_int("prefill", prefill))
    found, ended = tokens.new_empty(len(tokens), steps), torch.zeros_like(tokens[:, :1], dtype=torch.bool)
    for step in range(steps):
        token = choose(decoder.logits)
        if stop is not None:
            token = token.masked_fill(ended, stop)
            ended |= token == stop
        found[:, step : step + 1] = token
        if stop is not None and step % LOOK == 0 and bool(ended.all()):
            return found[:, : step + 1]
        if step + 1 < steps:
            decoder.advance(token, captures and step >= WARM)
    return found


def padded(prompt: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """The prompts as one tensor, filled up at their ends, and their lengths."""
    prompts = [torch.as_tensor(ids, device=device) for ids in prompt]
    if not prompts or any(ids.dim() != 1 or not len(ids) or ids.is_floating_point() for ids in prompts):
        wanted = "(B, n) token ids, or a list of 1-D tensors or lists, each of at least one token"
        raise ValueError(f"prompt must be {wanted}, got {prompt!r:.50}")
    lengths = torch.tensor([*map(len, prompts)], device=device)
    return nn.utils.rnn.pad_sequence(prompts, batch_first=True).long(), lengths


def chooser(
    temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Callable[[Tensor], Tensor]:
    """What takes the next token of each sample, (B, 1), from logits."""
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if not temperature and (top_k is not None or top_p is not None):
        raise ValueError("top_k and top_p have no effect at temperature 0: give a temperature above 0")
    if top_k is not None:
        check_int("top_k", top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")

    def choose(logits: Tensor) -> Tensor:
        if not temperature:
            return logits.argmax(-1, keepdim=True)
        logits = logits.float() / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        if top_p is not None:
            ordered, index = logits.sort(descending=True)
            shares = ordered.softmax(-1)
            beyond = shares.cumsum(-1) - shares >= top_p  # the likeliest one stays
            logits = logits.scatter(-1, index, ordered.masked_fill(beyond, -torch.inf))
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    return choose
