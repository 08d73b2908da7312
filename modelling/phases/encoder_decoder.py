"""Builds the phases of encoder-decoders: two stacks of layers, encoder head and loss.

Every decoder layer reads the last row of the encoder's activations and adds to its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import popxl
from data.seq2seq import SEQ2SEQ
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
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.layers.output_layer import PooledHeadLoss
from modelling.layers.packing import Packing
from modelling.phases.buffers import ActivationBuffers, InputBuffers, LayerIO
from modelling.phases.dense_layers import build_runs_by_type, runs_in_order
from modelling.phases.loss_phase_builder import build_loss_phases, set_objective
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhasePlan, PhaseRun
from modelling.phases.settings import PhaseSettings
from modelling.weights.weight_map import EMBEDDINGS
from popxl import Tensor


class StackBlock(LayerWrapper):
    """Wraps an encoder or decoder block so that it runs on full samples, without a KV cache."""

    layer: Module

    def build(
        self,
        x: Tensor,
        mask: Tensor,
        encoded: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Runs the block: (batch, length, hidden) -> the same shape.

        Args:
            encoded: the encoder's output, for a block of the decoder; see `DecoderContext`.
            mask, seed: fields of `EncoderContext`.
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
    """Build the phases of an encoder-decoder: embeddings, layers, encoder head, loss head.

    Input streams: `input_ids` and `mask`, int32 (micro-batch, sequence_length), see
    `EncoderContext`; `decoder_input_ids`, int32 (sequences, decoder_sequence_length), and those of
    the head's objective, of that shape.
    """
    config, token_embedding_layer = settings.config, model.token_embedding_layer
    head = adapters.attach_to_head(model.head(), token_embedding_layer)
    set_objective(head, settings)
    packing = Packing.from_config(config, config.answers_per_example)
    batch = config.execution.micro_batch_size
    sequences = batch * packing.sequences_per_sample
    targets = popxl.TensorSpec((sequences, SEQ2SEQ.output_length(config)), popxl.int32)
    loss_inputs = head.objective.input_specs(targets)
    inputs = _make_inputs({"decoder_input_ids": targets, **loss_inputs}, settings)
    args = settings, model, adapters
    encoder, runs = _build_encoder(inputs, *args)
    last_encoder_phase = runs[-1].phase
    decoder_phases = [] if model.decoder_embeddings is None else [DECODER_EMBEDDINGS]
    decoder = _make_activation_buffers(
        "decoder", targets, model, settings, EMBEDDINGS, *decoder_phases
    )
    embeddings = (model.decoder_embeddings or model.embeddings)()
    embeddings = adapters.attach_to_embeddings(embeddings, token_embedding_layer)
    tokens, outputs = {"input_ids": inputs.layer_io("decoder_input_ids")}, [decoder.last_row]
    shared = {} if model.has_decoder_tokens else {TOKENS: runs[0].phase}
    phase = Phase(DECODER_EMBEDDINGS, embeddings, tokens, outputs, settings, 1, shared)
    token_weight = shared or {TOKENS: phase}
    runs.append(PhaseRun(phase, range(1)))
    decoder_inputs = {"encoded": encoder.shared_output(), **inputs.layer_ios(["mask"])}
    runs += _build_stack("decoder", decoder_inputs, decoder, *args)
    shared = token_weight if head.tied else {}
    last, _ = build_loss_phases(head, {"x": decoder.last_row}, inputs, settings, shared)

    def zero_grads() -> None:
        with last_encoder_phase.label_in_plan("backward"):
            encoder.zero_grad()

    return PhasePlan(inputs, [*runs[:-1], replace(runs[-1], zero_grads=zero_grads), last])


def build_encoder_phases(
    settings: PhaseSettings, model: EncoderDecoderSpec, adapters: LayerAdapters
) -> PhasePlan:
    """Build the phases of the encoder alone: embeddings, layers, encoder head, loss.

    Input streams: `input_ids` and `mask`, and those of the objective, of the same shape.
    """
    head = PooledHeadLoss(None, "", None)
    set_objective(head, settings)
    inputs = _make_inputs(head.objective.input_specs(_token_spec(settings)), settings)
    encoder, runs = _build_encoder(inputs, settings, model, adapters)
    last, batch_loss = build_loss_phases(head, {"x": encoder.last_row}, inputs, settings)
    return PhasePlan(inputs, [*runs, last], batch_loss=batch_loss)


def _token_spec(settings: PhaseSettings) -> popxl.TensorSpec:
    """Returns the spec of the tokens that the encoder reads: (micro-batch, sequence_length)."""
    config = settings.config
    shape = config.execution.micro_batch_size, config.model.sequence_length
    return popxl.TensorSpec(shape, popxl.int32)


def _make_inputs(specs: Mapping[str, popxl.TensorSpec], settings: PhaseSettings) -> InputBuffers:
    """Create the buffers of the encoder's inputs, and of others by name."""
    tokens = _token_spec(settings)
    return InputBuffers({"input_ids": tokens, "mask": tokens, **specs}, settings)


def _make_activation_buffers(
    name: str,
    tokens: popxl.TensorSpec,
    model: EncoderDecoderSpec,
    settings: PhaseSettings,
    *phases: str,
) -> ActivationBuffers:
    """Create the buffers between a stack's layers.

    Args:
        phases: those that write the first row.
    """
    config = settings.config
    hidden = model.stacks[name].hidden_size or config.model.hidden_size
    shape = ActivationLayout.from_config(config).shape(tokens.shape[0], tokens.shape[1], hidden)
    spec = popxl.TensorSpec(shape, settings.dtype)
    return ActivationBuffers(spec, settings, any(map(settings.is_phase_trainable, phases)))


def _build_encoder(
    inputs: InputBuffers,
    settings: PhaseSettings,
    model: EncoderDecoderSpec,
    adapters: LayerAdapters,
) -> tuple[ActivationBuffers, list[PhaseRun]]:
    """Build the encoder's phases; the embeddings come first."""
    tokens = _token_spec(settings)
    encoder = _make_activation_buffers("encoder", tokens, model, settings, EMBEDDINGS)
    embeddings = with_packed_positions(adapters.attach_to_embeddings(model.embeddings()))
    mask, names = inputs.layer_ios(["mask"]), ["input_ids"]
    names += ["mask"] if isinstance(embeddings, PackedEncoderEmbeddings) else []
    outputs = [encoder.last_row]
    first = Phase(EMBEDDINGS, embeddings, inputs.layer_ios(names), outputs, settings)
    runs = [PhaseRun(first, range(1))]
    runs += _build_stack("encoder", mask, encoder, settings, model, adapters)
    if model.encoder_head is not None:
        x, y = encoder.reserve_rows(1, settings.is_phase_trainable(ENCODER_HEAD))
        last = Phase(ENCODER_HEAD, model.encoder_head(), {"x": x}, [y], settings)
        runs.append(PhaseRun(last, range(1)))
    return encoder, runs


def _build_stack(
    name: str,
    extra_inputs: Mapping[str, LayerIO],
    activations: ActivationBuffers,
    settings: PhaseSettings,
    model: EncoderDecoderSpec,
    adapters: LayerAdapters,
) -> list[PhaseRun]:
    """Build a stack's phases; a first layer that owns the position bias is a separate phase.

    Args:
        extra_inputs: inputs of each layer besides x, by name.
    """
    stack, runs, shared = model.stacks[name], list[PhaseRun](), dict[str, Phase]()
    bias, layer = stack.find_position_bias(), 0
    first = {} if bias is None else {f"first_{name}_layer": 1}
    rest = settings.layers_per_phase(f"{name}_block", stack.num_layers - len(first))
    for title, layers in (first | rest).items():
        if layers:
            input_has_grad = any(layer_io.grad for layer_io in extra_inputs.values())
            requires_grad = settings.is_phase_trainable(title) or input_has_grad
            x, y = activations.reserve_rows(layers, requires_grad)
            names = [layer_name(name, i) for i in range(layer, layer + layers)]
            types = stack.block_types[layer : layer + layers]
            blocks = adapters.build_layers(names, types, stack.block).map_modules(StackBlock)
            inputs = {"x": x, **extra_inputs}
            by_type = build_runs_by_type(title, blocks, inputs, [y], settings, shared)
            runs += runs_in_order(blocks, by_type)
            layer += layers
            shared = {} if bias is None else {bias[0]: runs[0].phase}
    return runs
