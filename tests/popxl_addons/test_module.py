import numpy as np
import pytest

import popxl
from popxl import ops
from popxl_addons import GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.graph_cache import GraphCache, function
from popxl_addons.layers import Linear
from popxl_addons.module import create_grad_graph_info
from popxl_addons.testing_utils import TensorInput, ops_of_type, run_module
from popxl_addons.variable_factory import VariableFactory

SPEC = popxl.TensorSpec((2, 4), popxl.float32)


class Scale(Module):
    def __init__(self, value, **kwargs):
        super().__init__(**kwargs)
        self.value = value

    def build(self, x):
        w = self.add_variable_input("w", lambda: np.full(x.shape[-1], self.value), x.dtype)
        return x * w


class Net(Module):
    def __init__(self):
        super().__init__()
        self.first = Scale(2)
        self.layers = Module.from_list([Scale(3), Scale(5)])

    def build(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x + self.add_variable_input("bias", lambda: np.ones(4), x.dtype)


@pytest.fixture
def ir():
    ir = popxl.Ir()
    with ir.main_graph:
        yield ir


def test_variables_of_sub_modules_are_named_after_attributes(ir):
    factories, graph = Net().create_graph(SPEC)
    names = ["first.w", "layers.0.w", "layers.1.w", "bias"]
    assert factories.keys_flat() == graph.args.keys_flat() == names
    assert tuple(graph.args.values_flat()) == graph.graph.inputs[1:]
    own = ["bias", "first/w", "layers/0/w", "layers/1/w"]
    assert isinstance(graph.args.tensors, tuple)
    assert [t.name for t in graph.args.tensors] == own
    assert graph.args.layers[1].w.name == "layers/1/w"


def test_a_module_computes_with_its_variables():
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    (y,) = run_module(Net(), TensorInput(x))
    np.testing.assert_array_equal(y, x * 30 + 1)


def test_weights_can_be_given():
    (y,) = run_module(Scale(2), TensorInput(np.ones(3)), weights=lambda v: {v.w: np.arange(3.0)})
    assert y.tolist() == [0, 1, 2]


def test_a_module_makes_many_graphs(ir):
    net = Net()
    assert net.create_graph(SPEC)[0].keys_flat() == net.create_graph(SPEC)[0].keys_flat()


class CallingStack(Module):
    def __init__(self):
        super().__init__()
        self.layer = Scale(2)

    def build(self, x):
        factories, graph = self.layer.create_graph(x)
        for i in range(2):
            (x,) = graph.bind(self.add_variable_inputs(i, factories)).call(x)
        return x


def test_a_sub_modules_graph_is_called_with_variables_of_its_own(ir):
    factories, graph = CallingStack().create_graph(SPEC)
    assert factories.keys_flat() == ["0.w", "1.w"]
    assert len(graph.graph.called_graphs) == 1


def test_a_sub_modules_graph_computes_with_each_set_of_variables():
    (y,) = run_module(CallingStack(), TensorInput(np.ones(3)))
    assert y.tolist() == [4, 4, 4]


def test_a_name_is_used_once(ir):
    class Twice(Module):
        def build(self, x):
            self.add_variable_input("w", lambda: np.zeros(4), x.dtype)
            return x * self.add_variable_input("w", lambda: np.ones(4), x.dtype)

    with pytest.raises(ValueError, match="has a variable 'w' already"):
        Twice().create_graph(SPEC)


def test_overwriting_replaces_the_variable(ir):
    class Twice(Module):
        def build(self, x):
            self.add_variable_input("w", lambda: np.zeros(4), x.dtype)
            return x * self.add_variable_input("w", lambda: np.ones(4), x.dtype, overwrite=True)

    _, graph = Twice().create_graph(SPEC)
    assert graph.args.tensors == graph.graph.inputs[2:]


def test_sub_modules_need_an_initialised_parent():
    class Careless(Module):
        def __init__(self):
            self.layer = Scale(1)

    with pytest.raises(AttributeError, match=r"super\(\).__init__"):
        Careless()


def test_inputs_from_factories(ir):
    class Uses(Module):
        def build(self, x):
            inputs = Module.from_variable_factories([VariableFactory(np.ones(4), name="a")])
            self.inputs = inputs
            return x * inputs[0]

    factories, _ = Uses().create_graph(SPEC)
    assert factories.keys_flat() == ["inputs.0"]


# ---- graphs with names --------------------------------------------------------------------------
def test_positional_inputs_fill_what_is_not_bound(ir):
    graph = ir.create_graph(
        lambda a, b, c: a * 100 + b * 10 + c, *[popxl.TensorSpec((), popxl.float32)] * 3
    )
    named = GraphWithNamedArgs(graph, NamedTensors(mid=graph.inputs[1]))
    one, two, three = (popxl.constant(float(i)) for i in (1, 2, 3))
    (y,) = named.bind(NamedTensors(mid=two, other=one)).call(one, three)
    (z,) = named.call(3.0, 1.0, args={graph.inputs[1]: two})
    streams = [popxl.d2h_stream((), popxl.float32) for _ in range(2)]
    ops.host_store(streams[0], y)
    ops.host_store(streams[1], z)
    with popxl.Session(ir) as session:
        out = session.run()
    assert [out[s] for s in streams] == [123, 321]
    with pytest.raises(ValueError, match="takes 2 positional"):
        named.bind(NamedTensors(mid=two)).call(one, two, three)
    with pytest.raises(ValueError, match="lacks"):
        named.call(one)


def test_binding_in_steps(ir):
    _, graph = Net().create_graph(SPEC)
    bound = graph.bind(NamedTensors(bias=popxl.constant(np.zeros(4, np.float32))))
    more = bound.bind({graph.args.first.w: popxl.constant(np.ones(4, np.float32))})
    assert (len(bound.args), len(more.args)) == (1, 2)


def test_a_graph_with_names_says_when_it_is_no_gradient(ir):
    _, graph = Scale(1).create_graph(SPEC)
    with pytest.raises(AttributeError, match="no gradient graph"):
        _ = graph.grad_graph_info
    assert not hasattr(graph, "grad_graph_info")
    with pytest.raises(ValueError, match="unknown method 'fast'"):
        graph.autodiff(method="fast")
    assert hasattr(graph.autodiff(), "grad_graph_info")


def test_a_schedule_is_text_to_print(ir, capsys):
    _, graph = Scale(1).create_graph(SPEC)
    text = graph.print_schedule()
    assert "mul" in text
    assert capsys.readouterr().out == ""


def test_variables_nest_under_dotted_names_and_numbers(ir):
    factories, _ = Scale(1).create_graph(SPEC)
    with ir.create_empty_graph("g"):
        outer = Module()
        inputs = outer.add_variable_inputs("a.b", factories)
        outer.add_variable_inputs(3, factories)
        assert (outer._args.a.b.w, inputs.w.name) == (inputs.w, "a.b.w")
        assert outer._factories.keys_flat() == ["a.b.w", "3.w"]
        with pytest.raises(ValueError, match="no key of a tree"):
            outer.add_variable_inputs(-1, factories)


# ---- caches -------------------------------------------------------------------------------------
def test_cached_modules_share_graphs_of_like_arguments(ir):
    module = Scale(2, cache=True)
    first, second = module.create_graph(SPEC), module.create_graph(SPEC)
    other = module.create_graph(popxl.TensorSpec((3,), popxl.float32))
    assert first[1].graph is second[1].graph is not other[1].graph
    assert second[0].keys_flat() == ["w"]
    first[0].pop("w")
    assert module.create_graph(SPEC)[0].keys_flat() == ["w"]


def test_graph_cache_goes_by_hash_and_place(ir):
    class Shift(Module):
        def __init__(self, by):  # no variables: the base class need not be set up
            self.by = by

        def build(self, x, times=1):
            return x + self.by * times

        def __hash__(self):
            return self.by

    cache, x = GraphCache(), popxl.constant(np.ones(2, np.float32))
    first = cache.create_graph(Shift(3), x)
    assert cache.create_graph(Shift(3), x, times=1) is first
    assert cache.create_graph(Shift(4), x) is not first
    assert cache.create_graph(Shift(3), x, 2) is not first
    assert cache.create_graph(Shift(3), x, -1) is not cache.create_graph(Shift(3), x, -2)
    with popxl.ipu(1):
        assert cache.create_graph(Shift(3), x) is not first
    with popxl.io_tiles():
        assert cache.create_graph(Shift(3), x) is not first
    assert Shift(3)(x).shape == (2,)


def test_cached_graphs_belong_to_one_ir():
    cache, graphs = GraphCache(), []
    for _ in range(2):
        with popxl.Ir().main_graph:
            graphs.append(cache.create_graph(lambda x: x + 1.0, popxl.constant(1.0)))
    assert graphs[0].ir is not graphs[1].ir


def test_graph_cache_tells_values_of_arguments_apart(ir):
    cache = GraphCache()

    def fn(x, n):
        return x + n

    a = popxl.constant(np.ones(2, np.float32))
    graphs = [cache.create_graph(fn, a, n) for n in (1, 1, 2, 1.0, 0.0, -0.0)]
    assert graphs[0] is graphs[1]
    assert len(set(graphs)) == 5
    with pytest.raises(TypeError, match="not hashable"):
        cache.create_graph(fn, a, {1, 2})


def test_function_turns_calls_into_calls_of_one_graph(ir):
    @function
    def double(x):
        return x * 2

    x = popxl.constant(np.ones(2, np.float32))
    double(double(x))
    assert ops_of_type(ir.main_graph.ops, "call") == 2
    assert len(ir.main_graph.called_graphs) == 1


# ---- hand-written gradients ---------------------------------------------------------------------
class Bent(Module):
    """Linear with a gradient three times too big, to see whose gradient is used."""

    def build(self, x):
        w = self.add_variable_input("w", lambda: np.ones((4, 3)), x.dtype)
        self.aux.x, self.aux["kept"] = x, [w, x * 1]
        return x @ w

    def build_grad(self, dy):
        w, x = self.aux.kept
        self.var_grad.w = self.aux["x"].T @ dy * 3
        assert x is not self.aux.x
        return dy @ w.T * 3


@pytest.mark.parametrize(("method", "factor"), [("auto", 3), ("build_grad", 3), ("autodiff", 1)])
def test_build_grad_is_used_unless_autodiff_is_asked_for(ir, method, factor):
    factories, graph = Bent().create_graph(SPEC)
    grad = graph.autodiff(method=method)
    with ir.main_graph:
        x = popxl.constant(np.arange(8, dtype=np.float32).reshape(2, 4))
        info = graph.bind(factories.init()).call_with_info(x)
        dy = popxl.constant(np.ones((2, 3), np.float32))
        outs = grad.call_with_info(dy, args=grad.grad_graph_info.inputs_dict(info))
        by_input = grad.grad_graph_info.fwd_graph_ins_to_grad_parent_outs(outs)
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in by_input.values()]
        for s, t in zip(streams, by_input.values(), strict=True):
            ops.host_store(s, t)
    with popxl.Session(ir) as session:
        out = session.run()
    assert list(by_input) == list(graph.graph.inputs)
    np.testing.assert_array_equal(out[streams[0]], np.full((2, 4), 3 * factor))
    np.testing.assert_array_equal(out[streams[1]][:, 0], np.array([4, 6, 8, 10]) * factor)


def test_call_module_brings_its_gradient_along(ir):
    class Parent(Module):
        def __init__(self):
            super().__init__()
            self.inner = Bent()

        def build(self, x):
            return self.call_module(self.inner)(x)[0] * 2

    factories, graph = Parent().create_graph(SPEC)
    assert factories.keys_flat() == ["inner.w"]
    grad = graph.autodiff(grads_required=[graph.args.inner.w])
    info = graph.bind(factories.init()).call_with_info(popxl.constant(np.ones((2, 4), np.float32)))
    (dw,) = grad.call(
        popxl.constant(np.ones((2, 3), np.float32)), args=grad.grad_graph_info.inputs_dict(info)
    )
    stream = popxl.d2h_stream(dw.shape, dw.dtype)
    ops.host_store(stream, dw)
    with popxl.Session(ir) as session:
        out = session.run()
    np.testing.assert_array_equal(out[stream], np.full((4, 3), 2 * 2 * 3))


def test_a_missing_gradient_is_named(ir):
    class Lazy(Bent):
        def build_grad(self, dy):
            return None

    _, graph = Lazy().create_graph(SPEC)
    with pytest.raises(ValueError, match="returns 0 gradients, but those of 1 inputs"):
        graph.autodiff(grads_required=[graph.graph.inputs[0]])


def test_differentiating_twice_needs_force(ir):
    _, graph = Linear(3).create_graph(SPEC)
    graph.autodiff()
    with pytest.raises(ValueError, match="already"):
        graph.autodiff()
    graph.autodiff(force=True)


def test_grad_graph_info_of_a_hand_made_graph(ir):
    forward = ir.create_graph(lambda x: x * x, SPEC)
    backward = ir.create_graph(lambda dy, x: dy * x * 2.0, SPEC, SPEC)
    dy, x = backward.inputs
    info = create_grad_graph_info(
        ir,
        forward,
        backward,
        {dy: forward.outputs[0]},
        {backward.outputs[0]: forward.inputs[0]},
        {x: forward.inputs[0]},
    )
    assert info.inputs == (forward.outputs[0], forward.inputs[0])
    with pytest.raises(ValueError, match=r"\['x'\] have none"):
        create_grad_graph_info(
            ir,
            forward,
            backward,
            {dy: forward.outputs[0]},
            {backward.outputs[0]: forward.inputs[0]},
            {},
        )
