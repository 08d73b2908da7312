"""A PopXL program of four replicas for any number of processes; run by test_processes.

    python program.py FOLDER

Process 0 writes what all of them saw to FOLDER/PROCESSES.npz. It asks popdist for nothing but what
programs ask: replicas are those of popdist, streams take and give what this process has.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import popdist
import popxl
from popxl import ops

RUNS, TRANSFERS, SIZE = 2, 2, 6


def build():
    """The Ir, its input and output, and its variables by name."""
    ir = popxl.Ir(replication="popdist")
    ir.num_host_transfers = TRANSFERS
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(np.float32)  # sums are exact in any order

    pairs, strided = ir.replica_grouping(group_size=2), ir.replica_grouping(stride=2)
    with ir.main_graph, popxl.in_sequence():
        source = popxl.h2d_stream((SIZE,), popxl.float32)
        sink = popxl.d2h_stream((SIZE,), popxl.float32)
        buffer = popxl.remote_buffer((SIZE,), popxl.float32, 3)
        found = {
            "common": popxl.variable(values(SIZE), name="common"),
            "of_pairs": popxl.variable(values(2, SIZE), name="p", replica_grouping=pairs),
            "of_all": popxl.variable(
                values(4, SIZE), name="a", replica_grouping=ir.replica_grouping(group_size=1),
                retrieval_mode="all_replicas",
            ),
            "remote": popxl.remote_variable(values(2, SIZE), buffer, 1, replica_grouping=strided),
        }  # fmt: skip
        found["sharded"], shards = popxl.replica_sharded_variable(values(8), name="s")
        for _ in range(TRANSFERS):
            x = ops.host_load(source) * found["of_pairs"]
            x = ops.collectives.replicated_all_reduce(x, "add", strided)
            entry = ops.remote_load(buffer, 1)
            ops.remote_store(buffer, 1, entry + x)
            whole = ops.collectives.replicated_all_gather(shards)
            ops.host_store(sink, x + entry + found["common"] + ops.reshape(whole, (-1,))[:SIZE])
        ops.scaled_add_(found["common"], ops.collectives.replicated_all_reduce(x, "add"))
        ops.scaled_add_(found["of_all"], x)
    return ir, source, sink, found


def main(folder: str) -> None:
    """Run it, and compare what the processes read."""
    ir, source, sink, variables = build()
    own, index = ir.instance_replication_factor, popdist.getInstanceIndex()
    rng = np.random.default_rng(1)
    data = rng.integers(-4, 5, (RUNS, TRANSFERS, 4, SIZE)).astype(np.float32)
    given = data[:, :, index * own : (index + 1) * own]
    with popxl.Session(ir, "cpu") as session:
        if own == 1:
            given = given[:, :, 0]  # dimensions equal to 1 are left out
        outputs = [session.run({source: batch})[sink] for batch in given]
        assert session.create_host_outputs()[sink].shape == outputs[0].shape
        read = {name: session.read_variable_data(v) for name, v in variables.items()}
        session.write_variable_data(variables["of_pairs"], read["of_pairs"] + 1)
        read["written"] = session.get_tensor_data(variables["of_pairs"])
        outputs.append(session.run({source: given[0]})[sink])
    seen = popdist.all_gather_object({name: value.tolist() for name, value in read.items()})
    assert all(one == seen[0] for one in seen)
    shape = (len(outputs), TRANSFERS, own, SIZE)
    parts = popdist.all_gather_object(np.stack(outputs).reshape(shape).tolist())
    if index == 0:
        whole = np.concatenate([np.asarray(p, np.float32) for p in parts], axis=2)
        np.savez(Path(folder) / f"{popdist.getNumInstances()}.npz", outputs=whole, **read)


if __name__ == "__main__":
    main(sys.argv[1])
