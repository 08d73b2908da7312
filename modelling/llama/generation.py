"""Generation with Llama-shaped models: that of a decoder alone."""

from __future__ import annotations

from config.llama import LlamaConfig
from modelling.generation import CachedModel, DecoderOnlyGenerator, ReadsOneToken, ReadsPrompts
from modelling.layers import Groups, Layers
from modelling.llama.block import Block
from modelling.llama.ends import DecoderHead, embeddings
from modelling.llama.rotary import rotary_tables


class PromptBlock(ReadsPrompts, Block):  # type: ignore[misc]
    """A layer that reads prompts."""


class TokenBlock(ReadsOneToken, Block):  # type: ignore[misc]
    """A layer at one position."""


class LlamaGenerator(DecoderOnlyGenerator):
    """See `modelling.generation.Generator`."""

    def __init__(self, config: LlamaConfig, groups: Groups, sequences: int = 1) -> None:
        """Create the graphs in the current Ir. `config.model.eval` must be set."""
        model = config.model
        kinds = list(dict.fromkeys(model.kinds))
        room = model.output_length
        cached = CachedModel(
            prompt=Layers.of(model.kinds, lambda kind: PromptBlock(config, kind, room)),
            token=Layers.of(model.kinds, lambda kind: TokenBlock(config, kind, room)),
            head=DecoderHead(config),
            embeddings=lambda: embeddings(config),
            tables=lambda kind, positions: rotary_tables(model, kinds[kind], positions),
        )
        super().__init__(config, groups, cached, sequences)
