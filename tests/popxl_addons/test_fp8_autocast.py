"""Linear layers in FP8, and their state, in programs of any kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.fp8 import Recipe, names_of_fp8_products
from popxl_addons.layers import Linear
from popxl_addons.testing_utils import TensorInput, run_module
from tests.slow import slow

RECIPE = addons.DelayedScaling(history=4)
rng = np.random.default_rng(5)


class Two(addons.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(6), Linear(4, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.second(ops.gelu(self.first(x)))


def names(recipe: Recipe | None, kind: str) -> list[str]:
    with popxl.Ir().main_graph, addons.fp8_autocast(recipe):
        facts, _ = Two().create_graph(popxl.TensorSpec((3, 5), popxl.float32))
    return facts.of_kind(kind).keys_flat()


def test_state_is_among_the_variables_and_no_parameter():
    parameters = ["first.weight", "first.bias", "second.weight"]
    assert names(None, "parameter") == parameters
    assert names(None, "fp8") == names(addons.CurrentScaling(), "fp8") == []
    assert set(names(RECIPE, "parameter")) == set(parameters)
    state = {f"{n}.product.{s}" for n in ("first", "second") for s in ("scale", "amax_history")}
    assert set(names(RECIPE, "fp8")) == state
    steps = {f"{n}.product.step" for n in ("first", "second")}
    assert set(names(addons.DelayedScaling(interval=2), "fp8")) == state | steps


def test_graphs_take_the_scales_alone_also_of_called_modules():
    class Outer(addons.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Two()

        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            return self.call_module(self.inner)(x)

    with popxl.Ir().main_graph, addons.fp8_autocast(RECIPE):
        facts, graph = Outer().create_graph(popxl.TensorSpec((3, 5), popxl.float32))
        variables = facts.init()
    state = {n for n in graph.args.keys_flat() if ".product." in n}
    assert state == {"inner.first.product.scale", "inner.second.product.scale"}
    assert names_of_fp8_products(facts) == ["inner.first.product", "inner.second.product"]
    with pytest.raises(
        TypeError, match=r"inner\.first\.product was made with DelayedScaling, not Cu"
    ):
        addons.update_fp8(addons.CurrentScaling(), facts, variables, variables)
    assert "inner.second.product.amax_history" in variables.keys_flat()


def test_a_layer_is_what_it_was_when_it_was_made():
    x = rng.standard_normal((3, 5)).astype(np.float32)
    theirs = torch.nn.Linear(5, 6)
    with addons.fp8_autocast(addons.CurrentScaling()):
        with addons.fp8_autocast(None):
            ordinary = Linear(6)
        inside = Linear(6)
    results = {}
    for name, layer in (("ordinary", ordinary), ("inside", inside), ("outside", Linear(6))):
        (results[name],) = run_module(
            layer, TensorInput(x), weights=lambda v: Linear.torch_mapping(v, theirs)
        )
    np.testing.assert_array_equal(results["ordinary"], results["outside"])
    error = np.abs(results["inside"] - results["outside"]).max()
    assert 1e-3 < error < 0.2


def test_state_is_never_sharded():
    ir = popxl.Ir(replication=2)
    with ir.main_graph, addons.fp8_autocast(RECIPE):
        facts, _ = Two().create_graph(popxl.TensorSpec((3, 5), popxl.float32))
        buffers = addons.named_variable_buffers(facts)
    assert buffers.get("first.weight").meta_shape
    assert not buffers.get("first.product.amax_history").meta_shape


@pytest.mark.parametrize(
    ("replicas", "recompute"), [(1, True), (2, False), slow(1, False), slow(2, True)]
)
def test_the_largest_of_all_micro_batches_and_replicas_counts_once(replicas, recompute):
    """Accumulation in the trap that Transformer Engine's port to T5X fell into: the amax of a step
    is neither the last micro-batch's nor a mean, and an update comes once a step."""
    steps, micro_batches = 3, 4
    data = rng.standard_normal((steps * micro_batches, replicas, 3, 5)).astype(np.float32)
    data *= np.exp2(rng.integers(-3, 4, (steps * micro_batches, replicas, 1, 1))).astype(np.float32)
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = steps * micro_batches
    with ir.main_graph:
        stream = popxl.h2d_stream((3, 5), popxl.float32)
        with addons.fp8_autocast(RECIPE):
            facts, graph = Linear(4, bias=False).create_graph(stream.spec)
        variables = facts.init()
        grad_facts, grad = addons.autodiff_with_accumulation(graph, graph.args.tensors)
        if recompute:
            grad = addons.recompute_graph(grad)
        out = {
            n: popxl.d2h_stream(t.shape, t.dtype)
            for n, t in variables.to_dict().items()
            if "product" in n
        }
        program = Step(stream, graph, grad, grad_facts, facts, out, micro_batches)
        ops.repeat(ir.create_graph(program, variables.values_flat(), variables.keys_flat()), steps,
                   *variables.values_flat())  # fmt: skip
        weight = variables.get("weight")
    with popxl.Session(ir, "cpu") as session:
        w = session.get_tensor_data(weight)
        found = session.run({stream: data if replicas > 1 else data[:, 0]})
    largest = np.abs(data).reshape(steps, -1).max(1)
    history = found[out["product.amax_history"]][:steps]
    scale = found[out["product.scale"]][:steps]
    if replicas > 1:
        np.testing.assert_array_equal(scale[:, 0], scale[:, 1])
        history, scale = history[:, 0], scale[:, 0]
    for i in range(steps):
        np.testing.assert_array_equal(history[i, 0, : i + 1], largest[i::-1])
        np.testing.assert_array_equal(history[i, 1, : i + 1], np.abs(w).max())
        np.testing.assert_array_equal(history[i, :, i + 1 :], 0)
        expected = 2.0 ** np.floor(np.log2(448 / largest[: i + 1].max()))
        assert scale[i, 0] == expected


class Step:
    """One step: the gradient of all micro-batches, and the update of the state."""

    def __init__(self, stream, graph, grad, grad_facts, facts, out, micro_batches) -> None:
        self.stream, self.graph, self.grad, self.grad_facts = stream, graph, grad, grad_facts
        self.facts, self.out, self.micro_batches = facts, out, micro_batches

    def __call__(self, tensors: list[popxl.TensorByRef], names: list[str]) -> None:
        variables = addons.NamedTensors.pack(names, tensors)
        sums = self.grad_facts.init_zero()
        for _ in range(self.micro_batches):
            call = self.graph.bind(variables).call_with_info(ops.host_load(self.stream))
            y = call.parent_output(0)
            info = self.grad.grad_graph_info
            self.grad.bind(sums).call(y, args=info.inputs_dict(call))
        addons.update_fp8(RECIPE, self.facts, variables, sums.accum)
        for name, stream in self.out.items():
            ops.host_store(stream, variables.get(name))
