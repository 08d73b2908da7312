"""The phases at the end of a model whose loss is a function of the whole global batch.

All micro-batches go forward to a vector for each sequence; then the loss and its gradient with
regard to the vectors are computed once; then all micro-batches go backward. So nothing is computed
twice, and the loss does not depend on the micro-batches and replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import popxl
from modelling.layers.batch_loss import BatchLoss
from modelling.layers.head_loss import LOSS_STATS
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.layers.output_layer import PooledHeadLoss
from modelling.objectives import LOSS_WEIGHT
from modelling.phases.buffers import InputBuffers, LayerIO, fixed_row_handle
from modelling.phases.phase import Phase
from modelling.phases.settings import PhaseSettings
from popxl import Tensor, ops


class SequenceVectorLayer(LayerWrapper):
    """Wraps an output layer without a head, so that it returns the vectors of sequences."""

    layer: PooledHeadLoss

    def build(self, x: Tensor, seed: Tensor | None = None, **token_inputs: Tensor) -> Tensor:
        """Returns the objective's statistics, float32 (sequences, hidden).

        Args:
            x: the last layer's output, (batch, length, hidden).
            seed: uint32 (2,) for dropout.
            token_inputs: `Objective.token_inputs` by name.
        """
        return self.layer.loss_stats(self.layer.features(x, seed), token_inputs)


class VectorPhase(Phase):
    """The phase that computes the vectors of sequences; in evaluation the host gets them, too.

    Attributes:
        vector_stream: stream of the vectors of each micro-batch; None in training.
    """

    vector_stream: popxl.DeviceToHostStream | None = None

    def _output_streams(
        self, results: Sequence[popxl.Tensor]
    ) -> dict[popxl.Tensor, popxl.DeviceToHostStream]:
        if self._settings.is_training:
            return {}
        (vectors,) = results
        self.vector_stream = popxl.d2h_stream(vectors.shape, vectors.dtype, "vectors")
        return {vectors: self.vector_stream}


class VectorBuffers:
    """Remote buffers of the vectors of all micro-batches, and of their gradients.

    Args:
        spec: spec of the vectors of one micro-batch on one replica.
    """

    def __init__(self, spec: popxl.TensorSpec, settings: PhaseSettings) -> None:
        self.spec, self._count = spec, settings.num_micro_batches
        self._values, self._grads = (
            popxl.remote_buffer(spec.shape, spec.dtype, self._count) for _ in range(2)
        )
        self._values.kind, self._grads.kind = "vectors", "gradients of vectors"

    @property
    def layer_io(self) -> LayerIO:
        """The vectors as output of a layer."""
        return LayerIO(
            self.spec, fixed_row_handle(self._values, 0), fixed_row_handle(self._grads, 0)
        )

    def load_all(self) -> Tensor:
        """Loads the vectors of all micro-batches: (micro-batches * sequences, hidden)."""
        sequences, hidden = self.spec.shape

        def load(vectors: Tensor, step: Tensor) -> list[Tensor]:
            loaded = ops.remote_load(self._values, step).reshape((1, sequences, hidden))
            vectors = ops.dynamic_update(vectors, step, loaded, [0], [1], no_overlap=True)
            return [vectors, step + 1]

        start = popxl.constant(0, popxl.int32)
        empty = ops.init((self._count, sequences, hidden), self.spec.dtype)
        graph = popxl.gir().create_graph(load, empty, start)
        vectors = ops.repeat(graph, self._count, empty, start)[0]
        return vectors.reshape((self._count * sequences, hidden))

    def store_gradients(self, grads: Tensor) -> None:
        """Stores the gradients of all micro-batches, of the shape of `load_all`."""
        sequences, hidden = self.spec.shape

        def store(step: Tensor, grads: Tensor) -> Tensor:
            part = ops.dynamic_slice(grads, step, [0], [1], no_overlap=True)
            ops.remote_store(self._grads, step, part.reshape((sequences, hidden)))
            return step + 1

        start = popxl.constant(0, popxl.int32)
        by_micro_batch = grads.reshape((self._count, sequences, hidden))
        graph = popxl.gir().create_graph(store, start, by_micro_batch)
        ops.repeat(graph, self._count, start, by_micro_batch)


class BatchLossPhase:
    """The phase that computes the loss of the global batch, with its gradient if it trains.

    It is no `Phase`: it has no variables and no loop over micro-batches. The loss of the step goes
    to `loss_stream` once for each micro-batch.

    Attributes:
        aux_outputs: streams of further outputs by name: in evaluation, of the vectors.

    Args:
        vectors: of all micro-batches.
        inputs: of the step; `LOSS_WEIGHT` is equal in all micro-batches.
        vector_stream: see `VectorPhase`.
    """

    def __init__(
        self,
        module: BatchLoss,
        vectors: VectorBuffers,
        inputs: InputBuffers,
        settings: PhaseSettings,
        vector_stream: popxl.DeviceToHostStream | None,
    ) -> None:
        self.aux_outputs = {} if vector_stream is None else {LOSS_STATS: vector_stream}
        self._vectors, self._inputs, self._settings = vectors, inputs, settings
        self.loss_stream = popxl.d2h_stream((), popxl.float32, "loss")
        dp, shape = settings.groups.data_parallel, vectors.spec.shape
        count = settings.num_micro_batches * shape[0]
        own, batch = (popxl.TensorSpec((n, shape[1]), popxl.float32) for n in (count, dp * count))
        self._forward = module.create_graph(own, batch)[1]

    def forward(self) -> None:
        """Compute the loss without gradient; in training `backward` computes both."""
        if self._settings.is_training:
            return
        with popxl.plan.part("loss/forward"):
            own = self._vectors.load_all()
            (loss,) = self._forward.call(own, self._gather_vectors(own))
            self._store_loss(loss * self._load_loss_weight())

    def backward(self) -> popxl.Tensor:
        """Compute the loss and store the gradients of the vectors.

        Returns:
            The sum of squares of no gradients, float32 scalar: 0; NaN if the loss is not finite, so
            that the optimizer skips the step.
        """
        with popxl.plan.part("loss/backward"):
            own, weight = self._vectors.load_all(), self._load_loss_weight()
            grad = self._forward.autodiff(grads_required=self._forward.graph.inputs)
            info = self._forward.call_with_info(own, self._gather_vectors(own))
            loss = info.outputs[0] * weight
            scaling = popxl.constant(self._settings.config.execution.loss_scaling, popxl.float32)
            args = grad.grad_graph_info.inputs_dict(info)
            own_grads, batch_grads = grad.call(weight * scaling, args=args)
            self._vectors.store_gradients(own_grads + self._reduce_scatter(batch_grads))
            self._store_loss(loss)
            zero, nan = (popxl.constant(x, popxl.float32) for x in (0.0, math.nan))
            return ops.where(ops.isfinite(loss), zero, nan)

    def _gather_vectors(self, local_vectors: Tensor) -> Tensor:
        """Gathers the vectors of all data-parallel replicas."""
        groups = self._settings.groups
        if groups.data_parallel == 1:
            return local_vectors
        return ops.collectives.replicated_all_gather(local_vectors, 0, groups.dp, "concat")

    def _reduce_scatter(self, batch_grads: Tensor) -> Tensor:
        """Sums the gradients of gathered vectors over replicas; returns those of this replica."""
        groups, hidden = self._settings.groups, batch_grads.shape[-1]
        if groups.data_parallel == 1:
            return batch_grads
        own = ops.collectives.replicated_reduce_scatter(batch_grads, "add", groups.dp)
        return own.reshape((-1, hidden))

    def _load_loss_weight(self) -> Tensor:
        return ops.remote_load(self._inputs.buffers[LOSS_WEIGHT], 0)

    def _store_loss(self, loss: Tensor) -> None:
        """Sends the weighted loss of the replica's rows to the host, once per micro-batch.

        The mean over micro-batches and replicas is the loss, as with losses of micro-batches.
        """
        count = self._settings.num_micro_batches

        def store(step: Tensor, loss: Tensor) -> Tensor:
            ops.host_store(self.loss_stream, loss)
            return step + 1

        start, share = popxl.constant(0, popxl.int32), loss / count
        graph = popxl.gir().create_graph(store, start, share)
        ops.repeat(graph, count, start, share)
