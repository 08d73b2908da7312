"""Frozen variables of the toy family: loaded, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import popxl
from modelling.layers import ParallelGroups
from modelling.phases import Phase, PhaseSettings
from modelling.phases.training import TrainingProgram, build_training_program
from tests.modelling.phases.test_phased_training import NAMES, train_torch
from tests.modelling.phases.toy import build_toy_phases, toy_config, toy_weight_map
from tests.modelling.phases.toy_runs import STEPS, draw, feed, toy_session, weights_of
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # the same programs for each case

FROZEN = [("w0",), ("scale",), ("w1", "w2"), ("w0", "scale")]
"""One that no other phase uses; one that another borrows; all of a phase's own; a whole phase,
before which nothing is trained."""
LAYOUTS = [(1, 1, "end"), (2, 2, "end"), (2, 1, "deferred")]


def stored(program: TrainingProgram) -> set[popxl.RemoteBuffer]:
    """The buffers that the program writes to."""
    return {
        op.attrs["buffer"]
        for graph in program.ir._graphs
        for op in graph._ops
        if op.name == "remote_store"
    }


def cases() -> Iterator[Any]:
    """All together; by default each frozen thing in one layout."""
    brief = list(zip(FROZEN, [LAYOUTS[2], *LAYOUTS], strict=True))
    for case in product(FROZEN, LAYOUTS):
        yield (case[0], *case[1]) if case in brief else slow(case[0], *case[1])


@pytest.mark.parametrize(("frozen", "dp", "tp", "update"), list(cases()))
def test_equals_torch_without_their_gradients(frozen, dp, tp, update) -> None:
    config = toy_config(dp, tp)
    config = replace(config, execution=replace(config.execution, update=update))
    weights, scale, xs, ys = draw()
    program, session = toy_session(config, weights, scale, toy_weight_map(*frozen))
    losses, norms = [], []
    with session:
        for x, y in zip(xs, ys, strict=True):
            inputs = feed(program, config, {"x": x[None], "y": y[None]})
            if program.update_only is not None:
                inputs[program.update_only] = np.zeros(
                    (program.ir.num_host_transfers, dp * tp), bool
                )
            out = session.run(inputs)
            losses.append(out[program.loss].mean())
            norms.append(out[program.grad_norm].reshape(-1)[0])
        if program.update_only is not None:
            inputs[program.update_only] = ~inputs[program.update_only]
            session.run(inputs)
    expected_losses, expected_norms, expected = train_torch(*frozen)
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    found = session.get_tensors_data(weights_of(program))
    for name, variable, start, value in zip(
        NAMES, weights_of(program), [*weights, scale], expected, strict=True
    ):
        if name in frozen:
            assert found[variable].tobytes() == start.tobytes(), name
        np.testing.assert_allclose(found[variable], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("frozen", FROZEN)
def test_they_are_loaded_and_have_nothing_else(frozen) -> None:
    config = toy_config()
    program = build_training_program(config, build_toy_phases, weight_map=toy_weight_map(*frozen))
    ir = popxl.Ir()
    with ir.main_graph:
        layout = build_toy_phases(
            PhaseSettings(config, ParallelGroups.from_current_ir(1), toy_weight_map(*frozen))
        )
    written = stored(program)
    for name, variable in zip(NAMES, weights_of(program), strict=True):
        assert (variable._remote[0] in written) == (name not in frozen), name
    for phase, w in zip(layout.phases, ("w0", "w1"), strict=False):
        names = {"w": w, "scale": "scale"}
        check_phase(phase, [name for name, weight in names.items() if weight not in frozen])


def check_phase(phase: Phase, trained: list[str]) -> None:
    """A phase loads all its variables; only trainable ones have gradients and state."""
    assert phase.names == ["w", "scale"]
    assert phase.trainable == trained
    args = [] if phase.bwd is None else phase.bwd.args.keys_flat()
    assert {n for n in args if n.startswith("accum.")} == {f"accum.{n}" for n in trained}
    store = phase.variables
    own = [n for n in trained if n in store.facts]
    assert set(phase.fwd.args.keys_flat()) == {"w", "scale"}
    assert store.grads.keys_flat() == own
    assert (phase.optimizer.facts.keys() if phase.optimizer else []) == own


def test_a_table_has_no_gradients_and_no_state_of_them() -> None:
    config, weight_map = toy_config(), toy_weight_map("w0", "scale")
    program, session = toy_session(config, *draw()[:2], weight_map)
    with session:
        names = list(weight_map.to_logical_tensors(session.read_variable_data, program.variables))
    assert [w.name for w in weight_map.trainable_weights] == ["w1", "w2"]
    assert {n for n in names if "/" not in n} == set(NAMES)
    assert {n.rpartition("/")[2] for n in names if "/" in n} == {"w1", "w2"}
