"""A feed-forward layer whose weights are split over replicas, next to data parallelism."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.array_munging import shard, tensor_parallel_input
from popxl_addons.layers import Linear
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_addons.patterns import apply_pre_alias_patterns


# [layer]
class FeedForward(addons.Module):
    """x + gelu(x @ W1 + b1) @ W2 + b2, with W1 split by columns and W2 by rows."""

    def __init__(self, hidden: int, inner: int, tp: int):
        super().__init__()
        # Replicas that hold the same shard: `dp` of them, `tp` apart.
        ir = popxl.gcg().ir
        self.group = ir.replica_grouping(stride=tp, group_size=ir.replication_factor // tp)
        self.up = Linear(inner // tp, replica_grouping=self.group)
        self.down = Linear(hidden, bias=False, replica_grouping=self.group)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        # ----- identical computation -----
        z = replicated_all_reduce_identical_inputs(x, group=self.group.transpose())
        # ----- sharded computation -----
        z = self.down(ops.gelu(self.up(z)))
        # ----- identical computation -----
        z = replicated_all_reduce_identical_grad_inputs(z, group=self.group.transpose())
        return x + z + self.add_variable_input("bias", lambda: np.zeros(x.shape[-1]), x.dtype)


# [end]


def load_weights(variables, weights: dict[str, np.ndarray], tp: int):
    """Whole weights by name -> data of the variables, one shard for each group."""
    return {
        variables.up.weight: shard(weights["up.weight"], tp, axis=-1),
        variables.up.bias: shard(weights["up.bias"], tp, axis=-1),
        variables.down.weight: shard(weights["down.weight"], tp, axis=0),
        variables.bias: weights["bias"],
    }


def run(x: np.ndarray, dy: np.ndarray, weights: dict[str, np.ndarray], tp: int):
    """Outputs and gradients.

    Args:
        x, dy: inputs and gradients of the outputs, (dp, rows, hidden).

    Returns:
        y and dx of each replica, (dp * tp, rows, hidden); and gradients of the weights on each
        replica by name, summed over data-parallel replicas.
    """
    dp, rows, hidden = x.shape
    ir = popxl.Ir(replication=dp * tp)
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream((rows, hidden), popxl.float32, name="x")
        dy_stream = popxl.h2d_stream((rows, hidden), popxl.float32, name="dy")
        x_t, dy_t = ops.host_load(x_stream), ops.host_load(dy_stream)
        facts, layer = FeedForward(hidden, len(weights["up.bias"]), tp).create_graph(x_t)
        required = [*layer.graph.inputs[:1], *layer.args.values_flat()]
        grad = addons.autodiff(layer, grads_required=required)
        variables = facts.init(empty=True)

        call = layer.bind(variables).call_with_info(x_t)
        dx, *dws = grad.call(dy_t, args=grad.grad_graph_info.inputs_dict(call))
        dp_group = ir.replica_grouping(stride=tp, group_size=dp)
        dws = [ops.collectives.replicated_all_reduce(g, group=dp_group) for g in dws]
        streams = [addons.host_store(t) for t in (call.outputs[0], dx, *dws)]
    apply_pre_alias_patterns(ir)

    session = popxl.Session(ir, "ipu_model")
    session.write_variables_data(load_weights(variables, weights, tp))
    with session:
        # Replicas of a tensor-parallel group get the same data: repeat each part `tp` times.
        host = [tensor_parallel_input(a, tp, dp * tp) for a in (x, dy)]
        host = [h.reshape(session._full_input_shape((rows, hidden))) for h in host]
        outputs = session.run(dict(zip((x_stream, dy_stream), host, strict=True)))
    y, dx_all, *dw_all = (outputs[s] for s in streams)
    return y, dx_all, dict(zip(layer.args.named_tensors, dw_all, strict=True))
