"""Phases of fine-tuning programs: a layer's graphs, variables and passes.

A step's micro-batches go through a layer one after the other, with its weights loaded once. The
backward graph computes the layer again. It is bound to weights and accumulators and called with the
row alone: what else it needs, such as the seed of each micro-batch, the forward graph has stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.remote import load_remote_graph, named_variable_buffers, store_remote_graph
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serialise,
    batch_serialise_fwd_and_grad,
)

SEED = popxl.TensorSpec((2,), popxl.uint32)


def fixed_row(row: int) -> Callable[[popxl.Tensor], popxl.Tensor]:
    """Returns the handle offset of a constant row."""
    return lambda _: popxl.constant(row, popxl.int32)


@dataclass(frozen=True)
class Port:
    """Buffers of a layer's input and of its gradient, or of an output and its gradient."""

    spec: popxl.TensorSpec
    value: RemoteHandle | popxl.HostToDeviceStream
    grad: RemoteHandle | None = None


class Boundary:
    """Buffers of the activations between layers, a row per boundary, and of their gradients."""

    def __init__(self, spec: popxl.TensorSpec, steps: int, rows: int):
        self.spec = spec
        self.x, self.dx = (popxl.remote_buffer(spec.shape, spec.dtype, steps * rows) for _ in "xd")

    def at(self, row: int) -> Port:
        return Port(self.spec, RemoteHandle(self.x, row), RemoteHandle(self.dx, row))


class Phase:
    """A layer.

    Args:
        inputs: of the layer; then `build` takes a seed, if it is `random`, and what is `passed` to
            each call: a table that layers share.
        owner: the phase whose variables it uses; default: its own.
    """

    def __init__(self, name: str, module: addons.Module, inputs: Sequence[Port], output: Port,
                 steps: int, rows: int = 1, random: bool = False,
                 passed: Iterable[popxl.TensorSpec] = (), owner: Phase | None = None):  # fmt: skip
        seeds, tables = [SEED] if random else [], list(passed)
        specs = [*(port.spec for port in inputs), *seeds, *tables]
        self.facts, graph = module.create_graph(*specs)
        tensors = graph.graph.inputs[: len(specs)]
        ports = dict(zip(tensors, inputs, strict=False))
        (y,) = graph.graph.outputs
        grad = self.accumulate(graph, ports, tensors[len(inputs) + len(seeds) :])
        grad = addons.recompute_graph(grad)
        returned = (port.grad for port in inputs if port.grad is not None)
        fwd, bwd = batch_serialise_fwd_and_grad(
            graph, grad, graph.args, steps,
            load_handles={**{t: p.value for t, p in ports.items()},
                          grad.graph.inputs[0]: output.grad},
            store_streams={},
            store_buffers={y: output.value, **dict(zip(grad.graph.outputs, returned, strict=True))},
            seed_input=tensors[len(inputs)] if random else None, rows=rows,
        )  # fmt: skip
        self.fwd, self.bwd = fwd.graph, bwd.graph
        self.own(name, rows, owner)

    def accumulate(self, graph, ports, tables=()) -> addons.GraphWithNamedArgs:
        wanted = [t for t, port in ports.items() if port.grad is not None]
        self.grad_facts, grad = addons.autodiff_with_accumulation(
            graph, [*graph.args.tensors, *tables], grads_required=wanted
        )
        return grad

    def own(self, name: str, rows: int, owner: Phase | None = None) -> None:
        if owner is not None:
            self.load, self.names, self.store = owner.load, owner.names, owner.store
            return
        buffers = named_variable_buffers(self.facts, rows, shard_over_dict=False)
        self.variables = [self.facts.init_remote(buffers, i, f"{name}.{i}") for i in range(rows)]
        self.load, self.names = load_remote_graph(buffers, rows)
        self.store = store_remote_graph(buffers, rows)

    def weights(self, row: int) -> NamedTensors:
        return NamedTensors.pack(self.names, self.load.call(row))

    def forward(self, row: int, *passed: popxl.Tensor) -> None:
        self.fwd.bind(self.weights(row)).call(row, *passed)

    def backward(self, row: int) -> NamedTensors:
        """Mean gradients over the micro-batches, in the type of the weights."""
        values, accumulators = self.weights(row), self.grad_facts.init_zero()
        values.update(accumulators)
        self.bwd.bind(values).call(row)
        return accumulators.accum

    def update(self, row: int, grads: NamedTensors, lr: float) -> None:
        weights = self.weights(row)
        for name, weight in weights.to_dict().items():
            ops.scaled_add_(weight, grads.get(name), b=-lr)
        self.store.bind(weights).call(row)


class LossPhase(Phase):
    """A layer whose output is the loss; runs forward and backward at once."""

    def __init__(self, name: str, module: addons.Module, inputs: Sequence[Port],
                 loss: popxl.DeviceToHostStream, steps: int):  # fmt: skip
        self.facts, fwd = module.create_graph(*(port.spec for port in inputs))
        grad = self.accumulate(fwd, dict(zip(fwd.graph.inputs, inputs, strict=False)))
        args = NamedTensors()

        def build(*tensors: popxl.Tensor) -> list[popxl.Tensor]:
            for source in (fwd.args, grad.args):
                for key, t in source.to_dict().items():
                    made = popxl.graph_input(t.shape, t.dtype, by_ref=source is grad.args)
                    args.insert(key, made, overwrite=True)
            info = fwd.bind(args).call_with_info(*tensors)
            values = grad.grad_graph_info.inputs_dict(info)
            return [info.outputs[0], *grad.bind(args).call(popxl.constant(1.0), args=values)]

        graph = popxl.gir().create_graph(build, *(port.spec for port in inputs))
        loads = {t: p.value for t, p in zip(graph.inputs, inputs, strict=False)}
        returned = (port.grad for port in inputs if port.grad is not None)
        self.bwd = batch_serialise(
            addons.GraphWithNamedArgs(graph, args), steps, loads, {graph.outputs[0]: loss},
            dict(zip(graph.outputs[1:], returned, strict=True)),
        ).graph  # fmt: skip
        self.own(name, 1)


def apply_dropout(x: popxl.Tensor, seed: popxl.Tensor, p: float) -> popxl.Tensor:
    return ops.dropout(x, seed, p=p) if p else x


def dropout_masks(seed: popxl.Tensor, count: int, spec: popxl.TensorSpec, p: float,
          steps: int) -> list[popxl.DeviceToHostStream]:  # fmt: skip
    """Returns the masks of a layer's `count` dropouts for each micro-batch."""

    def build(seed: popxl.Tensor) -> list[popxl.Tensor]:
        ones = ops.init(spec.shape, spec.dtype) + 1.0
        return [apply_dropout(ones, s, p) for s in ops.split_random_seed(seed, count)]

    graph = popxl.gir().create_graph(build, SEED)
    streams = [popxl.d2h_stream(spec.shape, spec.dtype) for _ in range(count)]
    batch_serialise(
        addons.GraphWithNamedArgs(graph), steps, {}, dict(zip(graph.outputs, streams, strict=True)),
        {}, seed_input=graph.inputs[0],
    ).graph.call(0, seed)  # fmt: skip
    return streams
