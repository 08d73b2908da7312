"""Variables that called graphs update: by reference, or declared at the call."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import ops


def moving_statistics(xs: np.ndarray, momentum: float) -> dict[str, np.ndarray]:
    """Moving mean and largest value of each feature, and the number of batches seen.

    Args:
        xs: (batches, rows, features).
    """
    batches, rows, features = xs.shape
    ir = popxl.Ir()
    ir.num_host_transfers = batches
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream((rows, features), popxl.float32, name="x")
        mean = popxl.variable(np.zeros(features), popxl.float32, name="mean")
        largest = popxl.variable(np.full(features, -np.inf), popxl.float32, name="largest")
        count = popxl.variable(0, popxl.int32, name="count")

        # An annotation makes an input by-reference: what the graph does to it, the caller sees.
        def update_mean(mean: popxl.TensorByRef, x: popxl.Tensor) -> None:
            batch_mean = ops.mean(x, axis=0)
            ops.var_updates.accumulate_moving_average_(mean, batch_mean, f=momentum)

        # Without it the caller's tensor keeps its value ...
        def update_largest(largest: popxl.Tensor, x: popxl.Tensor) -> None:
            ops.var_updates.copy_var_update_(largest, ops.maximum(largest, ops.max(x, axis=0)))

        # ... unless the call says otherwise. `+=` is in place.
        def update_count() -> None:
            n = popxl.graph_input((), popxl.int32, "n", by_ref=True)
            n += 1

        x_spec = x_stream.spec
        mean_graph = ir.create_graph(update_mean, mean, x_spec)
        largest_graph = ir.create_graph(update_largest, largest, x_spec)
        count_graph = ir.create_graph(update_count)

        def batch(mean: popxl.TensorByRef, largest: popxl.TensorByRef, n: popxl.TensorByRef):
            x = ops.host_load(x_stream)
            ops.call(mean_graph, mean, x)
            info = ops.call_with_info(largest_graph, largest, x)
            info.set_parent_input_modified(largest)
            ops.call(count_graph, n)

        variables = (mean, largest, count)
        ops.repeat(ir.create_graph(batch, *variables), batches, *variables)
    with popxl.Session(ir, "ipu_model") as session:
        session.run({x_stream: xs})
    return {t.name: session.get_tensor_data(t) for t in variables}


if __name__ == "__main__":
    print(moving_statistics(np.random.default_rng(0).normal(size=(5, 8, 3)).astype("f4"), 0.5))
