"""A start imports what its own model and program need, and its process starts anew before that."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.children import PYTHON_PATH
from tests.small_runs import ROOT

_PROGRAM = """
import json, sys
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from modelling.model_family import get_family
from modelling.phases.training import build_training_program
from run.training_throughput import measure_throughput

config_class = config_class_of_preset(load_preset("finetuning", "tiny"), "tiny")
config = load_config(config_class, "finetuning", "tiny", {})
build_training_program(config, get_family(config).build_phases)
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
own = [n for n, f in files.items() if f.startswith(ROOT) and "site-packages" not in f]
print(json.dumps([own, [n for n in ("transformers", "torch", "scipy") if sys.modules.get(n)]]))
"""


_START = """
import json, sys
import run_finetuning

assert run_finetuning.main(["--config", "tiny", "--training.steps", "2", "--run_dir", RUN]) == 0
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
own = [n for n, f in files.items() if f.startswith(ROOT) and "site-packages" not in f]
print(json.dumps(own))
"""


def run_python(code: str, **environment: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHON_PATH, **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_training_imports_its_own_family_objective_and_ops_alone():
    own, others = run_python(f"ROOT = {str(ROOT)!r}\n{_PROGRAM}")
    assert len(own) <= 282
    unneeded = ("modelling.generation.", "huggingface.", "modelling.llama", "config.llama")
    assert [name for name in own if name.startswith(unneeded)] == []
    assert {"popxl.ops.convolution", "data.pipeline", "popdist._process_group"} & set(own) == set()
    unneeded_parts = (
        "popxl.plan.plan", "popxl._storage.disk_queue", "popxl._storage.prefetch",
        "popxl_addons.optimizers.adafactor", "popxl_addons.optimizers.state_8bit",
        "modelling.quantization", "modelling.layers.experts", "modelling.objectives.contrastive",
        "modelling.objectives.distillation", "checkpoints.safetensors_files",
    )  # fmt: skip
    assert set(unneeded_parts) & set(own) == set()
    assert others == []


@pytest.mark.slow
def test_a_second_start_imports_few_modules(tmp_path):
    """Of two steps of `tiny`, with its executables cached."""
    for start in ("first", "second"):
        code = f"ROOT, RUN = {str(ROOT)!r}, {str(tmp_path / start)!r}\n{_START}"
        own = run_python(code, POPXL_CACHE_DIR=str(tmp_path / "cache"))
    assert len(own) <= 302
    unneeded = (
        "data.conversations", "data.labeled_rows", "data.packing", "data.preference",
        "data.rollout", "data.token_", "checkpoints.safetensors_files",
        "checkpoints.verified_loading",
        "huggingface.pretrained", "modelling.weights.lora", "modelling.weights.trainable",
        "modelling.t5.config_json", "planning.placement_search", "planning.requirements",
        "popxl._analysis.printing", "popxl._compile.xla_compile", "popxl.ops.fused_attention",
        "popxl.ops.fp8", "popxl.ops.random", "popxl_addons.fp8",
        "config.unknown_flags", "config.other_trainers_flags", "terminal.help_texts",
        "checkpoints.collective_io", "run.profiler", "run.quantized_cache", "run.resume",
        "run.base_model_ref", "run.model_weights", "run.weight_checks", "run.best_checkpoint",
        "data.prompt_boundary", "popxl.custom", "popxl.timing", "popxl._compat.popart_handles",
        "popxl._schedule.lookahead",
    )  # fmt: skip
    assert [name for name in own if name.startswith(unneeded)] == []


def test_a_run_imports_what_its_options_need():
    """No evaluation, export, checkpoints, mirror, teacher or metric tool, until it is asked for."""
    names = run_python("import json, sys, run.training_loop\nprint(json.dumps(list(sys.modules)))")
    unneeded = (
        "run.evaluation", "run.hf_export", "run.teacher", "run.initial_model", "run.model_card",
        "run.checkpoint_mirror", "run.records.wandb_log", "run.records.tensorboard_log",
        "run.records.prometheus_page", "checkpoints.store", "checkpoints.manifest",
        "huggingface.model_folders", "huggingface.peft_files", "modelling.generation",
        "data.chat_template", "popxl.plan.plan", "planning.requirements",
    )  # fmt: skip
    assert [name for name in names if name.startswith(unneeded)] == []


@pytest.mark.parametrize("script", ["finetuning", "inference"])
def test_a_script_that_may_start_anew_has_imported_little(script):
    """`restart_with_huge_pages` replaces the process, and what it imported."""
    names = run_python(f"import json, sys, {script}\nprint(json.dumps(list(sys.modules)))")
    assert {"jax", "numpy", "modelling", "planning"} & set(names) == set()
