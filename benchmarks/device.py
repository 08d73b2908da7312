"""What a device does while a model trains in phases: work, transfers, and how far they overlap.

    python3 -m benchmarks.device --config gptj_6B_gpu --runs 3
    python3 -m benchmarks.device --record runs/h100

Trains on generated data with random weights, and prints a line of JSON (see
`benchmarks.device_tasks`). `--record DIR` measures a machine within nine minutes instead:
bandwidths, the matrix rate, and large presets compared with the timeline (see
`benchmarks.device_record`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import device_tasks
from benchmarks.device_record import MINUTES, record, tasks
from files.atomic_writing import check_folder
from terminal.entry_point import entry_point
from terminal.parser import Parser


def _record(arguments: Sequence[str]) -> None:
    parser = Parser(description="Measure a machine within minutes.")
    parser.add_argument("--record", type=Path, required=True, metavar="DIR", help="where it goes")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it")
    parser.add_argument("--train", nargs="*", default=["gptj_6B_gpu", "xl_gpu"], metavar="PRESET")
    parser.add_argument("--fp8", nargs="*", default=["gptj_6B_gpu_fp8"], metavar="PRESET")
    parser.add_argument("--generate", nargs="*", default=["gptj_6B_gpu"], metavar="PRESET")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu", "tpu"])
    given = parser.parse_args(arguments)
    check_folder("the record to", given.record)
    given.record.mkdir(parents=True, exist_ok=True)
    wanted = tasks(given.train, given.fp8, given.generate)
    record(given.record, wanted, ["--device", given.device], given.minutes)
    print((given.record / "record.md").read_text(encoding="utf-8"))


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, or record."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(each.partition("=")[0] == "--record" for each in given):
        _record(given)
    else:
        device_tasks.run(["train", *given])


if __name__ == "__main__":
    sys.exit(main())
