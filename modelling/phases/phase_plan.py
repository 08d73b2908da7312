"""The phases of a model, and the order in which a training step runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import popxl
from modelling.phases.buffers import InputBuffers, loop_over_layers
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.step_inputs import StepInputs, UpdateInputs

if TYPE_CHECKING:
    from modelling.phases.batch_loss_phase import BatchLossPhase
    from modelling.phases.streamed_experts import StreamedExperts


def _no_op() -> None:
    pass


@dataclass(frozen=True)
class PhaseRun:
    """Consecutive layers of one phase, run as one loop, with their streamed experts, if any.

    Attributes:
        rows: indices of the layers in the phase.
        experts: streamed experts of these layers; the experts of a layer run right after it.
        zero_grads: zeros the gradients that these layers add to, before their backward pass.
    """

    phase: Phase
    rows: range
    experts: StreamedExperts | None = None
    zero_grads: Callable[[], None] = _no_op

    @property
    def phases(self) -> list[Phase]:
        """The phase of the layers, then, if their experts are streamed, the experts' phase."""
        return [self.phase] if self.experts is None else [self.phase, self.experts.phase]


@dataclass(frozen=True)
class PhasePlan:
    """All phases of a model in the current Ir, in the order in which a step runs them.

    Attributes:
        inputs: buffers of a step's batch.
        order: runs of layers in forward order; the backward pass reverses it. A phase that owns
            variables comes before the phases that borrow them; the loss comes last.
        zero_activations: zeros the activations that layers add to, before the forward pass.
        batch_loss: computes the loss from the outputs of the last phase, if that is no loss phase.
    """

    inputs: InputBuffers
    order: Sequence[PhaseRun]
    zero_activations: Callable[[], None] = _no_op
    batch_loss: BatchLossPhase | None = None

    @cached_property
    def phases(self) -> list[Phase]:
        """All phases of the model, each once, in the order of their first layers."""
        return list(dict.fromkeys(phase for phase_run in self.order for phase in phase_run.phases))

    @property
    def head(self) -> LossPhase | BatchLossPhase:
        """The phase that ends the forward pass and computes the loss."""
        head = self.order[-1].phase
        if self.batch_loss is not None:
            return self.batch_loss
        assert isinstance(head, LossPhase)
        return head

    def forward(self, step: StepInputs) -> None:
        """Run the forward pass through all phases; in training all but the loss phase."""
        self.zero_activations()
        for phase_run in self.order:

            def forward_layer(
                row: popxl.Tensor, *tensors: popxl.Tensor, phase_run: PhaseRun = phase_run
            ) -> list[popxl.Tensor]:
                phase_run.phase.forward(row, step.with_tensors(tensors))
                if phase_run.experts is not None:
                    phase_run.experts.forward(row, step.with_tensors(tensors))
                return []

            _loop_over_rows(phase_run, phase_run.rows, forward_layer, (), step)
        if self.batch_loss is not None:
            self.batch_loss.forward()

    def backward(self, step: StepInputs) -> popxl.Tensor:
        """Run the backward pass through all phases, the loss phase first.

        Returns:
            This replica's share of the sum of squares of all gradients, float32 scalar; zero
            before the last pass of the step.
        """
        if step.is_last:
            for phase in self.phases:
                phase.zero_shared_grads()
        zero, row = popxl.constant(0.0, popxl.float32), popxl.constant(0, popxl.int32)
        order = self.order
        if self.batch_loss is not None:
            sum_squares = self.batch_loss.backward()
        else:
            head, order = order[-1].phase, order[:-1]
            assert isinstance(head, LossPhase)
            sum_squares = head.backward(row, step, zero)
        for phase_run in order[::-1]:
            if all(phase.bwd is None for phase in phase_run.phases):
                continue
            phase_run.zero_grads()

            def backward_layer(
                row: popxl.Tensor,
                sum_squares: popxl.Tensor,
                *tensors: popxl.Tensor,
                phase_run: PhaseRun = phase_run,
            ) -> list[popxl.Tensor]:
                if phase_run.experts is not None:
                    sum_squares = phase_run.experts.backward(
                        row, step.with_tensors(tensors), sum_squares
                    )
                return [phase_run.phase.backward(row, step.with_tensors(tensors), sum_squares)]

            (sum_squares,) = _loop_over_rows(
                phase_run, phase_run.rows[::-1], backward_layer, [sum_squares], step
            )
        return sum_squares

    def update(self, update_inputs: UpdateInputs) -> None:
        """Run the optimizer update of all layers."""
        for phase in self.phases:

            def update_layer(
                row: popxl.Tensor, *tensors: popxl.Tensor, phase: Phase = phase
            ) -> list[popxl.Tensor]:
                phase.update(row, UpdateInputs(*tensors))
                return []

            if phase.optimizer is not None and phase.owns_variables:
                loop_over_layers(range(phase.num_layers), update_layer, (), update_inputs.tensors)


def _loop_over_rows(
    phase_run: PhaseRun,
    rows: range,
    body: Callable[..., list[popxl.Tensor]],
    carry: Sequence[popxl.Tensor],
    step: StepInputs,
) -> list[popxl.Tensor]:
    """Run `body` for the row index of each layer in one loop; without a loop for one layer."""
    if phase_run.phase.num_layers == 1:
        return body(popxl.constant(0, popxl.int32), *carry, *step.tensors)
    return loop_over_layers(rows, body, carry, step.tensors)


def split_by_remat(phase: Phase) -> list[PhaseRun]:
    """Split a phase's layers into a run that recomputes, then a run that saves activations.

    The last layers save their activations, because these wait the shortest time for the backward
    pass.
    """
    recomputed = phase.num_layers - phase.num_saved_layers
    if not recomputed or not phase.num_saved_layers:
        return [PhaseRun(phase, range(phase.num_layers))]
    return [
        PhaseRun(phase, range(recomputed)),
        PhaseRun(phase.build_saved_layers_phase(), range(recomputed, phase.num_layers)),
    ]


def slice_runs(runs: Sequence[PhaseRun], rows: range) -> list[PhaseRun]:
    """Restrict runs of layers to the indices in `rows`; runs that become empty are dropped."""
    sliced = [
        replace(run, rows=range(max(run.rows.start, rows.start), min(run.rows.stop, rows.stop)))
        for run in runs
    ]
    return [run for run in sliced if run.rows]
