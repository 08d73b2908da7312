"""Host collectives of two processes."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from tests.children import PYTHON_PATH, child, free_port

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": PYTHON_PATH}

PROGRAM = """
import json, sys, time
import numpy as np
import popdist
popdist.init(2, int(sys.argv[1]), sys.argv[2])
import popxl
from popxl import ops
from popxl._run import process_gather

client = popdist._joined._client._client
kept = lambda: len(client.key_value_dir_get("popdist/main"))
before = popdist.rpc_stats()["exchange"]
found = [popdist.all_gather_object(i) for i in range(50)]
after = popdist.rpc_stats()["exchange"]
assert found == [[i] * 2 for i in range(50)]
popdist.all_gather_object("all have counted")

ir = popxl.Ir(replication="popdist")
with ir.main_graph, popxl.in_sequence():
    common = popxl.variable(np.arange(1000.0, dtype=np.float32), name="common")
    ops.scaled_add_(common, ops.collectives.replicated_all_reduce(common * 2.0, "mean"))
asked = []
ask = process_gather.gather_shards
process_gather.gather_shards = lambda *args: asked.append(1) or ask(*args)
with popxl.Session(ir, "cpu") as session:
    session.run({})
    value = session.read_variable_data(common)
assert np.array_equal(value, 3 * np.arange(1000.0))

mine = popdist.getInstanceIndex()
popdist.set_status(f"step {mine}" if mine else "")  # process 0 tells nothing
others, end = [f"step {i}" if i else "" for i in range(2) if i != mine], time.monotonic() + 60
while list(popdist.peer_status().values()) != others:
    assert time.monotonic() < end, popdist.peer_status()
    time.sleep(0.1)
assert all("(pid " in who for who in popdist.peer_status())
seen = popdist.all_gather_object([kept(), after.messages - before.messages, len(asked)])
if popdist.getInstanceIndex() == 0:
    print(json.dumps(seen))
"""


def address() -> str:
    """A free one of this host: of IPv6, where there is that."""
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        return f"[::1]:{probe.getsockname()[1]}"
    return f"127.0.0.1:{free_port()}"


def test_the_service_keeps_two_values_of_a_channel_and_replicas_are_read_here():
    """Each gather left a value of each process in the service; a variable that all processes have
    was asked of all of them."""
    meeting = address()
    runs = [
        child([sys.executable, "-c", PROGRAM, str(index), meeting], env=ENV) for index in range(2)
    ]
    (first, errors), others = (run.communicate(timeout=200) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], (errors, others)
    # Two of each process; nobody was asked for a variable. For each exchange a process stores its
    # value, waits and reads; process 0 also stores all of them, and deletes those before.
    assert json.loads(first) == [[4, 250, 0], [4, 150, 0]]
