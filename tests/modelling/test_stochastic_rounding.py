"""Training with 16-bit weights that are rounded at random when they are updated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import ml_dtypes
import numpy as np
import pytest

import popxl
from config.gptj import GPTJConfig
from config.presets import load_config
from config.sections import RunConfig
from config.t5 import T5Config
from data.loader import Loader
from data.pipeline import Pipeline
from data.seq2seq import SEQ2SEQ
from modelling.model_family import get_family
from sessions.training import TrainingSession
from tests.modelling.gptj.hf import small_config
from tests.modelling.gptj.training import batches
from tests.modelling.sessions import check_continuing, fine_tuning
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # master weights are trained with the same blocks

RATE = 1e-3


def config_of(dp: int = 2, tp: int = 2, threshold: int = 64) -> GPTJConfig:
    """A tiny GPT-J in bfloat16, without dropout."""
    config = small_config(dp, tp, layers=2, precision="bfloat16").to_dict()
    config["training"]["stochastic_rounding"] = True
    config["execution"]["rts_weights_threshold"] = threshold
    return GPTJConfig.from_dict(config)


@cache
def trainer(dp: int = 2, tp: int = 2) -> TrainingSession:
    """A model for all tests: compiling it is most of the work."""
    return fine_tuning(config_of(dp, tp), gradients=True)


def initial(config: RunConfig) -> Mapping[str, np.ndarray]:
    return get_family(config).weight_map(config).init_weights(seed=0)


def train(model: TrainingSession, first: int, last: int) -> None:
    for step in range(first, last):
        model.run([batches(last)[step]], [RATE], step)


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of bfloat16 next below (or equal) and next above, by truncating float32."""
    pattern = x.astype(np.float32).view(np.uint32)
    inner = (pattern & 0xFFFF0000).view(np.float32)
    outer = ((pattern & 0xFFFF0000) + 0x10000).view(np.float32)
    return np.minimum(inner, outer), np.maximum(inner, outer)


# The slow one is compiled as for users: LLVM decides where half types are rounded.
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), slow(1, 2)])
def test_the_update_is_computed_in_float32_and_only_the_weight_is_rounded(dp: int, tp: int) -> None:
    """One step of AdamW by numpy in float64, from the gradients that the devices report."""
    model = trainer(dp, tp)
    model.write(initial(model.config))
    with model:
        before = model.read(optimizer=False)
        (result,) = model.run([batches(1)[0]], [RATE], 0)
        gradients, after = model.gradients(), model.read()
    clip = 1 / max(result.grad_norm, 1.0)
    errors, variances = [], []
    for name, old in before.items():
        gradient, weight = gradients[name].astype(np.float64) * clip, old.astype(np.float64)
        decay = 0.1 if old.ndim > 1 else 0.0
        exact = weight - RATE * (gradient / (np.abs(gradient) + 1e-6) + decay * weight)
        low, high = neighbours(exact)
        new = after[name].astype(np.float64)
        assert after[f"optimizer/first_order/{name}"].dtype == np.float32
        # float32 has its own error: that of the weight and the step, which may cancel.
        tolerance = 2.0**-22 * (np.abs(weight) + RATE)
        assert ((np.abs(new - low) <= tolerance) | (np.abs(new - high) <= tolerance)).all(), name
        part = (exact - low) / (high - low)
        errors.append(((new - exact) / (high - low)).ravel())
        variances.append((part * (1 - part)).ravel())
    error, variance = (np.concatenate(x) for x in (errors, variances))
    assert variance.mean() > 0.05, "few weights lie between two values"
    assert abs(error.sum()) < 5 * np.sqrt(variance.sum())
    assert np.square(error).sum() == pytest.approx(variance.sum(), rel=0.05)  # to nearest: less


def test_a_continued_run_rounds_as_the_one_that_was_not_stopped() -> None:
    """Nothing that a checkpoint does not hold says how the next step rounds."""
    check_continuing(trainer(), initial(trainer().config), train)


@pytest.mark.slow
def test_copies_of_weights_stay_equal_on_all_replicas() -> None:
    """Nothing is sharded over the replicas that hold it alike. 20 seconds on two cores."""
    model = fine_tuning(config_of(2, 2, 2**30))
    model.write(initial(model.config))
    with model:
        train(model, 0, 3)
        compared = sum(
            copies_of(model, variable)
            for layers in model.program.variables.values()
            for layer in layers
            for variable in layer.tensors
        )
    assert compared > 100


def copies_of(model: TrainingSession, variable: popxl.Variable) -> int:
    """How many replicas hold a copy of what another one holds; all are compared."""
    assert variable._remote is not None
    buffer, entry = variable._remote
    assert not buffer.meta_shape
    array = np.asarray(model.session._state.entries[buffer].array(entry))
    rows = array.reshape(model.config.num_replicas, -1)
    groups: dict[int, np.ndarray] = {}
    copies = 0
    for replica, group in enumerate(variable.replica_grouping.assignment):
        copies += group in groups
        expected = groups.setdefault(group, rows[replica])
        np.testing.assert_array_equal(rows[replica], expected, err_msg=variable.name)
    return copies


@pytest.mark.slow
def test_tiny_trains_as_in_float32() -> None:
    """200 steps of the preset `tiny` at a small rate; about two minutes on two cores.

    Rounding to nearest loses most updates; at random, the loss falls as in float32.
    """
    losses = {
        (precision, rounding): final_loss(precision, rounding)
        for precision, rounding in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    }
    exact, nearest, random = losses.values()
    print({k: round(v, 4) for k, v in losses.items()})
    assert abs(random - exact) < 0.02 * exact
    assert abs(nearest - exact) > 5 * abs(random - exact)


def final_loss(precision: str, rounding: bool, steps: int = 200) -> float:
    """The mean loss of the last 30 steps."""
    overrides = {
        "model": {"precision": precision},
        "training": {"stochastic_rounding": rounding, "global_batch_size": 32},
        "execution": {"micro_batch_size": 32, "device": "cpu"},
    }
    config = load_config(T5Config, "finetuning", "tiny", overrides)
    loader = Loader(Pipeline(config, SEQ2SEQ).make_training_samples(), 32, seed=0)
    model = fine_tuning(config)
    model.write(initial(config))
    with model:
        results = [model.run([loader.next_batch()], [5e-5], step)[0] for step in range(steps)]
    return float(np.mean([r.loss for r in results[-30:]]))


def test_neighbours() -> None:
    low, high = neighbours(np.array([1.001, -1.001, 2.0]))
    np.testing.assert_array_equal(low, [1, -1.0078125, 2])
    np.testing.assert_array_equal(high, [1.0078125, -1, 2.015625])
    assert ml_dtypes.bfloat16(high[0]) == high[0]
