"""Runs chat templates, programs of strangers, for a process that sends each as a line of JSON.

What takes too long is ended by the kernel, whatever it is at: no Python has to run for that. A
script of its own, which starts without the packages around it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_PROCESS_SIZE = Path("/proc/self/statm")


def render_request(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the text and blocks that a template gives, or what it raised."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, blocks = render_jinja_template(**request)
    except TemplateSyntaxError as error:
        return {"syntax": [error.message or "", error.lineno]}
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # a template may raise anything
        return {"raised": str(error).strip().partition("\n")[0] or type(error).__name__}
    return {"text": texts[0], "blocks": blocks[0] if blocks else []}


def limit_memory(more: int) -> None:
    """Let this process grow by so many bytes, where its size is known."""
    if _PROCESS_SIZE.exists():
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = int(_PROCESS_SIZE.read_text().split()[0]) * resource.getpagesize() + more
        if hard == resource.RLIM_INFINITY or size < hard:
            resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def main() -> None:
    """Answer each line; a line's time is that of its computing, by whose end the process ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    render_request(
        {"conversations": [[]], "chat_template": ""}
    )  # imports take seconds, which do not count
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_memory(request.pop("memory"))
        signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
        reply = json.dumps(render_request(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
