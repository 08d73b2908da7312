"""The programs of popxl_addons' document on phased execution, word for word.

The names they use are those of `popxl_addons`' top level; what the document leaves open, such as
the spec of the input, is set before. Each is compared with numpy.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import (
    NamedTensors,
    all_gather_replica_sharded_graph,
    load_remote_graph,
    named_variable_buffers,
)

LINEAR = """
class Linear(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (2, 2)), x.dtype)
        y = x @ w
        return y

args, graph = Linear().create_graph(x_spec)
"""

ALWAYS_LIVE = """
variables = args.init()  # NamedTensor(w=popxl.Variable)
"""

REMOTE = """
buffers = named_variable_buffers(args)
variables = args.init_remote(buffers, 0)
"""

LOADED = """
load_graph, names = load_remote_graph(buffers)
ts = load_graph.call(0)
vs = NamedTensors.pack(names, ts)
"""

THRESHOLD = """
buffers = named_variable_buffers(args, sharded_threshold=16)
variables = args.init_remote(buffers, 0)
"""

GATHERED = """
load_graph, names = load_remote_graph(buffers)

ts = load_graph.call(0)
v_shards = NamedTensors.pack(names, ts)

gather_graph, names = all_gather_replica_sharded_graph(v_shards)

ts = gather_graph.bind(v_shards).call()
vs = NamedTensors.pack(names, ts)
"""

WHOLE_STEP = """
# psuedo-code
for _ in range(GA):
    fwd
    loss
    bwd
optimiser
"""

LAYERS = """
# Layer A
vs = load()
xs = load()
ys = a.bind(vs).call(xs)
store(ys)

# Layer B
vs = load()
ys = load()
ys = b.bind(vs).call(xs)
store(ys)
"""

LOOP_OUTSIDE = """
for _ in range(gradient_accumulation_steps):
    ...
    # Layer A
    vs = load()
    xs = load()
    ys = a.bind(vs).call(xs)
    store(ys)

    # Layer B
    vs = load()
    ys = load()
    ys = b.bind(vs).call(xs)
    store(ys)
    ...
optimiser
"""

LOOP_INSIDE = """
...
# Layer A
vs = load()
for _ in range(gradient_accumulation_steps):
    xs = load()
    ys = a.bind(vs).call(xs)
    store(ys)

# Layer B
vs = load()
for _ in range(gradient_accumulation_steps):
    vs = load()
    ys = load()
    ys = b.bind(vs).call(xs)
    store(ys)
...
optimiser
"""

X = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
REPLICAS = pytest.mark.parametrize("replicas", [1, 4])


class Page:
    """A program of the document's snippets. `names` are its global names."""

    def __init__(self, replicas: int, variable: int = 4) -> None:
        """`variable`: elements of w; the document's has 4, and (8, 2) shows the threshold."""
        self.ir = popxl.Ir(replication=replicas)
        self.shape = (2, 2) if variable == 4 else (variable // 2, 2)
        self.x = X if variable == 4 else np.repeat(X, variable // 4, 1)
        self.names = {
            "addons": addons, "popxl": popxl, "np": np, "partial": partial,
            "NamedTensors": NamedTensors, "named_variable_buffers": named_variable_buffers,
            "load_remote_graph": load_remote_graph,
            "all_gather_replica_sharded_graph": all_gather_replica_sharded_graph,
            "x_spec": popxl.TensorSpec(self.x.shape, popxl.float32),
        }  # fmt: skip
        self.run(LINEAR.replace("(2, 2)", str(self.shape)))

    def run(self, *snippets: str) -> None:
        with self.ir.main_graph:
            for snippet in snippets:
                exec(compile(snippet, "phased_execution.md", "exec"), self.names)

    def check(self, vs: NamedTensors, variables: NamedTensors) -> None:
        """The graph with `vs` multiplies by the variable's value, on each replica."""
        with self.ir.main_graph:
            (y,) = self.names["graph"].bind(vs).call(popxl.constant(self.x))
            out = addons.host_store(y)
        with popxl.Session(self.ir, "ipu_model") as session:
            found = session.run()[out]
            w = session.get_tensor_data(variables.w)
        assert w.shape == self.shape
        assert w.std() > 0
        for replica in found.reshape(-1, *y.shape):
            np.testing.assert_allclose(replica, self.x @ w, rtol=1e-5, atol=1e-7)


@REPLICAS
def test_variables_that_are_always_live(replicas):
    page = Page(replicas)
    page.run(ALWAYS_LIVE)
    variables = page.names["variables"]
    assert isinstance(variables.w, popxl.tensor.Variable)
    page.check(variables, variables)


@REPLICAS
def test_variables_in_remote_buffers(replicas):
    """On several replicas the buffer is sharded by default: what is loaded is a shard."""
    page = Page(replicas)
    page.run(REMOTE, LOADED)
    vs, variables = page.names["vs"], page.names["variables"]
    assert page.names["names"] == ["w"]
    assert page.names["buffers"].w.tensor_shape == ((2, 2) if replicas == 1 else (1,))
    if replicas > 1:
        assert (vs.w.shape, vs.w.meta_shape) == ((1,), (2, 2))
        with page.ir.main_graph:
            gather, names = all_gather_replica_sharded_graph(vs)
            vs = NamedTensors.pack(names, gather.bind(vs).call())
    page.check(vs, variables)


@REPLICAS
@pytest.mark.parametrize(("variable", "sharded"), [(4, False), (12, False), (16, True)])
def test_variables_from_a_size_on_are_sharded(replicas, variable, sharded):
    page = Page(replicas, variable)
    page.run(THRESHOLD, GATHERED)
    names, shape = page.names, page.shape
    shard = (variable // replicas,) if sharded and replicas > 1 else shape
    assert names["buffers"].w.tensor_shape == names["v_shards"].w.shape == shard
    assert names["vs"].w.shape == shape
    page.check(names["vs"], names["variables"])


# ---- batch serialisation ------------------------------------------------------------------------
STEPS = 3


class Loops(Page):
    """Two layers whose weights, inputs and outputs are in remote buffers.

    `load()` gives the next of a list of what the snippet loads: a layer's weights, or the
    activation of a micro-batch. `store(ys)` puts a result into the next entry of a buffer.
    """

    def __init__(self, replicas: int, order: list[str]) -> None:
        super().__init__(replicas)
        names, (rows, width) = self.names, X.shape
        self.loads, self.stored = iter(order), 0
        with self.ir.main_graph:
            buffers = named_variable_buffers(names["args"], entries=2)
            self.variables = [names["args"].init_remote(buffers, i, f"l{i}") for i in range(2)]
            self.load_weights, self.weight_names = load_remote_graph(buffers, 2)
            shards = NamedTensors.pack(self.weight_names, self.load_weights.graph.outputs)
            self.gather, _ = all_gather_replica_sharded_graph(shards)
            self.buffer = popxl.remote_buffer((rows, width), popxl.float32, 4 * STEPS)
            for i in range(STEPS):
                ops.remote_store(self.buffer, i, popxl.constant(X * (i + 1)))
            self.at = {"x": 0, "y": 0}
        names.update(
            a=names["graph"], b=names["graph"], load=self.load, store=self.store, GA=STEPS,
            gradient_accumulation_steps=STEPS, optimiser=None, fwd=None, loss=None, bwd=None,
        )  # fmt: skip

    def load(self):
        what = next(self.loads)
        if what in "AB":
            ts = self.load_weights.call("AB".index(what))
            shards = NamedTensors.pack(self.weight_names, ts)
            return NamedTensors.pack(self.weight_names, self.gather.bind(shards).call())
        self.at[what] += 1
        return ops.remote_load(self.buffer, (0 if what == "x" else STEPS) + self.at[what] - 1)

    def store(self, ys):
        (y,) = ys
        ops.remote_store(self.buffer, STEPS + self.stored, y)
        self.stored += 1

    def results(self):
        with self.ir.main_graph:
            outs = [
                addons.host_store(ops.remote_load(self.buffer, STEPS + i))
                for i in range(self.stored)
            ]
        with popxl.Session(self.ir, "ipu_model") as session:
            found = session.run()
            weights = [session.get_tensor_data(v.w).copy() for v in self.variables]
        return [found[s].reshape(-1, *X.shape)[-1] for s in outs], weights


@REPLICAS
@pytest.mark.parametrize(
    ("snippet", "order", "micro_batches", "of_b"),
    [
        (LAYERS, ["A", "x", "B", "y"], [1], [1]),
        (LOOP_OUTSIDE, ["A", "x", "B", "y"] * STEPS, [1, 2, 3], [1, 2, 3]),
        # The document's layer B reads xs, which the loop of layer A has left at the last.
        (
            LOOP_INSIDE,
            ["A"] + ["x"] * STEPS + ["B"] + ["B", "y"] * STEPS,
            [1, 2, 3],
            [3, 3, 3],
        ),
    ],
    ids=["layers", "loop_outside", "loop_inside"],
)
def test_the_order_of_loops(replicas, snippet, order, micro_batches, of_b):
    page = Loops(replicas, order)
    page.run(WHOLE_STEP, snippet)
    assert next(page.loads, "none left") == "none left"
    found, (w_a, w_b) = page.results()
    of_a = [X * i @ w_a for i in micro_batches]
    of_b = [X * i @ w_b for i in of_b]
    outside = snippet is LOOP_OUTSIDE
    expected = (
        [y for pair in zip(of_a, of_b, strict=True) for y in pair] if outside else of_a + of_b
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
