"""T5's phases and their order in training.

Buffers, with L layers in each stack: row 0 of the encoder's rows is the embeddings' output, rows 1
to L the layers', row L + 1 the encoder head's, which every decoder layer reads, adding to its
gradient. The decoder's rows are 0 to L.
"""

from __future__ import annotations

from collections.abc import Mapping

import popxl
from config.t5 import T5Config
from modelling.layers import Axes, Embeddings
from modelling.phases import (
    ActivationBuffers,
    InputBuffers,
    Layout,
    LossPhase,
    Phase,
    Port,
    Settings,
)
from modelling.t5.blocks import DecoderBlock, DecoderHead, EncoderBlock, EncoderFinalNorm

RELATIVE_POSITION = "relative_position"


def t5_layout(settings: Settings) -> Layout:
    """Embeddings and layers of both stacks, the encoder's end, and the head."""
    config = settings.config
    assert isinstance(config, T5Config)
    model, batch, head = config.model, config.execution.micro_batch_size, DecoderHead(config)
    examples = batch * config.data.examples_per_row
    words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    targets = popxl.TensorSpec((examples, model.decoder_sequence_length), popxl.int32)
    learned = head.objective.streams(targets)
    inputs = InputBuffers(
        {"words": words, "mask": words, "decoder_words": targets, **learned}, settings
    )
    end = model.layers + 1  # the row of the encoder's output

    def rows_of(tokens: popxl.TensorSpec, count: int) -> ActivationBuffers:
        shape = Axes.of(config).shape(tokens.shape[0], tokens.shape[1], model.hidden_size)
        return ActivationBuffers.create(popxl.TensorSpec(shape, settings.dtype), count, settings)

    encoder, decoder = rows_of(words, end + 1), rows_of(targets, end)
    row, mask = encoder.port, inputs.ports(["mask"])
    embeddings = Phase("embeddings", Embeddings(config), inputs.ports(["words"]), row(0), settings)
    stacks = _stack("encoder", EncoderBlock, mask, encoder, settings)
    final_norm = {"x": row(model.layers)}
    stacks.append(Phase("encoder_head", EncoderFinalNorm(config), final_norm, row(end), settings))
    read = {"words": inputs.port("decoder_words")}
    shared = {"": embeddings}
    row = decoder.port
    stacks.append(
        Phase("decoder_embeddings", Embeddings(config), read, row(0), settings, shared=shared)
    )
    stacks += _stack(
        "decoder", DecoderBlock, {"encoded": encoder.shared(end)} | mask, decoder, settings
    )
    tied = {"tokens": embeddings} if head.tied else None
    loss_inputs = {"x": row(model.layers), **inputs.ports(learned)}
    loss = LossPhase("head", head, loss_inputs, settings, tied)

    def begin() -> None:
        with popxl.plan.part("encoder_head/backward"):
            encoder.begin_gradient(end, settings.micro_batches)

    order = [(phase, range(phase.entries)) for phase in (embeddings, *stacks, loss)]
    return Layout(inputs, order, begin)


def _stack(
    name: str,
    block: type[EncoderBlock] | type[DecoderBlock],
    others: Mapping[str, Port],
    rows: ActivationBuffers,
    settings: Settings,
) -> list[Phase]:
    """The phase of a stack's first layer, which lends its relative positions, and that of the
    layers after it.

    Args:
        others: what layers take besides x.
    """
    config, row = settings.config, rows.port
    assert isinstance(config, T5Config)
    first = Phase(f"first_{name}_layer", block(config), {"x": row(0), **others}, row(1), settings)
    if config.model.layers == 1:
        return [first]
    lent = {n: first for n in first.names if RELATIVE_POSITION in n.split(".")}
    inputs, rest = {"x": row(1), **others}, config.model.layers - 1
    return [first, Phase(f"{name}_block", block(config), inputs, row(2), settings, rest, lent)]
