"""AdamW against torch."""

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.remote import load_remote, named_variable_buffers, store_remote
from popxl_addons.rts import gather_replica_sharded_tensor, replica_sharded_spec
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory
from tests.slow import slow

STEPS = 5
rng = np.random.default_rng(0)
W = rng.normal(size=(3, 4)).astype(np.float32)
GRADS = rng.normal(size=(STEPS, 3, 4)).astype(np.float32)
SETTINGS = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


def in_torch(clip=None):
    p = torch.nn.Parameter(torch.tensor(W))
    s = SETTINGS
    optimizer = torch.optim.AdamW(
        [p], s["lr"], (s["beta1"], s["beta2"]), s["eps"], s["weight_decay"]
    )
    for g in GRADS:
        p.grad = torch.tensor(g)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p], clip)
        optimizer.step()
    return p.detach().numpy()


def run(build, feeds, replicas=1):
    """Steps of a program that `build(grad)` makes; returns its variable after them."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        stream = popxl.h2d_stream(W.shape, popxl.float32)
        variable = build(ops.host_load(stream))
    with popxl.Session(ir) as session:
        for grad in feeds:
            session.run({stream: grad if replicas == 1 else np.repeat(grad[None], replicas, 0)})
    return session.get_tensor_data(variable)


def plain(**changes):
    def build(grad):
        var = popxl.variable(W.astype(changes.pop("var_dtype", np.float32)), name="w")
        tensors = {k: v for k, v in changes.items() if isinstance(v, popxl.Tensor)}
        settings = {"first_order_dtype": popxl.float32, **SETTINGS, **changes}
        facts, step = AdamOptimizerStep().create_graph(var, grad, **settings)
        assert facts.keys_flat()[:2] == ["first_order", "second_order"]
        step.bind(facts.init()).call(var, grad, *tensors.values())
        return var

    return build


def test_steps_are_those_of_adamw():
    np.testing.assert_allclose(run(plain(), GRADS), in_torch(), rtol=1e-5, atol=1e-6)


def test_loss_scaling_is_undone():
    scaled = run(plain(loss_scaling=64.0), GRADS * 64)
    np.testing.assert_allclose(scaled, in_torch(), rtol=1e-5, atol=1e-6)


def test_numbers_may_be_tensors():
    def build(grad):
        var = popxl.variable(W, name="w")
        values = {k: popxl.constant(v, popxl.float32, k) for k, v in SETTINGS.items()}
        facts, step = AdamOptimizerStep().create_graph(
            var, grad, **values, first_order_dtype=popxl.float32
        )
        step.bind(facts.init()).call(var, grad, *values.values())
        return var

    np.testing.assert_allclose(run(build, GRADS), in_torch(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_gradients_are_clipped_to_a_norm(limit):
    def build(grad):
        var = popxl.variable(W, name="w")
        norm = ops.sqrt(ops.sumsquare(grad))
        facts, step = AdamOptimizerStep().create_graph(
            var, grad, **SETTINGS, first_order_dtype=popxl.float32,
            global_norm=norm, global_norm_max=limit,
        )  # fmt: skip
        step.bind(facts.init()).call(var, grad, norm)
        return var

    np.testing.assert_allclose(run(build, GRADS), in_torch(limit), rtol=1e-4, atol=1e-5)


def test_without_bias_correction_the_first_step_is_smaller():
    changed = run(plain(bias_correction=False, weight_decay=0.0), GRADS[:1])
    m, v = 0.2 * GRADS[0], 0.05 * GRADS[0] ** 2
    np.testing.assert_allclose(changed, W - 0.01 * m / (np.sqrt(v) + 1e-6), rtol=1e-5)


def test_half_variables_are_updated_in_float32():
    changed = run(plain(var_dtype=np.float16), GRADS)
    assert changed.dtype == np.float16
    np.testing.assert_allclose(changed, in_torch(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("replicas", [slow(2), 4])
def test_each_replica_may_update_its_part(replicas):
    def build(grad):
        ir = popxl.gir()
        group = ir.replica_grouping()
        fwd = NamedVariableFactories(w=VariableFactory(W, name="w"))
        buffers = named_variable_buffers(fwd)
        variables = fwd.init_remote(buffers)
        part = load_remote(buffers)
        grad_part = ops.collectives.replica_sharded_slice(grad, group)
        assert part.w.spec == grad_part.spec == replica_sharded_spec(grad, group)
        facts, step = AdamOptimizerStep().create_graph(
            part.w, grad_part, group, **SETTINGS, first_order_dtype=popxl.float32
        )
        assert facts.first_order.meta_shape == W.shape
        assert facts.step.shape == ()
        state_buffers = named_variable_buffers(facts)
        facts.init_remote(state_buffers)
        state = load_remote(state_buffers)
        step.bind(state).call(part.w, grad_part)
        gather_replica_sharded_tensor(part.w)
        store_remote(buffers, NamedTensors(w=part.w))
        store_remote(state_buffers, state)
        return variables.w

    np.testing.assert_allclose(run(build, GRADS, replicas), in_torch(), rtol=1e-5, atol=1e-6)


def test_like_variables_share_a_graph():
    ir = popxl.Ir()
    with ir.main_graph:
        optimizer = AdamOptimizerStep(cache=True)
        var = popxl.variable(W)
        graphs = [optimizer.create_graph(var, var.spec, lr=lr)[1].graph for lr in (0.1, 0.1, 0.2)]
        assert graphs[0] is graphs[1] is not graphs[2]


def test_misuse_is_told():
    ir = popxl.Ir()
    with ir.main_graph:
        var, other = popxl.variable(W), popxl.TensorSpec((2,), popxl.float32)
        with pytest.raises(ValueError, match=r"has shape \(2,\), its variable \(3, 4\)"):
            AdamOptimizerStep().create_graph(var, other, lr=0.1)
        with pytest.raises(ValueError, match="both global_norm"):
            AdamOptimizerStep().create_graph(var, var.spec, lr=0.1, global_norm_max=1.0)
