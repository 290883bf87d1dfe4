"""Modules with projections: project, call `dilated_attention`, normalise, project. Drop-ins for nn.MultiheadAttention.

Legend: E = H * D; query, key, value (B, N, E), (N, B, E) with batch_first=False, or unbatched (N, E); projected
(B, N, H, D), key and value (B, N, Hk, D); padding (B, N) or (N,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dilated_attention.autograd import is_plain
from dilated_attention.checks import check_flag, check_int, check_tensor, checked_scale
from dilated_attention.nn.core import Core, Lengths, ModuleOptions
from dilated_attention.resolve import DTYPES, check_padding_mask

MOST_CHECKED = 4096  # tokens of an attn_mask whose values are looked at
IF_NESTED = (  # nn.TransformerEncoder makes such tensors when its first layer is dense
    "pad it and pass key_padding_mask; nn.TransformerEncoder does so when built with enable_nested_tensor=False"
)


class _NoPackedWeight:
    """Stands for ``in_proj_weight``: PyTorch's dense shortcuts refuse to run on what defines __torch_function__."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> Any:
        raise TypeError("dilated attention has no in_proj_weight: use q_proj, k_proj and v_proj, or qkv_proj")


class MultiheadOptions(ModuleOptions, total=False):
    """What modules over ranks hand on to `MultiheadDilatedAttention`."""

    layer_norm_eps: float
    gamma_init: float
    device: torch.device | str | int | None
    dtype: torch.dtype | None
    num_kv_heads: int | None
    batch_first: bool


class MultiheadDilatedAttention(Core):
    """Projects tokens to queries, keys and values, attends, normalises, and projects back.

    Equals ``out_proj(norm(dilated_attention(q_proj(query), k_proj(key), v_proj(value))))``. Use it like
    ``nn.MultiheadAttention``, or as ``self_attn`` of ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``.
    A call returns (output, None): there are no attention weights. The norm and the initialisation are those of MAGNETO
    (arXiv:2210.06423). With ``layer_norm=False`` it loads a state dict of ``nn.MultiheadAttention``.

    Args:
        embed_dim: E, the channels of a token; a multiple of ``num_heads``.
        num_heads: H, the query heads; head_groups needs at least one (key/value) head per branch.
        segment_lengths, dilation_rates, dropout, options: see :class:`DilatedAttention`.
        bias: whether the four projections have one.
        layer_norm, layer_norm_eps: put a LayerNorm over E before the output projection.
        gamma_init: the gain with which the weights of v_proj and out_proj are drawn (Xavier normal). Those of q_proj
            and k_proj have gain 1.
        device, dtype: of the parameters.
        num_kv_heads: key and value heads, each of which serves ``num_heads // num_kv_heads`` query heads in a row;
            as many as ``num_heads`` by default.
        batch_first: False: tokens are (N, B, E) instead of (B, N, E).

    Examples:
        >>> pattern = da.DilatedPattern.longnet([64, 256], [1, 4])
        >>> attention = da.MultiheadDilatedAttention(64, 4, pattern=pattern, num_kv_heads=2)
        >>> out, _ = attention(torch.randn(2, 256, 64), is_causal=True)
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> layer.self_attn = attention
        >>> layer(out).shape
        torch.Size([2, 256, 64])
    """

    # nn.TransformerEncoderLayer and nn.TransformerEncoder read these names from their self_attn. In eval mode they
    # would skip our forward and compute dense attention; each of the three makes them call it.
    in_proj_bias = None
    _qkv_same_embed_dim = False
    in_proj_weight = _NoPackedWeight()  # the only one that an encoder built before self_attn was replaced looks at
    shown = ("embed_dim", "num_heads", "num_kv_heads", "batch_first", "gamma_init", *Core.shown)

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Lengths = None, dilation_rates: Lengths = None,
        dropout: float = 0.0, bias: bool = True, layer_norm: bool = True, layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None, *,
        num_kv_heads: int | None = None, batch_first: bool = True, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        super().__init__(segment_lengths, dilation_rates, dropout, **options)
        self.embed_dim, self.num_heads = check_int("embed_dim", embed_dim), check_int("num_heads", num_heads)
        self.num_kv_heads = check_int("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        for name, flag in (("bias", bias), ("layer_norm", layer_norm), ("batch_first", batch_first)):
            check_flag(name, flag)
        if dtype not in (None, *DTYPES):
            raise TypeError(f"dtype must be float64, float32, float16 or bfloat16, got {dtype}")
        self.pattern.check_heads(self.num_heads, self.num_kv_heads)
        self.head_dim = self.embed_dim // self.num_heads
        self.batch_first = batch_first
        self.gamma_init = checked_scale(gamma_init, "gamma_init")
        layer_norm_eps = checked_scale(layer_norm_eps, "layer_norm_eps")

        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self._add_projections(bias=bias, **where)
        self.norm: nn.Module = nn.LayerNorm(embed_dim, layer_norm_eps, **where) if layer_norm else nn.Identity()
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias, **where)
        self.register_load_state_dict_pre_hook(_refit)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights again: Xavier normal, with gain ``gamma_init`` for values and output, and 1 for the others.

        Biases become 0, and the LayerNorm is reset.
        """
        weights = (*self._inputs(), (self.out_proj.weight, self.out_proj.bias))
        for at, (weight, bias) in enumerate(weights):
            self._draw(weight, self.gamma_init if at > 1 else 1.0)
            if bias is not None:
                nn.init.zeros_(bias)
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()

    def _draw(self, weight: Tensor, gain: float) -> None:
        nn.init.xavier_normal_(weight, gain=gain)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
        key_padding_mask: Tensor | None = None, need_weights: bool = False, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Returns (output, None); the output is shaped like query.

        Args:
            query, key, value: (B, N, E) or (N, E), all of one length. Key is query by default, value is key.
            key_padding_mask: (B, N) or (N,): bool with True = ignore this key, or float with -inf = ignore and
                0 = keep, whose values are checked: the host waits for the device.
            need_weights: only False.
            attn_mask: only the causal mask, together with ``is_causal=True``, as PyTorch's layers hand it over:
                (N, N) or (B * H, N, N). Up to 4,096 tokens on a CPU its values are checked; it is not read otherwise.
            average_attn_weights: changes nothing.
            is_causal: a query sees no later token.
        """
        tokens = query
        with self._errors_reach_ranks(query):  # all that can be wrong with a call
            check_flag("is_causal", is_causal)
            if need_weights:
                raise ValueError("need_weights must be False, got True: the attention weights are never held in memory")
            key = query if key is None else key
            query, key, value = self._batch_first(query, key, key if value is None else value)
            if attn_mask is not None:
                check_causal_mask(attn_mask, is_causal, query.shape[1], len(query) * self.num_heads)
            padding = key_padding_mask
            if padding is not None:
                check_tensor("key_padding_mask", padding)
                padding = ignored(padding.unsqueeze(0) if tokens.dim() == 2 else padding, query)
            q, k, v = (torch.unflatten(x, -1, (-1, self.head_dim)) for x in self._project(query, key, value))
        out = self._attend(q, k, v, is_causal, padding)
        out = self.out_proj(self.norm(out.flatten(-2)))
        if tokens.dim() == 2:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _widths(self) -> list[int]:
        """Of q, k and v, all heads of a token together."""
        return [self.embed_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim]

    def _add_projections(self, **factory: Any) -> None:
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(self.embed_dim, x, **factory) for x in self._widths())

    def _inputs(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Weight and bias that make q, k and v."""
        return tuple((linear.weight, linear.bias) for linear in (self.q_proj, self.k_proj, self.v_proj))

    def _project(self, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear, x in zip((self.q_proj, self.k_proj, self.v_proj), given, strict=True))

    def _batch_first(self, *given: Tensor) -> tuple[Tensor, ...]:
        """query, key and value as (B, N, E)."""
        query = given[0]
        for name, x in zip(("query", "key", "value"), given, strict=True):
            check_tensor(name, x, IF_NESTED)
            if x.dim() not in (2, 3) or x.shape[-1] != self.embed_dim or x.shape != query.shape:
                layout = "batch, tokens" if self.batch_first else "tokens, batch"
                raise ValueError(
                    f"query, key and value must all be ({layout}, {self.embed_dim}) or all (tokens, {self.embed_dim}), "
                    f"got {name} {tuple(x.shape)} and query {tuple(query.shape)}: dilated attention is self-attention "
                    "and needs equal lengths; to decode, project q, k and v and call dilated_attention()"
                )
        if query.dim() == 2:
            return each(lambda x: x.unsqueeze(0), *given)
        return given if self.batch_first else each(lambda x: x.transpose(0, 1), *given)


def each(change: Callable[[Tensor], Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """All of them changed; what was one tensor stays one, as a fused projection asks."""
    changed = {x: change(x) for x in dict.fromkeys(given)}
    return tuple(changed[x] for x in given)


def _refit(module: MultiheadDilatedAttention, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: rename what nn.MultiheadAttention calls otherwise, fuse or cut the projections.

    An incomplete set, or both at once, is left as it is, so that load_state_dict names what is wrong. So are the names
    of nn.MultiheadAttention where key and value have fewer heads than it.
    """
    for kind in ("weight", "bias"):
        fused, *separate = names = [f"{prefix}{x}_proj.{kind}" for x in ("qkv", "q", "k", "v")]
        if module.num_kv_heads == module.num_heads:
            for name, theirs in zip(names, ("in", "q", "k", "v"), strict=True):
                if f"{prefix}{theirs}_proj_{kind}" in state_dict and name not in state_dict:
                    state_dict[name] = state_dict.pop(f"{prefix}{theirs}_proj_{kind}")
        is_there, widths = [name in state_dict for name in separate], module._widths()
        if hasattr(module, "q_proj"):
            if fused in state_dict and not any(is_there) and len(state_dict[fused]) == sum(widths):
                # copies, not views: load_state_dict(assign=True) would keep all three in one storage
                thirds = (third.clone() for third in state_dict.pop(fused).split(widths))
                state_dict.update(zip(separate, thirds, strict=True))
        elif all(is_there) and fused not in state_dict:
            state_dict[fused] = torch.cat([state_dict.pop(name) for name in separate])


def ignored(mask: Tensor, x: Tensor) -> Tensor:
    """The padding mask of tokens (B, N, E) as bool; nn.TransformerEncoderLayer hands over a float one."""
    if mask.is_floating_point():
        wanted = "key_padding_mask must be bool, True = ignore this key, or float of 0 (keep) and -inf (ignore) only"
        is_ignored = mask == -torch.inf
        known = is_ignored | (mask == 0)
        if torch.compiler.is_compiling() or mask.is_meta:  # no value to look at yet
            torch._assert_async(known.all(), wanted)
        else:
            while torch._C._functorch.is_functorch_wrapped_tensor(known):  # under torch.func
                known = torch._C._functorch.get_unwrapped(known)
            if not known.all():
                raise ValueError(wanted)
        mask = is_ignored
    check_padding_mask(mask, x)
    return mask


def check_causal_mask(mask: Tensor, is_causal: bool, tokens: int, rows: int) -> None:
    """Raise unless ``mask`` is the causal one, which the caller says with ``is_causal``. rows: samples * heads."""
    if not is_causal:
        raise ValueError(
            "attn_mask must be None unless it is the causal mask and is_causal=True: the pattern says who sees whom; "
            "for causal attention pass is_causal=True, and for padded tokens key_padding_mask"
        )
    check_tensor("attn_mask", mask)
    is_bool = mask.dtype == torch.bool
    if mask.shape not in ((tokens, tokens), (rows, tokens, tokens)) or not (is_bool or mask.is_floating_point()):
        raise ValueError(
            f"attn_mask must be ({tokens}, {tokens}) or ({rows}, {tokens}, {tokens}) like the tokens, and bool or "
            f"float, got {tuple(mask.shape)} of {mask.dtype}"
        )
    if not is_plain(mask) or mask.device.type != "cpu" or tokens > MOST_CHECKED:
        return  # the caller's word is taken: there is no value yet, or the host would wait for it
    causal = nn.Transformer.generate_square_subsequent_mask(tokens)
    if not (mask == (causal < 0 if is_bool else causal)).all():
        raise ValueError(
            "attn_mask is not the causal mask (True or -inf above the diagonal, False or 0 elsewhere), and "
            "is_causal=True says that it is. The pattern says who sees whom: leave attn_mask out"
        )
