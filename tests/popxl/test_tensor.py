"""Tensors: identity, operators, indexing, creation of constants and variables."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import f32, run

pytestmark = pytest.mark.usefixtures("compiled_quickly")


# ---- identity -----------------------------------------------------------------------------------
def test_text_of_tensors(ir):
    assert repr(popxl.variable([1], popxl.int32, "bob")) == "Variable[bob popxl.dtypes.int32 (1,)]"
    assert repr(popxl.constant(1.0, name="c")) == "Constant[c popxl.dtypes.float32 ()]"
    x = popxl.variable(np.ones((2, 3), np.float16))
    assert repr(x + x) == "Tensor[add_out popxl.dtypes.float16 (2, 3)]"


def test_tensors_are_equal_only_to_themselves(ir):
    a, b = popxl.variable(1.0), popxl.variable(1.0)
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2
    assert a in ir.main_graph
    assert "a" not in ir.main_graph


def test_a_tensor_is_found_after_its_graph_or_name_changes(ir):
    graph = ir.create_empty_graph("g")
    with graph:
        t = popxl.constant(1.0, name="c")
    places = {t: "here"}
    t._graph, t._name = ir.main_graph, "other"
    assert places[t] == "here"


def test_shape_facts(ir):
    x = popxl.variable(np.ones((2, 3, 4), np.float32))
    assert (x.rank, x.nelms, len(x), x.strides()) == (3, 24, 2, (48, 16, 4))
    assert x.strides((5, 6)) == (24, 4)
    assert x.meta_shape == ()
    assert x.spec == popxl.TensorSpec((2, 3, 4), popxl.float32)
    with pytest.raises(ValueError, match="scalar"):
        len(popxl.variable(1.0))


def test_an_empty_list_is_no_host_data(ir):
    x = popxl.variable(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="an empty list is no host data"):
        [] + x  # noqa: RUF005 - the operator is meant
    found = []
    with pytest.raises(ValueError, match="an empty list is no host data"):
        found += x
    for create in (popxl.variable, popxl.constant):
        with pytest.raises(ValueError, match="an empty list is no host data"):
            create([])
    assert popxl.constant(np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_names_stay_in_order_and_unique_for_many_tensors(ir):
    x = popxl.variable(1.0, name="x")
    names = [(x + x).name for _ in range(4)]
    assert names == ["add_out", "add_out__t0", "add_out__t1", "add_out__t2"]
    assert popxl.constant(1.0, name="add_out__t3").name == "add_out__t3"
    assert [(x + x).name for _ in range(2)] == ["add_out__t4", "add_out__t5"]


def test_tensors_are_not_iterable_and_hold_nothing(ir):
    x = popxl.variable(np.ones(3, np.float32))
    with pytest.raises(TypeError):
        iter(x)
    with pytest.raises(TypeError):
        1.0 in x  # noqa: B015


@pytest.mark.parametrize("kind", [popxl.Tensor, popxl.Constant, popxl.Variable])
def test_tensors_cannot_be_made_directly(kind):
    with pytest.raises(TypeError, match=f"Cannot create popxl.tensor.{kind.__name__}"):
        kind()


def test_specs_are_mappings():
    spec = popxl.TensorSpec([2, 3], popxl.float16)
    assert dict(**spec) == {"shape": (2, 3), "dtype": popxl.float16}
    shard = popxl.TensorSpec((2,), popxl.float16, (3,))
    assert shard.to_tuple() == ((2,), popxl.float16, (3,))
    assert shard != spec
    assert len({spec, popxl.TensorSpec((2, 3), popxl.float16)}) == 1


# ---- operators ----------------------------------------------------------------------------------
BINARY = {
    "+": (lambda a, b: a + b, lambda a: a + 2, lambda a: 2 + a),
    "-": (lambda a, b: a - b, lambda a: a - 2, lambda a: 2 - a),
    "*": (lambda a, b: a * b, lambda a: a * 2, lambda a: 2 * a),
    "/": (lambda a, b: a / b, lambda a: a / 2, lambda a: 2 / a),
    "**": (lambda a, b: a**b, lambda a: a**2, lambda a: 2**a),
}


def test_operators_match_numpy():
    a, b = np.abs(f32(3, 4)) + 0.5, np.abs(f32(3, 4, seed=1)) + 0.5
    row = f32(4, seed=2)

    def build(a, b, row):
        found = [f(*xs) for fs in BINARY.values() for f, xs in zip(fs, ((a, b), (a,), (a,)))]  # noqa: B905
        return [*found, -a, a @ b.T, a + row, row + a, np.float32(2) * a, row @ b.T, a % b]

    found = run(build, a, b, row)
    expected = [f(*xs) for fs in BINARY.values() for f, xs in zip(fs, ((a, b), (a,), (a,)))]  # noqa: B905
    expected += [-a, a @ b.T, a + row, row + a, 2 * a, row @ b.T, np.fmod(a, b)]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


def test_logical_operators_match_numpy():
    a, b = np.array([True, True, False]), np.array([True, False, False])
    found = run(lambda a, b: [a & b, a | b, ~a], a, b)
    for x, y in zip(found, [a & b, a | b, ~a], strict=True):
        np.testing.assert_array_equal(x, y)


def test_numbers_take_the_dtype_of_the_tensor(ir):
    for dtype in (popxl.float16, popxl.int32):
        x = popxl.variable(np.ones(2), dtype)
        assert (x + 1).dtype is (1 * x).dtype is dtype


def test_plus_equals_is_in_place_and_the_others_make_new_tensors():
    def build(x):
        x = x * 1.0
        old, y = x, x
        y += 1.0
        after_add = ops.identity(old)
        z, w = x, x
        z -= 10.0
        w *= 10.0
        return after_add, old, z, w

    x = f32(3)
    added, old, z, w = run(build, x)
    np.testing.assert_allclose(added, x + 1, rtol=1e-6)
    np.testing.assert_array_equal(old, added)
    np.testing.assert_allclose(z, x - 9, rtol=1e-5)
    np.testing.assert_allclose(w, (x + 1) * 10, rtol=1e-6)


def test_plus_equals_on_a_variable_persists():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(2, np.float32))
        alias = v
        v += 1.5
        other = alias * 1.0
        out = popxl.d2h_stream((2,), popxl.float32)
        ops.host_store(out, other)
    with popxl.Session(ir) as session:
        for n in (1, 2, 3):
            assert session.run()[out].tolist() == [1.5 * n] * 2
    assert session.get_tensor_data(ir.main_graph.variables[0]).tolist() == [4.5, 4.5]


# ---- shape methods and indexing -----------------------------------------------------------------
def test_shape_methods_match_numpy():
    x = f32(2, 3, 4)
    square = f32(3, 3)

    def build(x, square):
        return [x.T, x.transpose((1, 0, 2)), x.reshape((4, -1)), x.flatten(), x.detach(),
                square.diag(), x.reshape_((6, 4)), x.T_, x.flatten_(), x.detach_()]  # fmt: skip

    expected = [x.T, x.transpose(1, 0, 2), x.reshape(4, -1), x.ravel(), x, np.diag(square),
                x.reshape(6, 4), x.T, x.ravel(), x]  # fmt: skip
    for a, b in zip(run(build, x, square), expected, strict=True):
        np.testing.assert_array_equal(a, b)


KEYS = [
    0, -1, slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(-2, None),
    (0, 1), (slice(None), 2), (..., -1), (1, ..., slice(0, 2)), (slice(1), slice(1, 9), 0),
    (slice(3, 0, -2), slice(None)), ..., (),
]  # fmt: skip


def test_slicing_matches_numpy():
    x = f32(4, 3, 5)
    found = run(lambda x: [x[key] * 1.0 for key in KEYS], x)
    for key, y in zip(KEYS, found, strict=True):
        np.testing.assert_array_equal(y, x[key], err_msg=str(key))


def test_arrays_and_tensors_gather_and_masks_keep():
    x, index = f32(5, 2), np.array([[4, 0], [1, 1]], np.int32)
    mask = x > 0

    def build(x, index, mask):
        return [x[index], x[np.array([3, 1])], x[[2]], x[mask]]

    expected = [x[index], x[[3, 1]], x[[2]], np.where(mask, x, 0)]
    for a, b in zip(run(build, x, index, mask), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_wrong_indices_are_errors(ir):
    x = popxl.variable(np.ones((3, 2), np.float32), name="x")
    with pytest.raises(IndexError, match="index 3 is out of range for axis 0 of size 3"):
        x[3]
    with pytest.raises(ValueError, match="3 indices for 'x', which has 2 axes"):
        x[0, 0, 0]
    with pytest.raises(TypeError, match="cannot be indexed"):
        x["a"]
    with pytest.raises(TypeError, match="must be integer or bool"):
        x[popxl.variable(1.0)]


# ---- constants and variables --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "dtype"),
    [(1, popxl.int32), (1.0, popxl.float32), (True, popxl.bool), ([1, 2], popxl.int32),
     (np.float64(2), popxl.float32), (np.ones(2, np.uint64), popxl.uint32),
     (np.ones(2, np.float16), popxl.float16), (np.zeros((0, 3), np.int8), popxl.int8)],
)  # fmt: skip
def test_data_without_dtype_keeps_its_own_in_at_most_32_bits(ir, data, dtype):
    for make in (popxl.constant, popxl.variable):
        assert make(data).dtype is dtype


def test_a_given_dtype_converts(ir):
    v = popxl.variable([1.7, -1.7], popxl.int32)
    assert v._data.tolist() == [1, -1]


def test_variables_copy_their_data(ir):
    data = np.ones(2, np.float32)
    v = popxl.variable(data)
    data[:] = 7
    assert v._data.tolist() == [1, 1]


def test_torch_tensors_are_data(ir):
    torch = pytest.importorskip("torch")
    v = popxl.variable(torch.arange(3, dtype=torch.float64))
    assert (v.dtype, v._data.tolist()) == (popxl.float32, [0, 1, 2])


def test_variables_live_in_the_main_graph(ir):
    with pytest.raises(ValueError, match=r"variables live in the main graph.*pass it as an input"):
        ir.create_graph(lambda: popxl.variable(1.0))


def test_constants_live_in_any_graph():
    def build(x):
        graph = popxl.gir().create_graph(lambda y: y + popxl.constant([1.0, 2.0]), x)
        return ops.call(graph, x)

    (y,) = run(build, np.zeros(2, np.float32))
    assert y.tolist() == [1, 2]


@pytest.mark.parametrize("data", [
    np.ones(2, popxl.float8_143.as_numpy()), np.ones(2, complex), np.array(["1", "2"]),
    np.array([b"1", b"2"]), np.zeros(2, "datetime64[s]"), np.zeros(2, "i4,i4"), [object()] * 2,
], ids=lambda x: str(np.asarray(x).dtype))  # fmt: skip
def test_what_holds_no_numbers_becomes_none(data):
    """The bits of float8, one part of complex numbers, and texts would be taken for numbers."""
    ir, made = popxl.Ir(), []
    with ir.main_graph:
        for dtype in map(
            popxl.dtype.from_name, ("float32", "int32", "bfloat16", "bool", "float8_152")
        ):
            made.append((popxl.h2d_stream((2,), dtype), popxl.variable(np.zeros(2), dtype)))
            ops.host_load(made[-1][0])
            for make in (popxl.constant, popxl.variable):
                with pytest.raises(ValueError, match="data (are|of type)"):
                    make(data, dtype)
    with popxl.Session(ir, "cpu") as session:
        for stream, variable in made:
            with pytest.raises(ValueError, match="data (are|of type)"):
                session.write_variable_data(variable, data)
            given = {s: np.zeros(2, s.dtype.as_numpy()) for s, _ in made}
            with pytest.raises(ValueError, match=f"input '{stream.tensor_id}'"):
                session.run(given | {stream: data})


def test_what_is_no_data_is_an_error(ir):
    with pytest.raises(ValueError, match="cannot make an array"):
        popxl.constant(object())
    with pytest.raises(ValueError, match="need a float8 dtype"):
        popxl.constant(1.0, popxl.float16, log2_scale=1)
    with pytest.raises(ValueError, match="unknown retrieval_mode"):
        popxl.variable(1.0, retrieval_mode="some")
