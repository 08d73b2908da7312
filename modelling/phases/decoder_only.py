"""The phases of a decoder-only model, and their order in training.

Row 0 of the activation rows is the embeddings' output, row i + 1 that of layer i.
"""

from __future__ import annotations

import popxl
import popxl_addons as addons
from data.causal_lm import examples_per_row
from modelling.layers import Axes, Embeddings, Layers, LMHeadLoss
from modelling.phases.buffers import ActivationBuffers, InputBuffers, Port
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings
from modelling.phases.stack import stack_backward, stack_forward
from modelling.phases.step import StepInputs


class DecoderOnlyLayout:
    """Embeddings, layers, and the head. See `modelling.phases.training.Layout`.

    Inputs: `words`, int32 (micro-batch, sequence_length), those of the head's objective, and where
    samples hold several texts, `starts`, see `data.causal_lm.starts_of`.

    Args:
        layers: of one kind, or several; `build(x, seed=None)` returns the shape of x, (batch,
            length, hidden), or `build(x, starts, seed=None)` where samples hold several texts.
        head: it may be tied to the embedding.
        embeddings: of the words; default: as they are in the table.
    """

    def __init__(
        self,
        settings: Settings,
        layers: addons.Module | Layers,
        head: LMHeadLoss,
        embeddings: Embeddings | None = None,
    ) -> None:
        config = settings.config
        model, batch = config.model, config.execution.micro_batch_size
        if isinstance(layers, addons.Module):
            layers = Layers([layers], [0] * model.layers)
        self._layers, self._settings = layers, settings
        words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
        learned = head.objective.streams(words)
        packed = {"starts": words} if examples_per_row(config) > 1 else {}
        self.inputs = InputBuffers({"words": words} | learned | packed, settings)
        shape = Axes.of(config).shape(batch, model.sequence_length, model.hidden_size)
        hidden = popxl.TensorSpec(shape, settings.dtype)
        row = ActivationBuffers.create(hidden, model.layers + 1, settings).port
        self.embeddings = Phase(
            "embeddings",
            embeddings or Embeddings(config),
            {"words": self.inputs.port("words")},
            row(0),
            settings,
        )
        starts = {name: self.inputs.port(name) for name in packed}
        self.kinds = self._kinds({"x": row(0), **starts}, row(1))
        head_inputs = {"x": row(model.layers), **self.inputs.ports(learned)}
        tied = {"tokens": self.embeddings} if head.tied else None
        self.head = LossPhase("head", head, head_inputs, settings, tied)
        self.phases = [self.embeddings, *self.kinds, self.head]

    def _kinds(self, inputs: dict[str, Port], output: Port) -> list[Phase]:
        """A phase for each kind of layer; the first has the variables of all layers."""
        found: list[Phase] = []
        for number, module in enumerate(self._layers.kinds):
            name = f"layer_{number + 1}" if number else "layer"
            weights_of = found[0] if found else None
            count = len(self._layers.order)
            phase = Phase(
                name, module, inputs, output, self._settings, count, weights_of=weights_of
            )
            found.append(phase)
        return found

    def forward(self, step: StepInputs) -> None:
        """All phases forwards; see `Layout`."""
        only = popxl.constant(0, popxl.int32)
        self.embeddings.forward(only, step)
        for kind, rows in self._layers.runs():
            stack_forward(self.kinds[kind], step, rows)
        self.head.forward(only, step)

    def backward(self, step: StepInputs) -> popxl.Tensor:
        """All phases backwards; see `Layout`."""
        only = popxl.constant(0, popxl.int32)
        squares = self.head.backward(only, step)
        for kind, rows in reversed(self._layers.runs()):
            squares = stack_backward(self.kinds[kind], squares, step, rows)
        return squares + self.embeddings.backward(only, step)
