"""How a step's time grows with the number of processes, on one machine.

    python3 -m benchmarks.many_processes --processes 1 2 4 8

A toy model, a product and an all-reduce of its gradient, trains for 5 steps on a replica in each
process. Prints a row for each number of processes: seconds from start to end, milliseconds of a
step (the median), the largest resident memory of a process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.launch import in_processes
from terminal.entry_point import entry_point
from terminal.parser import count_option

STEPS, SIZE = 5, 256


@entry_point(alone=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, one number of processes after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=count_option, nargs="+", default=[1, 2, 4, 8])
    counts = parser.parse_args(arguments).processes
    print("processes  start to end, s  a step, ms  MB each")
    for count in counts:
        begin = time.perf_counter()
        found = in_processes(count, "benchmarks.many_processes", "--be-one")
        seconds = time.perf_counter() - begin
        print(f"{count:9} {seconds:16.1f} {found['step'] * 1e3:11.1f} {found['peak'] / 1e6:8.0f}")


def be_one() -> None:
    """Be one of the processes; the first one prints what was measured."""
    import numpy as np

    import popdist
    import popxl
    from popxl import ops

    ir = popxl.Ir(replication="popdist")
    rng = np.random.default_rng(0)
    with ir.main_graph, popxl.in_sequence():
        source = popxl.h2d_stream((SIZE, SIZE), popxl.float32)
        sink = popxl.d2h_stream((), popxl.float32)
        weight = popxl.variable(rng.standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE)
        x = ops.host_load(source)
        error = x @ weight - x
        gradient = ops.collectives.replicated_all_reduce(x.T @ error, "mean")
        ops.scaled_add_(weight, gradient, b=-1e-3)
        ops.host_store(sink, ops.mean(error * error))
    batch = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
    seconds, losses = [], []
    with popxl.Session(ir, "cpu") as session:
        for _ in range(STEPS):
            begin = time.perf_counter()
            losses.append(float(session.run({source: batch})[sink]))
            seconds.append(time.perf_counter() - begin)
    assert losses[-1] < losses[0], losses
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    everyones = popdist.gather([statistics.median(seconds), peak])
    if popdist.getInstanceIndex() == 0:
        step, most = (max(column) for column in zip(*everyones, strict=True))
        print(json.dumps({"step": step, "peak": most}))


if __name__ == "__main__":
    sys.exit(be_one() if sys.argv[1:] == ["--be-one"] else main())
