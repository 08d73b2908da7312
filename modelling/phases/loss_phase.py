"""The last phase of training: loss and gradient in a single pass over the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import popxl
import popxl_addons as addons
from modelling.phases.buffers import LayerIO
from modelling.phases.phase import Phase
from modelling.phases.settings import PhaseSettings
from modelling.phases.step_inputs import StepInputs
from popxl import ops
from popxl_addons.transforms.batch_serialisation import batch_serialise

_LOSS_SUM = "loss_sum"


class LossPhase(Phase):
    """The phase that computes the loss, with its gradient if it trains.

    `backward` computes the loss and its gradient together, without recomputation. The unscaled
    loss of each micro-batch goes to `loss_stream`. If a loss is not finite, `backward` returns NaN
    as the sum of squares, so the optimizer skips the step even if all gradients are finite.

    Attributes:
        aux_outputs: streams of the module's further outputs, by the names in its `aux_outputs`.

    Args:
        module: module whose `build(<inputs>, seed=None)` returns the loss, a float32 scalar, or
            the loss followed by tensors for the host.
    """

    _num_host_outputs: int  # outputs for the host, which come before the gradients of inputs

    def __init__(
        self,
        name: str,
        module: addons.Module,
        inputs: Mapping[str, LayerIO],
        settings: PhaseSettings,
        shared: Mapping[str, Phase] | None = None,
    ) -> None:
        self.loss_stream = popxl.d2h_stream((), popxl.float32, "loss")
        self._aux_names = getattr(module, "aux_outputs", ())
        self.aux_outputs: dict[str, popxl.DeviceToHostStream] = {}
        super().__init__(name, module, inputs, [], settings, shared=shared)

    def _build_graphs(self, forward: addons.GraphWithNamedArgs) -> None:
        settings, inputs = self._settings, self._inputs
        self._num_host_outputs = len(forward.graph.outputs)
        with_grad = [
            t
            for t, layer_io in zip(forward.graph.inputs, inputs.values(), strict=False)
            if layer_io.grad is not None
        ]
        self._grad_facts, grad = addons.autodiff_with_accumulation(
            forward,
            self._accumulated_inputs(forward),
            forward.graph.outputs[:1],
            grads_required=with_grad,
            mean=False,
            accumulator_dtype=popxl.float32 if settings.accumulates_gradients else None,
            adds=settings.accumulates_gradients,
        )
        self._grad_facts.insert(_LOSS_SUM, addons.VariableFactory(0.0, popxl.float32, by_ref=True))
        both = self._join_loss_and_grad(forward, grad, [p.spec for p in inputs.values()])
        tensors = dict(zip(inputs, both.graph.inputs, strict=False))
        seed = both.graph.inputs[len(inputs)] if settings.seed_spec is not None else None
        count = self._num_host_outputs
        host_outputs, grads = both.graph.outputs[:count], both.graph.outputs[count:]
        input_grads = [layer_io.grad for layer_io in inputs.values() if layer_io.grad is not None]
        serialised = batch_serialise(
            both,
            settings.micro_batches_per_pass,
            load_handles={tensors[n]: layer_io.value for n, layer_io in inputs.items()},
            store_streams=self._output_streams(host_outputs),
            store_buffers=dict(zip(grads, input_grads, strict=True)),
            seed_input=seed,
            io_mode="compute",
            numbered=settings.num_passes > 1,
        )
        self.fwd = self.bwd = serialised.graph

    def _join_loss_and_grad(
        self,
        forward: addons.GraphWithNamedArgs,
        grad: addons.GraphWithNamedArgs,
        specs: list[popxl.TensorSpec],
    ) -> addons.GraphWithNamedArgs:
        """Join the forward and the gradient graph into one graph."""
        scaling = self._settings.config.execution.loss_scaling
        named: dict[str, popxl.Tensor] = {}

        def build(inputs: list[popxl.Tensor], seed: popxl.Tensor | None) -> list[popxl.Tensor]:
            for source in (forward.args, grad.args):
                for name, t in source.to_dict().items():
                    named[name] = popxl.graph_input(
                        t.shape, t.dtype, name, by_ref=source is grad.args
                    )
            args = addons.NamedTensors.from_dict(named)
            total = popxl.graph_input((), popxl.float32, _LOSS_SUM, by_ref=True)
            named[_LOSS_SUM] = total
            seeds = [] if seed is None else [seed]
            info = forward.bind(args).call_with_info(*inputs, *seeds)
            grads = grad.bind(args).call(
                popxl.constant(scaling, popxl.float32),
                args=grad.grad_graph_info.inputs_dict(info),
            )
            host_outputs = info.outputs[: self._num_host_outputs]
            ops.var_updates.accumulate_(total, host_outputs[0])
            return [*host_outputs, *grads]

        graph = popxl.gir().create_graph(build, specs, self._settings.seed_spec)
        return addons.GraphWithNamedArgs(graph, addons.NamedTensors.from_dict(named))

    def _output_streams(
        self, results: Sequence[popxl.Tensor]
    ) -> dict[popxl.Tensor, popxl.DeviceToHostStream]:
        loss, *more = results
        streams = {loss: self.loss_stream}
        for name, t in zip(self._aux_names, more, strict=True):
            self.aux_outputs[name] = streams[t] = popxl.d2h_stream(t.shape, t.dtype, name)
        return streams

    def forward(self, row: popxl.Tensor, step: StepInputs) -> None:
        """Compute the loss without gradient; in training `backward` computes both."""
        if not self._settings.is_training:
            super().forward(row, step)

    def _load_for_backward(self, row: popxl.Tensor, step: StepInputs) -> addons.NamedTensors:
        """Load a layer's variables; run its deferred update first, as no forward pass did."""
        return self._load_full(row, step)

    def _reduce_and_store_gradients(
        self, row: popxl.Tensor, accumulators: addons.NamedTensors
    ) -> popxl.Tensor:
        sum_squares = super()._reduce_and_store_gradients(row, accumulators)
        is_finite = ops.isfinite(accumulators.get(_LOSS_SUM))
        return ops.where(is_finite, sum_squares, popxl.constant(math.nan, popxl.float32))
