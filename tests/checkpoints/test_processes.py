"""Several processes save one checkpoint together; any number of them loads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import CheckpointStore, load_checkpoint
from checkpoints.safetensors_files import sha256_of_array
from checkpoints.step_folders import list_step_folders
from tests.children import PYTHON_PATH

ROOT = Path(__file__).parents[2]

# The argument is a list of works: name, folder, and more. Process 0 prints what came of each.
PROGRAM = """
import json, os, sys, time, warnings
from pathlib import Path
import numpy as np
import popdist
import checkpoints.store as module
from checkpoints import CheckpointError, CheckpointStore, DamagedCheckpointError, load_checkpoint
from checkpoints import collective_io
from checkpoints.safetensors_files import sha256_of_array
from checkpoints.tensor_shards import TensorShard
from checkpoints.errors import raise_damage_on_all_processes

popdist.init()
index, count = popdist.getInstanceIndex(), popdist.getNumInstances()
collective_io.RETRY_SECONDS = (0.1, 0.1, 0.1)
write = module.write_safetensors

def save(folder, death=False):
    rng = np.random.default_rng(0)
    with CheckpointStore(folder, to_keep=3, shard_bytes=40_000) as store:
        for step in (1, 2, 3):
            tensors = {f"t{i}": rng.standard_normal(i * 1000).astype(np.float32) for i in range(9)}
            if death and (step, index) == (3, 1):
                os._exit(9)
            store.save(step, tensors, {"step": step}, wait=step == 2)

def full(folder, host):  # the disk of one host, at the second step
    said = []
    def fails(path, shard):
        if (store.steps(), index) == ([1], host):
            raise OSError(28, "No space left on device", str(path))
        write(path, shard)
    module.write_safetensors = fails
    with CheckpointStore(folder) as store:
        for step in (1, 2, 3):
            try:
                store.save(step, {f"t{i}": np.full(9, step) for i in range(9)}, {}, wait=step == 2)
                store.wait()
                if step == 2:
                    module.write_safetensors = write
            except CheckpointError as error:
                said.append(str(error))
                module.write_safetensors = write
    return popdist.all_gather_object(said)

def copies(folder):  # each host has a copy
    collective_io._VISIBILITY_TIMEOUT = 0.5
    try:
        load_checkpoint(f"{folder}/{index}")
    except CheckpointError as error:
        return popdist.all_gather_object(str(error))

def best(folder):  # with periodic saves, on a slow disk
    module.write_safetensors = lambda *args: (time.sleep(0.05 + 0.1 * index), write(*args))
    with CheckpointStore(folder, to_keep=1) as store, CheckpointStore(folder + "/best") as best:
        for step in range(1, 6):
            tensors = {f"t{i}": np.full(100, step) for i in range(4)}
            store.save(step, tensors, {"step": step})
            popdist.all_gather_object(step)
            best.save(step, tensors, {"best": step}, wait=True)
            popdist.all_gather_object(step)
    module.write_safetensors = write

def flip(folder):  # a bit of the newest step
    if index == 0:
        path = max(Path(folder).glob("*-step-3/*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-5] ^= 16
        path.write_bytes(content)
    popdist.all_gather_object("flipped")

def part(shape):
    first, end = (shape[0] * i // count for i in (index, index + 1))
    return TensorShard(shape, (0,), (0,), shape, first, end - first)

def read(folder):  # each process a part of each tensor, which is verified as it is read
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while True:
            found = load_checkpoint(folder, verify=False)
            try:
                with raise_damage_on_all_processes():
                    for name in found.tensors:
                        found.tensors.read_shards(name, [part(found.tensors.spec(name).shape)])
                break
            except DamagedCheckpointError as error:
                found.mark_damaged(str(error))
    return popdist.all_gather_object([found.step, [str(w.message) for w in warned]])

def load(folder):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = load_checkpoint(folder)
    said = [str(w.message) for w in warned]
    digests = {name: sha256_of_array(found.tensors[name]) for name in found.tensors}
    seen = popdist.all_gather_object([found.step, digests, said])
    assert all(one[:2] == seen[0][:2] for one in seen)
    return seen[0]

for what, *given in json.loads(sys.argv[1]):
    found = globals()[what](*given)
    if index == 0:
        print(json.dumps(found), flush=True)
"""


def run(processes: int, *works: tuple[object, ...], umask: int = -1) -> tuple[list[Any], int]:
    """Return the results of each function and the exit code."""
    command = [sys.executable, "-m", "popdist.run", "--processes", str(processes), "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, json.dumps(works, default=str)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True, text=True, timeout=120, check=False, umask=umask,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(works) or done.returncode, done.stderr
    return found, done.returncode


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int]:
    """The folder in which three processes have worked, what came of each work, and their code."""
    folder = tmp_path_factory.mktemp("three")
    for name, process, values in (
        *(("behind", "0", (0, 1)), ("behind", "1", (0,)), ("behind", "2", (0, 1))),
        *(("other", "0", (0, 1)), ("other", "1", (0, 7)), ("other", "2", (0, 1))),
    ):
        with CheckpointStore(folder / name / process) as store:
            for step, value in enumerate(values):
                store.save(step, {"a": np.full(3, value)}, {})
    works: dict[str, tuple[object, ...]] = {
        "whole": ("save",), "full-0": ("full", 0), "full-2": ("full", 2), "best": ("best",),
        "behind": ("copies",), "other": ("copies",), "death": ("save", True),
    }  # fmt: skip
    given = [(what, folder / name, *more) for name, (what, *more) in works.items()]
    found, code = run(3, *given, umask=0o027)
    return folder, dict(zip(works, found, strict=False)), code


def test_any_number_of_processes_reads_what_three_have_saved(three, tmp_path):
    folder = Path(shutil.copytree(three[0] / "whole", tmp_path / "whole"))
    alone = load_checkpoint(folder)
    files = [file.name for file in alone.path.glob("*.safetensors")]
    assert {name.split("-")[1] for name in files} == {"00000", "00001", "00002"}
    rng = np.random.default_rng(0)
    values = [[rng.standard_normal(i * 1000).astype(np.float32) for i in range(9)] for _ in "123"]
    expected = {f"t{i}": sha256_of_array(array) for i, array in enumerate(values[2])}
    assert {name: sha256_of_array(alone.tensors[name]) for name in alone.tensors} == expected

    # A flipped bit, which one process of two sees, that which verifies it: both take the step
    # before. The same where each reads what it needs, once, and finds damage as it does so.
    works = [(what, folder) for what in ("load", "flip", "load", "read")]
    (whole, _, damaged, in_parts), code = run(2, *works)
    assert (whole, code) == ([3, expected, []], 0)
    step, _, warned = damaged
    assert step == 2
    assert "the checkpoint of step 3 is damaged" in warned[0]
    assert in_parts == [[2, warned]] * 2


def test_a_step_is_there_when_all_processes_have_written_theirs(three):
    folder, found, code = three
    assert code != 0
    assert list(found)[-1] == "other"  # one of them died in the work after this
    assert [step.step for step in list_step_folders(folder / "death")] == [2, 1]
    assert load_checkpoint(folder / "death").step == 2


def test_the_best_is_saved_beside_periodic_saves(three):
    """Two stores with one channel, one of them on another thread."""
    folder = three[0] / "best"
    assert load_checkpoint(folder).metadata == {"step": 5}
    best = load_checkpoint(folder / "best")
    assert best.metadata == {"best": 5}
    assert all((best.tensors[name] == 5).all() for name in best.tensors)


@pytest.mark.parametrize("host", [0, 2])
def test_the_disk_of_one_host_is_full(host, three):
    """All three end the save, with the same sentence, and wait for nobody; the next one is good."""
    folder, found, _ = three
    folder /= f"full-{host}"
    ((first,),) = {tuple(said) for said in found[f"full-{host}"]}
    expected = f"cannot save step 2 in {folder}: process {host} on "
    assert first.startswith(expected)
    assert first.endswith(": No space left on device")
    assert [step.step for step in list_step_folders(folder)] == [3, 1]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_files_follow_the_umask(three):
    files = list((three[0] / "whole").glob("*-step-3/*"))
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}


def test_copies_of_a_run_that_differ(three):
    """Processes that read different steps would wait for each other."""
    for said in three[1]["behind"]:
        assert said.startswith("process 1 does not see ")
        assert "000001-step-1, the newest step that process 0 sees" in said
    assert all(said.startswith("process 1 reads another ") for said in three[1]["other"])
