"""Train a configured model on generated data and report its speed.

    python3 finetuning.py --config tiny
    python3 finetuning.py --config small --micro_batch_size 8 --runs 10

Starts from random weights. Ends with one JSON line. `TrainingSession` is the session to import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports
from terminal.entry_point import entry_point

if TYPE_CHECKING:
    from sessions.training import TrainingSession as TrainingSession
else:
    lazy_exports(__name__)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the training speed of a configuration, and print it."""
    # Takes seconds: after the entry point, which may restart the process.
    from run.training_throughput import report

    report(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
