"""Ten steps of Adafactor against transformers', through a checkpoint and into other layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor as TheirAdafactor

from checkpoints import CheckpointStore
from checkpoints.errors import CheckpointError
from config.sections import Adafactor, RunConfig
from modelling.model_family import get_family
from run.resume import resolve_initial_state
from tests.modelling.gptj import training as gptj
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.sessions import fine_tuning
from tests.modelling.t5 import training as t5
from tests.modelling.torch_training import logical, worst
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other tests train the same blocks

STEPS, RATE, BETA1 = 10, 1e-2, 0.9


def in_torch(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    return TheirAdafactor(groups, lr=rate, relative_step=False, beta1=BETA1)


def config_of(family: str, dp: int, tp: int, load: str | None = None) -> RunConfig:
    """Everything is sharded that can be."""
    config = t5.our_config(dp, tp, layers=1) if family == "t5" else small_config(dp, tp)
    own = Adafactor(beta1=BETA1)
    optimizer = replace(config.training.optimizer, name="adafactor", adafactor=own)
    return replace(
        config,
        training=replace(config.training, optimizer=optimizer),
        checkpoint=replace(config.checkpoint, load=load),
    )


def state_of(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Optimizer state but the steps' numbers, without the first part of the names."""
    names = {n: n.removeprefix("optimizer/") for n in tensors if n.startswith("optimizer/")}
    return {names[n]: tensors[n] for n in names if not names[n].startswith("step/")}


def their_state(state: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    ours = {
        "exp_avg": "first_order",
        "exp_avg_sq": "second_order",
        "exp_avg_sq_row": "second_order_rows",
        "exp_avg_sq_col": "second_order_columns",
    }
    return {
        f"{ours[slot]}/{name}": t.numpy()
        for name, slots in state.items()
        for slot, t in slots.items()
        if slot in ours
    }


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("gptj", (2, 2), (2, 2)),
        slow("gptj", (2, 2), (1, 1)),
        slow("gptj", (1, 4), (4, 1)),
        slow("t5", (2, 2), (1, 1)),
        slow("t5", (4, 1), (1, 4)),
    ],
)
def test_ten_steps_with_a_checkpoint_after_five(family, first, second, tmp_path):
    made, half = (t5 if family == "t5" else gptj), STEPS // 2
    batches, fewer = made.batches(STEPS), {"layers": 1} if family == "t5" else {}
    expected = made.reference(STEPS, in_torch, **fewer)
    model = fine_tuning(config_of(family, *first))
    model.write(logical(t5.their_model(1) if family == "t5" else hf_model(small_config())))
    with model, CheckpointStore(tmp_path) as store:
        losses = [model.run([b], [RATE], i)[0].loss for i, b in enumerate(batches[:half])]
        store.save(half, model.read(), {}, wait=True)

    config = config_of(family, *second, load=str(tmp_path))
    weight_map = get_family(config).weight_map(config)
    start = resolve_initial_state(config, weight_map)
    model = model if first == second else fine_tuning(config)
    model.write(start.tensors)
    with model:
        held = model.read()
        for name, array in start.tensors.items():
            np.testing.assert_array_equal(held[name], array, name)
        losses += [model.run([b], [RATE], half + i)[0].loss for i, b in enumerate(batches[half:])]
        after = model.read()
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-4)
    weights = {n: a for n, a in after.items() if "/" not in n}
    for ours, theirs in (
        (weights, expected.weights),
        (state_of(after), their_state(expected.state)),
    ):
        error, name = worst(ours, theirs)
        assert error < 1e-3, name

    other = replace(config.training, optimizer=replace(config.training.optimizer, name="adamw"))
    with pytest.raises(CheckpointError, match="no optimizer/second_order/.*load_optimizer false"):
        resolve_initial_state(replace(config, training=other), weight_map)
