"""FLAN-T5's training program compiled for TPUs that are not here.

Needs the package libtpu, which holds the compiler: `pip install libtpu==0.0.42.1`. It compiles for
a topology without devices; nothing runs. Each test is a process of its own, since the compiler
reads its settings when it is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from modelling.phases.training import build_training
from modelling.t5.family import FAMILY
from popxl._lower.program import Program
from tests.modelling.t5.test_training import our_config

dp, tp = map(int, sys.argv[1:])
ir = build_training(our_config(dp, tp), FAMILY.layout).ir
devices = np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices)
program = Program(ir, Mesh(devices[: dp * tp], ("r",)))
memory = program.compile().memory_analysis()
names = ("host_argument", "host_alias", "host_temp")
print(json.dumps({n: getattr(memory, f"{n}_size_in_bytes") for n in names}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (2, 2), (2, 4)])
def test_remote_buffers_stay_in_host_memory(dp: int, tp: int) -> None:
    """All state is host memory that is updated in place, and no host copies are made."""
    spec = importlib.util.find_spec("libtpu")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LIBRARY_PATH": str(Path(spec.submodule_search_locations[0], "libtpu.so")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime/src")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(dp), str(tp)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    memory = json.loads(done.stdout.splitlines()[-1])
    assert memory["host_argument"] == memory["host_alias"] > 0
    assert memory["host_temp"] == 0
