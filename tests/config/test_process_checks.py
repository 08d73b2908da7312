"""Processes that are given different things end with one sentence, all of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.children import PYTHON_PATH

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import popdist
popdist.init()
from checkpoints import collective_io
from checkpoints.collective_io import check_shared_folder
from config import process_checks
from config.process_checks import check_same_on_all_processes, check_same_run_on_all_processes
from config.errors import UserError
from config.families import config_class_of_preset
from config.presets import merge_over, load_preset
from data.data_cache import DataCache
from data.pipeline import Pipeline
from data.examples import Corpus, Example
from run import weight_loading
from run.answers import generate

index, folder = popdist.getInstanceIndex(), Path(sys.argv[1])
collective_io._VISIBILITY_TIMEOUT = 0.5
data = load_preset("finetuning", "tiny")
config = config_class_of_preset(data, "tiny").from_dict(data)

def run(changes):
    own = merge_over(data, changes if index else {})
    check_same_run_on_all_processes(config_class_of_preset(data, "tiny").from_dict(own))

def read(examples, more=""):
    tokenizer = SimpleNamespace(identity_values=["tokens" + more * index])
    Pipeline.check_processes_agree(SimpleNamespace(tokenizer=tokenizer), Corpus(examples))

def sources(own=process_checks._hash_source_files):
    process_checks._hash_source_files = lambda: str(index)
    try:
        run({})
    finally:
        process_checks._hash_source_files = own

def version():
    found = process_checks.metadata.version
    process_checks.metadata.version = lambda name: found(name) + "+here" * index
    run({})

def program():
    own, sys.argv[0] = sys.argv[0], f"run_{index}.py"
    try:
        run({})
    finally:
        sys.argv[0] = own

def prompts(count, text="where?"):
    list(generate.generate_answers(config, [generate.PromptRow({}, text)] * count, DataCache()))

def weights():
    weight_loading.check_lower_bound = weight_loading.announce_devices = lambda config: None
    weight_loading.load_weights = lambda *_: SimpleNamespace(step=5, sha256=str(index))
    weight_loading.load_inference_weights(config)

cases = {
    "alike": lambda: run({"checkpoint": {"save": "/mnt/a"}, "data": {"train": "other.jsonl"}}),
    "rate": lambda: run({"training": {"optimizer": {"learning_rate": {"maximum": 0.5}}}}),
    "seed": lambda: run({"model": {"seed": 7}}),
    "model": lambda: run({"model": {"layers": 3}}),
    "rows": lambda: read([Example("a", "b")] * (2 + index)),
    "row": lambda: read([Example("a", "b" * (1 + index))]),
    "tokenizer": lambda: read([Example("a", "b")], "x"),
    "shared": lambda: check_shared_folder(folder / "one"),
    "shared, and there": lambda: check_shared_folder(folder / "one"),
    "not shared": lambda: check_shared_folder(folder / str(index)),
    "sources": sources,
    "program": program,
    "prompts": lambda: prompts(1 + index),
    "prompt": lambda: prompts(1, f"where {index}?"),
    "weights": weights,
    "version": version,
}
found = {}
for name, case in cases.items():
    try:
        found[name] = case()
    except UserError as error:
        found[name] = str(error)
everyones = popdist.all_gather_object(found)
assert everyones[0] == everyones[1], everyones
if index == 0:
    print(json.dumps(found))
"""
SAID = {
    "program": "has program 'run_1.py', but process 0 has 'run_0.py'",
    "prompts": "has number of prompts 2, but process 0 has 1",
    "prompt": "has digest of the prompts",
    "weights": "has digest of the weights '1', but process 0 has '0'",
    "rate": "process 1 on .* has training.optimizer.learning_rate.maximum 0.5, "
    "but process 0 has 0.001",
    "seed": "has model.seed 7, but process 0 has 42",
    "model": "has model.layers 3, but process 0 has 2",
    "rows": "has number of examples 3, but process 0 has 2",
    "row": "has digest of the examples",
    "tokenizer": "has digest of the tokenizer",
    "not shared": "process 1 on .* does not see what process 0 writes into .*/0: give --save a",
    "version": "has version of jax '.*\\+here', but process 0 has",
    "sources": "has digest of the program's sources '1', but process 0 has '0'",
}


def test_what_differs_is_named(tmp_path):
    command = [sys.executable, "-m", "popdist.run", "--processes", "2", "--", sys.executable]
    done = subprocess.run(
        [*command, "-c", PROGRAM, str(tmp_path)], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    agreed = {name for name, text in found.items() if text is None}
    assert agreed == {"alike", "shared", "shared, and there"}
    for name, pattern in SAID.items():
        assert re.search(pattern, found[name]), (name, found[name])
        assert len(found[name]) < 300
    assert not list(tmp_path.rglob(".shared-*"))
