"""LongNetLM, a decoder-only language model, and LongNetEncoder, for embeddings: plain PyTorch.

Legend: tokens, labels (B, n); states (B, n, E); logits (B, n, V); positions (n,) or (B, n). Over a group of ranks, n is
this rank's part of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dilated_attention import functional
from dilated_attention.call import CuSeqlens, checked_cu_seqlens
from dilated_attention.context_parallel import Over
from dilated_attention.models import generate, weights
from dilated_attention.models.layers import Sequences, attend_each, mean_of, process_group
from dilated_attention.models.loss import summed_loss, token_losses
from dilated_attention.models.transformer import LMConfig, Trunk
from dilated_attention.resolve import cu_seqlens_on_host


class LongNetLM(Trunk):
    """A decoder-only language model with dilated attention. ``config``: for example ``LMConfig.of("125M", pattern)``.

    Its blocks are those of MAGNETO (sub-layer norm) unless the config says otherwise. ``checkpointing``, an attribute,
    computes each block again in the backward pass: True, a number of bytes for attention that is kept, or "auto".

    Examples:
        >>> from dilated_attention.models import LMConfig, LongNetLM
        >>> pattern = da.DilatedPattern.longnet([64, 256], [1, 4])
        >>> model = LongNetLM(LMConfig(vocab_size=256, dim=32, depth=2, heads=4, pattern=pattern))
        >>> tokens = torch.randint(256, (1, 100))
        >>> model(tokens).shape  # logits
        torch.Size([1, 100, 256])
        >>> model(tokens[:, :-1], tokens[:, 1:]).mean().backward()  # the loss of each token
        >>> model.generate_tokens(tokens, max_new_tokens=5).shape
        torch.Size([1, 5])
    """

    def __init__(self, config: LMConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False, device=device, dtype=dtype)
        if config.tied:
            self.head.weight = self.embed.weight
        else:
            nn.init.normal_(self.head.weight, std=config.dim**-0.5)

    @classmethod
    def from_checkpoint(cls, path: weights.File) -> Self:
        """Loads what ``examples/train_lm.py`` wrote: a file, or the newest one in a folder.

        No code in it runs. The model is on torch's default device, and in its default dtype.
        """
        return cls.of_checkpoint(*weights.checkpoint(path))

    @classmethod
    def of_checkpoint(cls, found: Mapping[str, Any], said: str) -> Self:
        given, state = found["config"], found["model"]
        if not isinstance(state, Mapping):  # a name would be that of another file
            raise ValueError(f"{said} has no weights: its 'model' is of type {type(state).__name__}")
        if isinstance(given, Mapping) and given.get("depth", 0) not in range(len(state) + 1):  # none is made in vain
            raise ValueError(f"{said} has no config of a language model: {given['depth']!r} layers of fewer weights")
        try:
            config = LMConfig.from_dict(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{said} has no config of a language model: {weights.short(error)}") from error
        model = weights.load(lambda: cls(config), weights.read(state)[0], said)
        if config.tied:  # each weight was loaded under its own name
            model.head.weight = model.embed.weight
        return model

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, *, positions: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None, group: Over = None, chunk: int = 8192,
        reduction: Literal["none", "sum"] = "none",
    ) -> Tensor:  # fmt: skip
        """Returns logits (B, n, vocab_size), or with labels the loss of each token, (B, n), or their sum.

        With labels, logits are computed some tokens at a time, to save memory.

        Args:
            tokens: (B, n) ids, or (B, n, E) embedded.
            labels: (B, n), the next token of each, shifted already; -100 where there is none: the loss is then 0.
            positions: (n,) or (B, n) integers. By default 0 to n - 1, from 0 again in each packed document. Over a
                group, give ``local_positions(N, group)`` for N tokens on all ranks together, or for packed documents
                this rank's shard of ``document_positions(cu_seqlens)``.
            cu_seqlens: the start of each packed document, then the end of the last, for tokens (1, n). No document sees
                another.
            group: the ranks that share the sequence; tokens are then this rank's shard of it.
            chunk: with labels, how many tokens have their logits computed at a time.
            reduction: with labels, "sum" gives the sum of the losses, in less time: no logits are computed again.
        """
        if reduction not in ("none", "sum"):
            raise ValueError(f"reduction must be 'none' or 'sum', got {reduction!r}")
        states = states_of(self, True, tokens, positions, cu_seqlens, group)
        if labels is None:
            return self.head(states)  # type: ignore[no-any-return]
        loss = token_losses if reduction == "none" else summed_loss
        return loss(states, self.head.weight, labels, chunk)

    generate_tokens = generate.generate_tokens


class LongNetEncoder(Trunk):
    """A bidirectional encoder with the blocks of `LongNetLM`, for embeddings of tokens or of whole sequences.

    Arguments are those of `LongNetLM`. To load weights of torchscale, use `models.torchscale.LongNetEncoder`.

    Examples:
        >>> from dilated_attention.models import LMConfig, LongNetEncoder
        >>> pattern = da.DilatedPattern.longnet([64, 256], [1, 4])
        >>> model = LongNetEncoder(LMConfig(vocab_size=256, dim=32, depth=2, heads=4, pattern=pattern))
        >>> tokens = torch.randint(256, (2, 100))
        >>> model(tokens).shape, model.pooled(tokens).shape
        (torch.Size([2, 100, 32]), torch.Size([2, 32]))
    """

    def forward(
        self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, positions: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None, group: Over = None,
    ) -> Tensor:  # fmt: skip
        """Returns the state of each token, (B, n, E).

        ``key_padding_mask``: (B, n) bool, True = ignore. Pad on the right: the pattern begins at the first column. The
        other arguments are those of `LongNetLM`.
        """
        return states_of(self, False, tokens, positions, cu_seqlens, group, key_padding_mask)

    def pooled(self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Returns the mean of the states of each sample, (B, E), without padding.

        Over a group it is the mean over the whole sequence. ``options``: positions and group.
        """
        if options.get("cu_seqlens") is not None:
            raise ValueError("pooled() takes no cu_seqlens: call the model, and average the states of each document")
        states = self(tokens, key_padding_mask=key_padding_mask, **options)
        return mean_of(states, key_padding_mask, process_group(options.get("group")))


def states_of(
    model: Trunk, is_causal: bool, tokens: Tensor, positions: Tensor | None, cu_seqlens: CuSeqlens | None,
    group: Over, padding: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The states of whole sequences or documents, or of this rank's shards of them."""
    with functional.errors_reach_group(group, tokens):
        packed = None if cu_seqlens is None else cu_seqlens_on_host(cu_seqlens)  # where every layer reads them
        positions = _positions(tokens, positions, packed, group)
    given = is_causal, Sequences(packed, group, model.backend), padding
    return model.states(tokens, positions, [partial(attend_each, calls, *given) for calls in model.config.calls])


def _positions(tokens: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, group: Over) -> Tensor:
    """Those given, or those of whole sequences or documents."""
    samples, n = checked_tokens(tokens).shape[:2]
    if positions is not None:
        if positions.shape not in ((n,), (samples, n)):
            raise ValueError(f"positions must be ({n},) or ({samples}, {n}), got {tuple(positions.shape)}")
        return positions
    ranks = process_group(group)
    if ranks is not None and ranks.size() > 1:
        raise ValueError("over a group, pass positions=local_positions(N, group), with N tokens on all ranks together")
    if cu_seqlens is None:
        return torch.arange(n, device=tokens.device)
    checked_cu_seqlens(cu_seqlens, n)
    return document_positions(cu_seqlens, tokens.device)


def checked_tokens(tokens: Tensor) -> Tensor:
    if tokens.dim() != (3 if tokens.is_floating_point() else 2):
        raise ValueError(f"tokens must be (B, n) ids or (B, n, E) embedded, got {tokens.dtype} {tuple(tokens.shape)}")
    return tokens


def document_positions(cu_seqlens: CuSeqlens, device: torch.device | str | None = None) -> Tensor:
    """Returns the position of each packed token in its own document, (T,).

    Examples:
        >>> models.document_positions([0, 3, 5])
        tensor([0, 1, 2, 0, 1])
    """
    packed = cu_seqlens_on_host(cu_seqlens)
    checked_cu_seqlens(packed, None)
    if device is None and isinstance(cu_seqlens, Tensor):
        device = cu_seqlens.device
    return within(packed, torch.arange(int(packed[-1]))).to(device)


def within(cu_seqlens: Tensor, place: Tensor) -> Tensor:
    """The position in its document of each token of a packed row, for places (n,) in that row."""
    return place - cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1]
