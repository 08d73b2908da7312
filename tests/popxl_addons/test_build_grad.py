"""Modules with a gradient written by hand."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popart import popart_exception
from popxl import ops
from popxl.transforms import ExpectedConnectionType
from popxl_addons import Module
from tests.popxl_addons.helpers import replicas_run

SPEC = popxl.TensorSpec((2, 4), popxl.float32)
FWD, GRAD = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad
rng = np.random.default_rng(0)


@pytest.fixture
def ir():
    ir = popxl.Ir()
    with ir.main_graph:
        yield ir


class Affine(Module):
    """y = (x * s) @ w + b, with gradients `factor` times too big, to see whose are used."""

    def __init__(self, factor=2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, x, s):
        w = self.add_variable_input("w", lambda: np.full((4, 3), 0.5), x.dtype)
        b = self.add_variable_input("b", lambda: np.ones(3), x.dtype)
        scaled = x * s
        self.aux["x"], self.aux["w"], self.aux["scaled"] = x, w, scaled
        self.aux["s"], self.aux["rows"] = s, x.shape[0]
        return scaled @ w + b

    def build_grad(self, dy):
        d_scaled = dy @ self.aux["w"].T
        self.var_grad["b"] = ops.sum(dy, axis=0) * self.factor
        self.var_grad["w"] = self.aux["scaled"].T @ dy * self.factor
        assert self.aux["w"] is self.aux["w"]
        ds = ops.sum(d_scaled * self.aux["x"], axis=0)
        return d_scaled * self.aux["s"] * self.factor, ds * self.factor


S = popxl.TensorSpec((4,), popxl.float32)


def affine(**kwargs):
    return Affine(**kwargs).create_graph(SPEC, S)


def connections(expected):
    return [(c.connection_type, c.fwd_tensor) for c in expected]


# ---- inputs and outputs -------------------------------------------------------------------------
def test_kept_tensors_become_outputs_of_the_forward_graph(ir):
    _, fwd = affine()
    graph = fwd.graph
    (y,) = graph.outputs
    grad = fwd.autodiff()
    x, s, w, b = graph.inputs
    scaled = graph.outputs[3]
    assert graph.outputs == (y, x, w, scaled, s)
    # Reading order: w, scaled, x, s.
    wanted = [(GRAD, y), (FWD, w), (FWD, scaled), (FWD, x), (FWD, s)]
    assert connections(grad.grad_graph_info.expected_inputs) == wanted
    assert len(grad.graph.inputs) == len(graph.outputs)
    assert connections(grad.grad_graph_info.expected_outputs) == [(GRAD, t) for t in (x, s, w, b)]
    again = fwd.autodiff(force=True)
    assert len(graph.outputs) == 5
    assert connections(again.grad_graph_info.expected_inputs) == wanted


def test_calls_made_afterwards_return_what_was_kept():
    x, s = (rng.normal(size=n).astype(np.float32) for n in ((1, 2, 4), (1, 4)))

    def build(x, s):
        facts, fwd = affine()
        fwd.autodiff()
        return list(fwd.bind(facts.init()).call(x, s))

    y, kept_x, w, scaled, kept_s = replicas_run(1, build, {"x": x, "s": s})
    np.testing.assert_array_equal(kept_x, x[0])
    np.testing.assert_array_equal(kept_s, s[0])
    np.testing.assert_allclose(scaled, x[0] * s[0], rtol=1e-6)
    np.testing.assert_allclose(y, scaled @ w + 1, rtol=1e-5)


def test_an_output_that_is_kept_is_an_output_twice(ir):
    class Exp(Module):
        def build(self, x):
            self.aux["y"] = y = ops.exp(x)
            return y

        def build_grad(self, dy):
            return dy * self.aux["y"]

    _, fwd = Exp().create_graph(SPEC)
    grad = fwd.autodiff()
    assert fwd.graph.outputs == (fwd.graph.outputs[0],) * 2
    assert len(grad.graph.inputs) == 2


def test_what_is_not_read_is_no_input(ir):
    class Idle(Module):
        def build(self, x):
            self.aux["x"], self.aux["two"] = x, 2.0
            return x * 2.0

        def build_grad(self, dy):
            assert "x" in self.aux
            assert "other" not in self.aux
            return dy * self.aux["two"]

    _, fwd = Idle().create_graph(SPEC)
    grad = fwd.autodiff()
    assert len(fwd.graph.outputs) == 2
    assert len(grad.graph.inputs) == 1


# ---- when aux and var_grad can be used ----------------------------------------------------------
def test_kept_values_are_read_while_build_grad_runs(ir):
    class Curious(Module):
        def build(self, x):
            assert "x" not in self.aux
            self.aux["x"] = x
            assert "x" in self.aux
            with pytest.raises(RuntimeError, match=r"aux\['x'\] is read outside build_grad"):
                _ = self.aux["x"]
            with pytest.raises(RuntimeError, match="var_grad"):
                self.var_grad["x"] = x
            with pytest.raises(RuntimeError, match="var_grad"):
                _ = self.var_grad["x"]
            return x * 1.0

        def build_grad(self, dy):
            with pytest.raises(RuntimeError, match="set in build_grad"):
                self.aux["late"] = dy
            with pytest.raises(KeyError, match="kept nothing"):
                _ = self.aux["late"]
            return dy

    module = Curious()
    _, fwd = module.create_graph(SPEC)
    fwd.autodiff()
    assert "x" in module.aux
    for wrong in (lambda: module.aux["x"], lambda: module.aux.x, lambda: module.var_grad["w"]):
        with pytest.raises(RuntimeError, match="outside build_grad"):
            wrong()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda dy, w: 1.0, TypeError, "must be a tensor"),
        (lambda dy, w: None, TypeError, "must be a tensor"),
        (lambda dy, w: dy, ValueError, r"must have shape \(4, 3\) .* but has \(2, 3\)"),
    ],
)
def test_gradients_of_variables_are_checked_when_they_are_set(ir, value, error, message):
    class Careless(Affine):
        def build_grad(self, dy):
            with pytest.raises(error, match=message):
                self.var_grad["w"] = value(dy, self.aux["w"])
            with pytest.raises(KeyError, match=r"no variable 'x': \['w', 'b'\]"):
                self.var_grad["x"] = dy
            with pytest.raises(KeyError, match="no 'w' yet"):
                _ = self.var_grad["w"]
            found = super().build_grad(dy)
            assert self.var_grad["w"] is self.var_grad.w
            return found

    _, fwd = Careless().create_graph(SPEC, S)
    fwd.autodiff()


def test_gradients_of_shards_are_shards():
    ir = popxl.Ir(replication=2)

    class Sharded(Module):
        def build(self, x):
            w = self.add_replica_sharded_variable_input("w", lambda: np.ones((2, 3)), x.dtype)
            self.aux["w"] = w
            return x * ops.collectives.replicated_all_gather(w, output_shape="meta_shape")

        def build_grad(self, dy):
            shard = self.aux["w"]
            with pytest.raises(ValueError, match=r"meta_shape \(2, 3\), but has \(3,\) and \(\)"):
                self.var_grad["w"] = shard.reshape((3,)) * 1.0
            self.var_grad["w"] = ops.collectives.replica_sharded_slice(dy)
            return dy

    with ir.main_graph:
        _, fwd = Sharded().create_graph(popxl.TensorSpec((2, 3), popxl.float32))
        grad = fwd.autodiff()
    assert grad.graph.outputs[1].meta_shape == (2, 3)


# ---- what is given and wanted -------------------------------------------------------------------
def returning(*results):
    """A module of two inputs whose `build_grad` returns gradients made by these functions."""

    class Made(Module):
        def build(self, a, b):
            self.add_variable_input("w", lambda: np.ones(4), a.dtype)
            return a * 1.0, b * 2.0

        def build_grad(self, da, db=None):
            self.var_grad["w"] = ops.sum(da, axis=0)
            return [f(da) for f in results]

    return Made().create_graph(SPEC, SPEC)[1]


def same(t):
    return t * 1.0


def test_gradients_come_first_and_then_those_of_variables_in_order(ir):
    _, fwd = affine()
    x, s, w, b = fwd.graph.inputs
    for required, wanted in [([b, x, w], [x, b, w]), ([w, s, x, b], [s, x, w, b]), ([w], [w])]:

        def choose(self, dy, required=required):
            found = dict(zip((x, s), Affine.build_grad(self, dy), strict=True))
            return [found[t] for t in required if t in found]

        class Chosen(Affine):
            build_grad = choose

        fwd._from_module = Chosen()
        info = fwd.autodiff(grads_required=required, force=True).grad_graph_info
        assert connections(info.expected_outputs) == [(GRAD, t) for t in wanted]
        assert [t.shape for t in info.graph.outputs] == [t.shape for t in wanted]


def test_fewer_gradients_may_be_provided(ir):
    fwd = returning(same, same)
    first, second = fwd.graph.outputs
    info = fwd.autodiff(grads_provided=[first]).grad_graph_info
    assert connections(info.expected_inputs) == [(GRAD, first)]
    info = fwd.autodiff(grads_provided=[second, first], force=True).grad_graph_info
    assert connections(info.expected_inputs) == [(GRAD, second), (GRAD, first)]


@pytest.mark.parametrize(
    ("results", "choice", "message"),
    [
        ((same, same, same), {}, "returns 3 gradients, but those of 2 inputs"),
        ((same, same), {"required": [0, 2]}, "returns 2 gradients, but those of 1 inputs"),
        ((lambda t: ops.sum(t, axis=0), same), {}, r"for 'a' must have shape \(2, 4\)"),
        ((lambda t: None,), {"required": [0]}, r"no gradient of \['a'\]"),
        ((), {"provided": []}, "does not take the gradients of 0 outputs"),
        ((), {"provided": [0, 1, 0]}, "grads_provided has .* twice"),
        ((), {"required": [0, 1, 0]}, "grads_required has .* twice"),
        ((same,), {}, "returns 1 gradients, but those of 2 inputs"),
    ],
)
def test_what_does_not_fit_is_refused(ir, results, choice, message):
    fwd = returning(*results)
    kwargs = {
        "grads_provided": [fwd.graph.outputs[i] for i in choice["provided"]]
        if "provided" in choice
        else None,
        "grads_required": [fwd.graph.inputs[i] for i in choice["required"]]
        if "required" in choice
        else None,
    }
    with pytest.raises(ValueError, match=message):
        fwd.autodiff(**kwargs)


def test_a_variable_without_a_gradient_is_refused(ir):
    class Lazy(Affine):
        more = (None,)

        def build_grad(self, dy):
            return dy @ self.aux["w"].T, *self.more

    _, fwd = Lazy().create_graph(SPEC, S)
    x, b = fwd.graph.inputs[0], fwd.args.b
    with pytest.raises(ValueError, match=r"no gradient of \['w', 'b'\]"):
        fwd.autodiff()
    Lazy.more = ()
    with pytest.raises(ValueError, match=r"no gradient of \['b'\]"):
        fwd.autodiff(grads_required=[x, b])
    fwd.autodiff(grads_required=[x])


@pytest.mark.parametrize(
    "build_grad",
    [lambda self, *grads: grads, lambda self, dy, **kw: dy, lambda self, dy, *, scale=1.0: dy],
)
def test_parameters_of_build_grad_are_positional(ir, build_grad):
    made = type("Made", (Module,), {"build": lambda self, x: x * 1.0, "build_grad": build_grad})
    _, fwd = made().create_graph(SPEC)
    with pytest.raises(TypeError, match="not a positional one"):
        fwd.autodiff()


def test_a_module_with_its_own_gradient_has_no_cache(ir):
    with pytest.raises(ValueError, match="cannot have a cache"):
        Affine(cache=True)


@pytest.mark.parametrize("what", ["grads_provided", "grads_required"])
def test_tensors_of_elsewhere_are_refused_before_build_grad_runs(ir, what):
    class Never(Module):
        def build(self, x):
            return (x + 1.0) * 2.0

        def build_grad(self, dy):
            raise AssertionError("build_grad ran")

    _, fwd = Never().create_graph(SPEC)
    inside = fwd.graph.tensors[-2]
    assert inside not in (*fwd.graph.inputs, *fwd.graph.outputs)
    with pytest.raises(ValueError, match=f"{what}.* is no"):
        fwd.autodiff(**{what: [inside]})


def test_build_grad_needs_a_module(ir):
    graph = ir.create_graph(lambda x: x * 2.0, SPEC)
    named = addons.GraphWithNamedArgs(graph)
    with pytest.raises(ValueError, match="comes from no module"):
        named.autodiff(method="build_grad")
    named.autodiff()
    with pytest.raises(ValueError, match="differentiated already"):
        named.autodiff()


# ---- inline calls -------------------------------------------------------------------------------
class Inlining(Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.inner = Affine(**kwargs)

    def build(self, x, s):
        return self.inner(x, s)


def test_inline_calls_of_modules_with_their_own_gradient(ir, recwarn):
    with pytest.raises(RuntimeError, match="call_module"):
        Inlining().create_graph(SPEC, S)
    with pytest.warns(UserWarning, match="call_module"):
        Inlining(grad_inlining_error="warning").create_graph(SPEC, S)
    recwarn.clear()
    Inlining(grad_inlining_error="none").create_graph(SPEC, S)
    assert not recwarn.list
    with pytest.raises(ValueError, match="error, warning, none, not 'ignore'"):
        Affine(grad_inlining_error="ignore")


# ---- call_module --------------------------------------------------------------------------------
class Calling(Module):
    """Calls a module as a graph."""

    def __init__(self, inner=None, **how):
        super().__init__()
        self.inner = inner or Affine()
        self.how = how

    def build(self, x, s):
        outputs = self.call_module(self.inner, **self.how)(x, s)
        assert isinstance(outputs, tuple)
        assert len(outputs) == 1
        return outputs[0] * 1.0


class Passing(Module):
    """Has a module that calls one, inline or as a graph, or by hand."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.mid = Calling()

    def build(self, x, s):
        if self.way == "inline":
            return self.mid(x, s)
        if self.way == "call_module":
            return self.call_module(self.mid)(x, s)[0]
        facts, graph = self.mid.create_graph(x, s)
        return graph.bind(self.add_variable_inputs("mid", facts)).call(x, s)[0]


def gradients(module):
    """Gradients of all inputs for ones, against those of the ops: their ratio."""
    x, s = (rng.normal(size=n).astype(np.float32) for n in ((2, 4), (4,)))

    def build(x, s):
        facts, fwd = module.create_graph(x, s)
        grad = addons.autodiff(fwd)
        info = fwd.bind(facts.init()).call_with_info(x, s)
        dy = popxl.constant(np.ones((2, 3), np.float32))
        args = grad.grad_graph_info.inputs_dict(info)
        return list(grad.call(dy, args=args))

    found = replicas_run(1, build, {"x": x[None], "s": s[None]})
    w = np.full((4, 3), 0.5)
    dx = np.ones((2, 3)) @ w.T
    wanted = [dx * s, (dx * x).sum(0), (x * s).T @ np.ones((2, 3)), np.full(3, 2)]
    return [np.median(f / g) for f, g in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("way", ["inline", "call_module", "by hand"])
def test_a_written_gradient_is_used_wherever_its_graph_is_called(way):
    np.testing.assert_allclose(gradients(Passing(way)), 2.0, rtol=1e-5)


def test_the_transform_s_gradient_is_used_if_it_is_asked_for():
    np.testing.assert_allclose(gradients(Calling(autodiff="autodiff")), 1.0, rtol=1e-5)


@pytest.mark.parametrize("way", ["inline", "call_module", "by hand"])
@pytest.mark.parametrize("differentiate", [lambda g: g.autodiff(), addons.autodiff])
def test_a_graph_with_a_written_gradient_is_not_differentiated_by_the_transform(
    ir, way, differentiate
):
    _, fwd = Passing(way).create_graph(SPEC, S)
    ((inner, info),) = fwd.called_graphs_grad_info.items()
    assert isinstance(inner, popxl.Graph)
    assert info.forward_graph is inner
    fwd.called_graphs_grad_info = {}
    with pytest.raises(popart_exception, match="written by hand"):
        differentiate(fwd)
    fwd.called_graphs_grad_info = {inner: info}
    differentiate(fwd)


def test_auto_leaves_modules_without_build_grad_to_the_transform(ir):
    class Plain(Module):
        def build(self, x, s):
            return x * s @ self.add_variable_input("w", lambda: np.ones((4, 3)), x.dtype)

    _, fwd = Calling(Plain()).create_graph(SPEC, S)
    assert fwd.called_graphs_grad_info == {}
    assert fwd.autodiff().graph.outputs
    _, fwd = Calling(Plain(), autodiff="autodiff").create_graph(SPEC, S)
    assert len(fwd.called_graphs_grad_info) == 1


def test_a_module_without_variables_is_called_twice(ir):
    class Square(Module):
        def build(self, x):
            self.aux["x"] = x
            return x * x

        def build_grad(self, dy):
            return dy * self.aux["x"] * 2.0

    class Twice(Module):
        def __init__(self):
            super().__init__()
            self.square = Square()

        def build(self, x):
            for _ in range(2):
                (x,) = self.call_module(self.square)(x)
            return x

    facts, fwd = Twice().create_graph(SPEC)
    assert facts.len() == 0
    assert len(fwd.called_graphs_grad_info) == 2
    fwd.autodiff()


def test_members_of_lists_are_called_by_their_names(ir):
    class Stack(Module):
        def __init__(self):
            super().__init__()
            self.layers = Module.from_list([Calling(), Calling()])

        def build(self, x, s):
            (first,) = self.call_module(self.layers[0])(x, s)
            (second,) = self.call_module(self.layers[1])(x, s)
            return first + second

    facts, fwd = Stack().create_graph(SPEC, S)
    assert facts.keys_flat() == [f"layers.{i}.inner.{n}" for i in range(2) for n in "wb"]
    assert len(fwd.called_graphs_grad_info) == 2
    fwd.autodiff()
