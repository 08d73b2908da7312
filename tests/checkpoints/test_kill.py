"""A process that is killed while it saves leaves nothing that could be mistaken for a step."""

from __future__ import annotations

import inspect
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoints import CheckpointStore, has_checkpoint, load_checkpoint
from tests.children import child

ROOT = Path(__file__).parents[2]


def state_of(step):
    rng = np.random.default_rng(step)
    return {f"t{i}": rng.standard_normal(9_000).astype(np.float32) for i in range(12)}


SAVE_WITHOUT_END = f"""
import itertools, sys
import numpy as np
from checkpoints import CheckpointStore, has_checkpoint

{inspect.getsource(state_of)}
store = CheckpointStore(sys.argv[1], to_keep=2, shard_bytes=100_000)
first = store.load().step + 1 if has_checkpoint(sys.argv[1]) else 1
print("ready", flush=True)
for step in itertools.count(first):
    store.save(step, state_of(step), {{"step": step}}, wait=step % 2 == 0)
"""


def start(program, *arguments):
    command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    return child(command, cwd=ROOT)


def test_killed_at_random_moments(tmp_path):
    """Six runs in a row, each going on from the last. A damaged step would be a warning. More of
    them if the moments were not those that matter, as on a busy machine."""
    moments = random.Random(7)
    reached, in_the_middle, runs = 0, 0, 0
    while runs < 6 or min(reached, in_the_middle) < 3:
        runs += 1
        assert runs < 100
        process = start(SAVE_WITHOUT_END, tmp_path)
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        time.sleep(moments.uniform(0.02, 0.2))
        process.kill()
        assert process.communicate()[1] == ""
        assert process.returncode == -signal.SIGKILL
        in_the_middle += any(path.name.startswith(".") for path in tmp_path.iterdir())
        if not has_checkpoint(tmp_path):
            continue
        checkpoint = load_checkpoint(tmp_path)
        assert checkpoint.step >= reached
        assert checkpoint.metadata == {"step": checkpoint.step}
        for name, array in state_of(checkpoint.step).items():
            assert np.array_equal(checkpoint.tensors[name], array)
        reached = checkpoint.step
    with CheckpointStore(tmp_path, to_keep=2) as store:
        store.save(reached + 1, {}, {})
    assert len(list(tmp_path.iterdir())) == 2


DIE_AT_EACH_FILE_OPERATION = """
import os, shutil, sys
from pathlib import Path
import numpy as np
from checkpoints import CheckpointError, CheckpointStore
from huggingface.model_folders import read_hf_directory, write_hf_directory

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
home, case = Path(sys.argv[1]), sys.argv[2]
template, path = home / "template", home / "run"

def tensors(value):
    return {name: np.full(50, value, np.float32) for name in "abc"}

def save(path, value, step):
    CheckpointStore(path, to_keep=2, shard_bytes=400).save(step, tensors(value), {}, wait=True)

def saved(path):
    store = CheckpointStore(path)
    for step in store.steps():  # also those being deleted: whole, or not there
        store.load(step)
    return store.load().tensors

def export(path, value, shard_bytes):
    write_hf_directory(path, tensors(value), {"value": value}, shard_bytes)

CASES = {  # what is there, what is being written, how to read, what a reader may find
    "new step": (
        lambda path: [save(path, 0, 1), save(path, 1, 2)],
        lambda path: save(path, 2, 3), saved, {1, 2}),
    "same step": (
        lambda path: save(path, 1, 1), lambda path: save(path, 2, 1), saved, {1, 2}),
    "first step": (lambda path: path.mkdir(), lambda path: save(path, 2, 1), saved, {None, 2}),
    "model folder": (
        lambda path: path.mkdir(),
        lambda path: export(path, 2, 400), read_hf_directory, {None, 2}),
}

def die_at(operation):
    count = 0
    def hook(event, _arguments):
        nonlocal count
        count += event in OPERATIONS
        if count == operation:
            os._exit(9)
    sys.addaudithook(hook)

def value_in(path, read):
    try:
        found = read(path)
    except CheckpointError:
        assert None in may_be
        return None
    values = {float(x) for name in "abc" for x in found[name]}
    assert len(values) == 1, values
    return int(values.pop())

build, write, read, may_be = CASES[case]
build(template)
deaths, seen = 0, set()
while True:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template, path)
    child = os.fork()
    if child == 0:
        die_at(deaths + 1)
        write(path)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    seen.add(value_in(path, read))
    assert seen <= may_be, (deaths, seen)
    if case != "model folder" or value_in(path, read) is None:
        write(path)
    else:  # the next export there finds what was left
        write(home / "other")
        shutil.rmtree(home / "other")
    assert value_in(path, read) == 2
    assert not [p for p in (*path.iterdir(), *home.iterdir()) if p.name.startswith(".")]
    if status == 0:
        break
    deaths += 1
print(deaths, len(seen) == len(may_be))
"""


@pytest.mark.parametrize("case", ["new step", "same step", "first step", "model folder"])
def test_killed_at_each_file_operation(tmp_path, case):
    process = start(DIE_AT_EACH_FILE_OPERATION, tmp_path, case)
    out, errors = process.communicate(timeout=300)
    assert errors == ""
    deaths, all_seen = out.split()
    assert int(deaths) >= 8
    assert all_seen == "True"
