"""FP8 state in phased training: the same for every split, in checkpoints, never the optimizer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from checkpoints import CheckpointStore
from checkpoints.errors import CheckpointError
from config.errors import ConfigError
from config.sections import FP8, RunConfig
from modelling.model_family import get_family
from run.resume import resolve_initial_state
from run.weight_loading import load_weights
from sessions.loss_evaluation import LossSession
from sessions.training import TrainingSession
from tests.modelling.encoder_decoders import KINDS as ENCODER_DECODERS
from tests.modelling.gptj import training as gptj
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.llama import training as llama
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.sessions import fine_tuning, inference
from tests.modelling.t5 import training as t5
from tests.modelling.torch_training import logical
from tests.slow import one_of_many, slow

STEPS, RATE = 3, 1e-2
KINDS = {kind: of for kind, of in ENCODER_DECODERS.items() if kind != "t5gemma2"}
RECIPE = FP8(enabled=True, amax_history_len=8, interval=2, head=True)
Tensors = Mapping[str, np.ndarray]


def config_of(family: str, dp: int, tp: int, micro: int, fp8: FP8 = RECIPE) -> RunConfig:
    """16 samples in a global batch, 8 of Llama's; everything is sharded that can be."""
    if family == "llama":
        return replace(llama_config(hf_config("mistral"), dp, tp, micro), fp8=fp8)
    if family in KINDS:
        # Most have tied heads, which stay in the training precision.
        return replace(KINDS[family].config(dp, tp, micro), fp8=replace(fp8, head=False))
    if family == "t5":
        return replace(t5.our_config(dp, tp, micro, layers=1), fp8=fp8)
    return replace(small_config(dp, tp, micro, layers=2), fp8=fp8)


def batches(family: str, count: int = STEPS) -> list:
    if family in KINDS:
        return KINDS[family].batches(count)
    return {"t5": t5, "gptj": gptj, "llama": llama}[family].batches(count)


def initial(family: str) -> Tensors:
    if family in KINDS:
        return KINDS[family].weights()
    if family != "gptj":
        config = config_of(family, 1, 1, 4)
        return get_family(config).weight_map(config).init_weights(5)
    return logical(hf_model(small_config(layers=2)))


@dataclass
class Trained:
    """A model, what it held before its last step and after, and losses."""

    model: TrainingSession
    losses: list[float]
    before: Tensors
    after: Tensors


@cache
def trained(family: str, dp: int, tp: int, micro: int, activations: str = "recompute") -> Trained:
    config = config_of(family, dp, tp, micro)
    execution = replace(config.execution, activations=activations)
    model = fine_tuning(replace(config, execution=execution))
    model.write(initial(family))
    losses, held = [], []
    with model:
        for step, batch in enumerate(batches(family)):
            held.append(model.read())
            losses.append(model.run([batch], [RATE], step)[0].loss)
        held.append(model.read())
    return Trained(model, losses, held[-2], held[-1])


def scales(tensors: Tensors) -> dict[str, np.ndarray]:
    return {n: a for n, a in tensors.items() if n.startswith("fp8/scale/")}


@pytest.mark.parametrize(
    ("family", "dp", "tp", "micro"),
    [
        ("gptj", 2, 2, 4),  # 2 micro-batches on each of 2 copies, cut in 2
        slow("gptj", 1, 1, 16),
        slow("gptj", 4, 1, 4),
        slow("gptj", 1, 4, 2),
        slow("t5", 2, 2, 2),
        slow("t5", 1, 1, 16),
        slow("llama", 2, 2, 2),
        slow("llama", 1, 4, 4),  # two devices hold each head of keys
        *(one_of_many(kind, 2, 2, 4) for kind in KINDS),
    ],
)
def test_every_split_gives_the_same_scales_and_losses(family, dp, tp, micro):
    """Also of gradients, which in a layer are larger the more micro-batches there are."""
    one, other = trained(family, 1, 1, 4), trained(family, dp, tp, micro)
    np.testing.assert_allclose(one.losses, other.losses, rtol=2e-5)
    expected, found = scales(one.after), scales(other.after)
    assert expected.keys() == found.keys()
    for name, scale in expected.items():
        np.testing.assert_array_equal(found[name], scale, name)
        mantissas, _ = np.frexp(scale)
        assert (scale != 1).all()
        assert (mantissas == 0.5).all(), "scales are powers of two"
    for name in (n for n in one.after if n.startswith("fp8/amax_history/")):
        np.testing.assert_allclose(other.after[name], one.after[name], rtol=1e-3, err_msg=name)
        latest = one.after[name][:, :STEPS]
        assert (latest > 0).all()
        assert (one.after[name][:, STEPS:] == 0).all(), "an amax is recorded once a step"
        steps = one.after[name.replace("amax_history", "step")]
        assert steps == STEPS


@pytest.mark.slow
def test_kept_activations_count_as_recomputed_ones():
    anew = trained.__wrapped__  # default tests compile quickly what is kept, to other bits
    one, other = anew("gptj", 1, 1, 4), anew("gptj", 1, 1, 4, "keep")
    assert one.losses == other.losses
    for name, array in one.after.items():
        np.testing.assert_array_equal(other.after[name], array, name)


def test_the_state_is_that_of_linear_layers_and_not_the_optimizers():
    found = trained("gptj", 1, 1, 4).after
    state = {n.partition("/")[2] for n in found if n.startswith("fp8/")}
    slots = {n.partition("/")[0] for n in state}
    assert slots == {"scale", "amax_history", "step"}
    weights = {n.partition("/")[2] for n in state}
    linear = {
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "attn.out_proj",
        "mlp.fc_in",
        "mlp.fc_out",
    }
    expected = {f"transformer.h.{i}.{name}.weight" for i in range(2) for name in linear}
    assert weights == expected | {"lm_head.weight"}
    assert not [n for n in found if n.startswith("optimizer/") and "fp8" in n]
    moments = {n.split("/")[-1] for n in found if n.startswith("optimizer/first_order/")}
    assert moments == {n for n in found if "/" not in n}


@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("gptj", (2, 2, 4)),
        slow("t5", (2, 2, 2)),
        slow("llama", (2, 2, 2)),
        slow("llama", (1, 4, 4)),
        *(one_of_many(kind, (2, 2, 4)) for kind in KINDS),
    ],
)
def test_a_run_goes_on_bit_for_bit_and_in_another_layout(family, other, tmp_path):
    one = trained(family, 1, 1, 4)
    last = batches(family)[-1]
    with CheckpointStore(tmp_path) as store:
        store.save(STEPS - 1, one.before, {}, wait=True)
    for layout in ((1, 1, 4), other):
        run = trained(family, *layout)
        config = run.model.config
        load = replace(config.checkpoint, load=str(tmp_path))
        start = resolve_initial_state(
            replace(config, checkpoint=load), get_family(config).weight_map(config)
        )
        run.model.write(start.tensors)
        with run.model as model:
            held = model.read()
            for name, array in one.before.items():
                np.testing.assert_array_equal(held[name], array, name)
            (result,) = model.run([last], [RATE], STEPS - 1)
            after = model.read()
        if layout == (1, 1, 4):
            assert result.loss == one.losses[-1]
            for name, array in one.after.items():
                np.testing.assert_array_equal(after[name], array, name)
        assert result.loss == pytest.approx(one.losses[-1], rel=2e-5)
        for name, array in scales(one.after).items():
            np.testing.assert_array_equal(after[name], array, name)


def test_a_step_that_is_left_out_leaves_the_state(tmp_path):
    one = trained("gptj", 1, 1, 4)
    broken = dict(one.before)
    name = "transformer.h.0.mlp.fc_in.weight"
    broken[name] = broken[name].copy()
    broken[name][0, 0] = np.nan
    one.model.write(broken)
    with one.model as model:
        (result,) = model.run([batches("gptj")[-1]], [RATE], STEPS - 1)
        after = model.read()
    assert result.skipped
    for name, array in broken.items():
        np.testing.assert_array_equal(after[name], array, name)


def test_a_history_of_another_length_is_cut_or_filled_up():
    config = config_of("gptj", 1, 1, 4)
    weight_map = get_family(config).weight_map(config)
    model = trained("gptj", 1, 1, 4).model
    before = trained("gptj", 1, 1, 4).before
    name = "fp8/amax_history/lm_head.weight"
    for length in (2, 20):
        tensors = dict(before)
        for key in (n for n in before if n.startswith("fp8/amax_history/")):
            tensors[key] = np.pad(before[key], ((0, 0), (0, 12)))[:, :length]
        made = weight_map.to_variables(tensors, model.program.variables)
        (variable,) = (v for v in made if "head.0.lm_head.product.amax_history" in v.name)
        history = made[variable]()
        np.testing.assert_array_equal(history[:, :2], before[name][:, :2])
        assert history.shape == (3, 8)
        assert (history[:, 2:] == 0).all()


class Samples:
    """The samples of a batch."""

    def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[indices] for name, array in self.batch.items()}


@pytest.mark.parametrize("family", ["gptj", slow("t5"), slow("llama")])
@pytest.mark.parametrize("lends", [True, slow(False)])
def test_the_loss_of_evaluation_is_that_of_training(family, lends):
    """Training's loss of a batch is before the update: with the same weights and scales."""
    one = trained(family, 1, 1, 4)
    one.model.write(one.before)
    with one.model as model:
        losses = LossSession(model.config, model if lends else None)
        losses.write(one.before)
        with losses:
            found = losses.compute(Samples(batches(family)[-1])).mean
    assert found == pytest.approx(one.losses[-1], rel=1e-6)
    assert found != pytest.approx(one.losses[0], rel=1e-3)


def test_generation_multiplies_in_fp8_with_the_scales_of_training(tmp_path):
    one = trained("gptj", 1, 1, 4)
    with CheckpointStore(tmp_path) as store:
        store.save(STEPS, one.after, {}, wait=True)
    config = one.model.config
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    start = load_weights(config, get_family(config).weight_map(config))
    model = inference(config)
    model.write(start.tensors)
    length = config.model.sequence_length
    input_ids = np.random.default_rng(0).integers(3, 60, (4, length)).astype(np.int32)
    with model:
        tokens = model.generate(input_ids, np.ones_like(input_ids))
        (variable,) = (
            v for n, v in model.program.variables.to_dict().items()
            if n == "layer.0.mlp.fc_in.product.scale"
        )  # fmt: skip
        held = model.session.read_variable_data(variable)
    np.testing.assert_array_equal(held, one.after["fp8/scale/transformer.h.0.mlp.fc_in.weight"])
    assert tokens.shape[0] == 4


def test_generation_without_scales_says_what_to_do(tmp_path):
    config = config_of("gptj", 1, 1, 4)
    weight_map = get_family(config).weight_map(config)
    with CheckpointStore(tmp_path) as store:
        store.save(1, weight_map.init_weights(0), {}, wait=True)
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"--fp8\.recipe current"):
        load_weights(config, weight_map)
    current = replace(config, fp8=replace(config.fp8, recipe="current"))
    assert not scales(load_weights(current, weight_map).tensors)


def test_four_bits_and_fp8_exclude_each_other():
    config = small_config()
    model = replace(config.model, eval=True, quantization="int4", quantization_group_size=4)
    with pytest.raises(ConfigError, match=r"fp8\.enabled"):
        replace(config, model=model, fp8=RECIPE)
