"""Released models that use LongNet's attention, with their weights and outputs."""

from dilated_attention.models.positions import check_attributes
from dilated_attention.models.slide import PRESETS, SlideEncoder, slide_pattern

__all__ = ["PRESETS", "SlideEncoder", "check_attributes", "slide_pattern"]
