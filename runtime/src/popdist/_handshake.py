"""The way to the other processes: the coordinator's door, and the addresses of this machine."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence

from popdist import _coordination_service
from popdist._process_info import DistributedError, Place

_AGAIN = 0.3  # seconds between attempts
_ATTEMPT = 10.0  # seconds that one may take


def knock(host: str, port: int, place: Place, what: int, seconds: float) -> socket.socket:
    """Connect to the coordinator, for its LIFELINE or SERVICE request (`_coordination_service`).

    Raises:
        DistributedError: nobody opens within so many seconds, or the run there is another.
    """
    end, why = time.monotonic() + seconds, "nobody answers there"
    while time.monotonic() < end:
        try:
            line = socket.create_connection((host, port), timeout=_ATTEMPT)
        except OSError:  # it is not there yet, or its name is not known yet
            time.sleep(_AGAIN)
            continue
        word = _answer(line, place, what)
        if word == _coordination_service.WELCOME:
            line.settimeout(None)
            return line
        line.close()
        # The run before may be ending at this port. Numbers and secrets do not change.
        why = _coordination_service.REASONS.get(word, "what answers there is another program")
        if word in (_coordination_service.OTHER_COUNT, _coordination_service.OTHER_SECRET):
            break
        time.sleep(_AGAIN)
    raise DistributedError(
        f"process {place.index} of {place.count} cannot come in at {host[:100]}:{port}: {why}; "
        "start each with an index of its own and the same coordinator, which no other run has"
    )


def _answer(line: socket.socket, place: Place, what: int) -> int:
    """The door's word; nobody's if it is another program's, or does not know the secret."""
    number = secrets.token_bytes(16)
    try:
        challenge = _read(line, _coordination_service.CHALLENGE.size)
        if challenge[:8] != _coordination_service.MAGIC:
            return -1
        run = _coordination_service.digest_of(place.run)
        hello = _coordination_service.HELLO.pack(
            _coordination_service.MAGIC, run, place.index, place.count, what, number, b""
        )[:-32]
        line.sendall(hello + _coordination_service.code_of(place.secret, challenge, hello))
        magic, word, code = _coordination_service.ANSWER.unpack(
            _read(line, _coordination_service.ANSWER.size)
        )
    except OSError:
        return -1
    if magic != _coordination_service.MAGIC:
        return -1
    known = code == _coordination_service.code_of(place.secret, number, bytes([word]))
    return (
        int(word)
        if word != _coordination_service.WELCOME or known
        else _coordination_service.OTHER_SECRET
    )


def _read(line: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes. Raises ConnectionError if the peer closes first."""
    said = b""
    while len(said) < size:
        more = line.recv(size - len(said))
        if not more:
            raise ConnectionError
        said += more
    return said


def own_address(host: str, port: int) -> str | None:
    """The address of this machine by which it reaches `host`; None if IPv4 does not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def address_among(index: int, addresses: Sequence[str | None]) -> str | None:
    """The address by which the others reach a process, from those by which each reached process 0.

    Process 0's may be 127.0.1.1, which its name is on a Debian; on several hosts that is nobody's.
    """
    mine = addresses[index]
    others = [a for a in addresses if a is not None and not ipaddress.ip_address(a).is_loopback]
    if not others or mine is None or not ipaddress.ip_address(mine).is_loopback:
        return mine
    return own_address(others[0], 9)  # the port does not matter
