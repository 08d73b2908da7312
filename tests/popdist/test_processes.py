"""Several processes run one program; the launcher starts them and ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popdist.run
from popdist import DistributedError
from popdist._coordinator_monitor import FOLLOWED_PEER
from popdist._gpu_assignment import _parse_uuids, assign_gpus, list_gpu_names
from popdist._process_info import process_info_from_args, process_info_from_env
from tests.children import PYTHON_PATH, child, free_port
from tests.slow import slow

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": PYTHON_PATH}
LAUNCHER_VARIABLES = ("OMPI_", "SLURM_", "PMIX_", "POPDIST_")


def started(processes: int, *program: str, **more) -> subprocess.Popen[str]:
    flags = ["--processes", str(processes), *more.pop("flags", [])]
    command = ["-m", "popdist.run", *flags, "--", sys.executable, *program]
    return child([sys.executable, *command], cwd=ROOT, env=ENV, **more)


@pytest.mark.parametrize("several", [2, slow(4)])
def test_a_program_gives_the_same_in_any_number_of_processes(several, tmp_path):
    """Streams are local, variables whole; sums of integers are exact in any order."""
    program = str(Path(__file__).with_name("program.py"))
    for processes in (1, several):
        run = started(processes, program, str(tmp_path), flags=["--replicas", "4"])
        out, errors = run.communicate(timeout=120)
        assert (run.returncode, out) == (0, ""), errors
    alone = np.load(tmp_path / "1.npz")
    found = np.load(tmp_path / f"{several}.npz")
    for name in alone:
        assert np.array_equal(found[name], alone[name]), name
    assert np.ptp(alone["outputs"], axis=2).any()  # replicas differ


EXECUTABLES = """
import json, os, sys
from pathlib import Path
import popdist
popdist.init()
folder = Path(sys.argv[1]) / str(popdist.getInstanceIndex())
os.environ["POPXL_CACHE_DIR"] = str(folder)
import popxl
from popxl import ops
from popxl._compile.executable_cache import statistics

def started():
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(3.0, name="x")
        buffer = popxl.remote_buffer((), popxl.float32, 1)
        y = ops.collectives.replicated_all_reduce(x * x, "add")
        ops.remote_store(buffer, 0, y)
        ops.add(ops.remote_load(buffer, 0), x)
    before = statistics.hits, statistics.compiles
    popxl.Session(ir, "cpu")
    return statistics.hits - before[0], statistics.compiles - before[1]

first = started()
second = started()
if popdist.getInstanceIndex():
    next(folder.glob("*.popxl")).unlink()
popdist.all_gather_object(0)
third = started()
everyones = popdist.all_gather_object([first, second, third])
if popdist.getInstanceIndex() == 0:
    print(json.dumps(everyones))
"""


def test_an_executable_that_one_process_lacks_is_compiled_by_all(tmp_path):
    """XLA's tuning on GPUs waits for all processes, those too that would load it."""
    run = started(2, "-c", EXECUTABLES.replace("replication=2", "'popdist'"), str(tmp_path))
    out, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    one, other = json.loads(out)
    assert one == other
    (_, count), second, third = one
    assert count > 0
    assert second == [count, 0]
    assert third == [count - 1, 1]


# ---- ends ---------------------------------------------------------------------------------------
MEET = """
import os, signal, sys, time
import popdist
popdist.init()
index = popdist.getInstanceIndex()
print("ready", index, flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.kill(os.getpid(), 9)", 137, "process 1 of 2 was ended by SIGKILL"),
        # As in test_an_error_in_one_of_two_processes_leaves_no_files (test_scratch_files.py).
        slow("raise ValueError('it')", 1, "ValueError: it"),
        slow("sys.exit(3)", 3, "process 1 of 2 ended with code 3"),
    ],
)
def test_all_end_when_one_fails(end, code, said):
    run = started(2, "-c", f"{MEET}if index == 1: {end}\nelse: popdist.all_gather_object(0)")
    assert run.stdout is not None
    assert "ready" in run.stdout.readline()
    errors = run.communicate(timeout=300)[1]  # without an end they wait for days
    assert run.returncode == code, errors
    assert said in errors


@pytest.mark.slow  # a quarter of a minute of silence
def test_the_launcher_names_a_process_that_has_fallen_silent():
    """The others, which waited for it, are those that end."""
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    program = f"{MEET}{stop} if index == 1 else popdist.all_gather_object(0)"
    run = started(2, "-c", program, flags=["--silence", "4"])
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == 1
    assert errors == (
        "popdist.run: nothing is heard of process 1 of 2 for 4 s (POPDIST_SILENCE): the others "
        "ended first\n"
    )


@pytest.mark.parametrize("given", ["2", "90000", "soon"])
def test_a_silence_that_cannot_be(given):
    errors = started(2, "-c", MEET, flags=["--silence", given]).communicate(timeout=60)[1]
    assert errors.startswith("popdist.run: the environment variable POPDIST_SILENCE is ")
    assert "set it to" in errors


def test_the_launcher_names_the_one_that_a_signal_ended(monkeypatch):
    """Others end because of it, or fail for the lack of it, in the same moment."""
    said: list[str] = []
    monkeypatch.setattr(popdist.run, "_print_error", lambda text, code: said.append(text) or code)
    monkeypatch.setattr(popdist.run, "GRACE", 0.2)  # all have ended

    def ended(*codes: int) -> list[Any]:
        return [subprocess.Popen([sys.executable, "-c", ends(c)]) for c in codes]

    def ends(code: int) -> str:
        return f"import os; os.kill(os.getpid(), {-code}) if {code} < 0 else os._exit({code})"

    for codes, code, text in [
        ((FOLLOWED_PEER, 1, -9), 137, "process 2 of 3 was ended by SIGKILL"),
        ((FOLLOWED_PEER, 3, FOLLOWED_PEER), 3, "process 1 of 3 ended with code 3"),
        ((0, FOLLOWED_PEER), 1, ""),
    ]:
        processes = ended(*codes)
        for process in processes:
            process.wait()
        assert popdist.run._wait_for_processes(processes) == code
        assert (said.pop() if text else "").startswith(text)
    assert not said


def test_signals_go_on_to_all_processes():
    handle = "signal.signal(15, lambda *_: sys.exit(0))\nprint('set', flush=True)\n"
    run = started(2, "-c", f"{MEET}{handle}time.sleep(60)")
    assert run.stdout is not None
    seen = 0
    while seen < 2:
        seen += run.stdout.readline() == "set\n"
    run.send_signal(signal.SIGTERM)
    errors = run.communicate(timeout=120)[1]
    assert (run.returncode, errors) == (0, "")


@pytest.mark.parametrize(("how", "victim"), [("SIGKILL", 0), slow("SIGSTOP", 2)])
def test_processes_alone_notice_that_another_is_gone(how, victim):
    """Without the launcher, of three that meet. The system closes what a dead one had open; of one
    that is only stopped, as of one whose host is gone, there is nothing but silence."""
    meeting = f"127.0.0.1:{free_port()}"
    silence_timeout = "5" if how == "SIGSTOP" else "1000"
    code = (
        MEET.replace("popdist.init()", "popdist.init(3, int(sys.argv[1]), sys.argv[2])")
        # One that is woken comes to its end before its other threads have run.
        + "sys.setswitchinterval(1000)\n"
        + f"os.kill(os.getpid(), signal.{how}) if index == {victim} else time.sleep(300)"
    )
    limits = [{"POPDIST_SILENCE": silence_timeout}, {}, {}]  # that of process 0 holds for all
    runs = [
        child([sys.executable, "-c", code, str(i), meeting], cwd=ROOT, env=ENV | limits[i])
        for i in range(3)
    ]
    others = [run for run in runs if run is not runs[victim]]
    assert others[0].stdout is not None
    assert "ready" in others[0].stdout.readline()
    errors = [run.communicate(timeout=200)[1] for run in others]
    runs[victim].send_signal(signal.SIGCONT)
    of_victim = runs[victim].communicate(timeout=120)[1]
    assert [run.returncode for run in others] == [1, 1]
    (said,) = filter(None, errors)
    assert said.startswith(f"error: process {victim} of 3 (pid {runs[victim].pid} on ")
    exit_reason = "ended" if how == "SIGKILL" else "not been heard of for 5 s (POPDIST_SILENCE)"
    assert said.endswith(f") has {exit_reason}, and the others end with it\n")
    assert said.count("\n") == 1
    if how == "SIGSTOP":  # it goes on, and learns why it ends
        who = f"process {victim} of 3 (pid {runs[victim].pid} on {socket.gethostname()})"
        assert of_victim == (
            f"error: the others have not heard of {who} for 5 s (POPDIST_SILENCE), and have ended\n"
        )


# ---- places -------------------------------------------------------------------------------------
@pytest.fixture
def environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)
    return lambda **found: [monkeypatch.setenv(k, v) for k, v in found.items()]


def test_launchers_are_recognised(environment):
    environment(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_LOCAL_SIZE="2")
    info = process_info_from_env()
    assert (info.index, info.count, info.coordinator) == (2, 4, None)  # several hosts
    environment(OMPI_COMM_WORLD_LOCAL_SIZE="4", OMPI_MCA_orte_hnp_uri="1531576320.0;tcp://10.0.0.1")
    info = process_info_from_env()
    assert info.coordinator is not None
    assert info.coordinator.startswith("127.0.0.1:")
    environment(POPDIST_NUM_INSTANCES="8", POPDIST_INSTANCE_INDEX="7", POPDIST_COORDINATOR="a:99")
    info = process_info_from_env()
    assert (info.index, info.count, info.coordinator) == (7, 8, "a:99")


def test_one_task_of_slurm_is_alone(environment):
    environment(SLURM_JOB_ID="77", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
    assert process_info_from_env().count == 1
    environment(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1")
    first = process_info_from_env().coordinator
    environment(SLURM_JOB_ID="78")
    second = process_info_from_env().coordinator
    environment(SLURM_STEP_ID="1")
    third = process_info_from_env().coordinator
    assert None not in (first, second, third)
    assert len({first, second, third}) == 3  # neither jobs meet nor steps of one


def test_tasks_of_slurm_on_two_hosts_meet():
    """Processes started like those of `srun --nodes 2`: the first host and the job's number give
    the address."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost,node02", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
    }  # fmt: skip
    code = """if True:
        import popdist
        popdist.init()
        print(popdist.all_gather_object(popdist.getInstanceIndex()))"""
    runs = [
        child([sys.executable, "-c", code], env={**ENV, **step, "SLURM_PROCID": str(index)})
        for index in range(2)
    ]
    assert [run.communicate(timeout=100) for run in runs] == [("[0, 1]\n", "")] * 2


@pytest.mark.parametrize("given", [(2, 2, "a:1"), (2, 0, "a"), (2, 0, ":7"), (2, 0, "a:70000")])
def test_what_cannot_be_is_refused(given):
    with pytest.raises(DistributedError):
        process_info_from_args(*given)


def test_processes_of_a_host_share_its_gpus():
    four = [str(i) for i in range(4)]
    hosts = [("a", four), ("a", four), ("b", four), ("c", ["0"]), ("c", ["1"])]
    assert assign_gpus(0, hosts) == [0, 1]
    assert assign_gpus(1, hosts) == [2, 3]
    assert assign_gpus(2, hosts) is None  # has them all
    assert assign_gpus(3, hosts) is None  # was given its own
    assert assign_gpus(0, [("a", []), ("a", [])]) is None
    assert list_gpu_names({}, ["nvidia0", "nvidiactl", "null", "nvidia1"], {}) == [
        "nvidia0",
        "nvidia1",
    ]
    assert list_gpu_names({"CUDA_VISIBLE_DEVICES": "2,3"}, ["nvidia0"], {}) == ["2", "3"]


def test_gpus_are_told_apart_by_uuid():
    """With `srun --gpus-per-task=2` under cgroups, each task numbers its own GPUs 0 and 1."""
    listed = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-{}-1b2c)\n"
    tasks = []
    for first in ("a", "b"):
        uuids = _parse_uuids(listed.format(0, f"{first}0") + listed.format(1, f"{first}1"))
        tasks.append(("host", list_gpu_names({"CUDA_VISIBLE_DEVICES": "0,1"}, [], uuids)))
    assert tasks[0][1] == ["GPU-a0-1b2c", "GPU-a1-1b2c"]
    assert assign_gpus(0, tasks) is None  # each keeps both of its own
    assert assign_gpus(1, tasks) is None
    assert assign_gpus(1, [tasks[0], tasks[0]]) == [1]
