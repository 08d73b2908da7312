"""Modules of a configuration, built without a program of the application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from config.gptj import GPTJConfig
from config.sections import RunConfig
from config.t5 import T5Config
from modelling.gptj import model as gptj
from modelling.layers import use_run_config
from modelling.layers.layer_wrapper import LayerWrapper, PositionalInputs
from modelling.phases.block_wrappers import TrainingBlock
from modelling.phases.encoder_decoder import StackBlock
from modelling.t5 import model as t5
from popxl_addons import Module


class StandaloneModule(LayerWrapper):
    """A module that `make` makes.

    Args:
        names: of its inputs, where they are given in another order than its own.
    """

    def __init__(
        self, config: RunConfig, make: Callable[[], Module], names: Sequence[str] = ()
    ) -> None:
        with use_run_config(config):
            made = make()
        super().__init__(PositionalInputs(made, names) if names else made)
        self._config = config

    def build(self, *inputs: Any) -> Any:
        """Returns the module's output."""
        with use_run_config(self._config):
            return self.layer(*inputs)


def t5_embeddings(config: T5Config) -> StandaloneModule:
    return StandaloneModule(config, t5.encoder_decoder_spec(config).embeddings)


def encoder_block(config: T5Config) -> StandaloneModule:
    return StandaloneModule(config, lambda: StackBlock(t5.T5EncoderBlock(config.model, True)))


def decoder_block(config: T5Config) -> StandaloneModule:
    return StandaloneModule(
        config,
        lambda: StackBlock(t5.T5DecoderBlock(config.model, True)),
        ("x", "encoded", "mask"),
    )


def encoder_final_norm(config: T5Config) -> StandaloneModule:
    make = t5.encoder_decoder_spec(config).encoder_head
    assert make is not None
    return StandaloneModule(config, make)


def t5_head(config: T5Config) -> StandaloneModule:
    """x, labels and weight -> the loss."""
    return StandaloneModule(config, t5.encoder_decoder_spec(config).head, ("x", "labels", "weight"))


def gptj_block(config: GPTJConfig) -> StandaloneModule:
    return StandaloneModule(config, lambda: TrainingBlock(gptj.GPTJBlock(config.model)))


def gptj_embeddings(config: GPTJConfig) -> StandaloneModule:
    return StandaloneModule(config, gptj.decoder_spec(config).embeddings)


def gptj_head(config: GPTJConfig, *names: str) -> StandaloneModule:
    """x, labels and weight -> the loss."""
    return StandaloneModule(
        config, gptj.decoder_spec(config).head, ("x", *(names or ("labels", "weight")))
    )
