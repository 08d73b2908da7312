"""Several processes save one checkpoint together; any number of them loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import CheckpointStore, load_checkpoint
from checkpoints.digests import digest
from checkpoints.folders import step_folders
from tests.slow import slow

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys, time, warnings
import numpy as np
import popdist
from checkpoints import CheckpointStore, load_checkpoint
from checkpoints.digests import digest

popdist.init()
index, what, folder = popdist.getInstanceIndex(), sys.argv[1], sys.argv[2]
if what == "save":
    rng = np.random.default_rng(0)
    with CheckpointStore(folder, to_keep=3, shard_bytes=40_000) as store:
        for step in (1, 2, 3):
            tensors = {f"t{i}": rng.standard_normal(i * 1000).astype(np.float32) for i in range(9)}
            if len(sys.argv) > 3 and (step, index) == (3, 1):
                os._exit(9)
            store.save(step, tensors, {"step": step}, wait=step == 2)
elif what == "full":  # the disk of one host, at the second step
    import checkpoints.store as module
    from checkpoints import CheckpointError
    write, said = module.write_shard, []
    def full(path, shard):
        if (store.steps(), index) == ([1], int(sys.argv[3])):
            raise OSError(28, "No space left on device", str(path))
        write(path, shard)
    module.write_shard = full
    with CheckpointStore(folder) as store:
        for step in (1, 2, 3):
            try:
                store.save(step, {f"t{i}": np.full(9, step) for i in range(9)}, {}, wait=step == 2)
                store.wait()
                if step == 2:
                    module.write_shard = write
            except CheckpointError as error:
                said.append(str(error))
                module.write_shard = write
    everyones = popdist.gather(said)
    if index == 0:
        print(json.dumps(everyones))
elif what == "copies":  # each host has a copy, of which process 0's has got on
    from checkpoints import CheckpointError, folders
    folders._SEEN = 0.5
    try:
        load_checkpoint(f"{folder}/{index}")
    except CheckpointError as error:
        popdist.fail(str(error), 2)
elif what == "best":  # with periodic saves, on a slow disk
    import checkpoints.store as module
    write = module.write_shard
    module.write_shard = lambda *args: (time.sleep(0.05 + 0.1 * index), write(*args))
    with CheckpointStore(folder, to_keep=1) as store, CheckpointStore(folder + "/best") as best:
        for step in range(1, 6):
            tensors = {f"t{i}": np.full(100, step) for i in range(4)}
            store.save(step, tensors, {"step": step})
            popdist.gather(step)
            best.save(step, tensors, {"best": step}, wait=True)
            popdist.gather(step)
elif what == "read":  # each process a part of each tensor, which is verified as it is read
    from checkpoints import DamagedError
    from checkpoints.parts import Part
    from checkpoints.together import damage_told
    count = popdist.getNumInstances()
    def part(shape):
        first, end = (shape[0] * i // count for i in (index, index + 1))
        return Part(shape, (0,), (0,), shape, first, end - first)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while True:
            found = load_checkpoint(folder, verify=False)
            try:
                with damage_told():
                    for name in found.tensors:
                        found.tensors.some(name, [part(found.tensors.spec(name).shape)])
                break
            except DamagedError as error:
                found.set_aside(str(error))
    seen = popdist.gather([found.step, [str(w.message) for w in warned]])
    if index == 0:
        print(json.dumps(seen))
else:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = load_checkpoint(folder)
    said = [str(w.message) for w in warned]
    digests = {name: digest(found.tensors[name]) for name in found.tensors}
    seen = popdist.gather([found.step, digests, said])
    assert all(one[:2] == seen[0][:2] for one in seen)
    if index == 0:
        print(json.dumps(seen[0]))
"""


def run(processes: int, *arguments: str, umask: int = -1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "popdist.run", "--processes", str(processes), "--"]
    return subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime/src'}"},
        capture_output=True, text=True, timeout=120, check=False, umask=umask,
    )  # fmt: skip


def test_any_number_of_processes_reads_what_two_have_saved(tmp_path):
    saved = run(2, "save", str(tmp_path))
    assert saved.returncode == 0, saved.stderr
    alone = load_checkpoint(tmp_path)
    files = [file.name for file in alone.path.glob("*.safetensors")]
    assert {name.split("-")[1] for name in files} == {"00000", "00001"}
    rng = np.random.default_rng(0)
    values = [[rng.standard_normal(i * 1000).astype(np.float32) for i in range(9)] for _ in "123"]
    expected = {f"t{i}": digest(array) for i, array in enumerate(values[2])}
    assert {name: digest(alone.tensors[name]) for name in alone.tensors} == expected
    read = run(4, "load", str(tmp_path))
    assert json.loads(read.stdout) == [3, expected, []], read.stderr

    # A flipped bit, which one process of three sees, that which verifies it: all take the step
    # before.
    path = alone.path / sorted(files)[-1]
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)
    step, _, warned = json.loads(run(3, "load", str(tmp_path)).stdout)
    assert step == 2
    assert "the checkpoint of step 3 is damaged" in warned[0]

    # The same where each reads what it needs, once, and finds damage as it does so.
    seen = json.loads(run(3, "read", str(tmp_path)).stdout)
    assert seen == [[2, warned]] * 3


def test_a_step_is_there_when_all_processes_have_written_theirs(tmp_path):
    failed = run(2, "save", str(tmp_path), "with a death")
    assert failed.returncode != 0
    assert [folder.step for folder in step_folders(tmp_path)] == [2, 1]
    assert load_checkpoint(tmp_path).step == 2


def test_the_best_is_saved_beside_periodic_saves(tmp_path):
    """They took each other's turns: two stores, one channel, and one of them on another thread."""
    saved = run(2, "best", str(tmp_path))
    assert saved.returncode == 0, saved.stderr
    assert load_checkpoint(tmp_path).metadata == {"step": 5}
    best = load_checkpoint(tmp_path / "best")
    assert best.metadata == {"best": 5}
    assert all((best.tensors[name] == 5).all() for name in best.tensors)


@pytest.mark.parametrize("host", [slow(0), 2])
def test_the_disk_of_one_host_is_full(host, tmp_path):
    """All three end the save, with the same sentence, and wait for nobody; the next one is good."""
    done = run(3, "full", str(tmp_path), str(host))
    assert done.returncode == 0, done.stderr
    everyones = json.loads(done.stdout)
    assert all(said == everyones[0] for said in everyones)
    ((first,),) = {tuple(said) for said in everyones}
    expected = f"cannot save step 2 in {tmp_path}: process {host} on "
    assert first.startswith(expected)
    assert first.endswith(": No space left on device")
    assert [folder.step for folder in step_folders(tmp_path)] == [3, 1]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_files_follow_the_umask(tmp_path):
    saved = run(2, "save", str(tmp_path), umask=0o027)
    assert saved.returncode == 0, saved.stderr
    files = list(tmp_path.glob("*-step-3/*"))
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}


def test_copies_of_a_run_that_differ(tmp_path):
    """They were read as different steps, whose runs then waited for each other."""
    for process, steps in (("0", 2), ("1", 1)):
        with CheckpointStore(tmp_path / process) as store:
            for step in range(steps):
                store.save(step, {"a": np.full(3, step)}, {})
    done = run(2, "copies", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("process 1 does not see ")
    assert "000001-step-1, the newest step that process 0 sees" in done.stderr
    with CheckpointStore(tmp_path / "1") as store:
        store.save(1, {"a": np.full(3, 7)}, {})
    done = run(2, "copies", str(tmp_path))
    assert done.stderr.startswith("process 1 reads another ")
