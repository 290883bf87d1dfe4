"""Language models from disk, LongNetLM or Hugging Face's: what they say of tokens, and what attends in them.

Legend: tokens (B, n); q (B, n, H, D); k, v (B, n, Hk, D).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.charts import library
from dilated_attention.models import weights
from dilated_attention.models.generate import BEGIN
from dilated_attention.models.layers import Sequences, attend_whole
from dilated_attention.models.lm import LongNetLM, states_of
from dilated_attention.pattern import Pattern

Look = Callable[[int, Tensor, Tensor, Tensor, float | None], None]  # layer, q, k, v, scale
PART = 8192  # tokens whose losses are computed at a time


class Plain:
    """A LongNetLM, and how texts become its tokens: bytes, or by a tokenizer of Hugging Face."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        if tokenizer is None and self.vocabulary < BEGIN:
            raise ValueError(f"a vocabulary of {self.vocabulary} has no bytes: name the model's tokenizer")

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size  # type: ignore[no-any-return]

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        return self.model.config.patterns  # type: ignore[no-any-return]

    def tokens(self, text: bytes, begins: bool = True) -> list[int]:
        """Of a text, or of a piece of one that does not begin there."""
        if self.tokenizer is None:
            return [*[BEGIN][: begins and self.vocabulary > BEGIN], *text]
        first = [self.tokenizer.bos_token_id] if begins and self.tokenizer.bos_token_id is not None else []
        return [*first, *self.tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]]

    def losses(self, tokens: Tensor) -> Tensor:
        """Of all tokens but the first, (B, n - 1), in nats."""
        return self.model(tokens[:, :-1], tokens[:, 1:])  # type: ignore[no-any-return]

    def logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        """What is said at these places, (B, places, V)."""
        return self.model.head(states_of(self.model, True, tokens, None, None, None)[:, places])  # type: ignore[no-any-return]

    def watch(self, tokens: Tensor, look: Look) -> None:
        """Shows the queries, keys and values of each layer, one after another."""

        def attend(layer: int, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            look(layer, q, k, v, None)
            return attend_whole(pattern, True, Sequences(), None, q, k, v)

        positions = torch.arange(tokens.shape[1], device=tokens.device)
        self.model.states(tokens, positions, [partial(attend, *one) for one in enumerate(self.patterns)], apart=True)


class HuggingFace(Plain):
    """A decoder of transformers whose attention is ours."""

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        from dilated_attention.integrations.transformers.config import patterns_of

        return patterns_of(self.model.config)

    def losses(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens, use_cache=False).logits[:, :-1]
        parts = zip(logits.split(PART, 1), tokens[:, 1:].split(PART, 1), strict=True)
        return torch.cat([F.cross_entropy(x.float().mT, y, reduction="none") for x, y in parts], 1)

    def logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False, logits_to_keep=places).logits  # type: ignore[no-any-return]

    def watch(self, tokens: Tensor, look: Look) -> None:
        self.model(tokens, use_cache=False, logits_to_keep=1, watch=look)


def stored(path: Path, tokenizer: str | None = None, device: Any = None, dtype: torch.dtype | None = None) -> Plain:
    """The model in a checkpoint of examples/train_lm.py, or in a folder of Hugging Face. No code in them runs."""
    if not (path / "config.json").is_file():
        found, said = weights.checkpoint(path)
        if (trained := found.get("tokenizer")) and tokenizer is None:
            raise ValueError(f"{said} was trained with a tokenizer: give --tokenizer {trained}")
        known = None if tokenizer is None else _transformers().AutoTokenizer.from_pretrained(tokenizer)
        return Plain(LongNetLM.of_checkpoint(found, said).to(device, dtype), known)
    auto = _transformers()
    from dilated_attention.integrations import transformers as ours

    ours.register()
    options: Any = {"local_files_only": True}
    model = auto.AutoModelForCausalLM.from_pretrained(path, attn_implementation="dilated", dtype=dtype, **options)
    has_tokenizer = tokenizer is not None or any(path.glob("tokenizer*"))
    known = auto.AutoTokenizer.from_pretrained(tokenizer or path) if has_tokenizer else None
    if isinstance(model, ours.LongNetForCausalLM):
        return Plain(model.lm.to(device), known)
    return HuggingFace(model.to(device), known)


def _transformers() -> Any:
    return library("transformers", "models of Hugging Face need", "models")
