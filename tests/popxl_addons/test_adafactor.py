"""Adafactor against transformers'."""

import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor

import popxl
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.optimizers.adafactor import AdafactorOptimizerStep, MatrixLayout
from popxl_addons.remote import load_remote, named_variable_buffers, store_remote
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory
from tests.slow import slow

STEPS = 10
rng = np.random.default_rng(0)
DEFAULTS = {"lr": 1e-2, "relative_step": False}


@pytest.fixture(autouse=True)
def same_numbers():
    """Each test draws its own, whichever ran before it."""
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


def random(shape, scale=1.0):
    return (scale * rng.normal(size=shape)).astype(np.float32)


def gradients(shape):
    """Of different sizes, with rows and columns of zeros, as embeddings have them."""
    found = random((STEPS, *shape)) * rng.lognormal(sigma=2, size=(STEPS, *[1] * len(shape)))
    if len(shape) == 2 and shape[0] > 1:
        found[:, 0] = 0
        found[3] = 0
    return found.astype(np.float32)


def in_torch(values, grads, **settings):
    """The parameters after steps with the gradients grads[i][step]; each is its own."""
    parameters = [torch.nn.Parameter(torch.tensor(v)) for v in values]
    optimizer = Adafactor(parameters, **{**DEFAULTS, **settings})
    for step in range(STEPS):
        for p, g in zip(parameters, grads, strict=True):
            p.grad = torch.tensor(g[step])
        optimizer.step()
    return [p.detach().numpy() for p in parameters]


def ours(values, grads, **settings):
    """The variables after the steps, on one replica, whole."""
    ir = popxl.Ir()
    with ir.main_graph:
        streams = [popxl.h2d_stream(v.shape, popxl.float32) for v in values]
        variables = [popxl.variable(v, name="w") for v in values]
        for stream, var in zip(streams, variables, strict=True):
            grad = ops.host_load(stream)
            facts, step = AdafactorOptimizerStep().create_graph(
                var, grad, **{**DEFAULTS, **settings}
            )
            step.bind(facts.init()).call(var, grad)
    with popxl.Session(ir, "cpu") as session:
        for step in range(STEPS):
            session.run({s: g[step] for s, g in zip(streams, grads, strict=True)})
    return [session.get_tensor_data(v) for v in variables]


SETTINGS = {
    "mean": {"beta1": 0.9, "weight_decay": 0.1},
    "relative": {"lr": None, "relative_step": True},
    "warmup": {
        "lr": None, "relative_step": True, "warmup_init": True, "scale_parameter": False
    },
    "limits": {"clip_threshold": 0.3, "decay_rate": -0.5, "eps": (1e-4, 2.0)},
}  # fmt: skip
SOME, ALL = [(7,), (6, 10)], [(), (7,), (6, 10), (10, 6), (1, 5)]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("mean", ALL), *((name, SOME) for name in SETTINGS if name != "mean"),
     *(slow(name, ALL) for name in SETTINGS if name != "mean")],
)  # fmt: skip
def test_steps_are_those_of_transformers(name, shapes):
    settings = SETTINGS[name]
    values, grads = [random(s, 0.1) for s in shapes], [gradients(s) for s in shapes]
    expected, found = in_torch(values, grads, **settings), ours(values, grads, **settings)
    for before, there, here in zip(values, expected, found, strict=True):
        assert not np.array_equal(there, before)
        np.testing.assert_allclose(here - before, there - before, rtol=2e-4, atol=2e-7)


def cut(array, parts, axis):
    return np.stack(np.split(array, parts, axis))


@pytest.mark.parametrize(
    ("shape", "count", "axis", "tp", "dp"),
    [
        slow((6, 8), 1, 1, 2, 1),
        ((6, 8), 1, 0, 2, 2),
        ((5, 12), 3, 1, 2, 2),  # queries, keys and values, each its own matrix
        ((7, 8), 1, None, 1, 4),  # parts begin and end inside rows
        ((7, 6), 1, None, 1, 4),  # four replicas cannot share 42 elements: not cut
        slow((8, 6), 2, None, 1, 4),  # parts are whole rows
        slow((2, 1), 1, None, 1, 4),  # fewer elements than replicas: not cut
        slow((9,), 1, None, 1, 4),
        ((12,), 1, 0, 2, 2),
    ],
)
def test_replicas_hold_parts(shape, count, axis, tp, dp):
    """Cut over tp replicas along an axis, and what dp replicas share is sharded over them."""
    size = (*shape[:-1], shape[-1] // count)
    values, grads = [[f(size) for _ in range(count)] for f in (random, gradients)]
    settings = {"beta1": 0.5, "weight_decay": 0.1}
    expected = np.concatenate(in_torch(values, grads, **settings), -1)

    def on_replicas(arrays, offset=0):
        """(tp, ...): the parts of each of the arrays, side by side."""
        if axis is None:
            return np.concatenate(arrays, -1)[None]
        return np.concatenate([cut(a, tp, axis + offset) for a in arrays], -1)

    ir = popxl.Ir(replication=tp * dp)
    with ir.main_graph:
        group = ir.replica_grouping(stride=tp, group_size=dp)
        host, fed = on_replicas(values), on_replicas(grads, 1)
        stream = popxl.h2d_stream(host.shape[1:], popxl.float32)
        part = ops.host_load(stream)
        data = VariableFactory(list(host), popxl.float32, "w", replica_grouping=group)
        fwd = NamedVariableFactories(w=data)
        buffers = named_variable_buffers(fwd, 1, dp)
        variables = fwd.init_remote(buffers)
        var = load_remote(buffers).w
        assert bool(var.meta_shape) == (dp > 1 and np.prod(host.shape[1:]) % dp == 0)
        grad = ops.collectives.replica_sharded_slice(part, group) if var.meta_shape else part
        facts, step = AdafactorOptimizerStep().create_graph(
            var, grad, group, matrix_layout=MatrixLayout(count, axis, ir.replica_grouping()),
            **{**DEFAULTS, **settings},
        )  # fmt: skip
        state_buffers = named_variable_buffers(facts, 1, False)
        facts.init_remote(state_buffers)
        state = load_remote(state_buffers)
        step.bind(state).call(var, grad)
        store_remote(buffers, NamedTensors(w=var))
        store_remote(state_buffers, state)
    with popxl.Session(ir, "cpu") as session:
        for at in range(STEPS):
            session.run({stream: np.tile(fed[:, at], (dp, *[1] * len(shape)))})
    found = session.get_tensor_data(variables.w)
    before = host if tp > 1 else host[0]
    changes = on_replicas(np.split(expected, count, -1))
    changes = (changes if tp > 1 else changes[0]) - before
    np.testing.assert_allclose(found - before, changes, rtol=3e-4, atol=3e-7)


def test_state_of_a_matrix_is_a_row_and_a_column():
    with popxl.Ir().main_graph:
        var = popxl.variable(random((6, 10)))
        facts, _ = AdafactorOptimizerStep().create_graph(var, var.spec, lr=0.1)
        assert {n: f.shape for n, f in facts.to_dict().items()} == {
            "step": (), "second_order_rows": (6,), "second_order_columns": (10,)
        }  # fmt: skip


def test_misuse_is_told():
    with popxl.Ir().main_graph:
        var, other = popxl.variable(random((6, 10))), popxl.TensorSpec((2,), popxl.float32)
        for settings, message in (
            ({}, "lr, or relative_step"),
            ({"lr": 0.1, "relative_step": True}, "lr, or relative_step"),
            ({"lr": 0.1, "warmup_init": True}, "warmup_init needs"),
            ({"lr": 0.1, "global_norm_max": 1.0}, "both global_norm"),
            ({"lr": 0.1, "matrix_layout": MatrixLayout(3)}, "does not hold 3 matrices"),
        ):
            explicit = {"relative_step": False} if not settings else {}
            with pytest.raises(ValueError, match=message):
                AdafactorOptimizerStep().create_graph(var, var.spec, **settings, **explicit)
        with pytest.raises(ValueError, match="has shape"):
            AdafactorOptimizerStep().create_graph(var, other, lr=0.1)
