"""The phases of a decoder alone, and their order in training.

Row 0 of the activation rows is the embeddings' output, row i + 1 that of layer i.
"""

from __future__ import annotations

import popxl
import popxl_addons as addons
from modelling.layers import Axes, Embeddings
from modelling.phases.buffers import ActivationBuffers, InputBuffers
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings
from modelling.phases.stack import stack_backward, stack_forward


class DecoderOnlyLayout:
    """Embeddings, layers of one kind, and the head. See `modelling.phases.training.Layout`.

    Inputs: `words` and `labels`, int32 (micro-batch, sequence_length).

    Args:
        layer: `build(x, seed=None)` returns the shape of x, (batch, length, hidden).
        head: a `modelling.layers.LMHeadLoss`.
    """

    def __init__(self, settings: Settings, layer: addons.Module, head: addons.Module) -> None:
        config = settings.config
        model, batch = config.model, config.execution.micro_batch_size
        words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
        scalar = popxl.TensorSpec((), popxl.float32)
        self.inputs = InputBuffers({"words": words, "labels": words, "weight": scalar}, settings)
        shape = Axes.of(config).shape(batch, model.sequence_length, model.hidden_size)
        hidden = popxl.TensorSpec(shape, settings.dtype)
        row = ActivationBuffers.create(hidden, model.layers + 1, settings).port
        self.embeddings = Phase(
            "embeddings", Embeddings(config), {"words": self.inputs.port("words")}, row(0), settings
        )
        self.layer = Phase("layer", layer, {"x": row(0)}, row(1), settings, model.layers)
        head_inputs = {
            "x": row(model.layers),
            "labels": self.inputs.port("labels"),
            "weight": self.inputs.port("weight"),
        }
        self.head = LossPhase("head", head, head_inputs, settings)
        self.phases = [self.embeddings, self.layer, self.head]

    def forward(self, seed: popxl.Tensor | None) -> None:
        """All phases forwards; see `Layout`."""
        only = popxl.constant(0, popxl.int32)
        self.embeddings.forward(only, seed)
        stack_forward(self.layer, [] if seed is None else [seed])
        self.head.forward(only, seed)

    def forward_backward(self, seed: popxl.Tensor | None) -> popxl.Tensor:
        """All phases but the optimizer's; see `Layout`."""
        seeds = [] if seed is None else [seed]
        only = popxl.constant(0, popxl.int32)
        self.forward(seed)
        squares = self.head.backward(only, seed)
        squares = stack_backward(self.layer, squares, seeds)
        return squares + self.embeddings.backward(only, seed)
