"""Work on damaged input, each piece in a process of its own, forked from one that is warm.

A fork has everything imported and costs milliseconds, so that thousands of cases take a minute; it
cannot spoil the next case, and its time and memory are its own. Run as a program this file is the
process that forks; `Forks` is the side of the tests.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.children import PYTHON_PATH

ROOT = Path(__file__).parents[2]
MAX_SECONDS, MAX_BYTES = 20, 4 * 2**30


@dataclass(frozen=True)
class Outcome:
    """How a piece of work ended.

    Attributes:
        code: exit code; negative: the signal that killed it.
        text: what it wrote to stdout and stderr.
        seconds: of the processor.
        megabytes: of memory above what it had when it was forked.
    """

    code: int
    text: str
    seconds: float
    megabytes: float


class Forks:
    """The process that forks, as a context; `run` gives it a piece of work."""

    def __init__(self, folder: Path) -> None:
        """Args: `folder`: where relative paths lead."""
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        )

    def run(self, work: str, **arguments: Any) -> Outcome:
        """Do the `work` of that name, see `WORKS`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"work": work, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()  # closes its input, at whose end it ends


def serve(works: Mapping[str, Callable[..., int | None]]) -> None:
    """Fork for each line of stdin, and answer with how that ended."""
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory it looks at
    with tempfile.TemporaryFile() as output:
        for line in sys.stdin:
            request = json.loads(line)
            output.seek(0)
            output.truncate()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writer, str(_most_resident()).encode())
                _child(works[request["work"]], request["arguments"], output.fileno())
            os.close(writer)
            before = int(os.read(reader, 20))
            os.close(reader)
            _, status, used = os.wait4(child, 0)
            output.seek(0)
            outcome = {
                "code": os.waitstatus_to_exitcode(status),
                "text": output.read().decode(errors="replace"),
                "seconds": used.ru_utime + used.ru_stime,
                "megabytes": (used.ru_maxrss - before) / 1024,
            }
            print(json.dumps(outcome), flush=True)


def _child(work: Callable[..., int | None], arguments: Mapping[str, Any], output: int) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MAX_BYTES,) * 2)
        signal.alarm(10 * MAX_SECONDS)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = work(**arguments) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _most_resident() -> int:
    """The most memory that this process had so far, in KiB: in a fork, what it starts with."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    from tests.robustness.works import WORKS

    serve(WORKS)
