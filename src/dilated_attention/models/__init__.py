"""Models on dilated attention, in plain PyTorch: released ones with their weights and outputs, and language models."""

from dilated_attention.models import torchscale
from dilated_attention.models.explain import AttentionMap
from dilated_attention.models.finetune import finetuning, parameter_groups
from dilated_attention.models.lm import LongNetEncoder, LongNetLM, document_positions
from dilated_attention.models.loss import shifted, summed_loss, token_losses
from dilated_attention.models.positions import check_attributes
from dilated_attention.models.slide import PRESETS, SlideEncoder, slide_pattern
from dilated_attention.models.transformer import LMConfig

__all__ = [
    "PRESETS",
    "AttentionMap",
    "LMConfig",
    "LongNetEncoder",
    "LongNetLM",
    "SlideEncoder",
    "check_attributes",
    "document_positions",
    "finetuning",
    "parameter_groups",
    "shifted",
    "slide_pattern",
    "summed_loss",
    "token_losses",
    "torchscale",
]
