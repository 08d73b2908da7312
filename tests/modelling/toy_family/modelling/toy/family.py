"""The toy family as the scripts know it."""

from __future__ import annotations

from collections.abc import Sequence

from config.toy import ToyConfig
from data.causal_lm import CAUSAL_LM
from modelling.generation import (
    Caches,
    Executor,
    Prompts,
    SpecialTokens,
    Value,
    last_words,
    what_was_read,
)
from modelling.layers import Embeddings, Layers
from modelling.phases import Layout, Settings, decoder_only_layout
from modelling.spec import ModelFamily
from modelling.toy.block import Block, Head
from modelling.toy.config_json import from_config_json, to_config_json
from modelling.toy.weights import weight_table
from popxl import Tensor, TensorSpec


def toy_layout(settings: Settings) -> Layout:
    """See `modelling.phases.decoder_only_layout`."""
    config = settings.config
    layers = Layers([Block()], [0] * config.model.layers)
    return decoder_only_layout(settings, Embeddings(config), layers, Head(config))


class ToyGenerator:
    """See `modelling.generation.Generator`; nothing is caches of the positions before."""

    special = SpecialTokens(end=0, pad=1)
    prompts_per_sample = 1
    about: Sequence[TensorSpec] = ()

    def __init__(self, config: ToyConfig, sequences: int) -> None:
        model = config.model
        self._config = config
        self.prompt_length, self.output_length = model.sequence_length, model.output_length
        self.sequences = config.execution.micro_batch_size * sequences

    def begin(self, words: Tensor, mask: Tensor) -> Prompts:
        """See `Generator`."""
        first, _, prompted = last_words(words, mask)
        return Prompts(prompted, first, what_was_read(words, mask), [])

    def prefill(
        self, executor: Executor, words: Value, about: Sequence[Value]
    ) -> tuple[Caches, list[Tensor]]:
        """See `Generator`."""
        return [], []

    def decode(
        self,
        executor: Executor,
        words: Value,
        position: Tensor,
        caches: Caches,
        about: Sequence[Value],
        same: Sequence[Tensor],
    ) -> tuple[Value, Caches]:
        """See `Generator`."""
        x = executor.run("embeddings", Embeddings(self._config), words)
        return executor.run_layers("layer", Layers([Block()], [0] * self._config.model.layers), x)

    def head(self) -> Head:
        """See `Generator`."""
        return Head(self._config)


FAMILY = ModelFamily(
    sample_format=CAUSAL_LM,
    layout=toy_layout,
    generator=ToyGenerator,
    table=weight_table,
    to_config_json=to_config_json,
    from_config_json=from_config_json,
)
