"""Handshake at the coordinator's port, and robustness of the coordination service."""

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

from popdist import DistributedError, _coordination_service
from popdist._handshake import connect_to_coordinator, reachable_address
from popdist._process_info import ProcessInfo, process_info_from_args
from tests.children import PYTHON_PATH, child, free_port

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": PYTHON_PATH}


@contextmanager
def serving(
    port: int,
    processes: int,
    run: str = "mine",
    host: str = "127.0.0.1",
    files: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """The service, as process 0 starts it, with at most so many open files."""
    words = [_coordination_service.__file__, host, str(port), str(processes), run]
    limit = [] if files is None else ["prlimit", f"--nofile={files}:{files}"]
    service = subprocess.Popen(
        [*limit, sys.executable, *words], text=True, env=ENV | {"POPDIST_SECRET": "ours"},
        stderr=subprocess.DEVNULL, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield service
    finally:
        service.kill()
        service.communicate()


def lifeline(port: int, index: int, count: int, run: str = "mine", secret: str = "ours", **more):
    info = ProcessInfo(index, count, None, run, secret)
    return connect_to_coordinator(
        "127.0.0.1",
        port,
        info,
        more.get("what", _coordination_service.LIFELINE),
        more.get("seconds", 5),
    )


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
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.sendall(words)
            sock.shutdown(socket.SHUT_WR)
        first = stack.enter_context(lifeline(port, 0, 2))
        for given, why in [
            ((1, 2, "other"), "another run"),
            ((0, 2), "a process of its index already"),
            ((1, 3), "another number of processes"),
            ((1, 2, "mine", "guessed"), "another secret"),
        ]:
            with pytest.raises(DistributedError, match=why):
                lifeline(port, *given, seconds=0.5)
        other = lifeline(port, 1, 2)
        other.close()  # as the system does when a process is killed
        first.settimeout(10)
        assert first.recv(100) == (1).to_bytes(_coordination_service.INDEX_BYTES)
        notes = [said(service) for _ in range(5)]
        assert notes[0] == "refused 127.0.0.1: it does not say who it is"
        assert {note.rpartition(": ")[2] for note in notes[1:]} == set(
            _coordination_service.REASONS.values()
        )


def test_the_service_heeds_no_signal():
    """`scancel`, a time limit and systemd signal all processes of a job, the service among them."""
    port = free_port()
    with serving(port, 1) as service:
        service.send_signal(signal.SIGCONT)
        assert said(service) == "ready"
        for number in _coordination_service.SIGNALS:
            service.send_signal(number)
        time.sleep(0.2)
        with lifeline(port, 0, 1):
            assert service.poll() is None


def test_another_run_at_the_same_port_disturbs_neither(tmp_path):
    """The first goes on; the second ends with a sentence, without having come in."""
    port = free_port()
    code = (
        "import sys, time, popdist, popdist._process_group as g\n"
        "g.RENDEZVOUS_TIMEOUT = int(sys.argv[3])\n"
        "popdist.init(2, int(sys.argv[1]), sys.argv[2])\n"
        "print(popdist.all_gather_object(0), flush=True)\n"
        "input()\nprint(popdist.all_gather_object(1))"
    )

    def start(index: int, run: str, seconds: int = 100) -> subprocess.Popen[str]:
        return child(
            [sys.executable, "-c", code, str(index), f"127.0.0.1:{port}", str(seconds)],
            env={**ENV, "POPDIST_RUN": run}, stdin=subprocess.PIPE,
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


def test_addresses_of_others_and_limits_that_are_too_low():
    with serving(free_port(), 2, host="192.0.2.1") as service:  # behind a translation
        assert said(service) == "ready"

    with serving(free_port(), 100, files=256) as service:
        assert said(service) == (
            "100 processes need 528 open files, but the limit is 256: raise it by `ulimit -n`"
        )


def test_nobody_comes_to_jaxs_service_without_the_secret():
    """There is no other port, a taken index is refused, and a service without the secret is
    rejected."""
    port = free_port()
    with serving(port, 1) as service:
        assert said(service) == "ready"
        listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True)
        own = [sock for sock in listening.stdout.splitlines() if f"pid={service.pid}," in sock]
        assert [sock.split()[3] for sock in own] == [f"127.0.0.1:{port}"]
        with lifeline(port, 0, 1):
            with pytest.raises(DistributedError, match="another secret"):
                lifeline(port, 0, 1, secret="", what=_coordination_service.SERVICE)
            with lifeline(port, 0, 1, what=_coordination_service.SERVICE) as sock:
                sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                sock.settimeout(30)
                assert sock.recv(1)  # gRPC's settings


def test_a_code_that_was_overheard_does_not_open_again():
    port, words = free_port(), []
    with serving(port, 2) as service, ExitStack() as stack:
        assert said(service) == "ready"
        send = socket.socket.sendall

        class Overheard(socket.socket):
            def sendall(self, data, *more):
                words.append(bytes(data))
                return send(self, data, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "socket", Overheard)
            stack.enter_context(lifeline(port, 0, 2))
        again = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        again.sendall(words[0])
        assert again.recv(_coordination_service.CHALLENGE.size).startswith(
            _coordination_service.MAGIC
        )
        assert (
            _coordination_service.ANSWER.unpack(again.recv(_coordination_service.ANSWER.size))[1]
            == _coordination_service.OTHER_SECRET
        )


def test_a_secret_in_a_file_that_others_can_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("ours\n")
    monkeypatch.delenv("POPDIST_SECRET", raising=False)
    monkeypatch.setenv("POPDIST_SECRET_FILE", str(file))
    file.chmod(0o640)
    with pytest.raises(DistributedError, match="chmod 600"):
        process_info_from_args(2, 0, "a:99")
    file.chmod(0o600)
    info = process_info_from_args(2, 0, "a:99")
    assert info.secret == "ours"
    assert "ours" not in repr(info)


def test_only_the_coordinators_address_is_listened_at():
    assert next(iter(_coordination_service._listen_addresses("127.0.0.1"))) == "127.0.0.1"
    assert next(iter(_coordination_service._listen_addresses("localhost"))) in ("127.0.0.1", "::1")
    assert next(iter(_coordination_service._listen_addresses("10.1.2.3"))) == "10.1.2.3"


def test_a_name_that_is_this_machines_loopback(monkeypatch):
    """A Debian has `127.0.1.1 node01` in its hosts: others come from elsewhere, and gloo must not
    tell them that address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert list(_coordination_service._listen_addresses("node01")) == [""]
    monkeypatch.undo()
    monkeypatch.setattr("popdist._handshake.local_address", lambda host, port: f"reaches {host}")
    assert reachable_address(0, ["127.0.1.1", "10.0.0.2"]) == "reaches 10.0.0.2"
    assert reachable_address(1, ["127.0.1.1", "10.0.0.2"]) == "10.0.0.2"
    assert reachable_address(0, ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
