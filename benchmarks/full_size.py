"""Models of real size on one machine, with the state that memory cannot hold on disk.

    python3 -m benchmarks.full_size xl_adamw --folder /scratch/mine --record records.json

Trains a step to warm up and three that are measured, on generated data, and adds a line of JSON to
the record: seconds a step, the part of the machine's matrix rate, bytes to and from disk, and
memory against the plan. It names the command that made it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.finetuning import measure
from benchmarks.finetuning import summary as summary_of
from config.families import config_class_of
from config.presets import load_config, preset_data
from files.writing import write_text
from modelling.shortage import explained
from terminal.entry_point import entry_point

ADAFACTOR = {"name": "adafactor"}
ONE = {"global_batch_size": 1}
RUNS: Mapping[str, tuple[str, float, dict[str, Any]]] = {
    "base_adamw": ("base", 2.5, {"training": {"global_batch_size": 4}}),
    "large_adamw": ("large", 6.0, {"training": {"global_batch_size": 8}}),
    "xl_adamw": ("xl_gpu", 10.0, {"training": ONE}),
    "gptj_6b_adafactor": ("gptj_6B_gpu", 16.0, {"training": ONE | {"optimizer": ADAFACTOR}}),
}
"""By name: a fine-tuning preset, gigabytes of memory, and what is changed in it."""

STEPS = 3


def config_of(name: str, folder: str) -> Any:
    """The configuration of one of `RUNS`, with a micro-batch of 1."""
    preset, memory, changes = RUNS[name]
    execution = {"micro_batch_size": 1, "disk": folder, "host_memory": memory, "device": "cpu"}
    given = {**changes, "execution": execution, "checkpoint": {"load": None}}
    return load_config(config_class_of(preset_data("finetuning", preset), preset), "finetuning",
                       preset, given)  # fmt: skip


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one run, print it, and add it to the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", choices=RUNS, help="which model and optimizer")
    parser.add_argument("--folder", required=True, help="a folder of a local disk, for the state")
    parser.add_argument("--record", type=Path, help="file that the line of JSON is added to")
    given = parser.parse_args(arguments)
    config = config_of(given.run, given.folder)
    with explained(RUNS[given.run][0], config):
        measured = measure(config, STEPS)
    command = f"python3 -m benchmarks.full_size {given.run} --folder DIR"
    facts = {"command": command, "host_memory": config.execution.host_memory, **asdict(measured)}
    facts |= facts.pop("machine")
    print(summary_of(measured))
    print(json.dumps(facts))
    if given.record is not None:
        before = given.record.read_text("utf-8") if given.record.exists() else ""
        write_text("the record", given.record, before + json.dumps(facts) + "\n")


if __name__ == "__main__":
    sys.exit(main())
