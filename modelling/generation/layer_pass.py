"""Streamed generation: run one layer on all micro-batches before the next layer is loaded.

As in training, a layer's weights are loaded from remote buffers once, and all micro-batches run
through it. A micro-batch's state between layers and between positions (activations, KV caches,
state of the search) is in remote buffers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from modelling.phases.buffers import LayerIO
from modelling.phases.settings import PhaseSettings
from popxl import Tensor
from popxl_addons import Module, NamedTensors
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
)

LayerIOs = LayerIO | Sequence[LayerIO]


def _shared_buffer_io(spec: popxl.TensorSpec, settings: PhaseSettings) -> LayerIO:
    """Remote buffers of a layer input with one entry per micro-batch, which all layers share."""
    buffer = popxl.remote_buffer(spec.shape, spec.dtype, settings.num_micro_batches)
    return LayerIO(spec, RemoteHandle(buffer, None))


def _per_layer_buffer_io(t: Tensor, settings: PhaseSettings, num_layers: int) -> LayerIO:
    """Remote buffers of a layer input with an entry per layer and micro-batch, such as a cache."""
    return LayerIO(
        t.spec, RemoteHandle(batch_serial_buffer(t, settings.num_micro_batches, num_layers))
    )


class LayerPass:
    """A graph that runs one layer, given its weights, on all micro-batches.

    Args:
        module: `build` takes the values of `loads`, then the loop invariants.
        loads: where the inputs of each micro-batch are stored; a list is one input, a list.
        loop_invariants: specs of the inputs that are equal for all micro-batches.
        stores: where to store outputs, in order, as far as the specs match. The other outputs get
            buffers of their own.
        rows: number of layers; the new buffers have a row for each.

    Attributes:
        facts: variable factories of the module.
        outputs: where the outputs are stored.
    """

    def __init__(
        self,
        module: Module,
        loads: Sequence[LayerIOs],
        settings: PhaseSettings,
        loop_invariants: Sequence[popxl.TensorSpec] = (),
        stores: Sequence[LayerIO] = (),
        rows: int = 1,
    ) -> None:
        groups = [[load] if isinstance(load, LayerIO) else list(load) for load in loads]
        specs = [
            load.spec if isinstance(load, LayerIO) else [io.spec for io in load] for load in loads
        ]
        facts, graph = module.create_graph(*specs, *loop_invariants)
        self.facts, self.names = facts.inputs, graph.args.keys_flat()
        inner, flat = graph.graph, [io for group in groups for io in group]
        pairs = zip(inner.outputs, stores, strict=False)
        self.outputs = [io for t, io in pairs if t.spec == io.spec]
        self.outputs += [
            _shared_buffer_io(t.spec, settings)
            if rows == 1
            else _per_layer_buffer_io(t, settings, rows)
            for t in inner.outputs[len(self.outputs) :]
        ]
        assert len(set(inner.outputs)) == len(inner.outputs), "an output has one place"
        loaded = zip(inner.inputs, flat, strict=False)
        stored = zip(inner.outputs, self.outputs, strict=True)
        self._serialised = batch_serialise(
            graph,
            settings.num_micro_batches,
            load_handles={t: io.value for t, io in loaded},
            store_streams={},
            store_buffers={t: io.value_handle for t, io in stored},
            rows=rows,
            io_mode="compute",
        ).graph

    def run_layer(self, row: Tensor, weights: NamedTensors, *loop_invariants: Tensor) -> None:
        """Run all micro-batches through the layer of index `row`, with the given weights."""
        self._serialised.bind(weights).call(row, *loop_invariants)
