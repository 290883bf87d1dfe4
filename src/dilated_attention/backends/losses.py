"""Cross-entropy of some tokens, with the gradients of their logits: by one kernel on a GPU, elsewhere by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention.call import accumulate_dtype


def losses_(logits: Tensor, labels: Tensor, ignored: int, writes: bool) -> Tensor:
    """The loss of each row of logits (n, V), in float32, or float64 for float64; 0 where the label is ``ignored``.

    If ``writes``, the gradient of each loss takes the place of the logits.
    """
    if logits.is_cuda and logits.dtype is not torch.float64:
        from dilated_attention.backends.triton import losses as kernel  # late, as triton may be missing

        return kernel.losses_(logits, labels, ignored, writes)
    exact, is_ignored, label = accumulate_dtype(logits.dtype), labels == ignored, labels.clamp(min=0).unsqueeze(1)
    logs = logits.to(exact).log_softmax(-1)
    losses = (-logs.gather(1, label).squeeze(1)).masked_fill(is_ignored, 0.0)
    if writes:
        # p, and for the label's own logit p - 1, which near p = 1 would lose its digits
        p = logs.exp_().scatter_(1, label, torch.expm1(-losses).unsqueeze(1))
        logits.copy_(p.masked_fill_(is_ignored.unsqueeze(1), 0.0))
    return losses
