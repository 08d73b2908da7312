"""Some weights trained (`training.trainable`, `training.frozen`), against torch, in which the
others need no gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import tests.modelling.gptj.training as gptj
import tests.modelling.llama.training as llama
import tests.modelling.t5.training as t5
from config.sections import RunConfig
from modelling.generation import build_streamed_program
from modelling.model_family import get_family
from modelling.phases.evaluation import build_loss_program
from modelling.phases.training import build_training_program
from planning.requirements import finetuning_requirements
from popxl._run.schedule_executor import ScheduleExecutor
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.sessions import fine_tuning
from tests.modelling.torch_training import Reference, check_training, logical
from tests.planning.presets import preset
from tests.slow import slow

STEPS = 3


class Kind(NamedTuple):
    """A small model of three layers, and its training in torch."""

    config: Callable[..., Any]
    batches: Callable[[int], Any]
    reference: Callable[[str], tuple[dict[str, np.ndarray], Reference]]
    """Weights before, and what training gives those in whose names a regular expression is."""

    rate: float


def llama_kind(name: str) -> Kind:
    return Kind(
        lambda **split: llama_config(hf_config(name), **split),
        llama.batches,
        lambda only: llama.trained(hf_config(name), llama.batches(STEPS), only=only),
        llama.RATE,
    )


KINDS = {
    "t5": Kind(
        t5.our_config,
        t5.batches,
        lambda only: (logical(t5.their_model()), t5.reference(STEPS, only=only)),
        t5.RATE,
    ),
    "gptj": Kind(
        small_config,
        gptj.batches,
        lambda only: (logical(hf_model(small_config())), gptj.reference(STEPS, only=only)),
        gptj.RATE,
    ),
    "gemma2": llama_kind("gemma2"),  # tied; layers with windows and without
    "phi3": llama_kind("phi3"),  # whose files have q, k and v as one
}

CHOICES: dict[str, tuple[dict[str, str], str]] = {
    # what we are told, and the names that torch trains
    "t5/last layers": ({"trainable": "decoder.1,decoder.2"}, r"decoder\.block\.[12]"),
    "t5/norms": ({"trainable": "*norm*"}, "norm"),
    "t5/no embeddings": ({"frozen": "encoder.embed_tokens"}, "^(?!shared|.*embed_tokens)"),
    "t5/the encoder's": (
        {"trainable": "encoder*", "frozen": "*norm*,shared"},
        "^encoder(?!.*(norm|embed))",
    ),
    "t5/positions": ({"trainable": "*relative_attention_bias*"}, "relative_attention_bias"),
    "gptj/last layers": ({"trainable": "transformer.h.1,layer.2"}, r"\.h\.[12]"),
    "gptj/norms": ({"trainable": "*ln_*"}, "ln_"),
    "gptj/no embeddings": ({"frozen": "embeddings"}, "^(?!transformer.wte)"),
    "gptj/every other": ({"trainable": "layer.0,layer.2"}, r"\.h\.[02]"),
    "gptj/head": ({"trainable": "lm_head"}, "lm_head"),
    "gemma2/last layers": ({"trainable": "layer.1,layer.2"}, r"layers\.[12]"),
    "gemma2/norms": ({"trainable": "*norm*"}, "norm"),
    "gemma2/every other": ({"trainable": "layer.0,layer.2"}, r"layers\.[02]"),
    "gemma2/no embeddings": ({"frozen": "lm_head"}, "^(?!.*embed)"),
    "gemma2/embeddings": ({"trainable": "lm_head"}, "embed"),
    "phi3/last layers": ({"trainable": "model.layers.1,model.layers.2"}, r"layers\.[12]"),
    "phi3/attention": ({"trainable": "*qkv_proj*"}, "qkv_proj"),
}
IN_BRIEF = {"t5/last layers": (1, 1), "gptj/every other": (2, 2)}


def chosen(config: RunConfig, **training: Any) -> Any:
    """The configuration with other fields of its section on training."""
    found = config.to_dict()
    found["training"] |= training
    return type(config).from_dict(found)


def cases() -> Iterator[Any]:
    for name in CHOICES:
        for dp, tp in ((1, 1), (2, 2)):
            brief = IN_BRIEF.get(name) == (dp, tp)
            yield pytest.param(name, dp, tp, marks=[] if brief else pytest.mark.slow)


@pytest.mark.parametrize(("name", "dp", "tp"), list(cases()))
def test_as_torch_trains_them(name: str, dp: int, tp: int) -> None:
    """Loss, each gradient, three steps of AdamW; the others keep their bits."""
    kind, (told, only) = KINDS[name.partition("/")[0]], CHOICES[name]
    start, expected = kind.reference(only)
    config = chosen(kind.config(dp=dp, tp=tp, micro_batch=4 // dp), **told)
    weight_map = get_family(config).weight_map(config)
    model = fine_tuning(config, gradients=True)
    model.write(weight_map.from_hf(start))
    weights = check_training(
        model,
        kind.batches(STEPS),
        expected,
        kind.rate,
        lambda ours: dict(weight_map.to_hf(ours)),
    )
    for name in start.keys() - expected.gradients.keys():
        assert weights[name].tobytes() == start[name].tobytes(), name


# ---- what a step moves and computes --------------------------------------------------------------
def weight_bytes(config: RunConfig, *layers: str) -> int:
    """Bytes of the float32 weights in some layers, or all."""
    weight_map = get_family(config).weight_map(config)
    rows = [row for name in layers or weight_map.layers for row in weight_map.layers[name]]
    return sum(4 * math.prod(w.shape) for row in rows for w in row.weights)


def moved(config: RunConfig, batch: Any) -> dict[tuple[str, str], int]:
    """Bytes that a step loads and stores, by what they are."""
    found: Counter[tuple[str, str]] = Counter()
    plain = {"load": ScheduleExecutor._execute_load, "store": ScheduleExecutor._execute_store}

    def noted(what: str) -> Callable[..., None]:
        def note(walker: Any, step: Any, at: Any) -> None:
            found[what, step.buffer.kind] += step.nbytes
            plain[what](walker, step, at)

        return note

    with mock.patch.multiple(
        ScheduleExecutor, _execute_load=noted("load"), _execute_store=noted("store")
    ):
        model = fine_tuning(config)
        model.write(get_family(config).weight_map(config).init_weights(seed=0))
        with model:
            found.clear()
            model.run([batch], [1e-3], 0)
    return found


@pytest.mark.parametrize(("trained", "layers"), [("layer.1", ["layer.1"]), ("lm_head", ["head"])])
def test_frozen_weights_come_and_never_go(trained: str, layers: list[str]) -> None:
    """A step reads them for each pass, and writes what is trained, alone; the layers below have no
    backward pass."""
    config = chosen(small_config(), trainable=trained, frozen="*norm*,*ln_*")
    config = config.with_values({"execution.micro_batches_per_pass": config.gradient_accumulation})
    rows = [row for name in layers for row in get_family(config).weight_map(config).layers[name]]
    own = sum(4 * math.prod(w.shape) for row in rows if row.trainable for w in row.weights)
    found = moved(config, gptj.batches(1)[0])
    steps = 4 * sum(row.trainable for row in rows)
    assert found["store", "weights"] == found["store", "gradients"] == own > 0
    assert found["store", "moments"] == 2 * own + steps
    assert found["load", "moments"] == 2 * own + steps
    assert found["load", "gradients"] == own
    backward = {"layer.1": ["layer.1", "layer.2"], "lm_head": []}[trained]
    passes = weight_bytes(config) + (weight_bytes(config, *backward) if backward else 0)
    assert found["load", "weights"] == passes + own
    rows_between = len(backward) + 1
    entry = 16 * 12 * 32 * 4  # samples, tokens, features
    assert found["store", "activations between layers"] == 4 * entry  # of embeddings and layers
    plan = finetuning_requirements(config).plan
    between = (rows_between + (rows_between if backward else 0)) * entry
    inputs = 2 * 16 * 12 * 4 + 4 * 4  # words, labels, weights of micro-batches
    assert plan.remote == weight_bytes(config) + 3 * own + steps + between + inputs


def test_products_of_frozen_weights_gradients_are_not_computed() -> None:
    config = small_config()
    every = finetuning_requirements(config)
    norms = finetuning_requirements(chosen(config, trainable="*norm*,*ln_*"))
    weight_map = get_family(config).weight_map(config)
    matrices = [w for w in weight_map.weights if len(w.shape) == 2 and "wte" not in w.name]
    products = sum(2 * 16 * 12 * math.prod(w.shape) for w in matrices)
    assert every.plan.flops - norms.plan.flops == products
    last = finetuning_requirements(chosen(config, trainable="layer.2,head"))
    parts = {part.name: part.flops for part in last.plan.parts}
    assert parts["layer/forward"] == 2 * parts["layer_from_2/forward"]
    assert "layer/backward" not in parts
    assert "embeddings/backward" not in parts


@pytest.mark.parametrize("name", ["xxl_pod64", slow("gptj_6B_1024_pod64")])
def test_host_memory_is_what_is_kept_of_both(name: str) -> None:
    """2 bytes of a frozen weight; 12 more of one that is trained; rows of the trained layers."""
    trained = "decoder.22,decoder.23" if name.startswith("xxl") else "layer.26,layer.27"
    config = preset(name, training={"trainable": trained})
    needs, weight_map = finetuning_requirements(config), get_family(config).weight_map(config)
    own = sum(math.prod(w.shape) for w in weight_map.trainable_weights)
    assert needs.state == 2 * needs.parameters + 12 * own
    model, samples = config.model, config.training.global_batch_size
    token = samples * model.hidden_size * 2
    if config.family == "t5":  # the encoder's output, and three rows of the decoder's
        rows = model.sequence_length + 2 * 3 * model.decoder_sequence_length
    else:
        rows = 2 * 3 * model.sequence_length
    assert needs.plan.host_bytes == pytest.approx(needs.state + rows * token, rel=2e-3)


def test_programs_that_borrow_have_the_same_phases() -> None:
    config = chosen(small_config(), trainable="layer.0,layer.2")
    family, training = get_family(config), get_family(config).weight_map(config)
    model = replace(config.model, eval=True)
    written = replace(config, model=model)
    programs = (
        build_training_program(config, family.build_phases, weight_map=training),
        build_loss_program(written, family.build_phases, training),
        build_streamed_program(written, family.generator, training),
    )
    counts = [{name: len(layers) for name, layers in p.variables.items()} for p in programs]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0] == {
        "embeddings": 1,
        "layer": 1,
        "layer_from_1": 1,
        "layer_from_2": 1,
        "head": 1,
    }
