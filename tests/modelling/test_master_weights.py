"""Training with float32 masters of 16-bit weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from checkpoints import CheckpointStore
from config.errors import ConfigError, UserError
from config.gptj import GPTJConfig
from config.optimizer_state import MASTER_WEIGHT as MASTER_SLOT
from config.presets import load_config
from config.sections import RunConfig
from config.t5 import T5Config
from modelling.model_family import get_family
from planning.requirements import finetuning_requirements
from run.resume import resolve_initial_state
from sessions.training import TrainingSession
from tests.modelling import half_training as mixed
from tests.modelling.gptj.hf import small_config
from tests.modelling.gptj.training import batches
from tests.modelling.half_training import as_array, rounded, train_half
from tests.modelling.sessions import check_continuing, fine_tuning
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # the same programs for each case

RATE = 1e-4
MASTER = "optimizer/master/"


def with_masters(config: RunConfig, wanted: bool = True) -> RunConfig:
    return replace(config, execution=replace(config.execution, master_weights=wanted))


def config_of(dp: int = 2, tp: int = 2) -> GPTJConfig:
    """A tiny GPT-J in bfloat16, whose large weights are sharded over the copies of the model."""
    config = small_config(dp, tp, layers=2, precision="bfloat16")
    return with_masters(config)


@cache
def trainer(dp: int = 2, tp: int = 2) -> TrainingSession:
    """A model for all tests: compiling it is most of the work."""
    return fine_tuning(config_of(dp, tp), gradients=True)


def initial() -> Mapping[str, np.ndarray]:
    config = config_of()
    return get_family(config).weight_map(config).init_weights(seed=0)


def train(model: TrainingSession, first: int, last: int) -> None:
    for step in range(first, last):
        model.run([batches(last)[step]], [RATE], step)


# The slow one is compiled as for users: LLVM decides where half types are rounded.
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), slow(1, 2)])
def test_the_optimizer_updates_masters_and_weights_are_masters_rounded(dp: int, tp: int) -> None:
    """Two steps of AdamW by numpy in float64, from the gradients that the devices report. Many
    updates are smaller than half the distance of two 16-bit values."""
    model = trainer(dp, tp)
    config = model.config.training.optimizer
    start = dict(initial())
    model.write(start)
    exact = {n: w.astype(np.float64) for n, w in start.items()}
    mean = {n: np.zeros(w.shape) for n, w in start.items()}
    square = {n: np.zeros(w.shape) for n, w in start.items()}
    with model:
        for step in (1, 2):
            (result,) = model.run([batches(2)[step - 1]], [RATE], step - 1)
            clip = 1 / max(result.grad_norm, 1.0)
            for name, gradient in model.gradients().items():
                g = gradient.astype(np.float64) * clip
                mean[name] += (1 - config.beta1) * (g - mean[name])
                square[name] += (1 - config.beta2) * (g * g - square[name])
                up = mean[name] / (1 - config.beta1**step)
                up /= np.sqrt(square[name] / (1 - config.beta2**step)) + config.eps
                decay = config.weight_decay if g.ndim > 1 else 0.0
                exact[name] -= RATE * (up + decay * exact[name])
        found = model.read()
    lost = []
    for name, first in start.items():
        master, weight = found[MASTER + name], found[name]
        assert master.dtype == np.float32
        np.testing.assert_array_equal(weight, master.astype(weight.dtype), err_msg=name)
        np.testing.assert_allclose(master, exact[name], rtol=1e-6, atol=2e-4 * RATE, err_msg=name)
        lost.append((weight == first.astype(weight.dtype))[master != first].ravel())
    assert np.concatenate(lost).mean() > 0.4


def test_a_continued_run_is_the_one_that_was_not_stopped() -> None:
    """Masters are part of the state, and what they hold beyond the weights is not lost."""
    half = check_continuing(trainer(), initial(), train)
    assert any((half[MASTER + n] != half[n].astype(np.float32)).any() for n in initial())


def test_a_run_without_masters_is_continued_with_them(tmp_path) -> None:
    """The masters begin with the weights; moments of another optimizer are refused."""
    config, weights = config_of(), dict(initial())
    weight_map = get_family(config).weight_map(config)
    moments = {
        f"optimizer/{slot.name}/{w.name}": np.zeros(slot.shape(w.shape), np.float32)
        for w in weight_map.weights
        for slot in config.training.optimizer.state_slots(len(w.shape))
    }
    with CheckpointStore(tmp_path) as store:
        store.save(3, weights | moments, {}, wait=True)
    loading = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    start = resolve_initial_state(loading, weight_map)
    assert "in another form" in start.source
    for name, weight in weights.items():
        np.testing.assert_array_equal(start.tensors[MASTER + name], weight)
    assert (
        "in another form"
        not in resolve_initial_state(with_masters(loading, False), weight_map).source
    )
    training = replace(
        config.training, optimizer=replace(config.training.optimizer, name="adafactor")
    )
    with pytest.raises(UserError, match=r"has no optimizer/second_.* --checkpoint.load_optimizer"):
        resolve_initial_state(replace(loading, training=training), weight_map)


def test_masters_are_planned() -> None:
    wide, narrow = (
        finetuning_requirements(with_masters(config_of(1, 1), on)) for on in (True, False)
    )
    masters = 4 * wide.parameters
    assert wide.state - narrow.state == masters
    assert wide.moments == narrow.moments
    stored = wide.plan.remote - narrow.plan.remote
    assert masters <= stored < 1.1 * masters


def test_one_way_to_keep_small_updates() -> None:
    changes = {
        "model": {"precision": "bfloat16"},
        "execution": {"master_weights": True},
        "training": {"stochastic_rounding": True},
    }
    with pytest.raises(ConfigError, match="two ways to keep small updates"):
        load_config(T5Config, "finetuning", "tiny", changes)
    changes["training"] = {}
    config = load_config(T5Config, "finetuning", "tiny", changes)
    assert config.master_weight_slot == MASTER_SLOT
    assert not config.rounds_stochastically
    wide = replace(config, model=replace(config.model, precision="float32"))
    assert wide.master_weight_slot is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "gptj"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_masters_are_no_worse_than_those_of_torch(family, precision, optimizer) -> None:
    """Hugging Face's model in 16 bits, on float32 masters that torch's AdamW updates. Adafactor's
    masters keep to what float32 weights do, better than weights without them."""
    their = mixed.FAMILIES[family]
    start = {n: as_array(p) for n, p in rounded(their.model(), torch.float32).named_parameters()}
    data = their.batches(mixed.STEPS)
    changes = {
        "optimizer": their.config(2, 2).to_dict()["training"]["optimizer"] | {"name": optimizer}
    }
    found = {}
    for masters in (True, False):
        config = mixed.in_precision(
            their.config(2, 2), precision, execution={"master_weights": masters}, training=changes
        )
        config = replace(config, training=replace(config.training, stochastic_rounding=False))
        found[masters] = masters_of(config, start, data, their.rate)
    if optimizer == "adamw":
        model, half = their.model(), their.model()
        exact = train_half(model, torch.float32, data, their.loss(model), their.rate).weights
        scaling = mixed.LOSS_SCALING[precision]
        theirs = train_half(
            half, getattr(torch, precision), data, their.loss(half), their.rate, scaling, True
        ).weights
        assert mixed.error(found[True], exact) < 1.1 * mixed.error(theirs, exact)
    else:
        config = mixed.in_precision(their.config(2, 2), "float32", training=changes)
        exact = masters_of(config, start, data, their.rate)
    assert mixed.error(found[True], exact) < mixed.error(found[False], exact)
    assert mixed.error(start, exact) > 8 * mixed.error(found[True], exact)


def masters_of(
    config: RunConfig, start: mixed.Arrays, data: list[mixed.Batch], rate: float
) -> dict[str, np.ndarray]:
    """The last weights, as precise as they are kept."""
    model = fine_tuning(config)
    model.write(start)
    with model:
        for step, batch in enumerate(data):
            model.run([batch], [rate], step)
        tensors = model.read()
    return {n: tensors.get(MASTER + n, tensors[n]).astype(np.float32) for n in start}
