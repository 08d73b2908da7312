"""GPT-J's phases and their order in training.

Row 0 of the activation rows is the embeddings' output, row i + 1 that of layer i.
"""

from __future__ import annotations

import popxl
from config.gptj import GPTJConfig
from modelling import phases
from modelling.gptj.block import Block
from modelling.gptj.head import Head
from modelling.layers import Embeddings


class GPTJLayout:
    """The phases of GPT-J. See `modelling.phases.training.Layout`."""

    def __init__(self, settings: phases.Settings) -> None:
        config = settings.config
        assert isinstance(config, GPTJConfig)
        model, batch = config.model, config.execution.micro_batch_size
        words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
        scalar = popxl.TensorSpec((), popxl.float32)
        self.inputs = phases.InputBuffers(
            {"words": words, "labels": words, "weight": scalar}, settings
        )
        hidden = popxl.TensorSpec((*words.shape, model.hidden_size), settings.dtype)
        rows = phases.ActivationRows.create(hidden, model.layers + 1, settings)

        def row(offset: int) -> phases.Port:
            return phases.Port(hidden, rows.value(offset), rows.grad(offset))

        self.embeddings = phases.Phase(
            "embeddings", Embeddings(config), {"words": self.inputs.port("words")}, row(0), settings
        )
        self.layer = phases.Phase(
            "layer", Block(config), {"x": row(0)}, row(1), settings, model.layers
        )
        head_inputs = {
            "x": row(model.layers),
            "labels": self.inputs.port("labels"),
            "weight": self.inputs.port("weight"),
        }
        self.head = phases.LossPhase("head", Head(config), head_inputs, settings)
        self.phases = [self.embeddings, self.layer, self.head]

    def forward_backward(self, seed: popxl.Tensor | None) -> popxl.Tensor:
        """All phases but the optimizer's; see `Layout`."""
        seeds = [] if seed is None else [seed]
        only = popxl.constant(0, popxl.int32)
        self.embeddings.forward(only, seed)
        phases.stack_forward(self.layer, seeds)
        squares = self.head.backward(only, seed)
        squares = phases.stack_backward(self.layer, squares, seeds)
        return squares + self.embeddings.backward(only, seed)
