"""Helpers for unit tests of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import popxl
from popxl import Variable
from popxl.utils import to_numpy
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.streams import host_load, host_store


@dataclass(frozen=True, eq=False)
class TensorInput:
    """Input data that `run_module` passes to a module as a tensor.

    Attributes:
        data: value.
        dtype: of the tensor; default: that of the data, downcast from 64 to 32 bits.
    """

    data: np.ndarray
    dtype: popxl.dtype | None = None


def ops_of_type(ops: Iterable[Any], op_type: str | type) -> int:
    """Count the ops of a type, given by name or class."""
    if isinstance(op_type, str):
        return sum(1 for op in ops if op.name == op_type)
    return sum(1 for op in ops if isinstance(op, op_type))


def run_module(
    module: Module,
    *args: Any,
    weights: Callable[[NamedTensors], Mapping[Variable, np.ndarray]] | None = None,
    **kwargs: Any,
) -> list[np.ndarray]:
    """Build a program that calls `module` once and run it on the CPU; returns outputs.

    Args:
        module: what to run.
        args, kwargs: arguments of its `build`. Each TensorInput becomes a tensor with its data.
        weights: from the module's variables to data for some of them.

    Returns:
        The module's outputs.
    """
    ir = popxl.Ir()
    with ir.main_graph:
        feeds: dict[popxl.HostToDeviceStream, np.ndarray] = {}

        def load(value: Any, name: str) -> Any:
            if not isinstance(value, TensorInput):
                return value
            dtype = value.dtype or popxl.dtype.as_dtype(to_numpy(value.data).dtype)
            data, stream, tensor = host_load(value.data, dtype, name)
            feeds[stream] = data
            return tensor

        tensors = [load(value, f"arg{i}") for i, value in enumerate(args)]
        named = {name: load(value, name) for name, value in kwargs.items()}
        factories, graph = module.create_graph(*tensors, **named)
        variables = factories.init()
        inputs = [t for t in (*tensors, *named.values()) if isinstance(t, popxl.Tensor)]
        streams = [host_store(t) for t in graph.bind(variables).call(*inputs)]
    with popxl.Session(ir, "cpu") as session:
        if weights is not None:
            session.write_variables_data(dict(weights(variables)))
        outputs = session.run(feeds)
    return [outputs[stream] for stream in streams]
