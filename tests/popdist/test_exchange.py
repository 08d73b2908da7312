"""What processes exchange, seen from two of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import child

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime/src'}"}

PROGRAM = """
import json, time
import numpy as np
import popdist
popdist.init()
import popxl
from popxl import ops
from popxl._run import device_variables

client = popdist._joined._client._client
kept = lambda: len(client.key_value_dir_get("popdist/main"))
before = popdist.traffic()["exchange"]
found = [popdist.gather(i) for i in range(50)]
after = popdist.traffic()["exchange"]
assert found == [[i] * 2 for i in range(50)]
popdist.gather("all have counted")

ir = popxl.Ir(replication="popdist")
with ir.main_graph, popxl.in_sequence():
    common = popxl.variable(np.arange(1000.0, dtype=np.float32), name="common")
    ops.scaled_add_(common, ops.collectives.replicated_all_reduce(common * 2.0, "mean"))
asked = []
ask = device_variables.parts_everywhere
device_variables.parts_everywhere = lambda *args: asked.append(1) or ask(*args)
with popxl.Session(ir, "cpu") as session:
    session.run({})
    value = session.read_variable_data(common)
assert np.array_equal(value, 3 * np.arange(1000.0))

mine = popdist.getInstanceIndex()
popdist.tell(f"step {mine}" if mine else "")  # process 0 tells nothing
others, end = [f"step {i}" if i else "" for i in range(2) if i != mine], time.monotonic() + 60
while list(popdist.others_work().values()) != others:
    assert time.monotonic() < end, popdist.others_work()
    time.sleep(0.1)
assert all("(pid " in who for who in popdist.others_work())
seen = popdist.gather([kept(), after.messages - before.messages, len(asked)])
if popdist.getInstanceIndex() == 0:
    print(json.dumps(seen))
"""


def test_the_service_keeps_two_values_of_a_channel_and_replicas_are_read_here():
    """Each gather left a value of each process in the service; a variable that all processes have
    was asked of all of them."""
    done = subprocess.run(
        [sys.executable, "-m", "popdist.run", "--processes", "2", "--", sys.executable, "-c",
         PROGRAM],
        env=ENV, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Two of each process; nobody was asked for a variable. For each exchange a process stores its
    # value, waits and reads; process 0 also stores all of them, and deletes those before.
    assert json.loads(done.stdout) == [[4, 250, 0], [4, 150, 0]]


def test_processes_meet_at_an_address_of_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("there is no IPv6 here")
    code = (
        "import sys, numpy as np, popdist, popxl\n"
        "from popxl import ops\n"
        f"popdist.init(2, int(sys.argv[1]), '[::1]:{port}')\n"
        "ir = popxl.Ir(replication='popdist')\n"
        "with ir.main_graph, popxl.in_sequence():\n"
        "    x = popxl.variable(np.float32(3))\n"
        "    ops.add_(x, ops.collectives.replicated_all_reduce(x, 'add'))\n"
        "with popxl.Session(ir, 'cpu') as session:\n"
        "    session.run({})\n"
        "    print(float(session.read_variable_data(x)))\n"
    )
    runs = [child([sys.executable, "-c", code, str(i)], env=ENV) for i in range(2)]
    assert [run.communicate(timeout=100) for run in runs] == [("9.0\n", "")] * 2
