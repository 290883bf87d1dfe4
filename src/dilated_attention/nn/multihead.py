"""Modules with projections: project, call `dilated_attention`, normalise, project. Drop-ins for nn.MultiheadAttention.

Legend: E = H * D; query, key, value (B, N, E) or unbatched (N, E); projected (B, N, H, D); padding (B, N) or (N,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention.functional import DTYPES, check_backend, checked_probability, checked_scale, dilated_attention
from dilated_attention.pattern import DilatedPattern, whole_number

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_FUSED = "qkv_proj"

Prepared = tuple[Tensor, Tensor, Tensor, Tensor | None]  # q, k, v (B, N, H, D) and the padding as bool


class _NoPackedWeight:
    """Stands for ``in_proj_weight``: PyTorch's dense shortcuts refuse to run on what defines __torch_function__."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> Any:
        raise TypeError("dilated attention has no in_proj_weight: use q_proj, k_proj and v_proj, or qkv_proj")


class MultiheadDilatedAttention(nn.Module):
    """Equals ``out_proj(norm(dilated_attention(q_proj(query), k_proj(key), v_proj(value))))``, heads cut from E.

    Used as ``nn.MultiheadAttention(..., batch_first=True)`` is, also as ``self_attn`` of
    ``nn.TransformerEncoderLayer``. The norm and the initialisation are those of MAGNETO (sub-layer norm).

    Args:
        embed_dim: E, the size of a token; a multiple of ``num_heads``.
        num_heads: H; head_groups needs at least one per branch.
        segment_lengths, dilation_rates: one of each per branch.
        dropout: the share of (query, key) pairs dropped in training mode.
        bias: whether the four projections have one.
        layer_norm: normalise over E before the output projection.
        layer_norm_eps: added to the variance there.
        gamma_init: the gain of the initial value and output weights.
        device, dtype: of the parameters.
        rule: "head_groups", "longnet" or "torchscale", see :class:`DilatedPattern`.
        backend: see :func:`dilated_attention`.
    """

    # nn.TransformerEncoderLayer and nn.TransformerEncoder read these names from their self_attn. In eval mode they
    # would skip our forward and compute dense attention; each of the last three makes them call it.
    batch_first = True
    in_proj_bias = None
    _qkv_same_embed_dim = False
    in_proj_weight = _NoPackedWeight()  # the only one that an encoder built before self_attn was replaced looks at

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        rule: str = "head_groups",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.embed_dim = whole_number("embed_dim", embed_dim)
        self.num_heads = whole_number("num_heads", num_heads)
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}: every head takes an "
                "equal part of a token"
            )
        for name, flag in (("bias", bias), ("layer_norm", layer_norm)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r}")
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(f"dtype must be float64, float32, float16 or bfloat16, got {dtype}")
        self.pattern = DilatedPattern.of(rule, segment_lengths, dilation_rates)
        self.pattern.check_heads(self.num_heads)
        self.head_dim = self.embed_dim // self.num_heads
        self.dropout = checked_probability(dropout, "dropout")
        self.gamma_init = checked_scale(gamma_init, "gamma_init")
        layer_norm_eps = checked_scale(layer_norm_eps, "layer_norm_eps")
        self.backend = backend

        self._add_projections(bias, device, dtype)
        self.norm: nn.Module = nn.Identity()
        if layer_norm:
            self.norm = nn.LayerNorm(self.embed_dim, eps=layer_norm_eps, device=device, dtype=dtype)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_refit)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier normal weights, the gain of value and output being ``gamma_init``; biases 0; the norm as new."""
        query, key, value = self._inputs()
        output = (self.out_proj.weight, self.out_proj.bias)
        for (weight, bias), gain in ((query, 1.0), (key, 1.0), (value, self.gamma_init), (output, self.gamma_init)):
            nn.init.xavier_normal_(weight, gain=gain)
            if bias is not None:
                nn.init.zeros_(bias)
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """(output, None), the output shaped like query.

        Args:
            query, key, value: (B, N, E) or (N, E), all of one length. Key is query by default, value is key.
            key_padding_mask: (B, N) or (N,): bool with True = ignore this key, or float with -inf = ignore and
                0 = keep. The values of a float mask are checked, for which the host waits for the device.
            need_weights, attn_mask: only as in the defaults; the weights are never held in memory.
            average_attn_weights: says how to return weights, so it changes nothing.
            is_causal: a query sees no later token.
        """
        key = query if key is None else key
        value = key if value is None else value
        q, k, v, mask = self._prepared(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        out = self._attend(q, k, v, is_causal, mask)
        out = self.out_proj(self.norm(out.flatten(-2)))
        return (out.squeeze(0) if query.dim() == 2 else out), None

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, {self.pattern}, dropout={self.dropout}, "
            f"gamma_init={self.gamma_init}, backend={self.backend!r}"
        )

    def _add_projections(self, bias: bool, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
        self.q_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, device=device, dtype=dtype)

    def _inputs(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Weight and bias that make q, k and v."""
        return tuple((linear.weight, linear.bias) for linear in (self.q_proj, self.k_proj, self.v_proj))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_padding_mask: Tensor | None) -> Tensor:
        return dilated_attention(
            q,
            k,
            v,
            self.pattern,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            backend=self.backend,
        )

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.num_heads, self.head_dim))

    def _prepared(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Prepared:
        """What the attention takes: all that comes before it, and all that can be wrong with a call."""
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
        if need_weights:
            raise ValueError("need_weights must be False, got True: the attention weights are never held in memory")
        if attn_mask is not None:
            raise ValueError(
                "attn_mask must be None: the pattern says who sees whom; for a causal mask pass is_causal=True and "
                "no attn_mask, for padded tokens pass key_padding_mask"
            )
        self._check_tokens(query, key, value, mask)
        mask = None if mask is None else _ignored(mask)
        q, k, v = self._project(query, key, value)
        if query.dim() == 2:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            mask = None if mask is None else mask.unsqueeze(0)
        return q, k, v, mask

    def _check_tokens(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if x.is_nested:  # nn.TransformerEncoder makes them when its first layer is dense
                raise ValueError(
                    f"{name} is a nested tensor: pad it and pass key_padding_mask; nn.TransformerEncoder does so when "
                    "built with enable_nested_tensor=False"
                )
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != self.embed_dim:
                beside = "" if x is query else f" and query {tuple(query.shape)}"
                raise ValueError(
                    f"query, key and value must all be (batch, tokens, {self.embed_dim}) or all (tokens, "
                    f"{self.embed_dim}), got {name} {tuple(x.shape)}{beside}"
                )
            if x.shape != query.shape:
                raise ValueError(
                    f"{name} is {tuple(x.shape)} and query {tuple(query.shape)}: dilated attention is self-attention "
                    "and needs equal lengths; to decode, project q, k and v and call dilated_attention()"
                )
        if mask is not None and not isinstance(mask, Tensor):
            raise TypeError(f"key_padding_mask must be a tensor, got {type(mask).__name__}")
        if mask is not None and mask.device != query.device:
            raise ValueError(f"key_padding_mask is on {mask.device} and query on {query.device}: move it")
        if mask is not None and mask.shape != query.shape[:-1]:
            raise ValueError(
                f"key_padding_mask must be {tuple(query.shape[:-1])} like the tokens, got {tuple(mask.shape)}"
            )


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Equals :class:`MultiheadDilatedAttention`, with one ``qkv_proj`` for q, k and v: one product when they are one.

    Either class loads the state dict of the other, alone or as part of a bigger model.
    """

    def _add_projections(self, bias: bool, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
        self.qkv_proj = nn.Linear(self.embed_dim, 3 * self.embed_dim, bias=bias, device=device, dtype=dtype)

    def _inputs(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        weights = self.qkv_proj.weight.chunk(3)
        biases = (None,) * 3 if self.qkv_proj.bias is None else self.qkv_proj.bias.chunk(3)
        return tuple(zip(weights, biases, strict=True))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if key is query and value is query:
            q, k, v = self.qkv_proj(query).chunk(3, dim=-1)
        else:
            q, k, v = (F.linear(x, *third) for x, third in zip((query, key, value), self._inputs(), strict=True))
        return self._heads(q), self._heads(k), self._heads(v)


def _refit(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: turn separate projections into a fused one or back, as the module has them.

    An incomplete set, or both at once, is left as it is, so that load_state_dict names what is wrong.
    """
    fused = isinstance(module, ImprovedMultiheadDilatedAttention)
    for kind in ("weight", "bias"):
        parts = [f"{prefix}{name}.{kind}" for name in _SEPARATE]
        whole = f"{prefix}{_FUSED}.{kind}"
        present = [name in state_dict for name in parts]
        if fused and all(present) and whole not in state_dict:
            state_dict[whole] = torch.cat([state_dict.pop(name) for name in parts])
        elif not fused and whole in state_dict and not any(present):
            # copies, not views: load_state_dict(assign=True) would keep all three in one storage
            thirds = (third.clone() for third in state_dict.pop(whole).chunk(3))
            state_dict.update(zip(parts, thirds, strict=True))


def _ignored(mask: Tensor) -> Tensor:
    """A padding mask as bool; nn.TransformerEncoderLayer hands over a float one."""
    if mask.dtype == torch.bool:
        return mask
    wanted = "key_padding_mask must be bool with True = ignore this key, or float of 0 (keep) and -inf (ignore) only"
    if not mask.is_floating_point():
        raise TypeError(f"{wanted}, got {mask.dtype}")
    ignored = mask == -torch.inf
    known = ignored | (mask == 0)
    if torch.compiler.is_compiling() or mask.is_meta:  # no value to look at yet
        torch._assert_async(known.all(), wanted)
    elif not known.all():
        raise ValueError(f"{wanted}, got {mask[~known][0].item()}")
    return ignored
