"""Authentication with the coordinator, and the network address of this process."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence

from popdist import _coordination_service
from popdist._process_info import DistributedError, ProcessInfo

_RETRY_INTERVAL = 0.3  # seconds between attempts
_CONNECT_TIMEOUT = 10.0  # seconds that one may take


def connect_to_coordinator(
    host: str, port: int, info: ProcessInfo, request: int, timeout: float
) -> socket.socket:
    """Connects to the coordinator: LIFELINE shows that this process lives, SERVICE relays to JAX's.

    Raises:
        DistributedError: the coordinator does not answer in time, or belongs to another run.
    """
    end, reason = time.monotonic() + timeout, "nobody answers there"
    while time.monotonic() < end:
        try:
            sock = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
        except OSError:  # it is not there yet, or its name is not known yet
            time.sleep(_RETRY_INTERVAL)
            continue
        status = _authenticate(sock, info, request)
        if status == _coordination_service.WELCOME:
            sock.settimeout(None)
            return sock
        sock.close()
        # The run before may be ending at this port. Numbers and secrets do not change.
        reason = _coordination_service.REASONS.get(status, "what answers there is another program")
        if status in (_coordination_service.OTHER_COUNT, _coordination_service.OTHER_SECRET):
            break
        time.sleep(_RETRY_INTERVAL)
    raise DistributedError(
        f"process {info.index} of {info.count} cannot come in at {host[:100]}:{port}: {reason}; "
        "start each with an index of its own and the same coordinator, which no other run has"
    )


def _authenticate(sock: socket.socket, info: ProcessInfo, request: int) -> int:
    """Authenticates at the coordinator and returns its answer; -1 if no coordinator answers."""
    number = secrets.token_bytes(16)
    try:
        challenge = _receive_exactly(sock, _coordination_service.CHALLENGE.size)
        if challenge[:8] != _coordination_service.MAGIC:
            return -1
        run = _coordination_service.hash_run_name(info.run)
        hello = _coordination_service.HELLO.pack(
            _coordination_service.MAGIC, run, info.index, info.count, request, number, b""
        )[:-32]
        sock.sendall(hello + _coordination_service.auth_code(info.secret, challenge, hello))
        magic, status, code = _coordination_service.ANSWER.unpack(
            _receive_exactly(sock, _coordination_service.ANSWER.size)
        )
    except OSError:
        return -1
    if magic != _coordination_service.MAGIC:
        return -1
    is_authentic = code == _coordination_service.auth_code(info.secret, number, bytes([status]))
    return (
        int(status)
        if status != _coordination_service.WELCOME or is_authentic
        else _coordination_service.OTHER_SECRET
    )


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Receives exactly `size` bytes; raises ConnectionError if the peer closes first."""
    received = b""
    while len(received) < size:
        chunk = sock.recv(size - len(received))
        if not chunk:
            raise ConnectionError
        received += chunk
    return received


def local_address(host: str, port: int) -> str | None:
    """Returns the local IPv4 address from which `host` is reached; None without an IPv4 route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def reachable_address(index: int, addresses: Sequence[str | None]) -> str | None:
    """Returns the address by which the other processes reach process `index`.

    Process 0's may be 127.0.1.1, which its name is on a Debian; on several hosts that is nobody's.
    """
    own_address = addresses[index]
    others = [a for a in addresses if a is not None and not ipaddress.ip_address(a).is_loopback]
    if not others or own_address is None or not ipaddress.ip_address(own_address).is_loopback:
        return own_address
    return local_address(others[0], 9)  # the port does not matter
