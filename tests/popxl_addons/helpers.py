"""What several tests of popxl_addons need."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

import popxl
from popxl._analysis.verify import verify_ir


def replicas_run(
    replicas: int,
    build: Callable[..., list[popxl.Tensor]],
    inputs: Mapping[str, np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Run a program on several replicas.

    Args:
        build: gets the inputs as tensors by name, and returns tensors.
        inputs: data, (replicas, *shape) for each.

    Returns:
        The tensors' values, (replicas, *shape) for each; without the first axis for one replica.
    """
    ir = popxl.Ir(replication=replicas)
    feeds, tensors, streams = {}, {}, []
    with ir.main_graph:
        for name, data in (inputs or {}).items():
            stream = popxl.h2d_stream(data.shape[1:], popxl.dtype.as_dtype(data.dtype), name)
            tensors[name] = popxl.ops.host_load(stream)
            feeds[stream] = data if replicas > 1 else data[0]
        for t in build(**tensors):
            streams.append(popxl.d2h_stream(t.shape, t.dtype))
            popxl.ops.host_store(streams[-1], t)
    verify_ir(ir)
    ir._patterns_applied = True
    with popxl.Session(ir, "cpu") as session:
        outputs = session.run(feeds)
    return [outputs[s] for s in streams]


def single_run(build: Callable[[], list[popxl.Tensor]]) -> list[np.ndarray]:
    """Run a program without inputs on one replica."""
    return replicas_run(1, build)
