"""Files for launchers, read as far as that goes without a cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from popdist._process_info import ProcessInfo, process_info_from_env
from tests.children import child

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture
def place(monkeypatch):
    """The place that an environment names."""
    for name in [n for n in os.environ if n.startswith(("OMPI_", "SLURM_", "PMIX_", "POPDIST_"))]:
        monkeypatch.delenv(name)

    def found(variables: dict[str, str]) -> ProcessInfo:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return process_info_from_env()

    return found


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def test_an_indexed_job_tells_its_pods_who_they_are(place):
    service, job = documents("kubernetes.yml")
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["publishNotReadyAddresses"] is True
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == (
        "batch/v1",
        "Job",
        "Indexed",
    )
    assert spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    given = {one["name"]: one.get("value") or one["valueFrom"] for one in container["env"]}
    index = given["POPDIST_INSTANCE_INDEX"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    ports = {str(port["port"]) for port in service["spec"]["ports"]}
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"  # of an Indexed Job
    for i in range(spec["completions"]):
        of_pod = {"POPDIST_INSTANCE_INDEX": str(i), "POPDIST_RUN": "uid"}
        found = place({k: v for k, v in given.items() if isinstance(v, str)} | of_pod)
        assert (found.index, found.count, found.run) == (i, 8, "uid")
        assert found.coordinator is not None
        host, _, port = found.coordinator.partition(":")
        assert host == first
        assert {port} == ports
    assert given["POPDIST_SECRET"]["secretKeyRef"]["key"] == "secret"


def test_skypilot_tells_its_nodes_who_they_are(place, tmp_path):
    (task,) = documents("skypilot.yml")
    assert task["num_nodes"] == 8
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text("#!/bin/sh\necho $@ >command\nenv\n")
    python.chmod(0o755)
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9", "SKYPILOT_NUM_NODES": "2",
           "SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "sky-1"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", task["run"]], cwd=tmp_path, env={"PATH": os.environ["PATH"], **sky},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    found = place({name: value for name, _, value in lines if name.startswith("POPDIST_")})
    assert found == ProcessInfo(1, 2, "10.0.0.4:61440", "sky-1")
    saved = re.search(r"--save (\S+)", (tmp_path / "command").read_text())
    assert saved is not None
    assert any(saved[1].startswith(f"{mount}/") for mount in task["volumes"])


def test_the_batch_script_is_sound():
    path = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        for script in (path, ROOT / "tests/deploy/slurm.sh"):
            done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^#SBATCH --requeue$", text, re.MULTILINE)
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.MULTILINE)


def test_the_image_is_nobody_elses():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    for name in re.findall(r"REQUIREMENTS=(\S+)", text):
        assert (ROOT / name).is_file()


@pytest.mark.parametrize(
    ("code", "again"), [(138, True), (0, False), (1, True), (2, False), (143, False)]
)
def test_a_job_that_is_warned_goes_back_into_the_queue(code, again, tmp_path):
    """Before its time limit; so does one that crashes, but not a mistake nor a run that is over."""
    programs = {
        "srun": f"trap 'exit {code}' USR1; touch started; while :; do sleep 0.02; done",
        "scontrol": 'echo "$@" >requeued',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path),
           "SLURM_JOB_ID": "7"}  # fmt: skip
    job = child(["bash", DEPLOY / "slurm.sbatch"], env=env)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == code
    requeued = tmp_path / "requeued"
    assert requeued.exists() == again
    assert not again or requeued.read_text() == "requeue 7\n"
