"""The coordination service is gone, or its host: each process says so in a sentence, and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from popdist._relay import CoordinatorRelay
from tests.children import PYTHON_PATH, child, free_port

ROOT = Path(__file__).parents[2]
ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("POPDIST_")},
    "PYTHONPATH": PYTHON_PATH,
}
CODE = """
import sys, time
import popdist
popdist.init(2, int(sys.argv[1]), sys.argv[2])
popdist.all_gather_object("all are here")
server = popdist._joined._server
print(server.pid if server else "ready", flush=True)
if popdist.getInstanceIndex():
    popdist.all_gather_object("never, for process 0 does not come")
time.sleep(300)
"""


def start(index: int, meeting: str, silence_timeout: int, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", CODE, str(index), meeting]
    return child(command, cwd=ROOT, env=ENV | {"POPDIST_SILENCE": str(silence_timeout)})


def line(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return run.stdout.readline().strip()


def assert_says(run: subprocess.Popen[str], index: int, meeting: str, what: str) -> None:
    errors = run.communicate(timeout=200)[1]
    assert run.returncode == 1, errors
    assert errors.startswith(f"error: the service at {meeting}, where the processes meet, {what}")
    assert errors.endswith(f"process {index} of 2 ends with it\n")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "what"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "has not answered for")]
)
def test_each_process_says_that_the_service_is_gone(number, what):
    """One process waits for the other, which does something else."""
    meeting = f"127.0.0.1:{free_port()}"
    runs = [start(index, meeting, 4) for index in range(2)]
    service = int(line(runs[0]))
    assert line(runs[1]) == "ready"
    try:
        os.kill(service, number)
        for index, run in enumerate(runs):
            assert_says(run, index, meeting, what)
    finally:
        if number == signal.SIGSTOP:
            os.kill(service, signal.SIGKILL)


def test_jaxs_connection_stays_open_when_nothing_can_be_handed_on():
    """The relay survives a write by JAX to a service that is gone, which closes both directions."""
    service, ours = socket.socketpair()
    address = CoordinatorRelay(ours).address.removeprefix("unix-abstract:")
    del ours
    with socket.socket(socket.AF_UNIX) as jax:
        jax.connect(f"\0{address}")
        jax.sendall(b"request")
        assert service.recv(7) == b"request"
        service.close()
        jax.settimeout(0.2)
        for _ in range(5):
            jax.sendall(b"request")
            with pytest.raises(TimeoutError):
                jax.recv(1)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, 10.213.0.1 and 10.213.0.2, that a cable joins."""
    names = [f"popdist-{os.getpid()}-{index}" for index in range(2)]
    ends = [f"p{os.getpid() % 10**6}-{index}" for index in range(2)]
    steps = [["netns", "add", name] for name in names]
    cable = ["link", "add", ends[0], "netns", names[0], "type", "veth"]
    steps.append([*cable, "peer", "name", ends[1], "netns", names[1]])
    for index, (name, end) in enumerate(zip(names, ends, strict=True)):
        steps.append(["-n", name, "address", "add", f"10.213.0.{index + 1}/24", "dev", end])
        steps += [["-n", name, "link", "set", each, "up"] for each in ("lo", end)]
    try:
        for step in steps:
            try:
                subprocess.run(["ip", *step], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_a_host_of_process_0_that_disappears_ends_the_other_within_a_minute(hosts):
    """Packets are dropped from one moment on, and no connection is closed."""
    meeting = "10.213.0.1:9000"
    inside = [["ip", "netns", "exec", name] for name in hosts]
    runs = [start(index, meeting, 30, *inside[index]) for index in range(2)]
    assert line(runs[0]).isdecimal()
    assert line(runs[1]) == "ready"
    cable = f"p{os.getpid() % 10**6}-0"
    subprocess.run([*inside[0], "ip", "link", "set", cable, "down"], check=True)
    begin = time.monotonic()
    assert_says(runs[1], 1, meeting, "has not answered for")
    assert time.monotonic() - begin < 60
    errors = runs[0].communicate(timeout=200)[1]
    assert runs[0].returncode == 1
    assert errors.startswith("error: process 1 of 2 (pid ")
