"""Errors of the hub are answered by what a person can do. The hub is a local server that answers as
huggingface.co does: status, X-Error-Code and X-Error-Message."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants

from config.errors import UserError
from huggingface.hub import load_split, load_tokenizer
from huggingface.hub_errors import explain_hub_error
from huggingface.pretrained import get_local_folder

NAME = "owner/small"
PAGES = "settings/tokens"
BAD_TOKEN = "Invalid credentials in Authorization header"
GATED = {
    "X-Error-Code": "GatedRepo",
    "X-Error-Message": "Access to model owner/small is restricted",
}


class Hub(BaseHTTPRequestHandler):
    """Knows the model: all may see that it is there; `answer` is what files are answered by."""

    answer: tuple[int, dict[str, str]] = (404, {})
    is_listed = True

    def do_GET(self) -> None:
        listed = self.is_listed and self.path.startswith("/api/") and "/resolve/" not in self.path
        if self.path == "/" or not listed:
            return self.reply(200 if self.path == "/" else self.answer[0], self.answer[1])
        file = {"type": "file", "path": "config.json", "size": 2, "oid": "0" * 40}
        found = [file] if "/tree/" in self.path else {"id": NAME, "sha": "0" * 40, "siblings": []}
        return self.reply(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    do_HEAD = do_GET

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def hub(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address; nothing is cached, and there is no token."""
    monkeypatch.setattr(constants, "ENDPOINT", server)
    template = f"{server}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(datasets.config, name, False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "data")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return server


def answer(
    monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], lists: bool
) -> None:
    monkeypatch.setattr(Hub, "answer", (status, headers))
    monkeypatch.setattr(Hub, "is_listed", lists)


ASKS: dict[str, tuple[Callable[[], object], str]] = {
    "model": (lambda: get_local_folder(NAME, ["config.json"]), ""),
    "tokenizer": (lambda: load_tokenizer(NAME), ""),
    "data set": (lambda: load_split(NAME, None, "train"), "datasets/"),
}


@pytest.mark.parametrize("what", ASKS)
@pytest.mark.parametrize("token", [None, "hf_mine"])
def test_a_gated_repository_is_answered_by_its_license_and_a_token(
    what: str, token: str | None, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token the hub says 401, with that of an account without access 403."""
    ask, kind = ASKS[what]
    answer(monkeypatch, 403 if token else 401, GATED, lists=what != "data set")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as caught:
        ask()
    said = str(caught.value)
    assert f"accept its license at {hub}/{kind}{NAME}" in said
    assert f"{hub}/{PAGES}" in said
    assert ("with that account" in said) == bool(token)
    assert ("`hf auth login` or HF_TOKEN" in said) == (not token)
    assert "check the path" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("status", "headers", "token", "said"),
    [
        (
            401,
            {"X-Error-Message": BAD_TOKEN},
            "hf_old",
            "does not accept your token): make another",
        ),
        (401, {"X-Error-Message": BAD_TOKEN}, "hf_old", "by `hf auth login` or HF_TOKEN"),
        (
            401,
            {"X-Error-Code": "RepoNotFound"},
            None,
            "no such model, or it is private): check the",
        ),
        (401, {}, None, "no such model, or it is private): check the"),
        (
            404,
            {"X-Error-Code": "RepoNotFound"},
            "hf_mine",
            "no such model, or it is private): check",
        ),
        (
            403,
            {"X-Error-Message": "Token has no right"},
            "hf_mine",
            "with your token (Token has no",
        ),
        (429, {}, None, "refuses more requests for now): wait some minutes, or give a token by"),
        (500, {}, None, "answers with status 500): try again later"),
    ],
)
def test_other_refusals(
    status: int,
    headers: dict[str, str],
    token: str | None,
    said: str,
    hub: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer(monkeypatch, status, headers, lists=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as caught:
        get_local_folder(NAME, ["config.json"])
    assert said in str(caught.value)
    assert "check the path" not in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize("what", ASKS)
def test_offline_mode_is_named_with_the_cache(
    what: str, variable: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        ASKS[what][0]()
    assert f"{variable} is set, and the cache {constants.HF_HUB_CACHE} does not have" in str(
        caught.value
    )
    assert f"connect to the network and unset {variable}" in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, 200, {"ETag": "0" * 40, "X-Repo-Commit": "0" * 40}, lists=True)
    (tmp_path / "hub").write_text("a file where the cache should be")
    with pytest.raises(UserError) as caught:
        get_local_folder(NAME, ["config.json"])
    assert f"the cache {tmp_path / 'hub'} cannot be used" in str(caught.value)
    assert "set HF_HOME to a folder that can be written" in str(caught.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_errors_of_the_file_system(number: int) -> None:
    error = RuntimeError("cannot load")
    error.__cause__ = OSError(number, "what it says", "/cache/file")
    assert "cannot be used (what it says)" in explain_hub_error(NAME, error, False).reason


def test_a_folder_of_the_cache_is_answered_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--small"
    (folder / "snapshots" / "0" / "x").mkdir(parents=True)
    with pytest.raises(
        UserError, match="folder of the hub's cache: give the model's name owner/small"
    ):
        get_local_folder(str(folder))
    with pytest.raises(
        UserError, match="folder of the hub's cache: give the model's name owner/small"
    ):
        load_tokenizer(str(folder))


def test_a_path_is_no_name_of_the_hub(hub: str) -> None:
    with pytest.raises(
        UserError, match="no name of a model of the Hugging Face hub: check the path"
    ):
        get_local_folder("a/folder/that/is/gone")


def test_the_headers_are_those_that_the_library_reads() -> None:
    """The names of headers above, in its own source."""
    source = Path(huggingface_hub.utils._http.__file__).read_text()
    for text in ("X-Error-Code", "X-Error-Message", "GatedRepo", "RepoNotFound", BAD_TOKEN):
        assert text in source
