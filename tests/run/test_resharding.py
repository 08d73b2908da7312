"""A checkpoint of one layout goes on in any other: equal tensors, then the same losses.

Each layout compiles a program; the slow test (a minute on two cores) takes the rest of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from checkpoints import CheckpointStore
from config.sections import RunConfig
from data.samples import Batch
from modelling.model_family import get_family
from run.resume import resolve_initial_state
from tests.modelling.gptj import hf as gptj
from tests.modelling.gptj import training as gptj_training
from tests.modelling.sessions import fine_tuning
from tests.modelling.t5 import training as t5_training
from tests.slow import slow

STEPS, RATE = 2, 1e-2
SAVED = (2, 2)


def config_of(family: str, dp: int, tp: int) -> RunConfig:
    """Everything is sharded that can be; 16 samples in micro-batches of 4."""
    made = t5_training.our_config if family == "t5" else gptj.small_config
    return made(dp, tp, layers=1)


def batches(family: str) -> tuple[list[Batch], list[Batch]]:
    """Batches before and after the checkpoint."""
    made = t5_training.batches if family == "t5" else gptj_training.batches
    found = made(2 * STEPS)
    return found[:STEPS], found[STEPS:]


@cache
def saved_run(family: str, folder: Path) -> list[float]:
    """Train, save in `folder`, train on. Returns the losses after saving."""
    config = config_of(family, *SAVED)
    before, after = batches(family)
    model = fine_tuning(config)
    model.write(get_family(config).weight_map(config).init_weights(5))
    with model, CheckpointStore(folder) as store:
        for step, batch in enumerate(before):
            model.run([batch], [RATE], step)
        store.save(STEPS, model.read(), {}, wait=True)
        return [model.run([b], [RATE], STEPS + i)[0].loss for i, b in enumerate(after)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(
    ("family", "dp", "tp"),
    [
        slow("t5", 1, 4),
        slow("t5", 4, 1),
        slow("t5", 1, 1),
        ("gptj", 1, 4),
        slow("gptj", 4, 1),
        slow("gptj", 1, 1),
    ],
)
def test_another_layout_goes_on(family, dp, tp, folder):
    losses = saved_run(family, folder / family)
    config = config_of(family, dp, tp)
    load = replace(config.checkpoint, load=str(folder / family))
    start = resolve_initial_state(
        replace(config, checkpoint=load), get_family(config).weight_map(config)
    )
    assert start.step == STEPS
    model = fine_tuning(config)
    model.write(start.tensors)
    with model:
        held = model.read()
        assert held.keys() == start.tensors.keys()
        assert any(name.startswith("optimizer/first_order/") for name in held)
        for name, array in start.tensors.items():
            assert np.array_equal(held[name], array), name
            assert held[name].dtype == array.dtype
        found = [
            model.run([batch], [RATE], STEPS + i)[0].loss
            for i, batch in enumerate(batches(family)[1])
        ]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
