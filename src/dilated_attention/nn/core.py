"""What all modules share: the options they take, the call they make, and the ranks it goes over. And the module that is
no more than that, without parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TypedDict, Unpack

from torch import Tensor, nn

from dilated_attention import functional
from dilated_attention.backends.choose import Backend
from dilated_attention.backends.problem import Inputs
from dilated_attention.checks import checked_probability, checked_scale
from dilated_attention.pattern import DilatedPattern, Pattern, Rule
from dilated_attention.resolve import Options, check_options
from dilated_attention.ring.run import Ranks, errors_reach_ranks

Lengths = Iterable[int] | None  # one entry per branch; None: a pattern says it


class ModuleOptions(TypedDict, total=False):
    """The keywords that every module takes."""

    pattern: Pattern | None
    rule: Rule | None
    backend: Backend


class Core(nn.Module):
    """Pattern, dropout and backend of a module, and the call that they make."""

    softmax_scale: float | None = None  # 1/sqrt(D), which only the tensors know
    ranks: Ranks | None = None  # None: one device
    held_heads: tuple[int, int] | None = None  # of key and value: the first one here, and how many there are; None: all
    shown: tuple[str, ...] = ("dropout", "backend")  # by repr(), beside the pattern and the ranks

    def __init__(
        self, segment_lengths: Lengths, dilation_rates: Lengths, dropout: float, *, pattern: Pattern | None = None,
        rule: Rule | None = None, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        if pattern is None:
            if segment_lengths is None or dilation_rates is None:
                raise ValueError("no pattern: give segment_lengths and dilation_rates, or pattern=")
            pattern = DilatedPattern.of(rule or "head_groups", segment_lengths, dilation_rates)
        elif (segment_lengths, dilation_rates) != (None, None) or rule not in (None, getattr(pattern, "rule", None)):
            raise ValueError(f"pattern={pattern} says segment_lengths, dilation_rates and rule: leave these out")
        self.pattern = pattern
        self.dropout = checked_probability(dropout, "dropout")
        self.backend: Backend = backend
        check_options(Options(self.pattern, backend=backend))

    def _ranks_of_call(self) -> Ranks | None:
        return None if self.ranks is None else self.ranks.for_call()

    def _errors_reach_ranks(self, x: Tensor) -> AbstractContextManager[None]:
        """An error in here reaches the other ranks, if there are any."""
        return errors_reach_ranks(self._ranks_of_call(), x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_padding_mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        options = Options(self.pattern, is_causal, self.softmax_scale, dropout, True, self.backend, self.held_heads)
        inputs = Inputs(q, k, v, key_padding_mask, self._seed(q) if dropout else None)
        out, _ = functional.attend(inputs, options, self._ranks_of_call())
        return out

    def _seed(self, x: Tensor) -> Tensor | None:
        """What dropout follows; None: it is drawn from torch's generator."""
        return None

    def extra_repr(self) -> str:
        ranks = [] if self.ranks is None else [str(self.ranks)]
        return ", ".join([str(self.pattern), *(f"{x}={getattr(self, x)!r}" for x in self.shown), *ranks])


class DilatedAttention(Core):
    """Stores the settings of `dilated_attention` and calls it, as a module without parameters.

    Equals ``dilated_attention(..., scale=softmax_scale, enable_gqa=True)``.

    Args:
        segment_lengths, dilation_rates: one of each per branch, in tokens.
        softmax_scale: multiplies the scores; 1/sqrt(D) by default.
        attention_dropout: the share of (query, key) pairs dropped in training mode; stored as ``self.dropout``.
        options: ``pattern``, any :class:`Pattern` instead of the two lists; ``rule``, how the two lists are
            assigned to heads: "head_groups" (the default), "longnet" or "torchscale"; ``backend``, as in
            :func:`dilated_attention`.

    Examples:
        >>> attention = da.DilatedAttention(pattern=da.DilatedPattern.longnet([64, 256], [1, 4]))
        >>> query, key, value = torch.randn(3, 2, 256, 4, 16).unbind(0)  # (batch, tokens, heads, head_dim)
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([2, 256, 4, 16])
    """

    shown = ("softmax_scale", *Core.shown)

    def __init__(
        self, segment_lengths: Lengths = None, dilation_rates: Lengths = None, softmax_scale: float | None = None,
        attention_dropout: float = 0.0, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        super().__init__(segment_lengths, dilation_rates, attention_dropout, **options)
        self.softmax_scale = None if softmax_scale is None else checked_scale(softmax_scale, "softmax_scale")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns (B, N, H, D), from query (B, N, H, D) and key, value (B, N, Hk, D).

        Key and value may have fewer heads: each serves H // Hk query heads in a row. ``key_padding_mask`` is
        (B, N) bool, True = ignore this key.
        """
        return self._attend(query, key, value, is_causal, key_padding_mask)
