"""The layer that all released LongNet models share: pre-norm, with one more LayerNorm inside each half (sub-LayerNorm).

The names of the modules are those of the released weights; LoRA tools match the same names.

Legend: x (B, N, C) with N tokens of C channels; H heads of D channels. Packed: B is 1, and sequences share the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention import functional
from dilated_attention.backends.choose import Backend
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import CuSeqlens, accumulate_dtype
from dilated_attention.checks import check_int, checked_probability
from dilated_attention.context_parallel import ContextParallel, Over
from dilated_attention.distributed.group import wire_device
from dilated_attention.distributed.sequence import gather_sequence
from dilated_attention.models.parts import in_parts
from dilated_attention.pattern import Pattern
from dilated_attention.resolve import Options, computed_dtype
from dilated_attention.ring.run import Ranks


@dataclass(frozen=True)
class Sequences:
    """What the rows of x are: by default B sequences of equal length."""

    cu_seqlens: CuSeqlens | None = None  # of packed sequences, (0, ..., N); on the host
    group: Over = None
    backend: Backend = "auto"

    @property
    def firsts(self) -> int:
        """How many rows come before the tiles of a shard: the class token, on the first rank."""
        group = process_group(self.group)
        return int(group is None or group.rank() == 0)

    def apart(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of each sequence, (N, C)."""
        return x.unbind() if self.cu_seqlens is None else x[0].tensor_split(self.cu_seqlens[1:-1])


def process_group(over: Over) -> dist.ProcessGroup | None:
    return None if over is None else ContextParallel.of(over).process_group()


def attend_whole(
    pattern: Pattern, is_causal: bool, rows: Sequences, padding: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """How tokens of whole sequences attend in a layer, or of this rank's shards of them."""
    inputs, options = Inputs(q, k, v, padding), Options(pattern, is_causal, enable_gqa=True, backend=rows.backend)
    # without a warning that there are fewer tokens than heads: short sequences have
    return functional.attend(inputs, options, Ranks.of(rows.group), rows.cu_seqlens, warns=False)


def attend_each(patterns: Sequence[Pattern], *given: Any) -> tuple[Tensor, ...]:
    """`attend_whole` with several patterns: their pairs, one after the other."""
    return tuple(x for pattern in patterns for x in attend_whole(pattern, *given))


def mean_of(x: Tensor, padding: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    """(B, C): the mean of the rows of x that are no padding; over a group, of the rows of all ranks."""
    wide = accumulate_dtype(x.dtype)  # half precision cannot count beyond 65,504
    count = x.new_full((len(x), 1), x.shape[1], dtype=wide)
    if padding is not None:
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)  # not times 0: padding may be NaN
        count -= padding.sum(1, keepdim=True)
    sums = torch.cat((x.sum(1, dtype=wide), count), -1).unsqueeze(1)
    total = (sums if group is None else gather_sequence(sums, group)).sum(1)
    return (total[:, :-1] / total[:, -1:].clamp(min=1)).to(x.dtype)


class XPos(nn.Module):
    """xPos: rotary positions for causal attention, with a factor that makes scores fall with the distance.

    Queries are multiplied by s^(m / 512) and keys by s^(-n / 512), with s < 1 and positions m and n counted from the
    middle. For keys that a query sees, the product of both is at most 1. For later keys it may overflow: attention
    never computes these scores, instead of adding -inf to them. In float32 this works up to 65,536 tokens.
    """

    MOST_TOKENS = 65536
    scale: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"xPos needs an even head dim, got {head_dim}")
        self.register_buffer("scale", (torch.arange(0, head_dim, 2) + 0.4 * head_dim) / (1.4 * head_dim))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, H, D), turned and scaled by their positions."""
        tokens, pairs = q.shape[1], q.shape[-1] // 2
        if tokens > self.MOST_TOKENS:
            raise ValueError(
                f"xPos takes at most {self.MOST_TOKENS} tokens, because its scales would overflow float32, got {tokens}"
            )
        if computed_dtype(q) == torch.float16:
            raise TypeError("the scales of xPos would overflow float16: use bfloat16 or float32")
        position = torch.arange(tokens, dtype=torch.float64)[:, None]
        angle = position * 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        power = self.scale.to("cpu", torch.float64) ** ((position - (tokens + 1) // 2) / 512)
        return self._turned(q, angle, power), self._turned(k, angle, 1 / power)

    @staticmethod
    def _turned(x: Tensor, angle: Tensor, power: Tensor) -> Tensor:
        cos, sin = ((wave * power).to(x.dtype).to(x.device).unsqueeze(1) for wave in (angle.cos(), angle.sin()))
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


class SelfAttention(nn.Module):
    """Project, attend, normalise, project."""

    def __init__(
        self, embed_dim: int, num_heads: int, pattern: Pattern, *, is_causal: bool = False, xpos: bool = False
    ) -> None:
        super().__init__()
        if embed_dim % check_int("num_heads", num_heads):
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        pattern.check_heads(num_heads)
        self.num_heads, self.pattern, self.is_causal = num_heads, pattern, is_causal
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(embed_dim)
        self.xpos = XPos(embed_dim // num_heads) if xpos else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, (B, N, H, D) each."""
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return (q, k, v) if self.xpos is None else (*self.xpos(q, k), v)

    def forward(self, x: Tensor, rows: Sequences) -> Tensor:
        # q, k and v are gone before the next rows are made
        out, _ = attend_whole(self.pattern, self.is_causal, rows, None, *self.project(x))
        return self.out_proj(self.inner_attn_ln(out.flatten(2)))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """The released order: GELU, then the LayerNorm."""

    def __init__(self, embed_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.ffn_layernorm = nn.LayerNorm(ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        # without gradients, its hidden rows, four times as wide as its own, would take most of the memory
        # in half precision torch computes GELU in float32 and rounds the result, as the released code does with copies
        return in_parts(lambda x: (self.fc2(self.ffn_layernorm(F.gelu(self.fc1(x)))),), (x,), self.parameters())[0]


class Layer(nn.Module):
    """One layer. In training, dropout follows each half (attention, feed-forward); drop path leaves out a half."""

    def __init__(
        self, embed_dim: int, num_heads: int, ffn_dim: int, pattern: Pattern, *, dropout: float = 0.0,
        drop_path: float = 0.0, **attention: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.self_attn = SelfAttention(embed_dim, num_heads, pattern, **attention)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.ffn = FeedForward(embed_dim, ffn_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout, self.drop_path = dropout, drop_path

    def forward(self, x: Tensor, rows: Sequences) -> Tensor:
        x = x + self._dropped(self.self_attn(self.self_attn_layer_norm(x), rows), rows)
        return x + self._dropped(self.ffn(self.final_layer_norm(x)), rows)

    def _dropped(self, x: Tensor, rows: Sequences) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        return drop_path(x, self.drop_path, rows) if self.training and self.drop_path > 0 else x


def stacked(depth: int, drop_path_rate: float, *sizes: Any, **options: Any) -> nn.ModuleList:
    """Layers whose drop path grows from 0 to ``drop_path_rate``."""
    top = checked_probability(drop_path_rate, "drop_path_rate")
    return nn.ModuleList(Layer(*sizes, drop_path=top * index / max(1, depth - 1), **options) for index in range(depth))


def drop_path(x: Tensor, p: float, rows: Sequences) -> Tensor:
    """x with whole sequences dropped with probability p, the others scaled by 1 / (1 - p)."""
    sequences = len(x) if rows.cu_seqlens is None else len(rows.cu_seqlens) - 1
    kept = x.new_empty(sequences, 1, 1).bernoulli_(1 - p)
    if (group := process_group(rows.group)) is not None:  # all ranks of a sequence must draw the same
        sent = kept.to(wire_device(group, kept.device))
        dist.broadcast(sent, group=group, group_src=0)
        kept = sent.to(kept.device)
    if p < 1:
        kept = kept / (1 - p)
    if rows.cu_seqlens is not None:
        sizes = torch.tensor(rows.cu_seqlens, device=x.device).diff()
        kept = kept.view(1, -1, 1).repeat_interleave(sizes, dim=1, output_size=x.shape[1])
    return x * kept
