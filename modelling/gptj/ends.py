"""What GPT-J's stack ends with. It begins with `modelling.layers.Embeddings`."""

from __future__ import annotations

from config.gptj import GPTJConfig
from modelling.layers import Dropout, LayerNorm, LMHeadLoss


class DecoderHead(LMHeadLoss):
    """The final norm, logits with a bias, and the loss."""

    def __init__(self, config: GPTJConfig) -> None:
        norm = LayerNorm(config.model.layer_norm_epsilon)
        super().__init__(config, norm, Dropout(), bias=True)
