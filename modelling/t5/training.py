"""T5's phases and their order in training.

Buffers, with L layers in each stack: row 0 of the encoder's rows is the embeddings' output, rows 1
to L the layers', row L + 1 the encoder head's, which every decoder layer reads, adding to its
gradient. The decoder's rows are 0 to L.
"""

from __future__ import annotations

from collections.abc import Mapping

import popxl
import popxl_addons as addons
from config.t5 import T5Config
from modelling.layers import Axes, Embeddings
from modelling.phases import (
    ActivationBuffers,
    InputBuffers,
    LossPhase,
    Phase,
    Port,
    Settings,
    StepInputs,
    stack_backward,
    stack_forward,
)
from modelling.t5.blocks import DecoderBlock, DecoderHead, EncoderBlock, EncoderFinalNorm

RELATIVE_POSITION = "relative_position"


class T5Layout:
    """The phases of T5. See `modelling.phases.training.Layout`."""

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.config, T5Config)
        self._settings, self._config = settings, settings.config
        self._layers = self._config.model.layers
        self._head = DecoderHead(self._config)
        self._specs()
        self._encoder_phases()
        self._decoder_phases()
        self.phases = [
            p
            for p in (
                self.embeddings, self.first_encoder, self.encoder, self.encoder_head,
                self.decoder_embeddings, self.first_decoder, self.decoder, self.head,
            )
            if p is not None
        ]  # fmt: skip

    def _specs(self) -> None:
        model, settings = self._config.model, self._settings
        batch = self._config.execution.micro_batch_size
        enc, dec = model.sequence_length, model.decoder_sequence_length
        axes = Axes.of(self._config)
        self._enc = popxl.TensorSpec(axes.shape(batch, enc, model.hidden_size), settings.dtype)
        targets = batch * self._config.data.examples_per_row
        self._dec = popxl.TensorSpec(axes.shape(targets, dec, model.hidden_size), settings.dtype)
        words = popxl.TensorSpec((targets, dec), popxl.int32)
        self._learned = self._head.objective.streams(words)
        self.inputs = InputBuffers(
            {
                "words": popxl.TensorSpec((batch, enc), popxl.int32),
                "mask": popxl.TensorSpec((batch, enc), popxl.int32),
                "decoder_words": words,
                **self._learned,
            },
            settings,
        )
        self._encoder_rows = ActivationBuffers.create(self._enc, self._layers + 2, settings)
        self._decoder_rows = ActivationBuffers.create(self._dec, self._layers + 1, settings)

    # ---- encoder --------------------------------------------------------------------------------
    def _encoder_phases(self) -> None:
        config, settings, row = self._config, self._settings, self._encoder_rows.port
        self.embeddings = Phase(
            "embeddings", Embeddings(config), {"words": self.inputs.port("words")}, row(0), settings
        )

        def inputs(offset: int) -> dict[str, Port]:
            return {"x": row(offset), "mask": self.inputs.port("mask")}

        self.first_encoder = Phase(
            "first_encoder_layer", EncoderBlock(config), inputs(0), row(1), settings
        )
        self.encoder = self._remaining(
            "encoder_block", EncoderBlock(config), inputs(1), row(2), self.first_encoder
        )
        self.encoder_head = Phase(
            "encoder_head",
            EncoderFinalNorm(config),
            {"x": row(self._layers)},
            row(self._layers + 1),
            settings,
        )

    def _remaining(
        self,
        name: str,
        module: addons.Module,
        inputs: Mapping[str, Port],
        output: Port,
        first: Phase,
    ) -> Phase | None:
        """The phase of the layers after the first, which lends its relative positions."""
        if self._layers == 1:
            return None
        lent = {n: first for n in first.names if RELATIVE_POSITION in n.split(".")}
        return Phase(name, module, inputs, output, self._settings, self._layers - 1, lent)

    # ---- decoder --------------------------------------------------------------------------------
    def _decoder_phases(self) -> None:
        config, settings, row = self._config, self._settings, self._decoder_rows.port
        self.decoder_embeddings = Phase(
            "decoder_embeddings",
            Embeddings(config),
            {"words": self.inputs.port("decoder_words")},
            row(0),
            settings,
            shared={"": self.embeddings},
        )
        encoded = self._encoder_rows.shared(self._layers + 1)

        def inputs(offset: int) -> dict[str, Port]:
            return {"x": row(offset), "encoded": encoded, "mask": self.inputs.port("mask")}

        self.first_decoder = Phase(
            "first_decoder_layer", DecoderBlock(config), inputs(0), row(1), settings
        )
        self.decoder = self._remaining(
            "decoder_block", DecoderBlock(config), inputs(1), row(2), self.first_decoder
        )
        head_inputs = {"x": row(self._layers), **self.inputs.ports(self._learned)}
        tied = {"tokens": self.embeddings} if self._head.tied else None
        self.head = LossPhase("head", self._head, head_inputs, settings, tied)

    # ---- order ----------------------------------------------------------------------------------
    def forward(self, step: StepInputs) -> None:
        """All phases forwards; see `Layout`."""
        zero = popxl.constant(0, popxl.int32)
        self.embeddings.forward(zero, step)
        self._stack_forward(self.first_encoder, self.encoder, step)
        self.encoder_head.forward(zero, step)
        self.decoder_embeddings.forward(zero, step)
        self._stack_forward(self.first_decoder, self.decoder, step)
        self.head.forward(zero, step)

    def backward(self, step: StepInputs) -> popxl.Tensor:
        """All phases backwards; see `Layout`."""
        zero = popxl.constant(0, popxl.int32)
        squares = self.head.backward(zero, step)
        with popxl.plan.part("encoder_head/backward"):
            self._encoder_rows.begin_gradient(self._layers + 1, self._settings.micro_batches)
        squares = self._stack_backward(self.first_decoder, self.decoder, squares, step)
        squares = squares + self.decoder_embeddings.backward(zero, step)
        squares = squares + self.encoder_head.backward(zero, step)
        squares = self._stack_backward(self.first_encoder, self.encoder, squares, step)
        return squares + self.embeddings.backward(zero, step)

    def _stack_forward(self, first: Phase, others: Phase | None, step: StepInputs) -> None:
        first.forward(popxl.constant(0, popxl.int32), step)
        if others is not None:
            stack_forward(others, step)

    def _stack_backward(
        self, first: Phase, others: Phase | None, squares: popxl.Tensor, step: StepInputs
    ) -> popxl.Tensor:
        """The first layer comes last, when the others have added to what it lends them."""
        if others is not None:
            squares = stack_backward(others, squares, step)
        return squares + first.backward(popxl.constant(0, popxl.int32), step)
