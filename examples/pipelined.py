"""A network over two IPUs, executed as a pipeline with gradient accumulation."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.digits import CLASSES, PIXELS
from examples.mnist import Linear
from popxl import ops

MICRO_BATCH = 8


class Stage0(addons.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = Linear(48)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return ops.gelu(self.fc1(x))


class Stage1(addons.Module):
    def __init__(self):
        super().__init__()
        self.fc2 = Linear(32)
        self.head = Linear(CLASSES, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.head(ops.gelu(self.fc2(x)))


def with_gradient(module: addons.Module, x: popxl.Tensor, *more: popxl.Tensor):
    """Variables, graph and gradient graph with accumulators of a stage.

    Args:
        more: inputs of the graph that need a gradient, besides the variables.
    """
    facts, graph = module.create_graph(x)
    returned = graph.graph.inputs[:1] if more else ()
    accum_facts, grad = addons.autodiff_with_accumulation(
        graph, graph.args.tensors, grads_required=returned
    )
    return facts.init(), accum_facts.init(), graph, grad


def program(micro_batches: int):
    """One step of gradient accumulation over `micro_batches`, without an optimizer."""
    ir = popxl.Ir()
    ir.num_host_transfers = micro_batches
    with ir.main_graph, popxl.in_sequence(False):
        img_stream = popxl.h2d_stream((MICRO_BATCH, PIXELS), popxl.float32, name="image")
        label_stream = popxl.h2d_stream((MICRO_BATCH,), popxl.int32, name="label")
        loss_stream = popxl.d2h_stream((), popxl.float32, name="loss")
        hidden = popxl.TensorSpec((MICRO_BATCH, 48), popxl.float32)

        with popxl.ipu(0):
            vars0, accums0, fwd0, bwd0 = with_gradient(Stage0(), img_stream.spec)
        with popxl.ipu(1):
            vars1, accums1, fwd1, bwd1 = with_gradient(Stage1(), hidden, True)

        with addons.pipelined_execution(steps=micro_batches) as pipeline:
            with pipeline.stage(0), popxl.ipu(0):
                x = ops.host_load(img_stream, "image")
                call0 = fwd0.bind(vars0).call_with_info(x)
                h = call0.outputs[0].copy_to_ipu(1)

            with pipeline.stage(1), popxl.ipu(1):
                labels = ops.host_load(label_stream, "label")
                call1 = fwd1.bind(vars1).call_with_info(h)
                loss, dlogits = addons.ops.cross_entropy_with_grad(call1.outputs[0], labels)
                ops.host_store(loss_stream, loss)
                activations = bwd1.grad_graph_info.inputs_dict(call1)
                (dh,) = bwd1.bind(accums1).call(dlogits, args=activations)
                dh = dh.copy_to_ipu(0)

            with pipeline.stage(2), popxl.ipu(0):
                # Between stage 0 and stage 2 other micro-batches pass: stash what is needed.
                stashed = pipeline.stash_and_restore_activations(call0, bwd0.grad_graph_info)
                bwd0.bind(accums0).call(dh, args=stashed)
    variables = addons.NamedTensors(stage0=vars0, stage1=vars1)
    accumulators = addons.NamedTensors(stage0=accums0, stage1=accums1)
    return ir, (img_stream, label_stream), loss_stream, variables, accumulators


def run(images: np.ndarray, labels: np.ndarray):
    """Losses of the micro-batches; weights and mean gradients by name.

    Args:
        images, labels: (micro_batches, MICRO_BATCH, PIXELS) and (micro_batches, MICRO_BATCH).
    """
    ir, inputs, loss_stream, variables, accumulators = program(len(images))
    with popxl.Session(ir, "ipu_model") as session:
        losses = session.run(dict(zip(inputs, (images, labels), strict=True)))[loss_stream]
    data = session.get_tensors_data([*variables.tensors, *accumulators.tensors])
    weights = {n: data[t] for n, t in variables.named_tensors.items()}
    grads = {n: data[t] for n, t in accumulators.named_tensors.items()}
    return losses, weights, grads


if __name__ == "__main__":
    from examples.digits import digits

    images, labels = digits(4 * MICRO_BATCH)
    shape = (4, MICRO_BATCH)
    print("losses", run(images.reshape(*shape, PIXELS), labels.reshape(shape))[0])
