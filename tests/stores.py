"""Object stores to test with: a folder, the memory of the process, and an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import fsspec
import pytest

from tests.slow import slow


@pytest.fixture(params=["file", "memory", slow("s3")])
def address(request, tmp_path, monkeypatch) -> str:
    """An address under which nothing is yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"bucket-{uuid4().hex[:8]}/runs/mine"
    if request.param == "file":
        return f"file://{tmp_path}/{name}"
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        fsspec.filesystem("s3").mkdir(name.split("/")[0])
    return f"{request.param}://{name}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[None]:
    """A server on this machine, which the environment names."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield
    server.stop()
