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
from modelling.adapters import LayerAdapters
from modelling.layers import Axes, Embeddings
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
from modelling.t5.blocks import DecoderBlock, DecoderHead, EncoderBlock, EncoderFinalNorm
from modelling.t5.weights import weight_table

RELATIVE_POSITION = "relative_position"


def t5_layout(settings: Settings) -> Layout:
    """Embeddings and layers of both stacks, the encoder's end, and the head."""
    config = settings.config
    assert isinstance(config, T5Config)
    make_embeddings, make_head = LayerAdapters(config, weight_table).ends(
        lambda: Embeddings(config), lambda: DecoderHead(config)
    )
    model, batch, head = config.model, config.execution.micro_batch_size, make_head()
    examples = batch * config.data.examples_per_row * answers_of(config)
    words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    targets = popxl.TensorSpec((examples, model.decoder_sequence_length), popxl.int32)
    learned = head.objective.streams(targets)
    inputs = InputBuffers(
        {"words": words, "mask": words, "decoder_words": targets, **learned}, settings
    )

    def chain_of(tokens: popxl.TensorSpec) -> Chain:
        shape = Axes.of(config).shape(tokens.shape[0], tokens.shape[1], model.hidden_size)
        spec = popxl.TensorSpec(shape, settings.dtype)
        return Chain(spec, settings, trained=settings.trains_any("embeddings"))

    encoder, decoder = chain_of(words), chain_of(targets)
    mask, read = inputs.ports(["mask"]), inputs.ports(["words"])
    embeddings = Phase("embeddings", make_embeddings(), read, [encoder.end], settings)
    stacks = _stack("encoder", EncoderBlock, mask, encoder, settings)
    x, y = encoder.through(1, settings.trains_any("encoder_head"))
    final = Phase("encoder_head", EncoderFinalNorm(config), {"x": x}, [y], settings)
    read = {"words": inputs.port("decoder_words")}
    borrowed = {"": embeddings}
    first = Phase(
        "decoder_embeddings", make_embeddings(), read, [decoder.end], settings, 1, borrowed
    )
    stacks += [Stage(final, range(1)), Stage(first, range(1))]
    encoded = {"encoded": encoder.shared()}
    stacks += _stack("decoder", DecoderBlock, encoded | mask, decoder, settings)
    tied = {"tokens": embeddings} if head.tied else None
    loss_inputs = {"x": decoder.end, **inputs.ports(learned)}
    loss = LossPhase("head", head, loss_inputs, settings, tied)

    def begin() -> None:
        with final.part("backward"):
            encoder.begin_gradient()

    *others, last = stacks
    ends = replace(last, begin=begin), Stage(loss, range(1))
    order = [Stage(embeddings, range(1)), *others, *ends]
    return Layout(inputs, order)


def _stack(
    name: str,
    block: type[EncoderBlock] | type[DecoderBlock],
    others: Mapping[str, Port],
    chain: Chain,
    settings: Settings,
) -> list[Stage]:
    """The stages of a stack: its first layer, which lends its relative positions, and those after
    it.

    Args:
        others: what layers take besides x.
    """
    config, lent = settings.config, dict[str, Phase]()
    assert isinstance(config, T5Config)
    adapters, before, stages = LayerAdapters(config, weight_table), 0, list[Stage]()
    first = {f"first_{name}_layer": 1}
    model = config.model
    depth = model.layers if name == "encoder" else model.decoder_depth
    for title, layers in (first | settings.runs(f"{name}_block", depth - 1)).items():
        if layers:
            reads_trained = any(port.grad for port in others.values())
            x, y = chain.through(layers, settings.trains_any(title) or reads_trained)
            inputs = {"x": x, **others}
            module = adapters.give(block(config), f"{name}.{before}")
            stages += layers_alike(Phase(title, module, inputs, [y], settings, layers, lent))
            before += layers
            lender = stages[0].phase
            lent = {n: lender for n in lender.names if RELATIVE_POSITION in n.split(".")}
    return stages
