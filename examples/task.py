"""A task: sessions for training and evaluation, with checkpoints and a dataloader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import popxl
import popxl_addons as addons
from examples.digits import CLASSES, PIXELS, digits
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.layers import LayerNorm, Linear
from popxl_addons.optimizers import AdamOptimizerStep

BATCH, WARMUP, PEAK = 16, 4, 0.01


class Net(addons.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.fc1, self.norm, self.fc2 = Linear(24), LayerNorm(), Linear(CLASSES)
        self.dropout = dropout

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        x = self.norm(ops.gelu(self.fc1(x)))
        if self.dropout:
            x = ops.dropout(x, seed, p=self.dropout)
        return self.fc2(x)


class Loader:
    """Batches of a data set in a shuffled order, whose position can be saved."""

    def __init__(self, size: int, seed: int = 0):
        self.images, self.labels = digits(size, seed)
        self.position = 0

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        per_epoch = len(self.labels) // BATCH
        epoch, batch = divmod(self.position, per_epoch)
        order = np.random.default_rng(epoch).permutation(len(self.labels))
        at = order[batch * BATCH : (batch + 1) * BATCH]
        self.position += 1
        return self.images[at], self.labels[at].astype(np.int32)

    def save(self, filename: str) -> None:
        Path(filename).write_text(json.dumps({"position": self.position}), encoding="utf-8")

    def resume(self, filename: str) -> None:
        self.position = json.loads(Path(filename).read_text(encoding="utf-8"))["position"]


def learning_rate(step: int) -> float:
    """A linear warm-up, then as the square root of the step (Vaswani et al., 2017)."""
    return PEAK * min((step + 1) / WARMUP, (WARMUP / (step + 1)) ** 0.5)


def training_session(dropout: float = 0.1, **kwargs) -> addons.TaskSession:
    np.random.seed(0)  # noqa: NPY002 - layers draw their initial weights from this generator
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = addons.InputStreams(
            image=((BATCH, PIXELS), popxl.float32), label=((BATCH,), popxl.int32),
            lr=((), popxl.float32),
        )  # fmt: skip
        outputs = addons.OutputStreams(loss=((), popxl.float32), grad_norm=((), popxl.float32))
        image, label, lr = (ops.host_load(s) for s in inputs)
        seed_variable, seed = addons.seed_variable(7)
        now, following = ops.split_random_seed(seed)
        ops.var_updates.copy_var_update_(seed, following)
        facts, fwd = Net(dropout).create_graph(image, now)
        grad = addons.autodiff(fwd, grads_required=fwd.args.values_flat())
        variables = facts.init()
        info = fwd.bind(variables).call_with_info(image, now)
        loss, dlogits = addons.cross_entropy_with_grad(info.outputs[0], label)
        grads = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        squares = [ops.sum(g * g) for g in grads]
        norm = ops.sqrt(ops.sum(ops.concat([s.reshape((1,)) for s in squares])))
        by_name = dict(zip(fwd.args.keys_flat(), grads, strict=True))
        state = optimise(variables, by_name, lr, norm)
        ops.host_store(outputs.loss, loss)
        ops.host_store(outputs.grad_norm, norm)
        named = NamedTensors(fwd=variables, optim=state, random_seed=seed_variable)
    return addons.TaskSession(inputs, outputs, named, ir=ir, device_desc="ipu_model", **kwargs)


def optimise(variables: NamedTensors, grads, lr: popxl.Tensor, norm: popxl.Tensor) -> NamedTensors:
    """AdamW with gradients clipped by their global norm."""
    adam, state = AdamOptimizerStep(cache=True), {}
    for name, var in variables.to_dict().items():
        g = grads[name]
        facts, graph = adam.create_graph(
            var, g.spec, lr=lr.spec, eps=1e-6, weight_decay=0.01, global_norm=norm.spec,
            global_norm_max=1.0, first_order_dtype=popxl.float32,
        )  # fmt: skip
        state[name] = facts.init(f"optim.{name}")
        graph.bind(state[name]).call(var, g, lr, norm)
    return NamedTensors.from_dict(state)


def evaluation_session() -> addons.TaskSession:
    """The same network without dropout; its state is named as that of training."""
    ir = popxl.Ir()
    with ir.main_graph:
        inputs = addons.InputStreams(image=((BATCH, PIXELS), popxl.float32))
        outputs = addons.OutputStreams(words=((BATCH,), popxl.int32))
        image = ops.host_load(inputs.image)
        seed = popxl.constant(np.zeros(2), popxl.uint32)
        facts, fwd = Net(0.0).create_graph(image, seed)
        variables = facts.init()
        (logits,) = fwd.bind(variables).call(image, seed)
        ops.host_store(outputs[0], ops.cast(ops.argmax(logits, dim=-1), popxl.int32))
    state = NamedTensors(fwd=variables)
    return addons.TaskSession(inputs, outputs, state, ir=ir, device_desc="ipu_model")


def train(session: addons.TaskSession, steps: int) -> list[tuple[float, float]]:
    """Run `steps` steps; returns (loss, gradient norm) of each."""
    history = []
    with session:
        for _ in range(steps):
            image, label = next(session.dataloader)
            lr = np.float32(learning_rate(session.session_state["steps"]))
            s = session.inputs
            out = session.run({s.image: image, s.label: label, s.lr: lr})
            history.append(tuple(float(out[stream]) for stream in session.outputs))
    return history


def accuracy(source: addons.TaskSession, loader: Loader, batches: int) -> float:
    session = evaluation_session()
    session.load_from_session(source)
    right = []
    with session:
        for _ in range(batches):
            image, label = next(loader)
            right.append(session.run({session.inputs.image: image})[session.outputs[0]] == label)
    return float(np.mean(right))
