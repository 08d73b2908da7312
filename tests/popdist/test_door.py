"""Who may come in at the coordinator's port, and what its service survives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from popdist import DistributedError, _service
from popdist._door import address_among, knock
from popdist._place import Place

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime/src'}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    port: int,
    processes: int,
    run: str = "mine",
    host: str = "127.0.0.1",
    second: int = 0,
    files: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """The service, as process 0 starts it, with at most so many open files."""
    words = [_service.__file__, host, str(port), str(second), str(processes), run]
    limit = [] if files is None else ["prlimit", f"--nofile={files}:{files}"]
    service = subprocess.Popen(
        [*limit, sys.executable, *words], text=True, env=ENV, stderr=subprocess.DEVNULL,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield service
    finally:
        service.kill()
        service.communicate()


def said(service: subprocess.Popen[str]) -> str:
    assert service.stdout is not None
    return service.stdout.readline().strip()


def test_strangers_are_refused_and_members_heard():
    """A request of HTTP, four bytes, another run, another size, an index twice: none of them counts
    as a process, and none ends the watch over those that do."""
    port = free_port()
    strangers = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0\0\0\1", b"popdist", b""]
    with serving(port, 2) as service, ExitStack() as stack:
        assert said(service) == "ready"
        for words in strangers:
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            line.sendall(words)
            line.shutdown(socket.SHUT_WR)
        first, second_port = knock("127.0.0.1", port, Place(0, 2, None, "mine"), 5)
        stack.enter_context(first)
        for place, why in [
            (Place(1, 2, None, "other"), "another run"),
            (Place(0, 2, None, "mine"), "a process of its index already"),
            (Place(1, 3, None, "mine"), "another number of processes"),
        ]:
            with pytest.raises(DistributedError, match=why):
                knock("127.0.0.1", port, place, 0.5)
        other, again = knock("127.0.0.1", port, Place(1, 2, None, "mine"), 5)
        assert again == second_port != port
        other.close()  # as the system does when a process is killed
        first.settimeout(10)
        assert first.recv(100) == (1).to_bytes(_service.WORD)
        notes = [said(service) for _ in range(4)]
        assert notes[0] == "refused 127.0.0.1: it does not say who it is"
        assert {note.rpartition(": ")[2] for note in notes[1:]} == set(_service.REASONS.values())


def test_the_service_heeds_no_signal():
    """`scancel`, a time limit and systemd signal all processes of a job, the service among them."""
    port = free_port()
    with serving(port, 1) as service:
        service.send_signal(signal.SIGCONT)
        assert said(service) == "ready"
        for number in _service.SIGNALS:
            service.send_signal(number)
        time.sleep(0.2)
        with knock("127.0.0.1", port, Place(0, 1, None, "mine"), 5)[0]:
            assert service.poll() is None


def test_another_run_at_the_same_port_disturbs_neither(tmp_path):
    """The first goes on; the second ends with a sentence, without having come in."""
    port = free_port()
    code = (
        "import sys, time, popdist, popdist._group as g; g.MEETING = int(sys.argv[3])\n"
        "popdist.init(2, int(sys.argv[1]), sys.argv[2])\n"
        "print(popdist.gather(0), flush=True)\ninput()\nprint(popdist.gather(1))"
    )

    def start(index: int, run: str, seconds: int = 100) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(index), f"127.0.0.1:{port}", str(seconds)],
            env={**ENV, "POPDIST_RUN": run}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    first = [start(i, "one") for i in range(2)]
    for process in first:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0, 0]\n"
    stranger = start(1, "two", 3)
    errors = stranger.communicate(timeout=100)[1]
    assert "cannot come in at 127.0.0.1" in errors
    assert "it belongs to another run" in errors
    for process in first:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=100) for process in first]
    assert [out for out, _ in ends] == ["[1, 1]\n"] * 2
    assert "note: refused 127.0.0.1: it belongs to another run" in ends[0][1]


def test_ports_that_are_in_use_and_limits_that_are_too_low():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with serving(free_port(), 2, second=taken.getsockname()[1]) as service:
            assert "the second port" in said(service)
        with serving(free_port(), 2, host="192.0.2.1") as service:  # behind a translation
            assert said(service) == "ready"

    with serving(free_port(), 100, files=256) as service:
        assert said(service) == (
            "100 processes need 328 open files, but the limit is 256: raise it by `ulimit -n`"
        )


def test_a_port_can_be_set():
    port, second = free_port(), free_port()
    with serving(port, 1, second=second) as service:
        assert said(service) == "ready"
        line, found = knock("127.0.0.1", port, Place(0, 1, None, "mine"), 5)
        line.close()
        assert found == second


def test_only_the_coordinators_address_is_listened_at():
    assert next(iter(_service._addresses("127.0.0.1"))) == "127.0.0.1"
    assert next(iter(_service._addresses("localhost"))) in ("127.0.0.1", "::1")
    assert next(iter(_service._addresses("10.1.2.3"))) == "10.1.2.3"


def test_a_name_that_is_this_machines_loopback(monkeypatch):
    """A Debian has `127.0.1.1 node01` in its hosts: others come from elsewhere, and gloo must not
    tell them that address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert list(_service._addresses("node01")) == [""]
    monkeypatch.undo()
    monkeypatch.setattr("popdist._door.own_address", lambda host, port: f"reaches {host}")
    assert address_among(0, ["127.0.1.1", "10.0.0.2"]) == "reaches 10.0.0.2"
    assert address_among(1, ["127.0.1.1", "10.0.0.2"]) == "10.0.0.2"
    assert address_among(0, ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
