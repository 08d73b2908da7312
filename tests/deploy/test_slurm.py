"""deploy/slurm.sbatch on a real Slurm, of two nodes that are this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.step_folders import list_step_folders
from tests.children import PYTHON_PATH
from tests.run.saved import digests
from tests.small_runs import GPTJ, RATE

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
STEPS = 200
FLAGS = [*GPTJ, *RATE, "--checkpoint.steps", "20", "--to_keep", "99"]
ENDED = "records of the run are in"  # the last line of a run that was not killed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(shutil.which(p, path="/usr/sbin:/usr/bin") for p in PROGRAMS),
        reason="needs slurm-wlm and munge, and root",
    ),
]


class Cluster:
    """A Slurm, and jobs of the batch script on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable,
            "PYTHONPATH": PYTHON_PATH,
            "POPXL_CACHE_DIR": str(folder / "executables"),
        }  # fmt: skip
        subprocess.run(["bash", Path(__file__).with_name("slurm.sh"), folder, "2"], check=True)

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, name: str, *options: str, steps: int = STEPS) -> str:
        words = [*FLAGS, "--steps", str(steps), "--save", str(self.folder / name)]
        out = ["--output", str(self.folder / f"{name}.txt"), "--nodes", "2"]
        return self.run("sbatch", "--parsable", *out, *options, "deploy/slurm.sbatch", *words)

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.txt"
        return path.read_text() if path.exists() else ""

    def wait_for(self, name: str, text: str, count: int = 1, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while self.said(name).count(text) < count:
            assert time.monotonic() < end, self.said(name)
            time.sleep(0.2)

    def steps(self, name: str) -> dict[int, dict[str, str]]:
        return {f.step: digests(f.path) for f in list_step_folders(self.folder / name)}

    def release(self, job: str) -> None:
        """When a job is in the queue again, let it begin now, and not in two minutes."""
        end = time.monotonic() + 120
        while (state := self.run("squeue", "--noheader", "--job", job, "-o", "%T")) != "PENDING":
            assert time.monotonic() < end, state
            time.sleep(0.2)
        time.sleep(5)  # for its nodes to forget the start before, whose credentials are revoked
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    found = Cluster(folder)
    yield found
    subprocess.run(["scancel", "--user", "root"], env=found.env, check=False)
    for _ in range(300):  # else what the daemons have started outlives them
        if not subprocess.run(["squeue", "-h"], env=found.env, capture_output=True).stdout:
            break
        time.sleep(0.1)
    for file in folder.glob("*.pid"):
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(cluster) -> dict[int, dict[str, str]]:
    """The steps of a run that nothing disturbs."""
    cluster.submit("whole")
    cluster.wait_for("whole", ENDED)
    return cluster.steps("whole")


def test_signals_save_and_a_job_in_the_queue_again_goes_on(cluster, whole):
    """Slurm's warning before the time limit; then the one of scancel, to all of the job's
    processes, among them the service at which they meet."""
    job = cluster.submit("signals")
    cluster.wait_for("signals", "step 1/")
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    cluster.wait_for("signals", "stopped by SIGUSR1 after step")
    cluster.release(job)
    cluster.wait_for("signals", "starting from step")
    cluster.run("scancel", "--signal=TERM", job)
    cluster.wait_for("signals", "stopped by SIGTERM after step")
    assert "Aborted" not in cluster.said("signals")
    cluster.submit("signals")
    cluster.wait_for("signals", ENDED, count=3)
    found = cluster.steps("signals")
    assert max(found) == STEPS
    assert all(whole[step] == found[step] for step in whole.keys() & found.keys())


def test_a_time_limit_saves_and_queues_the_job_again(cluster, whole):
    """Slurm sends its warning by itself, up to a minute early."""
    job = cluster.submit("limit", "--time", "2", "--signal", "B:USR1@60", steps=10**6)
    cluster.wait_for("limit", "stopped by SIGUSR1 after step")
    cluster.release(job)
    cluster.wait_for("limit", "starting from step")
    cluster.run("scancel", job)
    found = cluster.steps("limit")
    assert whole.keys() & found.keys()
    assert all(whole[step] == found[step] for step in whole.keys() & found.keys())


def test_two_jobs_at_once_disturb_neither(cluster, whole):
    for name in ("left", "right"):
        cluster.submit(name, "--oversubscribe")
    for name in ("left", "right"):
        cluster.wait_for(name, ENDED)
        assert cluster.steps(name) == whole
        assert "refused" not in cluster.said(name)


def test_a_node_that_is_lost_puts_the_job_into_the_queue_again(cluster, whole):
    job = cluster.submit("lost")
    cluster.wait_for("lost", "step 1/")
    while not list_step_folders(cluster.folder / "lost"):
        time.sleep(0.1)
    daemon = int((cluster.folder / "n2.pid").read_text())
    os.kill(daemon, signal.SIGKILL)
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    subprocess.run(["slurmd", "-N", "n2"], env=cluster.env, check=True)
    # The daemon's registration may have brought the node back already; then this is refused.
    resume = ["scontrol", "update", "NodeName=n2", "State=RESUME"]
    subprocess.run(resume, env=cluster.env, capture_output=True)
    cluster.release(job)
    cluster.wait_for("lost", f"step {STEPS}/{STEPS}:")
    while cluster.run("squeue", "--noheader", "--job", job):
        time.sleep(0.2)
    assert "starting from step" in cluster.said("lost")
    found = cluster.steps("lost")
    assert all(whole[step] == found[step] for step in whole.keys() & found.keys())
