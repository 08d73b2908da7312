"""A program with types, as a user of popxl writes it. `test_typing.py` has mypy check it."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.custom import jax_op
from popxl.ops.call import CallSiteInfo
from popxl.transforms import GradGraphInfo, autodiff
from popxl_addons.layers import Linear


@jax_op
def scaled(x: jnp.ndarray, *, by: float = 2.0) -> jnp.ndarray:
    return x * by


class Network(addons.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = Linear(hidden)
        self.second = Linear(classes, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y: popxl.Tensor = ops.gelu(self.first(x))
        logits: popxl.Tensor = self.second(y)
        result: popxl.Tensor = scaled(logits, by=0.5)
        return result


def update(weight: popxl.TensorByRef, grad: popxl.Tensor, lr: popxl.Tensor) -> None:
    ops.scaled_add_(weight, grad, b=-lr)


def program(batch: int) -> tuple[popxl.Ir, popxl.HostToDeviceStream, popxl.DeviceToHostStream]:
    ir = popxl.Ir(replication=1)
    ir.num_host_transfers = 1
    with ir.main_graph, popxl.in_sequence(True):
        stream = popxl.h2d_stream((batch, 8), popxl.float32, name="x")
        x: popxl.Tensor = ops.host_load(stream, "x")
        factories, graph = Network(16, 4).create_graph(x)
        weights: addons.NamedTensors = factories.init()
        info: CallSiteInfo = graph.bind(weights).call_with_info(x)
        (logits,) = info.outputs
        half: popxl.Tensor = (logits.T @ x)[0:2].reshape((-1,)) / 2.0
        result: popxl.DeviceToHostStream = popxl.d2h_stream(half.shape, half.dtype)
        ops.host_store(result, half)
    return ir, stream, result


def gradient(graph: popxl.Graph) -> GradGraphInfo:
    info = autodiff(graph, grads_required=graph.inputs[:1])
    assert isinstance(info, GradGraphInfo)
    return info


def run(ir: popxl.Ir, data: Mapping[popxl.HostToDeviceStream, np.ndarray]) -> list[np.ndarray]:
    with popxl.Session(ir, "cpu") as session:
        outputs = session.run(dict(data))
    variables: tuple[popxl.Variable, ...] = ir.main_graph.variables
    host = session.get_tensors_data(variables)
    return [*outputs.values(), *(host[v] for v in variables)]


if __name__ == "__main__":
    made, source, sink = program(2)
    arrays = run(made, {source: np.zeros((2, 8), np.float32)})
    print(sink.shape, [a.shape for a in arrays])
