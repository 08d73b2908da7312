"""Running a chat template, a program of strangers: within limits of time and memory.

What takes Python long is interrupted by a signal, and so in the main thread alone; a single power
of large numbers, which no signal interrupts, is refused unseen.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from files.shown import shown_bytes

SECONDS = 10.0
"""Of this process's computing, for a conversation."""
MEMORY = 2**30
"""Bytes that the process may grow by meanwhile."""

_SIZE = Path("/proc/self/statm")


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    asks: bool,
    marks: bool,
    variables: Mapping[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
    """The text of messages, and what its generation blocks mark.

    Args:
        source: the template.
        asks: for an answer, at the end.
        marks: the template has generation blocks.
        variables: what it is given besides.

    Raises:
        ConfigError: it takes too long, or too much memory.
        Exception: the template's own.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if _has_power(source):
        raise ConfigError("the chat template computes powers (**), which may take for ever")
    try:
        with _limited():
            texts, blocks = render_jinja_template(
                conversations=[list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=asks,
                **variables,
            )
    except TimeoutError:
        raise ConfigError(
            f"the chat template takes more than {SECONDS:g} s for a conversation: give another "
            "one with --data.chat_template FILE"
        ) from None
    except MemoryError:
        raise ConfigError(
            f"the chat template takes more than {shown_bytes(MEMORY)} of memory for a "
            "conversation: give another one with --data.chat_template FILE"
        ) from None
    return texts[0], blocks[0] if blocks else []


@cache
def _has_power(source: str) -> bool:
    """Whether a template has the operator; `f(**names)` is none."""
    from jinja2 import Environment

    if "**" not in source:
        return False
    tokens = [token[1:] for token in Environment().lex(source) if token[1] != "whitespace"]
    return any(
        (kind, text) == ("operator", "**") and before not in ("(", ",")
        for (_, before), (kind, text) in pairwise(tokens)
    )


@contextmanager
def _limited() -> Iterator[None]:
    """Raises TimeoutError inside after `SECONDS`, MemoryError beyond `MEMORY`."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGVTALRM, _over)
            stack.callback(signal.signal, signal.SIGVTALRM, before)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1.0)
            stack.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0.0)
        if _SIZE.exists():
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            size = int(_SIZE.read_text().split()[0]) * resource.getpagesize() + MEMORY
            if all(limit == resource.RLIM_INFINITY or size < limit for limit in (soft, hard)):
                resource.setrlimit(resource.RLIMIT_AS, (size, hard))
                stack.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
        yield


def _over(*_: object) -> None:
    raise TimeoutError
