"""A loop over chunks of tokens with a custom gradient that recomputes each chunk.

The scores of all queries, (b, h, q, k), and the logits of all tokens, (tokens, vocabulary), are the
largest tensors of a model. A loop over chunks holds those of one chunk at a time: its gradient is a
loop of its own, which recomputes each chunk.

It is a loop and not a series of calls, because a compiler that sees all calls, such as XLA, may
run them concurrently and save what should be recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import popxl
import popxl_addons as addons
from modelling.layers.module import cast_if_needed
from popxl import Tensor, TensorSpec, ops

ChunkFn = Callable[[Sequence[Tensor], Tensor | None], Tensor]
"""(inputs of a chunk, its seed) -> the result; a function without variables."""


class ChunkLoop(addons.Module):
    """Applies a function to one chunk of tokens at a time, to save memory.

    Args:
        fn: see `ChunkFn`.
        num_chunks: number of iterations; must divide the number of tokens.
        axes: for each input the axis of tokens, along which it is chunked; None: each chunk reads
            all of it. The first input is chunked.
        num_differentiable: number of inputs, the first ones, that have gradients.
        out_axis: axis of tokens in the result, along which the chunks' results are concatenated;
            None: they are summed.
    """

    def __init__(
        self,
        fn: ChunkFn,
        num_chunks: int,
        axes: Sequence[int | None],
        num_differentiable: int,
        out_axis: int | None,
    ) -> None:
        super().__init__()
        self.fn, self.num_chunks, self.axes = _ChunkModule(fn), num_chunks, axes
        self.num_differentiable, self.out_axis = num_differentiable, out_axis

    def build(self, inputs: list[Tensor], seed: Tensor | None = None) -> Tensor:
        """Returns the chunks' results, concatenated or summed.

        Args:
            seed: uint32 (2,), from which each chunk gets a seed of its own.
        """
        self.aux.inputs, self.aux.seed = inputs, seed

        def iteration(
            out: Tensor, start: Tensor, inputs: list[Tensor], seed: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            result = self.fn(self._slice_chunk(inputs, start), _derive_chunk_seed(seed, start))
            return self._store_chunk(out, start, result, axis), start + self._chunk_size(inputs)

        spec, axis = self._create_chunk_graph(inputs, seed).graph.outputs[0].spec, self.out_axis
        if axis is not None:
            spec = _resize_axis(spec, spec.shape[axis] * self.num_chunks, axis)
        out, start = ops.init(spec.shape, spec.dtype), popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, out, start, inputs, seed)
        return ops.repeat(graph, self.num_chunks, out, start, *inputs, *_seed_as_list(seed))[0]

    def build_grad(self, dy: Tensor) -> list[Tensor | None]:
        """Returns gradients of the differentiable inputs from the gradient of the result.

        Those of inputs that every chunk reads are summed in float32; other inputs have None.
        """
        inputs, seed = list(self.aux.inputs), self.aux.seed
        forward = self._create_chunk_graph(inputs, seed)
        differentiable = forward.graph.inputs[: self.num_differentiable]
        backward = addons.recompute_graph(forward.autodiff(grads_required=differentiable))

        def iteration(
            totals: list[Tensor],
            start: Tensor,
            dy: Tensor,
            inputs: list[Tensor],
            seed: Tensor | None,
        ) -> list[Tensor]:
            chunk = [
                *self._slice_chunk(inputs, start),
                *_seed_as_list(_derive_chunk_seed(seed, start)),
            ]
            if self.out_axis is not None:
                dy = _slice_axis(
                    dy, start, dy.shape[self.out_axis] // self.num_chunks, self.out_axis
                )
            grads = backward.call(dy, args=_map_forward_values(backward, chunk))
            totals = self._store_grads(totals, start, grads)
            return [*totals, start + self._chunk_size(inputs)]

        totals = self._init_grads(inputs)
        start = popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, totals, start, dy, inputs, seed)
        grads = ops.repeat(
            graph, self.num_chunks, *totals, start, dy, *inputs, *_seed_as_list(seed)
        )
        dtypes = [t.dtype for t in inputs]
        pairs = zip(grads[: self.num_differentiable], dtypes, strict=False)
        found = [cast_if_needed(grad, dtype) for grad, dtype in pairs]
        return self._with_none(found, dtypes)

    def _with_none(
        self, grads: Sequence[Tensor], dtypes: Sequence[popxl.dtype]
    ) -> list[Tensor | None]:
        """Appends None for the inputs after the differentiable ones, up to the last float.

        Args:
            dtypes: of all inputs.
        """
        floats = [number for number, dtype in enumerate(dtypes) if dtype.is_floating_point]
        return [*grads, *[None] * (floats[-1] + 1 - len(grads))]

    def _init_grads(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Creates zeros for the gradients; those of inputs that every chunk reads are float32."""
        floats = zip(inputs[: self.num_differentiable], self.axes, strict=False)
        return [ops.init(t.shape, popxl.float32 if axis is None else t.dtype) for t, axis in floats]

    def _store_grads(
        self, totals: Sequence[Tensor], start: Tensor, grads: Sequence[Tensor]
    ) -> list[Tensor]:
        terms = zip(totals, grads, self.axes, strict=False)
        return [
            self._store_chunk(t, start, cast_if_needed(g, t.dtype), axis) for t, g, axis in terms
        ]

    def _chunk_size(self, inputs: Sequence[Tensor]) -> int:
        axis = self.axes[0]
        assert axis is not None
        return inputs[0].shape[axis] // self.num_chunks

    def _slice_chunk(self, inputs: Sequence[Tensor], start: Tensor) -> list[Tensor]:
        """Slices the inputs of the chunk that starts at token `start`."""
        size, pairs = self._chunk_size(inputs), zip(inputs, self.axes, strict=True)
        return [t if axis is None else _slice_axis(t, start, size, axis) for t, axis in pairs]

    def _create_chunk_graph(
        self, inputs: Sequence[Tensor], seed: Tensor | None
    ) -> addons.GraphWithNamedArgs:
        """Creates the graph that applies `fn` to one chunk."""
        size, pairs = self._chunk_size(inputs), zip(inputs, self.axes, strict=True)
        specs = [t.spec if axis is None else _resize_axis(t.spec, size, axis) for t, axis in pairs]
        return self.fn.create_graph(specs, seed)[1]

    @staticmethod
    def _store_chunk(total: Tensor, start: Tensor, value: Tensor, axis: int | None) -> Tensor:
        """Writes a chunk's value into the total along `axis`; adds it if `axis` is None."""
        if axis is None:
            return total + value
        size = value.shape[axis]
        return ops.dynamic_update(total, start, value, [axis], [size], no_overlap=True)


class LossChunkLoop(ChunkLoop):
    """Sums a scalar loss over chunks of tokens and computes its gradients in the same loop.

    A chunk goes backward before the next one goes forward, so nothing is recomputed, and of the
    chunks' intermediate values those of one chunk are held. The gradients are those of a loss whose
    own gradient is 1: `build_grad` scales them.

    Args:
        fn, num_chunks, axes, num_differentiable: as for `ChunkLoop`; `fn` returns a float32 scalar.
    """

    def __init__(
        self, fn: ChunkFn, num_chunks: int, axes: Sequence[int | None], num_differentiable: int
    ) -> None:
        super().__init__(fn, num_chunks, axes, num_differentiable, out_axis=None)

    def build(self, inputs: list[Tensor], seed: Tensor | None = None) -> Tensor:
        """Returns the sum of the chunks' losses, float32 scalar.

        Args:
            seed: uint32 (2,), from which each chunk gets a seed of its own.
        """
        forward = self._create_chunk_graph(inputs, seed)
        differentiable = forward.graph.inputs[: self.num_differentiable]
        backward = forward.autodiff(grads_required=differentiable)

        def iteration(
            loss: Tensor,
            grads: list[Tensor],
            start: Tensor,
            inputs: list[Tensor],
            seed: Tensor | None,
        ) -> list[Tensor]:
            chunk = [
                *self._slice_chunk(inputs, start),
                *_seed_as_list(_derive_chunk_seed(seed, start)),
            ]
            info = forward.call_with_info(*chunk)
            args = backward.grad_graph_info.inputs_dict(info)
            chunk_grads = backward.call(popxl.constant(1, popxl.float32), args=args)
            grads = self._store_grads(grads, start, chunk_grads)
            return [loss + info.outputs[0], *grads, start + self._chunk_size(inputs)]

        loss, grads = ops.init((), popxl.float32), self._init_grads(inputs)
        start = popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, loss, grads, start, inputs, seed)
        loss, *grads = ops.repeat(
            graph, self.num_chunks, loss, *grads, start, *inputs, *_seed_as_list(seed)
        )
        for i in range(self.num_differentiable):
            self.aux[f"grad_{i}"] = grads[i]
        self.aux.dtypes = [t.dtype for t in inputs]
        return loss

    def build_grad(self, dy: Tensor) -> list[Tensor | None]:
        """Returns gradients of the differentiable inputs from the gradient of the loss."""
        grads = [self.aux[f"grad_{i}"] for i in range(self.num_differentiable)]
        scaled = [cast_if_needed(grad, popxl.float32) * dy for grad in grads]
        pairs = zip(scaled, self.aux.dtypes, strict=False)
        return self._with_none([cast_if_needed(g, dtype) for g, dtype in pairs], self.aux.dtypes)


class _ChunkModule(addons.Module):
    """Module whose `build` calls the function that a chunk loop applies."""

    def __init__(self, fn: ChunkFn) -> None:
        super().__init__()
        self._fn = fn

    def build(self, inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
        return self._fn(inputs, seed)


def _slice_axis(t: Tensor, start: Tensor, size: int, axis: int) -> Tensor:
    return ops.dynamic_slice(t, start, [axis], [size], no_overlap=True)


def _resize_axis(spec: TensorSpec, size: int, axis: int) -> TensorSpec:
    return TensorSpec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype)


def _derive_chunk_seed(seed: Tensor | None, start: Tensor) -> Tensor | None:
    return None if seed is None else ops.create_random_seed(seed, start)


def _seed_as_list(seed: Tensor | None) -> list[Tensor]:
    return [] if seed is None else [seed]


def _map_forward_values(
    backward: addons.GraphWithNamedArgs, values: Sequence[Tensor]
) -> dict[Tensor, Tensor]:
    """Maps a recomputing gradient graph's inputs to the values of the forward graph's inputs."""
    info = backward.grad_graph_info
    by_input = dict(zip(info.forward_graph.inputs, values, strict=True))
    expected = zip(info.graph.inputs, info.expected_inputs, strict=True)
    return {t: by_input[c.fwd_tensor] for t, c in expected if c.fwd_tensor in by_input}
