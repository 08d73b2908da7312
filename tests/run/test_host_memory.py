"""The host holds one copy of a state that is loaded or saved, and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESET = Path("/proc/self/clear_refs")

# Peaks are above what was there before, relative to the state. Compiling comes first: its memory
# is not what is measured here.
MEASURE = """
import ctypes, gc, json, math, sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from terminal.command_line import read_command_line
from tests.modelling.sessions import fine_tuning
from modelling.model_family import get_family
from checkpoints.store import SHARD_BYTES, CheckpointStore
from huggingface.model_folders import write_hf_directory
from run.checkpoint_manager import DISK_SHARD_BYTES
from run.resume import resolve_initial_state

folder, flags = Path(sys.argv[1]), sys.argv[2:]
config = read_command_line("", "finetuning", "tiny", flags).config
family = get_family(config)
table = family.weight_map(config)

def memory(which):
    line = next(x for x in open("/proc/self/status") if x.startswith(which))
    return int(line.split()[1]) * 1024

def peak_of(action):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    action()
    return memory("VmHWM") - before

def start_from(load):
    checkpoint = replace(config.checkpoint, load=load and str(folder / load))
    model.write(resolve_initial_state(replace(config, checkpoint=checkpoint), table).tensors)
    model.__enter__()

def save(name, wait, shard_bytes=SHARD_BYTES):
    with CheckpointStore(folder / name, shard_bytes=shard_bytes) as store:
        store.save(1, model.tensors(), {}, wait)

model = fine_tuning(config)
# Weights, gradients and two moments, float32.
state = 4 * 4 * sum(math.prod(w.shape) for w in table.weights)
found = {"random weights": peak_of(lambda: start_from(None)) / state}
model.run([family.sample_format.make_random_samples(config, 8, None).take(np.arange(8))], [1e-3], 0)
found["saving at once"] = peak_of(lambda: save("run", True)) / state
found["saving in small files"] = peak_of(lambda: save("small", True, DISK_SHARD_BYTES)) / state
found["saving in the background"] = peak_of(lambda: save("again", False)) / state
write_hf_directory(folder / "hf", model.tensors(optimizer=False), family.to_config_json(config))
model.__exit__(None, None, None)
for name in ("run", "hf"):
    found[name] = peak_of(lambda: start_from(name)) / state
    model.__exit__(None, None, None)
print(json.dumps(found | {"state": state}))
"""
# Of the two families GPT-J has fewer programs to compile.
FLAGS = [
    *("--config", "gptj_tiny", "--device", "cpu", "--layers", "4", "--hidden_size", "512"),
    *("--vocab_size", "8000", "--heads", "8", "--model.attention.rotary_dim", "16"),
    *("--sequence_length", "8", "--global_batch_size", "8", "--micro_batch_size", "8"),
]


@pytest.mark.skipif(not RESET.exists(), reason="peaks are measured as Linux counts them")
def test_peaks_of_host_memory(tmp_path):
    command = [sys.executable, "-c", MEASURE, str(tmp_path), *FLAGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found.pop("state") > 3e8
    # Weights and moments are three quarters of the state. They fit in one file, and files are
    # written whole.
    assert found.pop("saving in the background") < 0.95
    assert found.pop("saving at once") < 0.95
    assert found.pop("saving in small files") < 0.6
    assert found.keys() == {"random weights", "run", "hf"}
    for source, peak in found.items():
        # Moments and gradients that are zero take no pages of the host before they are written.
        assert 0.7 < peak < 1.2, source


FROZEN = """
import ctypes, gc, json, sys
from pathlib import Path

import numpy as np
import popxl
from terminal.command_line import read_command_line
from tests.modelling.sessions import fine_tuning
from modelling.model_family import get_family

config = read_command_line("", "finetuning", "tiny", sys.argv[1:]).config
family = get_family(config)

def memory(which):
    line = next(x for x in open("/proc/self/status") if x.startswith(which))
    return int(line.split()[1]) * 1024

model = fine_tuning(config)
plan = popxl.plan.plan_of(model.session.ir)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model.write(family.weight_map(config).init_weights(0))
batch = family.sample_format.make_random_samples(config, 8, None).take(np.arange(8))
with model:
    for step in range(3):
        model.run([batch], [1e-3], step)
print(json.dumps([memory("VmHWM") - before, plan.remote + plan.device_bytes]))
"""


@pytest.mark.slow  # 20 seconds on 2 cores
@pytest.mark.skipif(not RESET.exists(), reason="peaks are measured as Linux counts them")
def test_frozen_layers_take_what_is_planned():
    """Two of sixteen train: of the others there are the weights alone."""
    larger = [
        "--hidden_size",
        "1024",
        "--layers",
        "16",
        "--training.trainable",
        "layer.14,layer.15",
    ]
    command = [sys.executable, "-c", FROZEN, *FLAGS, *larger]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured, planned = json.loads(done.stdout.splitlines()[-1])
    assert planned < 1.5e9
    assert measured == pytest.approx(planned, rel=0.1)
