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
from modelling.phases.training import build_training_program
from modelling.t5.model import FAMILY
from popxl._run.program import Program
from popxl._schedule.segment import donated_argnums
from tests.modelling.t5.training import our_config

NAMES = ("alias", "host_argument", "host_output", "host_temp")
dp, tp = map(int, sys.argv[1:])
ir = build_training_program(our_config(dp, tp), FAMILY.build_phases).ir
devices = np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices)
program = Program(ir, Mesh(devices[: dp * tp], ("r",)))
program.compile()
for segment in {e: s for s, e in program.executables.items()}.values():
    memory = program.executables[segment].memory_analysis()
    sizes = {n: getattr(memory, f"{n}_size_in_bytes") for n in NAMES}
    given = [program.specs_of(segment)[0][i] for i in donated_argnums(segment)]
    own = [np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in given]
    print(json.dumps({"name": segment.name, "given": int(sum(own)), **sizes}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (2, 2), (2, 4)])
def test_segments_update_in_place_and_leave_the_host_to_the_schedule(dp: int, tp: int) -> None:
    """Donated arguments, padded to the tiles of a TPU, become results; no segment touches memory
    of the host, where the remote buffers are."""
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
    segments = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(segments) > 10
    for segment in segments:
        assert segment["alias"] >= segment["given"], segment
        assert not any(size for name, size in segment.items() if name.startswith("host_")), segment
