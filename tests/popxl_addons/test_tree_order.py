"""Programs zip trees of variables with trees of gradients: what decides that they pair up."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.remote import load_remote_graph, named_variable_buffers, store_remote_graph
from popxl_addons.rts import all_gather_replica_sharded_graph

REPLICAS, SIZE, RATE, STEPS = 4, 4, 0.05, 3


NAMES = ("w2", "w10", "w1")


def _start(name: str) -> np.ndarray:
    noise = np.random.default_rng(int(name[1:])).normal(size=(SIZE, SIZE))
    return (np.eye(SIZE) + 0.1 * noise).astype(np.float32)


class _Product(addons.Module):
    """Matrices of one shape, in another order than that of their names."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for name in NAMES:
            x = x @ self.add_variable_input(name, partial(_start, name))
        return x


def _by_walking(variables, shards, accumulators):
    """The names are those of the variables, as their tree has them; the gradients are sorted."""
    grads = [_own_part(t) for t in accumulators.tensors[:-1]]  # the last counts
    return [(shards[n], g) for n, g in zip(variables.named_tensors, grads, strict=True)]


def _by_sorting(variables, shards, accumulators):
    """The gradients come in any order, and are sorted by their own names."""
    grads = NamedTensors.from_dict({n: _own_part(accumulators.accum[n]) for n in NAMES})
    return zip(shards.tensors, grads.tensors, strict=True)


def _own_part(t):
    return ops.collectives.replica_sharded_slice(ops.collectives.replicated_all_reduce(t, "mean"))


def _train(pairs, xs):
    """Gradient descent on the mean of sum(y**2) / 2 over replicas; variables are cut over these."""
    ir = popxl.Ir(replication=REPLICAS)
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream((2, SIZE), popxl.float32)
        x = ops.host_load(x_stream)
        facts, forward = _Product().create_graph(x)
        grad_facts, backward = addons.autodiff_with_accumulation(forward, forward.args.tensors)
        buffers = named_variable_buffers(facts)
        variables = facts.init_remote(buffers, 0, "net")
        load, names = load_remote_graph(buffers)
        shards = NamedTensors.pack(names, load.call(0))
        gather, _ = all_gather_replica_sharded_graph(shards)
        whole = NamedTensors.pack(names, gather.bind(shards).call())
        call = forward.bind(whole).call_with_info(x)
        accumulators = grad_facts.init_zero()
        inputs = backward.grad_graph_info.inputs_dict(call)
        backward.bind(accumulators).call(call.outputs[0], args=inputs)
        for shard, grad in pairs(variables, shards, accumulators):
            ops.scaled_add_(shard, grad, b=-RATE)
        store_remote_graph(buffers).bind(shards).call(0)
    with popxl.Session(ir, "cpu") as session:
        for _ in range(STEPS):
            session.run({x_stream: xs})
    return {n: session.get_tensor_data(t) for n, t in variables.named_tensors.items()}


def _reference(xs):
    weights = {n: _start(n).astype(np.float64) for n in NAMES}
    for _ in range(STEPS):
        grads = dict.fromkeys(NAMES, 0.0)
        for x in xs.astype(np.float64):
            inputs = [x]
            for w in weights.values():
                inputs.append(inputs[-1] @ w)
            dy = inputs.pop()
            for name in reversed(NAMES):
                grads[name] = grads[name] + inputs.pop().T @ dy / REPLICAS
                dy = dy @ weights[name].T
        weights = {n: w - RATE * grads[n] for n, w in weights.items()}
    return weights


@pytest.mark.parametrize("pairs", [_by_walking, _by_sorting])
def test_sharded_variables_meet_their_own_gradients(pairs):
    xs = np.random.default_rng(0).normal(size=(REPLICAS, 2, SIZE)).astype(np.float32)
    trained = _train(pairs, xs)
    for name, want in _reference(xs).items():
        np.testing.assert_allclose(trained[name], want, rtol=2e-6, atol=2e-6)


def test_initialised_trees_are_in_sorted_order():
    with popxl.Ir().main_graph as main:
        facts, _ = _Product().create_graph(popxl.TensorSpec((2, SIZE), popxl.float32))
        assert facts.keys_flat() == ["w2", "w10", "w1"]
        buffers = named_variable_buffers(facts)
        for variables in (facts.init("a"), facts.init_remote(buffers, 0, "b")):
            assert [*variables.named_tensors] == ["w1", "w10", "w2"]
            assert variables.tensors == tuple(variables.named_tensors.values())
    assert len(main.variables) == 6
