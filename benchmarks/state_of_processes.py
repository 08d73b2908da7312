"""How much memory the state of a model takes in each of several processes, on one machine.

    python3 -m benchmarks.state_of_processes --processes 1 2 4

A GPT-J of 108 M parameters is trained for a step on four virtual devices (data parallel, sharded
state). Prints a row for each number of processes: the bytes of remote buffers that the plan gives a
process, what its resident memory grew by from before the weights were there to after the step (the
mean over processes), and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.launch import in_processes
from config.cli import count_option, entry_point

if TYPE_CHECKING:
    from config.sections import RunConfig

REPLICAS = 4


@entry_point(alone=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, one number of processes after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=count_option, nargs="+", default=[1, 2, 4])
    counts = parser.parse_args(arguments).processes
    print("processes  planned, MB each  measured, MB each  ratio", flush=True)
    for count in counts:
        planned, measured = in_processes(count, "benchmarks.state_of_processes", "--be-one")
        row = f"{planned / 1e6:16.0f} {measured / 1e6:18.0f} {measured / planned:6.2f}"
        print(f"{count:9} {row}", flush=True)


def be_one() -> None:
    """Be one of the processes; the first one prints what was planned and measured."""
    import numpy as np

    import popdist

    popdist.init()
    from modelling.finetuning import FineTuning
    from modelling.spec import family_of
    from popxl.plan import plan_of

    config = _config()
    family = family_of(config)
    model = FineTuning(config, family)
    before = _resident()
    model.write(family.weights(config).initial(0))
    with model:
        batch = family.generate(config, REPLICAS, None).take(np.arange(REPLICAS))
        model.run([batch], [1e-3])
        grown = popdist.gather(_resident() - before)
    if popdist.getInstanceIndex() == 0:
        planned = plan_of(model.program.ir).remote * REPLICAS / len(grown)
        print(json.dumps([planned, sum(grown) / len(grown)]))


def _config() -> RunConfig:
    from config.families import config_class_of
    from config.presets import merge, preset_data

    data = merge(
        preset_data("finetuning", "gptj_tiny"),
        {
            "model": {"layers": 8, "hidden_size": 1024},
            "training": {"global_batch_size": REPLICAS},
            "execution": {"micro_batch_size": 1, "data_parallel": REPLICAS, "device": "cpu"},
        },
    )
    return config_class_of(data, "gptj_tiny").from_dict(data)


def _resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(be_one() if sys.argv[1:] == ["--be-one"] else main())
