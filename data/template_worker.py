"""Process that renders untrusted chat templates: one JSON request per line.

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
    """Render the messages of a JSON request; returns the text and spans, or the exception."""
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


def limit_memory_growth(max_growth_bytes: int) -> None:
    """Limit how much the memory of this process grows, where its size is known."""
    if _PROCESS_SIZE.exists():
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = int(_PROCESS_SIZE.read_text().split()[0]) * resource.getpagesize() + max_growth_bytes
        if hard == resource.RLIM_INFINITY or size < hard:
            resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def main() -> None:
    """Serve requests from standard input, one JSON object per line.

    The kernel ends the process when a line takes too long.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    render_request(
        {"conversations": [[]], "chat_template": ""}
    )  # imports take seconds, which do not count
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_memory_growth(request.pop("memory"))
        signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
        reply = json.dumps(render_request(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
