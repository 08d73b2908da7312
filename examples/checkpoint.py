"""A task with named streams and state, saved and resumed by another session."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.digits import PIXELS, digits
from examples.mnist import BATCH, Adam, Net
from popxl import ops


def training_session() -> addons.TaskSession:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = addons.InputStreams(
            image=((BATCH, PIXELS), popxl.float32),
            label=((BATCH,), popxl.int32),
            lr=((), popxl.float32),
        )
        outputs = addons.OutputStreams(loss=((), popxl.float32))
        image, label, lr = (ops.host_load(s) for s in (inputs.image, inputs.label, inputs.lr))

        facts, net = Net().create_graph(image)
        grad = addons.autodiff(net, grads_required=net.args.values_flat())
        state = addons.NamedTensors(fwd=facts.init(), optim=addons.NamedTensors())
        call = net.bind(state.fwd).call_with_info(image)
        loss, dlogits = addons.ops.cross_entropy_with_grad(call.outputs[0], label)
        grads = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(call))
        by_name = dict(zip(net.args.named_tensors, grads, strict=True))
        adam = Adam(cache=True)
        for name, var in state.fwd.named_tensors.items():
            optim_facts, optim = adam.create_graph(var, by_name[name].spec, lr=lr.spec)
            variables = optim_facts.init(f"optim.{name}")
            optim.bind(variables).call(var, by_name[name], lr)
            state.optim.insert(name, variables, overwrite=True)  # with others of its layer
        ops.host_store(outputs.loss, loss)
    session = addons.TaskSession(inputs, outputs, state, ir=ir, device_desc="ipu_model")
    session.add_session_state_info({"learning_rate": "1 / step"})
    return session


def run_steps(session: addons.TaskSession, steps: range) -> list[float]:
    """Losses of steps `steps` of the training."""
    images, labels = digits(BATCH * steps.stop, seed=3)
    losses = []
    with session:
        for i in steps:
            batch = slice(i * BATCH, (i + 1) * BATCH)
            data = {
                session.inputs.image: images[batch],
                session.inputs.label: labels[batch],
                session.inputs.lr: np.float32(1e-2 / (1 + i)),
            }
            losses.append(float(session.run(data)[session.outputs.loss]))
    return losses


def interrupted(folder: str, steps: int, at: int) -> list[float]:
    """Losses of `steps` steps, of which those from `at` are done by a second session."""
    first = training_session()
    losses = run_steps(first, range(at))
    first.save_checkpoint(folder)

    second = training_session()
    second.load_checkpoint(folder, report_missing="error")
    return losses + run_steps(second, range(second.session_state["steps"], steps))
