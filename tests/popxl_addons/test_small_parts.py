"""Streams by name, seeds, prints, cross entropy, and utilities."""

import logging
import sys
import types

import numpy as np
import pytest
import torch

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, Module, NamedTensors, OutputStreams, WeightsDict, timer
from popxl_addons.named_tensors import print_named_tensors
from popxl_addons.ops import saturate
from popxl_addons.testing_utils import TensorInput, run_module
from popxl_addons.utils import OrderedDict, duplicate_items, overrides, suffix_graph_name
from tests.popxl_addons.helpers import single_run


@pytest.fixture
def ir():
    ir = popxl.Ir()
    with ir.main_graph:
        yield ir


# ---- streams ------------------------------------------------------------------------------------
def test_streams_are_made_from_specs_and_keep_order(ir):
    own = popxl.h2d_stream((), popxl.float32)
    streams = InputStreams(words=((2, 3), popxl.int32), lr=own)
    assert streams.words.spec == popxl.TensorSpec((2, 3), popxl.int32)
    assert streams.words.tensor_id == "words"
    assert repr(streams) == f"InputStreams(words={streams.words!r}, lr={own!r})"
    assert list(streams) == [streams.words, own]
    assert isinstance(OutputStreams(y=((), popxl.float32)).y, popxl.DeviceToHostStream)


def test_streams_are_a_mapping_that_iterates_over_its_values(ir):
    streams = InputStreams(a=((), popxl.int32), b=((), popxl.int32), c=((), popxl.int32))
    a, b, c = streams
    assert dict(streams) == dict(streams.items()) == {"a": a, "b": b, "c": c}
    assert list(streams.keys()) == ["a", "b", "c"]
    assert list(streams.values()) == [a, b, c]
    assert (streams["b"], streams.b, streams[1], streams[-2], streams.get("b")) == (b,) * 5
    assert (streams[1:], streams[:-1], streams[::2]) == ([b, c], [a, b], [a, c])
    assert "a" in streams
    assert "d" not in streams
    assert streams.get("d") is None
    assert len(streams) == 3
    with pytest.raises(KeyError):
        streams["d"]
    with pytest.raises(IndexError):
        streams[3]
    with pytest.raises(AttributeError, match=r"no stream 'd': \['a', 'b', 'c'\]"):
        _ = streams.d


def test_host_load_and_store_make_fitting_streams(ir):
    data, stream, t = addons.host_load([1.0, 2.0], popxl.float16, name="x")
    out = addons.host_store(t + 1.0)
    with popxl.Session(ir) as session:
        result = session.run({stream: data})[out]
    assert (result.tolist(), result.dtype) == ([2, 3], np.float16)


# ---- seeds --------------------------------------------------------------------------------------
@pytest.mark.parametrize("group_size", [None, 1, 2, 4])
def test_a_seed_is_the_variable_s_value_until_the_program_changes_it(group_size):
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        group = None if group_size is None else ir.replica_grouping(group_size=group_size)
        variable, seed = addons.seed_variable(42, group)
        stream = addons.host_store(seed)
    groups = 4 // (group_size or 1)
    with popxl.Session(ir) as session:
        first, second = (session.run()[stream] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (seed.shape, seed.dtype) == ((2,), popxl.uint32)
    assert len({tuple(s) for s in first}) == groups
    data = session.get_tensor_data(variable)
    assert data.shape == ((groups, 2) if groups > 1 else (2,))
    np.testing.assert_array_equal(data.reshape(groups, 2), first[:: group_size or 1])


def test_a_program_makes_each_run_s_seed_from_the_last():
    ir = popxl.Ir()
    with ir.main_graph:
        variable, seed = addons.seed_variable(42)
        now, following = ops.split_random_seed(seed)
        ops.var_updates.copy_var_update_(seed, following)
        stream = addons.host_store(now)
    with popxl.Session(ir) as session:
        session.run()
        session.weights_to_host()
        saved = session.get_tensor_data(variable).copy()
        expected = session.run()[stream]
    with popxl.Session(ir) as restored:
        restored.write_variable_data(variable, saved)
        np.testing.assert_array_equal(restored.run()[stream], expected)


# ---- prints -------------------------------------------------------------------------------------
def test_prints_are_built_only_at_their_level(ir, monkeypatch, capfd):
    x = popxl.constant([1.5])
    monkeypatch.setenv("MODEL_LOG_LEVEL", "INFO")
    assert addons.print_tensor(x) is x
    addons.print_text("hidden")
    monkeypatch.setenv("MODEL_LOG_LEVEL", "DEBUG")
    addons.print_tensor(x, title="shown")
    addons.print_text("text", popxl.constant(7))
    print_named_tensors(NamedTensors(w=NamedTensors(b=x)))
    with popxl.Session(ir) as session:
        session.run()
    printed = capfd.readouterr().err
    assert "shown: [1.5" in printed
    assert "text: 7" in printed
    assert "w.b: [1.5" in printed
    assert "hidden" not in printed
    monkeypatch.setenv("MODEL_LOG_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="'LOUD'"):
        addons.print_text("x")


# ---- cross entropy ------------------------------------------------------------------------------
LOGITS = np.random.default_rng(0).normal(0, 3, size=(5, 4)).astype(np.float32)
LABELS = np.array([0, 3, 3, 1, 2], np.int32)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [None, 3])
def test_cross_entropy(reduction, ignore):
    class Loss(Module):
        def build(self, x, labels):
            return addons.cross_entropy(x, labels, ignore, reduction)

    (loss,) = run_module(Loss(), TensorInput(LOGITS), TensorInput(LABELS))
    wanted = torch.nn.functional.cross_entropy(
        torch.tensor(LOGITS), torch.tensor(LABELS).long(), reduction=reduction,
        ignore_index=-100 if ignore is None else ignore,
    )  # fmt: skip
    np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-6)


def test_cross_entropy_with_its_gradient():
    class Loss(Module):
        def build(self, x, labels):
            return addons.cross_entropy_with_grad(x, labels, loss_scaling=8, ignore_index=1)

    loss, dx = run_module(Loss(), TensorInput(LOGITS), TensorInput(LABELS))
    t = torch.tensor(LOGITS, requires_grad=True)
    wanted = torch.nn.functional.cross_entropy(t, torch.tensor(LABELS).long(), ignore_index=1)
    (wanted * 8).backward()
    np.testing.assert_allclose(loss, wanted.detach(), rtol=1e-5)
    np.testing.assert_allclose(dx, t.grad, rtol=1e-4, atol=1e-6)


# ---- utilities ----------------------------------------------------------------------------------
def test_weights_are_checked_when_they_are_put_in(ir):
    v = popxl.variable(np.zeros((2, 3), np.float16))
    weights = WeightsDict({v: np.ones((2, 3))})
    assert weights[v].dtype == np.float16
    assert dict(weights).keys() == {v}
    with pytest.raises(ValueError, match=r"shape \(2, 3\), but has \(3, 2\)"):
        weights[v] = np.ones((3, 2))
    with pytest.raises(TypeError, match="must be variables"):
        weights["w"] = np.ones(2)
    del weights[v]
    assert len(weights) == 0


def test_ordered_dict_by_position():
    d = OrderedDict(b=1, a=2)
    assert (d.idx(0), d.idx(-1)) == (1, 2)


def test_timer_logs_its_title_at_the_start_and_the_end(caplog, monkeypatch):
    run = types.SimpleNamespace(summary={})
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    caplog.set_level(logging.INFO)
    with timer("Loading all weights"):
        assert "Loading all weights" in caplog.text
        assert "duration" not in caplog.text
    assert "Loading all weights duration: 0.00 mins" in caplog.text
    assert list(run.summary) == ["loading_all_weights_mins"]


def test_names_of_derived_graphs():
    assert suffix_graph_name("f_subgraph(0)", "grad") == "f_grad"
    assert suffix_graph_name("f", "grad") == "f_grad"


def test_overridden_methods_are_found():
    class Child(Module):
        def build(self):
            pass

    assert overrides(Child, Module, "build")
    assert not overrides(Child, Module, "build_grad")


def test_duplicates_in_order():
    assert duplicate_items([3, 1, 3, 2, 1]) == [3, 1]


def test_remapping_tensors(ir):
    a, b = popxl.constant(1.0), popxl.constant(2.0)
    tree = NamedTensors(x=NamedTensors(y=a))
    assert tree.remap({a: b}).x.y is b
    assert tree.tensors == (a,)
    assert tree.named_tensors == {"x.y": a}
    with pytest.raises(KeyError):
        tree.remap({})


def test_available_memory_proportions_are_attributes_of_ops(ir):
    x = popxl.variable(np.ones((2, 2), np.float32))
    graph = ir.create_graph(lambda x: ops.matmul(ops.relu(x), x), x)
    (y,) = ops.call(graph, x)
    rows = ops.gather(y, popxl.constant([0]), available_memory_proportion=0.2)
    ops.matmul(rows, x)
    addons.set_graph_available_memory_proportion_by_ipu(graph, (0.3,))
    addons.set_available_memory_proportion_by_ipu(ir, [0.4])
    assert "matmul(%relu_out, %x) available_memory_proportion=0.3" in str(graph)
    text = str(ir.main_graph)
    assert "available_memory_proportion=0.2" in text
    assert "available_memory_proportion=0.4" in text
    assert (str(graph) + text).count("available_memory_proportion=") == 3
    with popxl.Session(ir, "cpu") as session:
        session.run()


def test_an_ipu_without_a_proportion_is_named(ir):
    with popxl.ipu(1):
        ops.matmul(popxl.constant(np.ones((2, 2))), popxl.constant(np.ones((2, 2))))
    with pytest.raises(ValueError, match="matmul is on IPU 1, but there are 1 available"):
        addons.set_available_memory_proportion_by_ipu(ir, [0.4])


def test_hints_are_accepted(ir):
    addons.disable_fc_pass(ir)
    addons.enable_fc_pass(ir)
    for wrong in (0, 2):
        with pytest.raises(ValueError, match=str(wrong)):
            addons.set_available_memory_proportion_by_ipu(ir, [wrong])


def test_the_package_says_which_it_is():
    assert addons.GIT_COMMIT.startswith("popxl-xla ")


def test_helpers_run_programs():
    (y,) = single_run(lambda: [ops.identity(popxl.constant(3.0))])
    assert y == 3


# ---- saturate -----------------------------------------------------------------------------------
def test_saturate_cuts_off_and_lets_gradients_through(ir):
    x = popxl.variable(np.array([-9.0, -1.0, 2.0, np.inf], np.float32))
    graph = ir.create_graph(lambda t: saturate(t, limit=3.0), x)
    gradient = popxl.transforms.autodiff(graph)
    call = ops.call_with_info(graph, x)
    (dx,) = ops.call(gradient.graph, x, inputs_dict=gradient.inputs_dict(call))
    y_out, dx_out = (addons.host_store(t) for t in (call.outputs[0], dx))
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    np.testing.assert_array_equal(found[y_out], [-3, -1, 2, 3])
    np.testing.assert_array_equal(found[dx_out], [-9, -1, 2, np.inf])
