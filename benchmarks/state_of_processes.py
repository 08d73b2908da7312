"""How much memory the state of a model takes in each of several processes, on one machine.

    python3 -m benchmarks.state_of_processes --processes 1 2 4

A GPT-J is trained for a step on four virtual devices (data parallel, sharded state), once with 4
layers and once with 8, of 12.6 M parameters each. Prints a row for each number of processes, the
mean over the processes:

- of the deeper model, the bytes of remote buffers that the plan gives a process, those of the
  arrays that it holds after the step, and their ratio;
- for one more layer, the bytes that the plan adds, what the process's resident memory grows by, and
  their ratio. The difference leaves out what does not depend on the depth, such as compiled code.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.launch import in_processes
from terminal.entry_point import entry_point
from terminal.parser import Parser, count_option

if TYPE_CHECKING:
    from config.sections import RunConfig

REPLICAS = 4
DEPTHS = 4, 8


@entry_point(alone=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, one number of processes after the other."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=count_option, nargs="+", default=[1, 2, 4])
    counts = parser.parse_args(arguments).processes
    print("           remote buffers, MB each      one more layer, MB each")
    print("processes  planned    held   ratio   planned  resident   ratio", flush=True)
    for count in counts:
        less, more = (
            in_processes(count, "benchmarks.state_of_processes", "--be-one", str(depth))
            for depth in DEPTHS
        )
        layers = DEPTHS[1] - DEPTHS[0]
        planned, resident = ((more[what] - less[what]) / layers for what in ("planned", "resident"))
        print(
            f"{count:9} {more['planned'] / 1e6:8.1f} {more['held'] / 1e6:7.1f} "
            f"{more['held'] / more['planned']:7.3f} {planned / 1e6:9.1f} {resident / 1e6:9.1f} "
            f"{resident / planned:7.3f}",
            flush=True,
        )


def be_one(depth: int) -> None:
    """Be one of the processes; the first one prints what was planned and measured."""
    import numpy as np

    import popdist

    popdist.init()
    from data.loader import Loader
    from modelling.spec import family_of
    from popxl.plan import plan_of
    from sessions.training import FineTuning

    config = _config(depth)
    family = family_of(config)
    model = FineTuning(config)
    model.write(family.weight_map(config).init_weights(0))
    with model:
        batch = Loader.of(
            config, family.sample_format.generated(config, REPLICAS, None)
        ).next_batch()
        model.run([batch], [1e-3])
        everyones = popdist.gather([model.session.remote_bytes(), _resident()])
    if popdist.getInstanceIndex() == 0:
        held, resident = np.mean(everyones, axis=0)
        planned = plan_of(model.program.ir).remote * REPLICAS / len(everyones)
        print(json.dumps({"planned": planned, "held": held, "resident": resident}))


def _config(depth: int) -> RunConfig:
    from config.families import config_class_of
    from config.presets import merge, preset_data

    data = merge(
        preset_data("finetuning", "gptj_tiny"),
        {
            "model": {"layers": depth, "hidden_size": 1024},
            "training": {"global_batch_size": REPLICAS},
            "execution": {"micro_batch_size": 1, "data_parallel": REPLICAS, "device": "cpu"},
        },
    )
    return config_class_of(data, "gptj_tiny").from_dict(data)


def _resident() -> int:
    """Bytes of memory that this process has, without what its allocator keeps to use again."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(be_one(int(sys.argv[2])) if sys.argv[1:2] == ["--be-one"] else main())
