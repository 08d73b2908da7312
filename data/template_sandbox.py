"""Sandbox for untrusted chat templates: a process with limits on time and memory.

The process serves all conversations of this one. It is killed where a template takes too long, and
another begins; a single power of large numbers is refused unseen.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from files.formatting import format_bytes

MAX_SECONDS = 10.0
"""CPU seconds for a conversation."""
MAX_MEMORY = 2**30
"""Bytes by which the process can grow."""

_SCRIPT = Path(__file__).with_name("template_worker.py")


class TemplateRuntimeError(Exception):
    """Raised when a chat template raises an exception."""


def render_in_sandbox(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    has_generation_blocks: bool,
    variables: Mapping[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
    """Render messages in the sandbox; returns the text and its spans from generation blocks.

    Args:
        source: the template.
        add_generation_prompt: for an answer, at the end.
        has_generation_blocks: the template has generation blocks.
        variables: what it is given besides.

    Raises:
        ConfigError: it takes too long, or too much memory.
        TemplateSyntaxError: it is none.
        TemplateRuntimeError: it raised something else.
    """
    from jinja2 import TemplateSyntaxError

    if _has_power_operator(source):
        raise ConfigError("the chat template computes powers (**), which may take for ever")
    reply = _get_worker(os.getpid()).send_request(
        {
            "conversations": [list(messages)],
            "tools": None if tools is None else list(tools),
            "chat_template": source,
            "return_assistant_tokens_mask": has_generation_blocks,
            "add_generation_prompt": add_generation_prompt,
            "seconds": MAX_SECONDS,
            "memory": MAX_MEMORY,
            **variables,
        }
    )
    if "syntax" in reply:
        raise TemplateSyntaxError(*reply["syntax"])
    if "raised" in reply:
        raise TemplateRuntimeError(reply["raised"])
    if "memory" in reply:
        raise _exceeded_limit_error(f"{format_bytes(MAX_MEMORY)} of memory")
    return reply["text"], [(start, end) for start, end in reply["blocks"]]


@cache
def _has_power_operator(source: str) -> bool:
    """True if a Jinja source has the power operator `**`; `f(**names)` does not count."""
    from jinja2 import Environment

    if "**" not in source:
        return False
    tokens = [token[1:] for token in Environment().lex(source) if token[1] != "whitespace"]
    return any(
        (token_type, text) == ("operator", "**") and previous not in ("(", ",")
        for (_, previous), (token_type, text) in pairwise(tokens)
    )


def _exceeded_limit_error(resource: str) -> ConfigError:
    return ConfigError(
        f"the chat template takes more than {resource} for a conversation: give another one with "
        "--data.chat_template FILE"
    )


class _TemplateWorker:
    """Sandboxed process that renders untrusted chat templates; started on first use.

    Threads take turns. It ends when this process does, however that ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._kill_process, os.getpid())

    def send_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON request to the process; returns its reply.

        See `data.template_worker`.
        """
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            process = self._process = self._process or _start_worker_process()
            try:
                reply = _exchange_line(process, line)
                parsed: dict[str, Any] = json.loads(reply)
                return parsed
            except ValueError:  # no line: it has ended
                code = process.wait()
                self._kill_process(os.getpid())
                if code == -signal.SIGPROF:
                    raise _exceeded_limit_error(f"{MAX_SECONDS:g} s") from None
                raise ConfigError(
                    f"the chat template ended the process that reads it (exit code {code}): give "
                    "another one with --data.chat_template FILE"
                ) from None
            except BaseException:  # interrupted: its answer is to nobody
                self._kill_process(os.getpid())
                raise

    def _kill_process(self, owner_pid: int) -> None:
        """Kill the process if this process started it; a fork of this process must not."""
        if self._process is not None and owner_pid == os.getpid():
            process, self._process = self._process, None
            process.kill()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # closing writes what is left of a request
                process.stdin.close()
            with process:
                pass


@cache
def _get_worker(owner_pid: int) -> _TemplateWorker:
    """Return the template worker of this process id; a forked process starts another one."""
    return _TemplateWorker()


def _start_worker_process() -> subprocess.Popen[bytes]:
    """Start the worker process in a new session, discarding the output of libraries."""
    return subprocess.Popen(
        [sys.executable, "-P", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _exchange_line(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a line to a process and read its reply, which is incomplete if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()
