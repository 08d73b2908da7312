"""Training with optimizer state in few bits, and gradients in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tests.modelling.gptj.training as gptj
import tests.modelling.llama.training as llama
import tests.modelling.t5.training as t5
from checkpoints import CheckpointStore
from config.errors import ConfigError
from config.sections import RunConfig
from modelling.model_family import get_family
from modelling.weights import without_optimizer_state
from modelling.weights.optimizer_state import convert_optimizer_state, optimizer_state_specs
from planning.requirements import finetuning_requirements
from popxl_addons.optimizers import state_8bit
from run.resume import resolve_initial_state
from sessions.loss_evaluation import LossSession
from sessions.training import TrainingSession
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.sessions import check_continuing, fine_tuning
from tests.modelling.test_deferred_updates import differences
from tests.modelling.torch_training import logical
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other tests train the same blocks

RATE = 1e-3


def with_state(config: RunConfig, state: str, gradients: str = "float32") -> RunConfig:
    optimizer = replace(config.training.optimizer, state=state)
    training = replace(config.training, optimizer=optimizer, gradient_dtype=gradients)
    return replace(config, training=training)


def config_of(state: str, dp: int = 2, tp: int = 2, precision: str = "float32") -> RunConfig:
    return with_state(small_config(dp, tp, layers=2, precision=precision), state)


def initial(config: RunConfig) -> Mapping[str, np.ndarray]:
    """Hugging Face's: `gptj.reference` begins with them."""
    return logical(hf_model(config))


def train(model: TrainingSession, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        losses += [r.loss for r in model.run([gptj.batches(last)[step]], [RATE], step)]
    return losses


@cache
def trained(state: str, dp: int, tp: int, precision: str) -> tuple[list[float], dict[str, Any]]:
    """Losses of four steps, and the state after them."""
    config = config_of(state, dp, tp, precision)
    model = fine_tuning(config)
    model.write(initial(config))
    with model:
        return train(model, 0, 4), dict(model.read())


# ---- training -----------------------------------------------------------------------------------
@pytest.mark.parametrize("split", [slow((1, 1)), (2, 2)])
def test_losses_are_near_those_of_float32_state(split) -> None:
    exact = gptj.reference(4, layers=2, rate=RATE).losses
    found, _ = trained("8bit_residual8", *split, "float32")
    assert found[:2] == pytest.approx(exact[:2], rel=1e-6)  # the first update is of exact moments
    assert found == pytest.approx(exact, rel=1e-4)
    assert found != pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
def test_every_split_packs_the_same_groups() -> None:
    """Scales and codes have the same shapes, and but for rounding the same values."""
    _, one = trained("8bit_residual8", 1, 1, "float32")
    _, four = trained("8bit_residual8", 2, 2, "float32")
    assert one.keys() == four.keys()
    for name, ours in four.items():
        assert (ours.shape, ours.dtype) == (one[name].shape, one[name].dtype)
        if "_codes/" in name:
            off = np.abs(ours.astype(np.int32) - one[name])
            assert (off > 0).mean() < 0.02, name
        elif "_scales/" in name:
            np.testing.assert_allclose(
                ours.astype(np.float32), one[name].astype(np.float32), rtol=0.01, err_msg=name
            )


@pytest.mark.slow  # two more trainings
@pytest.mark.parametrize("state", ["8bit_residual8", "8bit_residual16"])
def test_weights_of_16_bits_have_residuals(state) -> None:
    """16-bit weights and residuals add up to float32 weights, up to the stored bits."""
    _, exact = trained("float32", 1, 1, "float32")
    _, found = trained(state, 1, 2, "bfloat16")
    start = initial(config_of(state))
    for name in ("transformer.h.0.attn.q_proj.weight", "lm_head.bias"):
        rest = found[f"optimizer/residual/{name}"]
        assert rest.dtype == (np.int8 if state == "8bit_residual8" else np.int16)
        whole = state_8bit.join_weight(found[name], rest)
        moved = np.abs(exact[name] - start[name]).mean()
        assert np.abs(whole - exact[name]).mean() < 0.15 * moved  # gradients are of 16-bit weights
        assert (whole != found[name].astype(np.float32)).any()


@cache
def trainer() -> TrainingSession:
    """A model in bfloat16 for two tests: compiling it is most of the work."""
    return fine_tuning(
        with_state(config_of("8bit_residual8", precision="bfloat16"), "8bit_residual8", "bfloat16")
    )


def test_a_continued_run_is_the_one_that_was_not_stopped() -> None:
    half = check_continuing(trainer(), initial(trainer().config), train)
    assert {a.dtype.name for a in half.values()} == {"bfloat16", "int8", "uint8", "float32"}


@pytest.mark.slow  # 40 seconds each
@pytest.mark.parametrize("state", ["8bit_residual8", "bfloat16"])
def test_updates_behind_change_no_bit(state) -> None:
    """With a tied embedding, dropout, a step that is left out, and a restart."""
    config = with_state(llama_config(hf_config("gemma2")), state, "bfloat16")
    changes = {"model": {"precision": "bfloat16", "dropout_prob": 0.2}}
    assert differences(config, llama.batches(5), changes, restart=True) == []


@pytest.mark.slow  # the ways that the test above leaves out
@pytest.mark.parametrize("family", ["t5", "gptj"])
@pytest.mark.parametrize("split", [{"dp": 2, "tp": 2}, {"tp": 2}])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
def test_all_ways(family, split, activations, gradients) -> None:
    made, batches = {"t5": (t5.our_config, t5.batches), "gptj": (small_config, gptj.batches)}[
        family
    ]
    config = with_state(made(**split), "8bit_residual8", gradients)
    assert differences(config, batches(5), {"execution": {"activations": activations}}) == []


@pytest.mark.slow  # two trainings
def test_resident_layers_change_no_bit() -> None:
    """Phased and resident, kept and recomputed: what is packed is the same."""

    def bits(**execution: object) -> dict[str, bytes]:
        config = with_state(small_config(1, 2, layers=2), "8bit_residual8", "bfloat16")
        config = replace(config, execution=replace(config.execution, **execution))
        model = fine_tuning(config)
        model.write(initial(config))
        with model:
            train(model, 0, 2)
            return {n: np.asarray(a).tobytes() for n, a in model.read().items()}

    expected = bits()
    assert bits(resident_layers=2, activations="keep") == expected


@pytest.mark.slow  # what is lent is tested with other state, too
def test_evaluation_reads_the_training_state() -> None:
    """Its program cuts weights as training does: the entries that it borrows fit."""
    config = config_of("8bit_residual8")
    model = fine_tuning(config)
    model.write(initial(config))
    samples = get_family(config).sample_format.make_random_samples(config, 16, None)
    with model:
        train(model, 0, 1)
        losses = LossSession(config, weight_source=model)
        losses.write(model.tensors())
        with losses:
            borrowed = losses.compute(samples).mean
        weights = {n: a.copy() for n, a in without_optimizer_state(model.tensors()).items()}
    own = LossSession(config)
    own.write(weights)
    with own:
        assert own.compute(samples).mean == borrowed


# ---- checkpoints --------------------------------------------------------------------------------
def saved(folder, state: str, precision: str) -> tuple[dict[str, Any], int]:
    """A checkpoint of a run with any state, and its bytes."""
    config = config_of(state, 1, 1, precision)
    low = "float32" if precision == "float32" else ml_dtypes.bfloat16
    tensors: dict[str, Any] = {n: w.astype(low) for n, w in initial(config).items()}
    rng = np.random.default_rng(0)
    for name, kept in optimizer_state_specs(config, get_family(config).weight_map(config)).items():
        dtype = np.dtype(getattr(ml_dtypes, kept.slot.dtype, kept.slot.dtype))
        values = np.abs(rng.normal(size=kept.shape))
        tensors[name] = (values if "float" in kept.slot.dtype else values * 20).astype(dtype)
    with CheckpointStore(folder) as store:
        store.save(4, tensors, {}, wait=True)
    return tensors, sum(p.stat().st_size for p in folder.rglob("*.safetensors"))


def started(folder, state: str, precision: str) -> tuple[str, Mapping[str, np.ndarray]]:
    config = config_of(state, 1, 1, precision)
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(folder)))
    weight_map = get_family(config).weight_map(config)
    start = resolve_initial_state(config, weight_map)
    for name, tensor in optimizer_state_specs(config, weight_map).items():
        assert start.tensors[name].shape == tensor.shape, name
    return start.source, start.tensors


def test_a_checkpoint_holds_what_is_kept(tmp_path) -> None:
    _, wide = saved(tmp_path / "wide", "float32", "bfloat16")
    _, narrow = saved(tmp_path / "narrow", "8bit_residual8", "bfloat16")
    assert narrow < 0.75 * wide  # half of these small weights are vectors and scales
    source, _ = started(tmp_path / "narrow", "8bit_residual8", "bfloat16")
    assert "another form" not in source


@pytest.mark.parametrize("state", ["float32", "bfloat16", "8bit_residual16"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compact_state_becomes_any_other_and_is_made_of_it(tmp_path, state, precision) -> None:
    there, _ = saved(tmp_path / "8bit_residual8", "8bit_residual8", precision)
    source, found = started(tmp_path / "8bit_residual8", state, precision)
    same = state == "8bit_residual16" and precision == "float32"  # there are no residuals
    assert ("its optimizer state in another form" in source) != same
    name = "transformer.h.1.mlp.fc_in.weight"
    codes, scales = (there[f"optimizer/second_order_{part}/{name}"] for part in ("codes", "scales"))
    groups = state_8bit.QuantBlocks.along_axis(1, codes.shape)
    exact = state_8bit.dequantize_second_moment(codes, scales.reshape(-1), groups)
    if state != "8bit_residual16":
        np.testing.assert_array_equal(found[f"optimizer/second_order/{name}"], exact)
    elif precision == "bfloat16":
        rest = found[f"optimizer/residual/{name}"]
        whole = state_8bit.join_weight(there[name], there[f"optimizer/residual/{name}"])
        np.testing.assert_allclose(state_8bit.join_weight(there[name], rest), whole, rtol=1e-6)
    back, _ = saved(tmp_path / "other", state, precision)
    _, again = started(tmp_path / "other", "8bit_residual8", precision)
    assert again[f"optimizer/second_order_codes/{name}"].dtype == np.uint8
    assert back.keys() != again.keys() or state == "8bit_residual16"


@pytest.mark.slow  # as above, with programs
@pytest.mark.parametrize("state", ["float32", "bfloat16", "8bit_residual16"])
def test_a_run_goes_on_with_another_state(state) -> None:
    """Losses go on as they would have, but for rounding."""
    config, other = (config_of(s, 1, 1, "bfloat16") for s in ("8bit_residual8", state))
    model = fine_tuning(config)
    model.write(initial(config))
    with model:
        train(model, 0, 2)
        half = dict(model.read())
        expected = train(model, 2, 4)
    kept = optimizer_state_specs(other, get_family(other).weight_map(other))
    tensors = convert_optimizer_state(half, half, kept, other)
    assert not isinstance(tensors, str)
    continued = fine_tuning(other)
    continued.write(tensors)
    with continued:
        assert train(continued, 2, 4) == pytest.approx(expected, rel=3e-3)


def test_residuals_of_a_new_run_are_what_rounding_takes() -> None:
    model, start = trainer(), initial(trainer().config)
    model.write(start)
    with model:
        found = dict(model.read())
    for name, weight in start.items():
        whole = state_8bit.join_weight(found[name], found[f"optimizer/residual/{name}"])
        np.testing.assert_allclose(
            whole, weight, rtol=2.0**-8 / 127 / 2 * 1.01, atol=1e-38, err_msg=name
        )


# ---- plans and settings -------------------------------------------------------------------------
def test_plans_count_what_is_kept() -> None:
    wide, narrow = (
        finetuning_requirements(
            with_state(small_config(layers=1, precision="bfloat16"), state, gradients)
        )
        for state, gradients in (("float32", "float32"), ("8bit_residual8", "bfloat16"))
    )
    assert wide.state == 14 * wide.parameters
    vectors = sum(
        np.prod(w.shape)
        for w in get_family(narrow.config).weight_map(narrow.config).weights
        if len(w.shape) == 1
    )
    matrices = narrow.parameters - vectors
    assert narrow.state == pytest.approx(matrices * (7 + 1 / 8) + vectors * 13, rel=0.01)
    assert narrow.plan.remote < wide.plan.remote


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"execution": {"master_weights": True}},
            "master_weights and .* 8bit_residual8 are two ways",
        ),
        ({"training": {"stochastic_rounding": True}}, "8bit_residual8 and .* are two ways"),
        (
            {"training": {"optimizer": {"state": "bfloat16"}, "stochastic_rounding": False}},
            "needs training.stochastic_rounding",
        ),
        (
            {"training": {"optimizer": {"name": "adafactor", "state": "bfloat16"}}},
            "for adamw's moments",
        ),
    ],
)
def test_what_contradicts_is_told(changes, message) -> None:
    found = config_of("8bit_residual8", precision="bfloat16").to_dict()
    for section, fields in changes.items():
        for name, value in fields.items():
            if isinstance(value, dict):
                found[section][name] |= value
            else:
                found[section][name] = value
    with pytest.raises(ConfigError, match=message):
        type(small_config()).from_dict(found)
