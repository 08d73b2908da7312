"""How often the devices are called for a layer and micro-batch, and what such a call returns."""

from __future__ import annotations

from typing import Any

import pytest

from modelling.model_family import get_family
from modelling.phases.training import build_training_program
from popxl._schedule.schedule import Routine, Run
from popxl._schedule.schedule_builder import build_schedule
from tests.modelling.gptj.hf import small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.t5.training import our_config as t5_config


def _steps(config: Any, activations: str, **execution: Any) -> list[Routine]:
    """The routines of a micro-batch in a layer with attention."""
    changes = {"execution.activations": activations}
    changes |= {f"execution.{name}": value for name, value in execution.items()}
    config = config.with_values(changes)
    family = get_family(config)
    program = build_training_program(
        config, family.build_phases, weight_map=family.weight_map(config)
    )
    routines = build_schedule(program.ir).routines
    layers = [r for r in routines if "Block" in r.title or "Layer" in r.title]
    found = [r for r in layers if "batch_serial_step" in r.title]
    assert found
    return found


def _runs(routine: Routine) -> list[Run]:
    return [step for step in routine.steps if isinstance(step, Run)]


CONFIGS = {
    "gptj": lambda: small_config(2, 2, 1, layers=2),
    "t5": lambda: t5_config(1, 2, 1, layers=2),
    "llama": lambda: llama_config(hf_config("gemma2"), 1, 2, 1),
}


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("family", CONFIGS)
def test_few_dispatches_do_a_layer(family: str, activations: str) -> None:
    """Parts of activations are gathered, and cut, where they are computed with."""
    for routine in _steps(CONFIGS[family](), activations):
        backward = "grad" in routine.title
        twice = backward and activations == "recompute"
        assert len(_runs(routine)) == (2 if twice else 1), routine.title


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_computed_again_is_not_returned(family: str) -> None:
    """A forward pass returns what the next layer takes, and what a layer is given to add to."""
    routines = _steps(CONFIGS[family](), "recompute")
    forward = [r for r in routines if "grad" not in r.title]
    assert forward
    for routine in forward:
        (run,) = _runs(routine)
        assert len(run.outs) == 1, routine.title


def test_a_hint_costs_no_segment() -> None:
    """Though weights that one device has whole leave it nothing else to do there."""
    config = t5_config(1, 1, 1, layers=2)
    counts = set()
    for hinted in (False, True):
        family, there = get_family(config), config.with_values({"execution.code_load": hinted})
        program = build_training_program(
            there, family.build_phases, weight_map=family.weight_map(there)
        )
        counts.add(len(build_schedule(program.ir).segments))
    assert len(counts) == 1
