"""The phases of an encoder-decoder, and their order in training.

The rows of the encoder's chain are the outputs of embeddings, layers and encoder head, the last of
which every decoder layer reads, adding to its gradient; those of the decoder's, of embeddings and
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import popxl
from data.preference_samples import answers_of
from data.seq2seq import SEQ2SEQ
from modelling.decoder import EMBEDDINGS
from modelling.encoder_decoder import (
    DECODER_EMBEDDINGS,
    ENCODER_HEAD,
    TOKENS,
    EncoderDecoder,
    layer_name,
)
from modelling.layers import Axes, LayerAdapters, Module, seed_adapters
from modelling.layers.encoder_decoder import (
    DecoderContext,
    EncoderContext,
    EncoderWords,
    StackContext,
    over_samples,
)
from modelling.layers.packing import Packing
from modelling.layers.wrapped import Wrapped
from modelling.phases.alike import layers_alike
from modelling.phases.buffers import Chain, InputBuffers, Port
from modelling.phases.layout import Layout, Stage
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings
from popxl import Tensor


class StackSamples(Wrapped):
    """A block of a stack over whole samples."""

    layer: Module

    def build(
        self,
        x: Tensor,
        mask: Tensor,
        encoded: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            encoded: what a block of the decoder reads; see `DecoderContext`.
            mask, seed: see `EncoderContext`.
        """
        seed_adapters(self.layer, seed)
        if encoded is None:
            ctx: StackContext = EncoderContext(mask, seed)
        else:
            ctx = DecoderContext(encoded, mask, seed)
        y: Tensor = self.layer(x, ctx)
        return y


def encoder_decoder_layout(
    settings: Settings, model: EncoderDecoder, adapters: LayerAdapters
) -> Layout:
    """Embeddings and layers of both stacks, the encoder's end, and the head.

    Inputs: `input_ids` and `mask`, int32 (micro-batch, sequence_length), see `EncoderContext`;
    `decoder_input_ids`, int32 (sequences, decoder_sequence_length), and those of the head's
    objective.
    """
    config, end = settings.config, adapters.head(model.head())
    packing, batch = Packing.of(config, answers_of(config)), config.execution.micro_batch_size
    sequences = batch * packing.count
    input_ids = popxl.TensorSpec((batch, config.model.sequence_length), popxl.int32)
    targets = popxl.TensorSpec((sequences, SEQ2SEQ.output_length(config)), popxl.int32)
    learned = end.objective.streams(targets)
    inputs = InputBuffers(
        {"input_ids": input_ids, "mask": input_ids, "decoder_input_ids": targets, **learned},
        settings,
    )

    def chain_of(tokens: popxl.TensorSpec, *phases: str) -> Chain:
        shape = Axes.of(config).shape(tokens.shape[0], tokens.shape[1], config.model.hidden_size)
        spec = popxl.TensorSpec(shape, settings.dtype)
        return Chain(spec, settings, any(map(settings.trains_any, phases)))

    own = [] if model.decoder_embeddings is None else [DECODER_EMBEDDINGS]
    encoder, decoder = chain_of(input_ids, EMBEDDINGS), chain_of(targets, EMBEDDINGS, *own)
    mask, start = inputs.ports(["mask"]), over_samples(adapters.embeddings(model.embeddings()))
    read = inputs.ports(["input_ids", "mask"] if isinstance(start, EncoderWords) else ["input_ids"])
    first = Phase(EMBEDDINGS, start, read, [encoder.end], settings)
    given = settings, model, adapters
    stages = [Stage(first, range(1)), *_stack("encoder", mask, encoder, *given)]
    if model.encoder_head is not None:
        x, y = encoder.through(1, settings.trains_any(ENCODER_HEAD))
        last = Phase(ENCODER_HEAD, model.encoder_head(), {"x": x}, [y], settings)
        stages.append(Stage(last, range(1)))
    last, read = stages[-1].phase, {"input_ids": inputs.port("decoder_input_ids")}
    again = adapters.embeddings((model.decoder_embeddings or model.embeddings)())
    table = {TOKENS: first}
    begin = Phase(DECODER_EMBEDDINGS, again, read, [decoder.end], settings, 1, table)
    stages.append(Stage(begin, range(1)))
    stages += _stack("decoder", {"encoded": encoder.shared(), **mask}, decoder, *given)
    loss_inputs = {"x": decoder.end, **inputs.ports(learned)}
    loss = LossPhase("head", end, loss_inputs, settings, table if end.tied else None)

    def begin_gradient() -> None:
        with last.part("backward"):
            encoder.begin_gradient()

    ends = replace(stages.pop(), begin=begin_gradient), Stage(loss, range(1))
    return Layout(inputs, [*stages, *ends])


def _stack(
    name: str,
    others: Mapping[str, Port],
    chain: Chain,
    settings: Settings,
    model: EncoderDecoder,
    adapters: LayerAdapters,
) -> list[Stage]:
    """The stages of a stack: its first layer by itself, if it lends the others a part, and those
    after it.

    Args:
        others: what layers take besides x.
    """
    stack, stages, lent = model.stacks[name], list[Stage](), dict[str, Phase]()
    bias, before = stack.position_bias(), 0
    first = {} if bias is None else {f"first_{name}_layer": 1}
    others_alike = settings.runs(f"{name}_block", stack.layers - len(first))
    for title, layers in (first | others_alike).items():
        if layers:
            reads_trained = any(port.grad for port in others.values())
            x, y = chain.through(layers, settings.trains_any(title) or reads_trained)
            block = adapters.give(stack.block(before == 0), layer_name(name, before))
            module = StackSamples(block)
            phase = Phase(title, module, {"x": x, **others}, [y], settings, layers, lent)
            stages += layers_alike(phase)
            before += layers
            lent = {} if bias is None else {bias[0]: stages[0].phase}
    return stages
