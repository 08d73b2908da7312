"""T5's phases and their order in training.

The rows of the encoder's chain are the outputs of embeddings, layers and encoder head, which every
decoder layer reads, adding to its gradient; those of the decoder's, of embeddings and layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import popxl
from config.t5 import T5Config
from data.preferences import answers_of
from modelling.layers import Axes, Embeddings, LayerAdapters, Module, seed_adapters
from modelling.layers.wrapped import Wrapped
from modelling.phases import (
    Chain,
    InputBuffers,
    Layout,
    LossPhase,
    Phase,
    Port,
    Settings,
    Stage,
    layers_alike,
)
from modelling.t5.contexts import DecoderContext, EncoderContext
from modelling.t5.model import (
    EncoderFinalNorm,
    T5DecoderBlock,
    T5EncoderBlock,
    embeddings,
    head,
)
from modelling.t5.table import weight_table
from popxl import Tensor

RELATIVE_POSITION = "relative_attention_bias"


class EncoderSamples(Wrapped):
    """A block of the encoder over whole samples."""

    layer: T5EncoderBlock

    def build(self, x: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask, seed: see `EncoderContext`.
        """
        seed_adapters(self.layer, seed)
        return self.layer(x, EncoderContext(mask, seed))


class DecoderSamples(Wrapped):
    """A block of the decoder over whole samples."""

    layer: T5DecoderBlock

    def build(self, x: Tensor, encoded: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch * sequences of a sample, length, hidden) -> the same shape.

        Args:
            encoded, mask, seed: see `DecoderContext`.
        """
        seed_adapters(self.layer, seed)
        return self.layer(x, DecoderContext(encoded, mask, seed))


def t5_layout(settings: Settings) -> Layout:
    """Embeddings and layers of both stacks, the encoder's end, and the head."""
    config = settings.config
    assert isinstance(config, T5Config)
    model, batch = config.model, config.execution.micro_batch_size
    adapters = LayerAdapters(config, weight_table)
    end = adapters.head(head(config))

    def made_embeddings() -> Embeddings:
        return adapters.embeddings(embeddings())

    examples = batch * config.data.examples_per_row * answers_of(config)
    words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    targets = popxl.TensorSpec((examples, model.decoder_sequence_length), popxl.int32)
    learned = end.objective.streams(targets)
    inputs = InputBuffers(
        {"words": words, "mask": words, "decoder_words": targets, **learned}, settings
    )

    def chain_of(tokens: popxl.TensorSpec) -> Chain:
        shape = Axes.of(config).shape(tokens.shape[0], tokens.shape[1], model.hidden_size)
        spec = popxl.TensorSpec(shape, settings.dtype)
        return Chain(spec, settings, trained=settings.trains_any("embeddings"))

    encoder, decoder = chain_of(words), chain_of(targets)
    mask, read = inputs.ports(["mask"]), inputs.ports(["words"])
    beginning = Phase("embeddings", made_embeddings(), read, [encoder.end], settings)
    stacks = _stack("encoder", mask, encoder, settings, adapters)
    x, y = encoder.through(1, settings.trains_any("encoder_head"))
    final = Phase("encoder_head", EncoderFinalNorm(model), {"x": x}, [y], settings)
    read = {"words": inputs.port("decoder_words")}
    borrowed = {"": beginning}
    again = made_embeddings()
    first = Phase("decoder_embeddings", again, read, [decoder.end], settings, 1, borrowed)
    stacks += [Stage(final, range(1)), Stage(first, range(1))]
    encoded = {"encoded": encoder.shared()}
    stacks += _stack("decoder", encoded | mask, decoder, settings, adapters)
    tied = {"tokens": beginning} if end.tied else None
    loss_inputs = {"x": decoder.end, **inputs.ports(learned)}
    loss = LossPhase("head", end, loss_inputs, settings, tied)

    def begin() -> None:
        with final.part("backward"):
            encoder.begin_gradient()

    *others, last = stacks
    ends = replace(last, begin=begin), Stage(loss, range(1))
    order = [Stage(beginning, range(1)), *others, *ends]
    return Layout(inputs, order)


def _stack(
    name: str,
    others: Mapping[str, Port],
    chain: Chain,
    settings: Settings,
    adapters: LayerAdapters,
) -> list[Stage]:
    """The stages of a stack: its first layer, which lends its relative positions, and those after
    it.

    Args:
        others: what layers take besides x.
    """
    config, lent = settings.config, dict[str, Phase]()
    assert isinstance(config, T5Config)
    before, stages = 0, list[Stage]()
    first = {f"first_{name}_layer": 1}
    model = config.model
    depth = model.layers if name == "encoder" else model.decoder_depth
    block = T5EncoderBlock if name == "encoder" else T5DecoderBlock
    over: type[Wrapped] = EncoderSamples if name == "encoder" else DecoderSamples
    for title, layers in (first | settings.runs(f"{name}_block", depth - 1)).items():
        if layers:
            reads_trained = any(port.grad for port in others.values())
            x, y = chain.through(layers, settings.trains_any(title) or reads_trained)
            inputs = {"x": x, **others}
            own: Module = block(model, is_first=before == 0)
            module = over(adapters.give(own, f"{name}.{before}"))
            stages += layers_alike(Phase(title, module, inputs, [y], settings, layers, lent))
            before += layers
            lender = stages[0].phase
            lent = {n: lender for n in lender.names if RELATIVE_POSITION in n.split(".")}
    return stages
