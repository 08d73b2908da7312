"""Large constants of the same bytes are in memory once, on the host and on the devices."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff
from tests.popxl.programs import f32, run, run_ir, store

N = 5000  # elements: too many to write into code
LARGE = f32(N)


def _large(ir: popxl.Ir) -> list[np.ndarray]:
    """The arrays of large constants, each object once."""
    arrays = (c._data for graph in ir._graphs for c in graph.constants)
    return list({id(a): a for a in arrays if a.nbytes >= N}.values())


def test_graphs_and_gradients_share_a_constant_of_the_same_bytes():
    ir = popxl.Ir()
    found = []
    with ir.main_graph:
        for k in range(4):
            graph = ir.create_graph(
                lambda x, k=k: ops.sum(ops.sin(x * (k + 1.0)) * popxl.constant(LARGE)),
                popxl.TensorSpec((), popxl.float32),
            )
            derivative = autodiff(graph)
            info = ops.call_with_info(graph, popxl.variable(np.float32(0.5)))
            seed = popxl.constant(1.0, popxl.float32)
            (dx,) = ops.call(derivative.graph, seed, inputs_dict=derivative.inputs_dict(info))
            found.append(store(dx))
    assert len(_large(ir)) == 1
    with popxl.Session(ir) as session:
        results = session.run()
        on_device = [a for a in jax.live_arrays() if a.shape == (N,)]
        assert len(on_device) == 1
        assert session.memory_use().variables < 2 * LARGE.nbytes
    total = LARGE.astype(np.float64).sum()
    for k, stream in enumerate(found):
        assert results[stream] == pytest.approx((k + 1) * np.cos((k + 1) * 0.5) * total, rel=1e-4)


def _negative_zeros() -> np.ndarray:
    return np.full(N, -0.0, np.float32)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.zeros(N, np.float32), _negative_zeros()),
        (np.zeros(N, np.float32), np.zeros(N, np.int32)),
        (np.ones((2, N), np.float32), np.ones((N, 2), np.float32)),
        (LARGE, np.nextafter(LARGE, np.inf, dtype=np.float32)),
    ],
)
def test_what_differs_in_a_bit_a_dtype_or_a_shape_is_not_shared(first, second):
    ir = popxl.Ir()
    with ir.main_graph:
        outs = [store(popxl.constant(x)) for x in (first, second)]
    assert len(_large(ir)) == 2
    for x, y in zip((first, second), run_ir(ir, outs), strict=True):
        assert (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())


def test_equal_and_different_constants_do_not_share_a_cached_executable(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    x = f32(N, seed=1)
    for second in (LARGE, LARGE + 1, LARGE):
        a, b, y = run(
            lambda x, c=second: (x * popxl.constant(LARGE), x - popxl.constant(c), x * 2), x
        )
        np.testing.assert_array_equal(a, x * LARGE)
        np.testing.assert_array_equal(b, x - second)
        np.testing.assert_array_equal(y, x * 2)


def test_a_constant_is_a_copy_that_nobody_changes():
    data = LARGE.copy()
    with popxl.Ir().main_graph as main:
        c = popxl.constant(data)
        out = store(c)
    data[:] = 7
    with popxl.Session(main.ir) as session:
        shown = session.get_tensor_data(c)
        np.testing.assert_array_equal(shown, LARGE)
        with pytest.raises(ValueError, match="read-only"):
            shown[0] = 7
        np.testing.assert_array_equal(session.run()[out], LARGE)


def test_the_bytes_go_with_the_last_program_that_holds_them():
    ir = popxl.Ir()
    with ir.main_graph:
        held = weakref.ref(popxl.constant(f32(N, seed=2))._data)
    assert held() is not None
    del ir
    gc.collect()
    assert held() is None
