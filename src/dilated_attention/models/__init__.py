"""Released models that use LongNet's attention, with their weights and outputs."""

from dilated_attention.models.explain import AttentionMap
from dilated_attention.models.finetune import finetuning, parameter_groups
from dilated_attention.models.positions import check_attributes
from dilated_attention.models.presets import PRESETS, slide_pattern
from dilated_attention.models.slide import SlideEncoder
from dilated_attention.models.torchscale import LongNetDecoder, LongNetEncoder, longvit_encoder

__all__ = [
    "PRESETS",
    "AttentionMap",
    "LongNetDecoder",
    "LongNetEncoder",
    "SlideEncoder",
    "check_attributes",
    "finetuning",
    "longvit_encoder",
    "parameter_groups",
    "slide_pattern",
]
