"""Models on dilated attention, in plain PyTorch. They are imported only when asked for."""

from dilated_attention.models.lm import LongNetEncoder, LongNetLM, document_positions
from dilated_attention.models.loss import shifted, token_losses
from dilated_attention.models.transformer import LMConfig

__all__ = ["LMConfig", "LongNetEncoder", "LongNetLM", "document_positions", "shifted", "token_losses"]
