"""What the stack of a Llama-shaped model begins and ends with."""

from __future__ import annotations

from config.llama import LlamaConfig
from modelling.layers import Dropout, Embeddings, LMHeadLoss, RMSNorm


def embeddings(config: LlamaConfig) -> Embeddings:
    """The embeddings of words, scaled."""
    return Embeddings(config, config.model.embedding.scale)


class DecoderHead(LMHeadLoss):
    """The final norm, logits and the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        model = config.model
        super().__init__(
            config,
            RMSNorm(model.norm_epsilon, model.norms_from_one),
            Dropout(),
            bias=False,
            tied=model.embedding.tied,
            scale=1 / model.logits_divisor,
            cap=model.logits_cap,
        )
