"""Generate with a configured model from generated prompts and report its speed.

    python3 inference.py --config tiny
    python3 inference.py --config small --micro_batch_size 8 --runs 10

Starts from random weights. All prompts have the full length, and random weights hardly ever end a
sequence early: it is the slowest case. Ends with one JSON line. `GenerationSession` is the session
to import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports
from terminal.entry_point import entry_point

if TYPE_CHECKING:
    from sessions.generation import GenerationSession as GenerationSession
else:
    lazy_exports(__name__)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the generation speed of a configuration, and print it."""
    # Takes seconds: after the entry point, which may restart the process.
    from run.generation_throughput import report

    report(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
