"""Which options change which program: each reaches all programs that it concerns, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl
from config.base import config_fields
from config.gptj import GPTJConfig
from config.sections import RunConfig
from data.samples import Samples
from modelling.generation import build_resident_program, build_streamed_program
from modelling.generation.decoding_strategy import strategy_from_config
from modelling.generation.token_by_token import build_token_by_token_program
from modelling.model_family import get_family
from modelling.phases.evaluation import build_loss_program
from modelling.phases.training import build_training_program
from sessions.generation import GenerationSession
from sessions.loss_evaluation import LossSession
from sessions.session import ModelSession
from sessions.training import TrainingSession
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.torch_training import logical
from tests.slow import slow

ROOT = Path(__file__).parents[2]

# T: training, E: evaluation; generation with R: resident weights, P: a token in each run,
# S: streamed weights.
ALL, LOSS, WRITING, EVAL = "TERPS", "TE", "RPS", "ERPS"

Cases = Mapping[str, tuple[Any, str]]
"""By the option's name: another value, and the programs that it changes."""

OPTIONS: Mapping[str, tuple[Mapping[str, Any], Cases]] = {
    "common": ({}, {
        "model.dropout_prob": (0.1, "T"),
        "model.precision": ("bfloat16", ALL),
        "model.eos_token_id": (3, WRITING),
        "model.attention.rotary_positional_embeddings_base": (500, ALL),
        "training.objective": ("dpo", LOSS),
        "adapter.rank": (2, ALL),
        "execution.attention": ("fused", ALL),
        "execution.transpose_batch_sequence": (True, ALL),
        "fp8.enabled": (True, ALL),
        "generation.search": ("beam", WRITING),
        "generation.repetition_penalty": (1.5, WRITING),
    }),
    "others": ({}, {
        "model.layer_norm_epsilon": (1e-3, ALL),
        "model.output_length": (9, WRITING),
        "training.global_batch_size": (32, "TES"),
        "training.gradient_dtype": ("bfloat16", "T"),
        "training.trainable": ("layer.0", "T"),
        "training.frozen": ("embeddings", "T"),
        "training.optimizer.state": ("bfloat16", "T"),
        "training.label_smoothing": (0.1, "T"),
        "training.optimizer.beta1": (0.5, "T"),
        "training.optimizer.beta2": (0.5, "T"),
        "training.optimizer.eps": (1e-3, "T"),
        "training.optimizer.weight_decay": (0.5, "T"),
        "training.optimizer.gradient_clipping": (0.5, "T"),
        "execution.loss_scaling": (8.0, "T"),
        "execution.activations": ("keep", "T"),
        "execution.micro_batches_per_pass": (1, "T"),
        "execution.update": ("deferred", "T"),
        "execution.disk": ("there", "T"),  # which hides its transfers by updates behind
        "execution.code_load": (True, LOSS),
        "execution.io_tiles": (32, ALL),
        "execution.available_memory_proportion": (0.5, ALL),
        "execution.device_iterations": (2, "TR"),
        "generation.micro_batches": (3, "S"),
        "generation.no_repeat_ngram_size": (2, WRITING),
        "model.pad_token_id": (3, WRITING),
    }),
    "sizes": ({}, {
        "model.layers": (2, ALL),
        "model.hidden_size": (64, ALL),
        "model.sequence_length": (24, ALL),
        "model.embedding.vocab_size": (120, ALL),
        "model.attention.heads": (2, ALL),
        "model.attention.rotary_dim": (8, ALL),
        "execution.micro_batch_size": (2, ALL),
        "execution.data_parallel": (2, ALL),
        "execution.tensor_parallel": (2, ALL),
        "execution.attention_serialisation": (2, ALL),
    }),
    "delayed": ({"fp8.enabled": True, "fp8.amax_history_len": 8}, {
        "fp8.recipe": ("current", ALL),
        "fp8.format": ("e4m3", ALL),
        "fp8.amax_history_len": (4, LOSS),  # evaluation holds the state that it does not use
        "fp8.amax_compute_algo": ("most_recent", "T"),
        "fp8.interval": (2, LOSS),
        "fp8.margin": (1, "T"),
        "fp8.power_of_2_scales": (False, ALL),
        "fp8.head": (True, ALL),
    }),
    "current": ({"fp8.enabled": True, "fp8.recipe": "current"}, {
        "fp8.margin": (1, ALL),
        "fp8.power_of_2_scales": (False, ALL),
        "fp8.head": (True, ALL),
    }),
    "optimizer": ({}, {"training.optimizer.name": ("adafactor", "T")}),
    "written": ({"model.eval": True, "model.quantization_group_size": 8}, {
        "model.quantization": ("int8", EVAL),
        "model.precision": ("bfloat16", EVAL),
    }),
    "few bits": ({
        "model.eval": True, "model.quantization": "int8", "model.quantization_group_size": 8,
    }, {
        "model.quantization": ("int4", EVAL),
        "model.quantization_group_size": (16, EVAL),
    }),
    "adapters": ({"adapter.rank": 2, "model.quantization_group_size": 8}, {
        "adapter.alpha": (3.0, ALL),
        "adapter.dropout": (0.5, "T"),
        "adapter.rslora": (True, ALL),
        "adapter.dora": (True, ALL),
        "adapter.targets": ("fc_in", ALL),
        "adapter.rank_pattern": ("q_proj=1", ALL),
        "adapter.alpha_pattern": ("q_proj=1", ALL),
        "adapter.modules_to_save": ("lm_head", "T"),
        "adapter.trainable_tokens": ("3,5", ALL),
        "model.quantization": ("int8", ALL),
    }),
    "tokens": ({"adapter.rank": 2, "adapter.trainable_tokens": "3,5"}, {
        "adapter.trainable_tokens_head": (False, ALL),
    }),
    "preferences": ({"training.objective": "dpo"}, {
        "training.beta": (0.5, LOSS),
        "training.objective": ("simpo", LOSS),
        "training.reference_cache": ("there", ""),
    }),
    "simpo": ({"training.objective": "simpo"}, {"training.gamma": (0.1, LOSS)}),
    "distillation": ({"training.objective": "distill", "training.teacher": "there"}, {
        "training.distill_rest": ("bin", LOSS),
        "training.distill_weight": (0.1, LOSS),
        "training.teacher": ("elsewhere", ""),
        "training.teacher_cache": ("there", ""),
        "training.teacher_quantization": ("int4", ""),
        "training.temperature": (2.0, LOSS),
        "training.top_k": (8, LOSS),
    }),
    "rollouts": ({"training.objective": "grpo"}, {
        "training.beta": (0.5, LOSS),
        "training.epsilon": (0.1, LOSS),
        "training.epsilon_high": (0.1, LOSS),
        "training.temperature": (0.5, LOSS),
        "training.scale_rewards": ("none", ""),
        "training.mask_truncated_completions": (True, ""),
        "training.objective": ("gspo", LOSS),
    }),
    "constant lengths": ({"training.objective": "dr_grpo"}, {
        "training.max_completion_length": (7, ""),
    }),
    "adafactor": ({"training.optimizer.name": "adafactor"}, {
        f"training.optimizer.adafactor.{name}": (value, "T")
        for name, value in {"beta1": 0.5, "decay_rate": 0.5, "eps": 1e-3, "clip_threshold": 0.5,
                            "scale_parameter": False, "min_scale": 0.1}.items()
    }),
    "halves": ({"model.precision": "bfloat16"}, {"execution.master_weights": (True, "T")}),
    "cut": ({"execution.tensor_parallel": 2, "execution.data_parallel": 2}, {
        "execution.rts_activations": (False, LOSS),
        "execution.rts_weights_threshold": (10**6, "TES"),
    }),
    "sample": ({"generation.search": "sample"}, {
        "generation.temperature": (0.5, WRITING),
        "generation.top_k": (3, WRITING),
        "generation.top_p": (0.5, WRITING),
    }),
    "beam": ({"generation.search": "beam"}, {
        "generation.num_beams": (2, WRITING),
        "generation.length_penalty": (0.5, WRITING),
    }),
}  # fmt: skip

UNSEEN: Mapping[str, Any] = {
    "model.seed": 5, "model.initializer_range": 0.5, "model.max_position_embeddings": 64,
    "training.steps": 7, "training.epochs": 2, "training.max_skipped_steps": 1,
    "training.stochastic_rounding": True,
    **{f"training.optimizer.learning_rate.{name}": value for name, value in {
        "function": "wsd", "maximum": 0.5, "minimum": 0.1, "warmup_steps": 3,
        "warmup_proportion": None, "num_cycles": 2, "decay_proportion": 0.3, "start_step": 2,
    }.items()},
    "adapter.load": "there", "execution.placement": "host", "execution.resident_layers": 1,
    "execution.quantized_cache": "there",
    "generation.weights": "streamed", "generation.max_tokens": 3, "generation.seed": 5,
    "generation.stop_strings": "a",
}  # fmt: skip
"""Options of other parts: loaders, schedules, the placement, the host side of generation."""

ELSEWHERE = {
    "family": "is another table",
    "model.eval": "is set for what evaluates and writes",
    "model.add_tokens": "sets model.embedding.vocab_size",
    "model.embedding.new_rows": "says which rows begin with the mean",
    "execution.device": "is where the program runs",
    "execution.host_memory": "limits the placement, with a disk",
    "adapter.target_parameters": "of experts: tests/modelling/test_adapters.py",
    **{
        f"training.{name}": "of embeddings: tests/modelling/test_contrastive.py"
        for name in ("pooling", "scale", "symmetric", "bidirectional", "negatives")
    },
    "training.center_rewards_coefficient": "of rewards: tests/modelling/test_sequence_labels.py",
    "training.multi_label": "of labels: tests/modelling/test_sequence_labels.py",
    "execution.expert_groups": "of experts: tests/modelling/llama/test_expert_groups.py",
    "execution.expert_parallel": "of experts: tests/modelling/llama/test_experts.py",
}
SECTIONS = ("family", "model", "training", "adapter", "execution", "fp8", "generation")


def texts_of(config: RunConfig, wanted: str = ALL) -> dict[str, str]:
    """The text of each program of a configuration; of training only if it is for that."""
    written, family = replace(config, model=replace(config.model, eval=True)), get_family(config)
    weight_map, generator, strategy = (
        family.weight_map(written),
        family.generator,
        strategy_from_config(written),
    )
    build: dict[str, Callable[[], Any]] = {
        "T": lambda: build_training_program(
            config, family.build_phases, weight_map=family.weight_map(config)
        ),
        "E": lambda: build_loss_program(written, family.build_phases, weight_map),
        "R": lambda: build_resident_program(written, generator, strategy),
        "P": lambda: build_token_by_token_program(written, generator, strategy),
        "S": lambda: build_streamed_program(written, generator, weight_map, strategy),
    }
    kinds = [kind for kind in wanted if kind != "T" or not config.model.eval]
    return {kind: text_of(build[kind]().ir) for kind in kinds}


def text_of(ir: popxl.Ir) -> str:
    """All that a program computes: ops, types, constants' values; and its number of IO tiles."""
    graphs = [ir.main_graph]
    for graph in graphs:
        graphs += [called for called in graph.called_graphs if called not in graphs]
    tiles = ir._pb_ir.getSessionOptions().numIOTiles
    return f"{ir}{tiles}{[c._data.tobytes() for graph in graphs for c in graph.constants]}"


QUICK = ("common", "current", "written", "preferences")


def bases(*programs: str) -> list[Any]:
    """The names in `OPTIONS` that have options for exactly these programs; none given: all."""
    return [
        base if base in QUICK else slow(base)
        for base, (_, cases) in OPTIONS.items()
        if not programs or {own for _, own in cases.values()} & {*programs}
    ]


@pytest.mark.parametrize("base", bases())
def test_an_option_changes_the_programs_that_it_is_for(base: str) -> None:
    given, cases = OPTIONS[base]
    config = small_config(layers=1).with_values(given)
    before = texts_of(config)
    changed = {}
    for option, (value, programs) in cases.items():
        after = texts_of(config.with_values({option: value}), programs)
        changed[option] = "".join(kind for kind in after if after[kind] != before[kind])
    assert changed == {option: programs for option, (_, programs) in cases.items()}


@pytest.mark.parametrize("base", bases("T", LOSS, WRITING))
def test_an_option_changes_no_other_program(base: str) -> None:
    """All options at once that are for the same programs."""
    given, cases = OPTIONS[base]
    config = small_config(layers=1).with_values(given)
    for programs in ("T", LOSS, WRITING):
        options = {option: value for option, (value, own) in cases.items() if own == programs}
        others = "".join(kind for kind in ALL if kind not in programs)
        assert texts_of(config, others) == texts_of(config.with_values(options), others), programs


def test_no_program_depends_on_what_others_read() -> None:
    config = small_config(layers=1)
    before = texts_of(config)
    assert before == texts_of(config), "the text of a program depends on nothing else"
    assert before == texts_of(config.with_values(UNSEEN))


def test_every_option_of_a_program_is_in_a_table() -> None:
    """A new field: say in `OPTIONS` which programs it changes, or that others read it."""
    known = {*UNSEEN, *ELSEWHERE, *(name for _, cases in OPTIONS.values() for name in cases)}
    fields = {leaf.path for leaf in config_fields(GPTJConfig)}
    assert {name for name in fields if name.split(".")[0] in SECTIONS} - known == set()


def test_programs_of_configurations_are_built_in_one_way() -> None:
    """`modelling.ir_building`, which sets what all layers follow; the programs of benchmarks
    and of the measured matrix product have no model."""
    found = {
        path.relative_to(ROOT).as_posix()
        for room in ("modelling", "sessions", "run", "planning", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"popxl\.Ir\(|fp8_layer_context\(config\)", path.read_text("utf-8"))
    }
    own = {
        *(f"benchmarks/{n}.py" for n in ("device_tasks", "accumulation", "accumulation_programs")),
        "planning/hardware/matrix_rate.py",
    }
    assert found - own == {"modelling/ir_building.py"}


# ---- results ------------------------------------------------------------------------------------
def results_of(config: RunConfig, samples: Samples) -> dict[str, np.ndarray]:
    """Results of each program: losses, or tokens."""
    family, found = get_family(config), {}
    weight_map = family.weight_map(config)
    weights = {**weight_map.init_weights(5), **logical(hf_model(small_config(layers=1)))}
    input_ids = np.random.default_rng(0).integers(
        3, 60, (16, config.model.sequence_length), np.int32
    )

    def run(model: ModelSession, do: Callable[[Any], Any]) -> np.ndarray:
        model.write(weights)
        with model:
            return np.asarray(do(model))

    batch = samples.take(np.arange(config.training.global_batch_size))
    found["T"] = run(TrainingSession(config), lambda model: model.run([batch], [1e-3])[0].loss)
    found["E"] = run(LossSession(config), lambda model: model.compute(samples).mean)
    for kind, placed in (("R", "resident"), ("S", "streamed")):
        writing = config.with_values({"generation.weights": placed})
        found[kind] = run(
            GenerationSession(writing), lambda m: m.generate(input_ids, np.ones_like(input_ids))
        )
    one = config.with_values({"execution.micro_batch_size": 1})
    rows = [row[None] for row in input_ids]
    found["P"] = run(
        GenerationSession(one, token_by_token=True),
        lambda model: [[*model.stream(row, np.ones_like(row))][-1][0] for row in rows],
    )
    return found


@cache
def plain_results() -> dict[str, np.ndarray]:
    config = small_config(layers=1)
    return results_of(config, samples_of(config))


def samples_of(config: RunConfig) -> Samples:
    count = config.training.global_batch_size
    return get_family(config).sample_format.make_random_samples(config, count, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"fp8.enabled": True, "fp8.recipe": "current"}, ALL),
        ({"fp8.enabled": True}, ALL),
        ({"model.precision": "bfloat16"}, ALL),
        ({"model.attention.rotary_positional_embeddings_base": 5}, ALL),
        ({"training.optimizer.beta1": 0.5, "execution.loss_scaling": 8.0}, ""),
        ({"adapter.rank": 2, "adapter.alpha": 3.0}, ""),  # which begin with zeros
        ({"execution.attention": "fused"}, ""),
        ({"execution.transpose_batch_sequence": True}, ""),
        ({"execution.tensor_parallel": 2, "execution.rts_activations": False}, ""),
        ({"execution.data_parallel": 2, "execution.micro_batch_size": 2}, ""),
        ({"execution.activations": "keep", "execution.update": "deferred"}, ""),
        ({"execution.attention_serialisation": 3, "execution.code_load": True}, ""),
    ],
)
def test_results_change_with_numerics_alone(options: dict[str, Any], changed: str) -> None:
    plain = plain_results()
    config = small_config(layers=1).with_values(options)
    results = results_of(config, samples_of(config))
    same = {kind: np.allclose(results[kind], plain[kind], rtol=1e-5) for kind in ALL}
    assert {kind for kind in ALL if not same[kind]} == {*changed}
