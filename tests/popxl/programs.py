"""Small programs for the tests of the core: write a main graph, run it, get arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl._analysis.verify import verify_ir

Build = Callable[..., Any]


def f32(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_list(tensors: Any) -> list[Any]:
    """A list of a function's results: none, one, or several."""
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def graph_of(function: Build, *args: Any) -> popxl.Graph:
    """A graph of the current program; `args` are inputs or what describes them."""
    return popxl.gir().create_graph(function, *args)


def run(
    build: Build,
    *inputs: np.ndarray,
    replicas: int = 1,
    transfers: int = 1,
    disk: Path | None = None,
) -> list[np.ndarray]:
    """Outputs of a program whose main graph is `build(*tensors)`.

    Args:
        inputs: (transfers, replicas, *shape) without leading dimensions equal to 1; each becomes
            one host load.
        disk: a folder for entries on disk.

    Returns:
        Arrays of the same form.
    """
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = transfers
    leading = (transfers > 1) + (replicas > 1)
    with ir.main_graph:
        streams = [
            popxl.h2d_stream(x.shape[leading:], popxl.dtype.as_dtype(x.dtype)) for x in inputs
        ]
        outputs = as_list(build(*map(ops.host_load, streams)))
        results = [store(t) for t in outputs]
    verify_ir(ir)
    with popxl.Session(ir, disk=disk) as session:
        found = session.run(dict(zip(streams, inputs, strict=True)))
    return [found[s] for s in results]


def store(t: Any) -> popxl.DeviceToHostStream:
    """A stream of its own for `t`."""
    stream = popxl.d2h_stream(t.shape, t.dtype)
    ops.host_store(stream, t)
    return stream


def run_ir(ir: popxl.Ir, results: Sequence[popxl.DeviceToHostStream] = ()) -> list[np.ndarray]:
    """Outputs of a program without inputs."""
    verify_ir(ir)
    with popxl.Session(ir) as session:
        found = session.run()
    return [found[s] for s in results]


def together(*tasks: Callable[[], None]) -> None:
    """Do things at the same time, each in a thread; raises what one of them raises."""
    start, failed = threading.Barrier(len(tasks)), list[BaseException]()

    def do(task: Callable[[], None]) -> None:
        try:
            start.wait()
            task()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=do, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
