"""What T5's stacks end with. They begin with `modelling.layers.Embeddings`."""

from __future__ import annotations

from config.t5 import T5Config
from modelling.layers import Dropout, Layer, LMHeadLoss, RMSNorm
from popxl import Tensor


class EncoderFinalNorm(Layer):
    """The end of the encoder: norm and dropout.

    Variables: `norm.weight`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.dropout = Dropout.of(config.model)
        self.norm = RMSNorm(config.model.layer_norm_epsilon)

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        return self.dropout(self.norm(x), seed)


class DecoderHead(LMHeadLoss):
    """The end of the decoder, the logits (without a bias) and the loss."""

    def __init__(self, config: T5Config) -> None:
        model = config.model
        super().__init__(
            config,
            RMSNorm(model.layer_norm_epsilon),
            Dropout.of(model),
            bias=False,
            tied=model.embedding.tied,
            scale=model.hidden_size**-0.5 if model.scaled_head else 1.0,
        )
