"""Language models from disk, LongNetLM or Hugging Face's: what they say of tokens, and what attends in them.

Legend: tokens (B, n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.models import weights
from dilated_attention.models.generate import BEGIN
from dilated_attention.models.layers import Sequences, attend_whole
from dilated_attention.models.lm import LongNetLM
from dilated_attention.pattern import Pattern
from dilated_attention.show.charts import library

Attend = Callable[[Pattern], tuple[Tensor, Tensor]]  # out and lse of a layer, as if it had this pattern
# of a layer's number, its key/value heads and what it can do: the out and lse that it goes on with; None: its own
Look = Callable[[int, int, Attend], tuple[Tensor, Tensor] | None]


class Plain:
    """A LongNetLM, and how texts become its tokens: bytes, or by a tokenizer of Hugging Face."""

    def __init__(self, model: Any, tokenizer: Any = None, patterns: Sequence[Pattern] = ()) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.patterns = tuple(patterns or model.config.patterns)
        if tokenizer is None and model.config.vocab_size < BEGIN:
            raise ValueError(f"a vocabulary of {model.config.vocab_size} has no bytes: give --tokenizer")

    def tokens(self, text: bytes, begins: bool = True) -> list[int]:
        """Of a text, or of a piece of one that does not begin there."""
        if self.tokenizer is None:
            return [*[BEGIN][: begins and self.model.config.vocab_size > BEGIN], *text]
        first = self.tokenizer.bos_token_id if begins else None
        found = self.tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        return [*([] if first is None else [first]), *found]

    def logits(self, tokens: Tensor, places: Tensor, look: Look | None = None) -> Tensor:
        """What is said at these places, (B, places, V). ``look``: sees the layers attend, one after another."""
        rows, positions = Sequences(backend=self.model.backend), torch.arange(tokens.shape[1], device=tokens.device)

        def attend(layer: int, calls: Sequence[Pattern], *qkv: Tensor) -> tuple[Tensor, ...]:
            def one(pattern: Pattern) -> tuple[Tensor, Tensor]:
                return attend_whole(pattern, True, rows, None, *qkv)

            out_lse = (look and look(layer, qkv[1].shape[2], one)) or one(calls[0])
            return (*out_lse, *(x for call in calls[1:] for x in one(call)))

        attends = [partial(attend, *one) for one in enumerate(self.model.config.calls)]
        return self.model.head(self.model.states(tokens, positions, attends, apart=True)[:, places])  # type: ignore[no-any-return]

    def losses(self, tokens: Tensor, look: Look | None = None) -> Tensor:
        """Of all tokens but the first, (B, n - 1), in nats."""
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        return F.cross_entropy(self.logits(tokens, places, look).float().mT, tokens[:, 1:], reduction="none")


class HuggingFace(Plain):
    """A decoder of transformers whose attention is ours."""

    def logits(self, tokens: Tensor, places: Tensor, look: Look | None = None) -> Tensor:
        more = {} if look is None else {"watch": look}  # not every model takes more words
        return self.model(tokens, use_cache=False, logits_to_keep=places, **more).logits  # type: ignore[no-any-return]


def stored(path: Path, tokenizer: str | None = None, device: Any = None, dtype: torch.dtype | None = None) -> Plain:
    """The model in a checkpoint of examples/train_lm.py, or in a folder of Hugging Face. No code in them runs."""
    if is_folder := (path / "config.json").is_file():
        tokenizer = tokenizer or (str(path) if any(path.glob("tokenizer*")) else None)
    else:
        found, said = weights.checkpoint(path)
        if (trained := found.get("tokenizer")) and tokenizer is None:
            raise ValueError(f"{said} was trained with a tokenizer: give --tokenizer {trained}")
    auto: Any = library("transformers", "this model needs", "models") if is_folder or tokenizer else None
    known = None if tokenizer is None else auto.AutoTokenizer.from_pretrained(tokenizer)
    if not is_folder:
        return Plain(LongNetLM.of_checkpoint(found, said).to(device, dtype), known)
    from dilated_attention.integrations import transformers as ours

    ours.register()
    options = {"attn_implementation": "dilated", "dtype": dtype, "local_files_only": True}
    model = auto.AutoModelForCausalLM.from_pretrained(path, **options).to(device)
    if isinstance(model, ours.LongNetForCausalLM):
        return Plain(model.lm, known)
    return HuggingFace(model, known, ours.config.patterns_of(model.config))
