"""A model's phases, and the order in which a step runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import popxl
from modelling.phases.buffers import InputBuffers, loop_over_layers
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.step_inputs import StepInputs, UpdateInputs
from modelling.phases.streamed_experts import StreamedExperts


def _nothing() -> None:
    """There is nothing to begin."""


@dataclass(frozen=True)
class PhaseRun:
    """Layers of a phase that run one after the other."""

    phase: Phase
    rows: range
    """Of its layers, those that run."""

    experts: StreamedExperts | None = None
    """The experts of these layers: those of a layer run after it."""

    zero_grads: Callable[[], None] = _nothing
    """Lets gradients be zero that they add to, before they run backwards."""

    @property
    def phases(self) -> list[Phase]:
        """Both phases, as far as there are."""
        return [self.phase] if self.experts is None else [self.phase, self.experts.phase]


@dataclass(frozen=True)
class PhasePlan:
    """What a family provides: its phases, built in the current Ir.

    Attributes:
        inputs: of a step.
        order: in which layers run forwards; backwards it is the opposite. A phase that keeps
            variables comes before those that borrow them, the loss is the last.
        begin_forward: lets values be zero that layers add to, before the forward phases.
    """

    inputs: InputBuffers
    order: Sequence[PhaseRun]
    zero_activations: Callable[[], None] = _nothing

    @cached_property
    def phases(self) -> list[Phase]:
        """All phases, each once, in the order of their first layers."""
        return list(dict.fromkeys(phase for run in self.order for phase in run.phases))

    @property
    def head(self) -> LossPhase:
        """The phase of the loss."""
        head = self.order[-1].phase
        assert isinstance(head, LossPhase)
        return head

    def forward(self, step: StepInputs) -> None:
        """All phases forwards, without the loss in training."""
        self.zero_activations()
        for run in self.order:

            def body(
                row: popxl.Tensor, *given: popxl.Tensor, run: PhaseRun = run
            ) -> list[popxl.Tensor]:
                run.phase.forward(row, step.with_tensors(given))
                if run.experts is not None:
                    run.experts.forward(row, step.with_tensors(given))
                return []

            _over(run, run.rows, body, (), step)

    def backward(self, step: StepInputs) -> popxl.Tensor:
        """All phases backwards, the loss first.

        Returns:
            This replica's part of the sum of squares of all gradients, float32 scalar; zero before
            the last pass.
        """
        if step.is_last:
            for phase in self.phases:
                phase.zero_shared_grads()
        zero, row = popxl.constant(0.0, popxl.float32), popxl.constant(0, popxl.int32)
        squares = self.head.backward(row, step, zero)
        for run in self.order[-2::-1]:
            if all(phase.bwd is None for phase in run.phases):
                continue
            run.zero_grads()

            def body(
                row: popxl.Tensor,
                squares: popxl.Tensor,
                *given: popxl.Tensor,
                run: PhaseRun = run,
            ) -> list[popxl.Tensor]:
                if run.experts is not None:
                    squares = run.experts.backward(row, step.with_tensors(given), squares)
                return [run.phase.backward(row, step.with_tensors(given), squares)]

            (squares,) = _over(run, run.rows[::-1], body, [squares], step)
        return squares

    def update(self, update: UpdateInputs) -> None:
        """The optimizer's update of all layers."""
        for phase in self.phases:

            def body(
                row: popxl.Tensor, *given: popxl.Tensor, phase: Phase = phase
            ) -> list[popxl.Tensor]:
                phase.update(row, UpdateInputs(*given))
                return []

            if phase.optimizer is not None and phase.owns_variables:
                loop_over_layers(range(phase.entries), body, (), update.tensors)


def _over(
    run: PhaseRun,
    rows: range,
    body: Callable[..., list[popxl.Tensor]],
    carry: Sequence[popxl.Tensor],
    step: StepInputs,
) -> list[popxl.Tensor]:
    """Run layers of a phase in a loop of the program, or the only one as it is."""
    if run.phase.entries == 1:
        return body(popxl.constant(0, popxl.int32), *carry, *step.tensors)
    return loop_over_layers(rows, body, carry, step.tensors)
