"""torchscale's LongNetEncoder and LongNetDecoder, with their weights: pre-norm, with sub-LayerNorm, GELU.

Legend: tokens (B, N) integers; x (B, N, C).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention.backends.choose import Backend
from dilated_attention.checks import checked_probability
from dilated_attention.models import weights
from dilated_attention.models.layers import Sequences, stacked
from dilated_attention.pattern import DilatedPattern, Pattern
from dilated_attention.resolve import check_backend

FIRST_POSITION = 2  # of the table of position embeddings; rows 0 and 1 are not used
LONGVIT_SEGMENTS = {
    1024: (64, 128, 256, 512, 1024),
    4096: (1024, 2048, 4096, 8192, 16384),
    8192: (1024, 4096, 8192, 16384, 65536),
    16384: (1024, 4096, 16384, 65536, 262144),
    32768: (1024, 4096, 32768, 262144, 1048576),
}  # by the side of the image in pixels


class LongNet(nn.Module):
    """Loads weights of torchscale, and runs them: what encoder and decoder of this module share."""

    is_causal = False

    def __init__(
        self, state: weights.State, num_heads: int, pattern: Pattern, *, scale_embedding: bool = False,
        dropout: float = 0.0, drop_path_rate: float = 0.0, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        """Makes the parts that ``state`` has weights for. `from_torchscale` also loads them."""
        super().__init__()
        ffn_dim, embed_dim = weights.matrix(state, "layers.0.ffn.fc1.weight", "the state dict")
        self.embed_scale = math.sqrt(embed_dim) if scale_embedding else 1.0
        self.dropout = checked_probability(dropout, "dropout")
        self.backend: Backend = backend
        check_backend(backend)
        self.layers = stacked(
            weights.depth(state, "layers."), drop_path_rate, embed_dim, num_heads, ffn_dim, pattern,
            dropout=dropout, is_causal=self.is_causal,
            xpos=self.is_causal and "layers.0.self_attn.xpos.scale" in state,  # which is for causal models
        )  # fmt: skip
        self.embed_tokens, self.embed_positions = (_table(state, f"embed_{of}") for of in ("tokens", "positions"))
        self.layernorm_embedding, self.layer_norm = (
            nn.LayerNorm(embed_dim) if f"{name}.weight" in state else nn.Identity()
            for name in ("layernorm_embedding", "layer_norm")
        )
        self.output_projection = _table(state, "output_projection", lambda rows, c: nn.Linear(c, rows, bias=False))

    @classmethod
    def from_torchscale(
        cls, source: weights.Source, *, num_heads: int, segment_lengths: Iterable[int], dilation_rates: Iterable[int],
        **options: Any,
    ) -> Self:  # fmt: skip
        """Loads the model of a state dict, or of a .safetensors or .pth file, in eval mode.

        ``num_heads``, ``segment_lengths`` and ``dilation_rates`` are those of torchscale's config. ``options``:
        ``scale_embedding`` (the opposite of its ``no_scale_embedding``), ``dropout``, ``drop_path_rate``, ``backend``.
        """
        state, said = weights.read(source)
        pattern = DilatedPattern.torchscale(segment_lengths, dilation_rates)
        model = weights.load(partial(cls, state, num_heads, pattern, **options), state, said)
        tokens, output = model.embed_tokens, model.output_projection
        if tokens is not None and output is not None and torch.equal(tokens.weight, output.weight):
            output.weight = tokens.weight  # as they were shared, so they are trained
        return model.eval()

    def forward(self, tokens: Tensor | None = None, *, embeddings: Tensor | None = None) -> Tensor:
        """Returns logits (B, N, vocabulary), or (B, N, C) of the last layer if the weights have no output projection.

        ``embeddings``: (B, N, C), instead of ``tokens`` (B, N).
        """
        if (tokens is None) == (embeddings is None):
            raise ValueError("give either tokens or embeddings")
        if embeddings is None:
            if self.embed_tokens is None:
                raise ValueError("these weights have no embed_tokens: give embeddings")
            embeddings = self.embed_tokens(tokens)
        x = self.embed_scale * embeddings
        if self.embed_positions is not None:
            room = self.embed_positions.num_embeddings - FIRST_POSITION
            if x.shape[1] > room:
                raise ValueError(f"the position embeddings are for {room} tokens, got {x.shape[1]}")
            x = x + self.embed_positions.weight[FIRST_POSITION : FIRST_POSITION + x.shape[1]]
        x = F.dropout(self.layernorm_embedding(x), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, Sequences(backend=self.backend))
        x = self.layer_norm(x)
        return x if self.output_projection is None else self.output_projection(x)  # type: ignore[no-any-return]


class LongNetEncoder(LongNet):
    """Runs the weights of torchscale's LongNetEncoder. To train a new one, use `models.LongNetEncoder`.

    Examples:
        >>> encoder = models.torchscale.LongNetEncoder.from_torchscale(
        ...     "encoder.pth", num_heads=12, segment_lengths=[2048, 4096], dilation_rates=[1, 2]
        ... )  # doctest: +SKIP
    """


class LongNetDecoder(LongNet):
    """Runs the weights of torchscale's LongNetDecoder: causal, with xPos positions if the weights have them."""

    is_causal = True


def _table(state: weights.State, name: str, kind: Callable[[int, int], Any] = nn.Embedding) -> Any:
    return kind(*weights.matrix(state, f"{name}.weight", "the state dict")) if f"{name}.weight" in state else None


def longvit_encoder(
    source: weights.Source, *, image_size: int, num_heads: int = 16, **options: Any
) -> tuple[LongNetEncoder, dict[str, Tensor]]:
    """Loads the encoder of a LongViT; returns it, and all other weights (embeddings, heads) by their names.

    ``image_size``, the side of the image in pixels, sets the segment lengths: 1024, 4096, 8192, 16384 or 32768. The
    others are arguments of ``from_torchscale``. The encoder takes ``embeddings`` (B, N, C). We had no outputs of the
    released model: only the names of the weights are known to fit.
    """
    if image_size not in LONGVIT_SEGMENTS:
        sizes = ", ".join(map(str, LONGVIT_SEGMENTS))
        raise ValueError(f"image_size must be one that LongViT was made for, {sizes}, got {image_size}")
    state = {re.sub(r"^(module\.)?(backbone\.)?", "", name): x for name, x in weights.read(source)[0].items()}
    layers = {name.removeprefix("encoder."): state.pop(name) for name in [*state] if name.startswith("encoder.")}
    encoder = LongNetEncoder.from_torchscale(
        layers, num_heads=num_heads, segment_lengths=LONGVIT_SEGMENTS[image_size], dilation_rates=(1, 2, 4, 8, 16),
        **options,
    )  # fmt: skip
    return encoder, state
