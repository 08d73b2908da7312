"""A step whose loss or gradients are not finite changes no bit of weights and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

import popxl
from modelling.phases.training import TrainingProgram
from popxl import ops
from popxl_addons.optimizers._optimizer_step import OptimizerStep
from tests.modelling.phases import toy
from tests.modelling.phases.toy import Loss, toy_config
from tests.modelling.phases.toy_runs import SAMPLES, draw, feed, toy_session

pytestmark = pytest.mark.usefixtures("cached")  # the same programs for each case


class LogOfWeight(Loss):
    """A loss that is -inf for a weight of 0, for which all gradients are 0."""

    def build(
        self,
        x: popxl.Tensor,
        y: popxl.Tensor,
        weight: popxl.Tensor,
        seed: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        return super().build(x, y, weight, seed) + ops.log(weight)


def state_of(session: popxl.Session, program: TrainingProgram) -> dict[str, np.ndarray]:
    """Weights and optimizer state by name."""
    trees = [layer for layers in program.variables.values() for layer in layers]
    tensors = {t.name: t for tree in trees for t in tree.tensors}
    data = session.get_tensors_data(tensors.values())
    return {name: data[t].copy() for name, t in tensors.items()}


class Run:
    """Steps of the toy model; the weight of one micro-batch on one replica can be spoilt."""

    def __init__(self, dp: int, tp: int) -> None:
        self.config = toy_config(dp, tp, 1, SAMPLES)
        weights, scale, self.xs, self.ys = draw()
        self.program, self.session = toy_session(self.config, weights, scale)

    def step(self, at: int, spoilt: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Losses of micro-batches, and the gradient norm on all replicas."""
        batch = {"x": self.xs[at : at + 1], "y": self.ys[at : at + 1]}
        inputs = feed(self.program, self.config, batch)
        if spoilt is not None:
            inputs[self.program.inputs["weight"]][1, -1] = spoilt
        out = self.session.run(inputs)
        norms = out[self.program.grad_norm].reshape(-1, self.config.num_replicas)[0]
        return out[self.program.loss], norms

    def state(self) -> dict[str, np.ndarray]:
        return state_of(self.session, self.program)


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def update_always(
    _: OptimizerStep, var: popxl.Tensor, update: Callable[[popxl.Tensor], popxl.Tensor]
) -> popxl.Tensor:
    return update(var)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_a_skipped_step_changes_nothing(dp: int, tp: int) -> None:
    """With it or without it, training goes on alike: moments and their counters are as before."""
    spoilt, clean = Run(dp, tp), Run(dp, tp)
    with spoilt.session, clean.session:
        for run in (spoilt, clean):
            run.step(0)
        before = spoilt.state()
        assert len([name for name in before if name.endswith("step")]) == 4
        for value in (np.inf, np.nan):
            losses, norms = spoilt.step(2, value)
            assert not np.isfinite(losses).all()
            assert not np.isfinite(norms).any()
            assert_equal(spoilt.state(), before)
        results = [run.step(1) for run in (spoilt, clean)]
        for ours, theirs in zip(*results, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        after = spoilt.state()
        assert_equal(after, clean.state())
    assert all((after[name] != before[name]).any() for name in after)


def test_a_loss_alone_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "Loss", LogOfWeight)
    run = Run(1, 1)
    with run.session:
        run.step(0)
        before = run.state()
        losses, norms = run.step(1, 0.0)
        assert np.isneginf(losses).sum() == 1
        assert np.isnan(norms).all()
        assert_equal(run.state(), before)
        assert np.isfinite(run.step(1)[1]).all()


def test_without_the_selection_a_step_would_spoil_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the selection the tests above fail."""
    monkeypatch.setattr(OptimizerStep, "update_variable", update_always)
    run = Run(1, 1)
    with run.session:
        run.step(0, np.inf)
        assert not any(np.isfinite(x).all() for n, x in run.state().items() if n.endswith(".w"))


def test_the_selection_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither temporaries nor copies: it belongs to the loop that computes the update."""

    def measured() -> tuple[int, int]:
        run = Run(1, 1)
        executables = run.session._program.executables.values()
        text = "".join(executable.as_text() for executable in executables)
        copies = text.count(" copy(") - text.count(" = f32[1]{0} copy(")  # one number is no array
        return run.session.memory_use().temporaries, copies

    with_it = measured()
    monkeypatch.setattr(OptimizerStep, "update_variable", update_always)
    without = measured()
    entry = 4 * toy.WIDTH**2
    assert with_it[0] - without[0] < entry
    assert with_it[1] <= without[1]


def counted(skips: Sequence[bool], most: int) -> list[bool]:
    """True for each step after which too many were skipped."""
    from run.skipped_steps import SkippedSteps
    from sessions.training import StepResult

    skipped = SkippedSteps(most, total=5)
    found = []
    for skip in skips:
        skipped.count_step(StepResult(1.0, np.inf if skip else 1.0))
        found.append(skipped.too_many_in_a_row)
    assert skipped.total == 5 + sum(skips)
    return found


def test_only_skips_in_a_row_are_too_many() -> None:
    assert counted([True, True, False, True, True, True, False], 2) == [False] * 5 + [True] * 2
    assert counted([True, False], 0) == [True, True]
    assert not any(counted([True, False] * 9, 1))
