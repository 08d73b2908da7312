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
    EncoderDecoderSpec,
    layer_name,
)
from modelling.layers import ActivationLayout, LayerAdapters, Module, seed_adapters
from modelling.layers.encoder_decoder import (
    DecoderContext,
    EncoderContext,
    PackedEncoderEmbeddings,
    StackContext,
    with_packed_positions,
)
from modelling.layers.packing import Packing
from modelling.layers.wrapped import LayerWrapper
from modelling.phases.buffers import ActivationRows, InputBuffers, LayerIO
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhasePlan, PhaseRun
from modelling.phases.remat_split import split_by_remat
from modelling.phases.settings import PhaseSettings
from popxl import Tensor


class StackBlock(LayerWrapper):
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


def build_encoder_decoder_phases(
    settings: PhaseSettings, model: EncoderDecoderSpec, adapters: LayerAdapters
) -> PhasePlan:
    """Embeddings and layers of both stacks, the encoder's end, and the head.

    Inputs: `input_ids` and `mask`, int32 (micro-batch, sequence_length), see `EncoderContext`;
    `decoder_input_ids`, int32 (sequences, decoder_sequence_length), and those of the head's
    objective.
    """
    config, end = settings.config, adapters.attach_to_head(model.head())
    packing = Packing.from_config(config, answers_of(config))
    batch = config.execution.micro_batch_size
    sequences = batch * packing.sequences_per_sample
    input_ids = popxl.TensorSpec((batch, config.model.sequence_length), popxl.int32)
    targets = popxl.TensorSpec((sequences, SEQ2SEQ.output_length(config)), popxl.int32)
    learned = end.objective.input_specs(targets)
    inputs = InputBuffers(
        {"input_ids": input_ids, "mask": input_ids, "decoder_input_ids": targets, **learned},
        settings,
    )

    def rows_of(tokens: popxl.TensorSpec, *phases: str) -> ActivationRows:
        layout = ActivationLayout.from_config(config)
        shape = layout.shape(tokens.shape[0], tokens.shape[1], config.model.hidden_size)
        spec = popxl.TensorSpec(shape, settings.dtype)
        return ActivationRows(spec, settings, any(map(settings.is_phase_trainable, phases)))

    own = [] if model.decoder_embeddings is None else [DECODER_EMBEDDINGS]
    encoder, decoder = rows_of(input_ids, EMBEDDINGS), rows_of(targets, EMBEDDINGS, *own)
    mask, start = (
        inputs.layer_ios(["mask"]),
        with_packed_positions(adapters.attach_to_embeddings(model.embeddings())),
    )
    read = inputs.layer_ios(
        ["input_ids", "mask"] if isinstance(start, PackedEncoderEmbeddings) else ["input_ids"]
    )
    first = Phase(EMBEDDINGS, start, read, [encoder.last_row], settings)
    given = settings, model, adapters
    runs = [PhaseRun(first, range(1)), *_stack("encoder", mask, encoder, *given)]
    if model.encoder_head is not None:
        x, y = encoder.reserve(1, settings.is_phase_trainable(ENCODER_HEAD))
        last = Phase(ENCODER_HEAD, model.encoder_head(), {"x": x}, [y], settings)
        runs.append(PhaseRun(last, range(1)))
    last, read = runs[-1].phase, {"input_ids": inputs.layer_io("decoder_input_ids")}
    again = adapters.attach_to_embeddings((model.decoder_embeddings or model.embeddings)())
    table = {TOKENS: first}
    begin = Phase(DECODER_EMBEDDINGS, again, read, [decoder.last_row], settings, 1, table)
    runs.append(PhaseRun(begin, range(1)))
    runs += _stack("decoder", {"encoded": encoder.shared_output(), **mask}, decoder, *given)
    loss_inputs = {"x": decoder.last_row, **inputs.layer_ios(learned)}
    loss = LossPhase("head", end, loss_inputs, settings, table if end.tied else None)

    def zero_grads() -> None:
        with last.part("backward"):
            encoder.zero_grad()

    ends = replace(runs.pop(), zero_grads=zero_grads), PhaseRun(loss, range(1))
    return PhasePlan(inputs, [*runs, *ends])


def _stack(
    name: str,
    others: Mapping[str, LayerIO],
    chain: ActivationRows,
    settings: PhaseSettings,
    model: EncoderDecoderSpec,
    adapters: LayerAdapters,
) -> list[PhaseRun]:
    """The stages of a stack: its first layer by itself, if it lends the others a part, and those
    after it.

    Args:
        others: what layers take besides x.
    """
    stack, runs, lent = model.stacks[name], list[PhaseRun](), dict[str, Phase]()
    bias, before = stack.position_bias(), 0
    first = {} if bias is None else {f"first_{name}_layer": 1}
    others_alike = settings.layers_per_phase(f"{name}_block", stack.layers - len(first))
    for title, layers in (first | others_alike).items():
        if layers:
            reads_trained = any(layer_io.grad for layer_io in others.values())
            x, y = chain.reserve(layers, settings.is_phase_trainable(title) or reads_trained)
            block = adapters.attach(stack.block(before == 0), layer_name(name, before))
            module = StackBlock(block)
            phase = Phase(title, module, {"x": x, **others}, [y], settings, layers, lent)
            runs += split_by_remat(phase)
            before += layers
            lent = {} if bias is None else {bias[0]: runs[0].phase}
    return runs
