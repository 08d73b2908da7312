"""Debugging aids: debug flags, code of segments, the op that made NaN."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile import platforms
from popxl._storage.disk_queue import EntryFile
from popxl._storage.prefetch import PrefetchMover
from popxl._storage.scratch_files import ScratchFile
from popxl.errors import DiskError, poplar_application_runtime_error
from popxl.transforms import autodiff
from tests.popxl.on_disk import program as on_disk
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")
HERE = r"test_debugging\.py:\d+"


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(name: str, value: str = "1") -> None:
        monkeypatch.setenv(f"POPXL_{name}", value)

    return use


# ---- one step after the other -------------------------------------------------------------------
def rows_after(ir: popxl.Ir, rows: list[popxl.Variable], folder: Any) -> list[np.ndarray]:
    with popxl.Session(ir, disk=folder) as session:
        for _ in range(3):
            session.run()
    return [session.get_tensor_data(row).copy() for row in rows]


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("files", [0, 4])
def test_stepwise_runs_do_the_same_and_nothing_early(memory, files, switch, monkeypatch, tmp_path):
    monkeypatch.setattr(platforms.Cpu, "host_memory", memory)
    usual = rows_after(*on_disk(files), tmp_path)

    def early(*_: Any) -> None:
        raise AssertionError("not now")

    for kind, name in ((PrefetchMover, "_dispatch_next_loads"), (EntryFile, "start_read")):
        monkeypatch.setattr(kind, name, early)
    switch("STEPWISE")
    stepwise = rows_after(*on_disk(files), tmp_path)
    np.testing.assert_array_equal(stepwise, usual)


def test_stepwise_runs_donate_nothing(switch):
    for donates in (True, False):
        session = popxl.Session(on_disk(0)[0])
        assert ("donating" in str(session.schedule)) is donates
        hlo = session.code(session.schedule.segments[0].name)
        assert ("input_output_alias" in hlo) is donates
        switch("STEPWISE")


def test_a_stepwise_run_ends_at_the_store_that_the_disk_refuses(switch, monkeypatch, tmp_path):
    ir, _ = on_disk(6)
    writes = []

    def refuse(*_: Any) -> None:
        writes.append(None)
        raise DiskError("the disk is full")

    switch("STEPWISE")
    with popxl.Session(ir, weights_to_host_on_exit=False, disk=tmp_path) as session:
        monkeypatch.setattr(ScratchFile, "write", refuse)
        with pytest.raises(DiskError) as caught:
            session.run()
    assert re.fullmatch(r"the disk is full \(.*on_disk\.py:\d+\)", str(caught.value))
    assert len(writes) == 1
    assert "store" in caught.value.__notes__[0]


def test_the_log_names_each_step_with_its_line_before_it_is_done(switch, capfd):
    ir, _ = on_disk(0)
    with popxl.Session(ir) as session:
        switch("STEPS")
        session.run()
    lines = capfd.readouterr().err.splitlines()
    loads = [re.search(r"load buffer \d+\[(\d)\].*on_disk\.py:\d+\)$", line) for line in lines]
    assert [int(m[1]) for m in loads if m] == [i for i in range(6) for _ in range(2 + 1)]
    assert all(line.startswith("popxl: ") for line in lines)


# ---- code ---------------------------------------------------------------------------------------
def test_the_code_of_a_segment():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.ones((2, 2), np.float32), name="x")
        ops.var_updates.accumulate_(x, ops.sin(x))
    session = popxl.Session(ir)
    assert "stablehlo.sine" in session.code("main.0", "stablehlo")
    assert "HloModule" in session.code("main.0")
    with pytest.raises(ValueError, match=r"'main\.7'; there are main\.0"):
        session.code("main.7")


# ---- what is not finite -------------------------------------------------------------------------
def logarithm(x: popxl.Tensor) -> popxl.Tensor:
    return ops.log(x) * 2.0


def straight(x: popxl.Tensor) -> popxl.Tensor:
    return ops.sum(logarithm(x - 1.0))


def called(x: popxl.Tensor) -> popxl.Tensor:
    return ops.call(popxl.gir().create_graph(logarithm, x), x - 1.0)[0]


def repeated(x: popxl.Tensor) -> popxl.Tensor:
    """The last iteration takes the logarithm of -1."""
    graph = popxl.gir().create_graph(lambda x, y: (x - 1.0, logarithm(x)), x, x)
    return ops.repeat(graph, 3, x, x)[1]


def chosen(x: popxl.Tensor) -> popxl.Tensor:
    graph = popxl.gir().create_graph(lambda x: logarithm(x - 1.0), x)
    other = popxl.gir().create_graph(lambda x: x * 1.0, x)
    return ops.conditional(popxl.constant(True), graph, other, [x], [x])[0]


def loaded(x: popxl.Tensor) -> popxl.Tensor:
    """Entries move between the ops."""
    buffer = popxl.remote_buffer(x.shape, x.dtype, 2)
    ops.remote_store(buffer, 0, x - 1.0)
    ops.remote_store(buffer, 1, logarithm(ops.remote_load(buffer, 0)))
    return ops.remote_load(buffer, 1)


def reduced(x: popxl.Tensor) -> popxl.Tensor:
    return ops.collectives.replicated_all_reduce(logarithm(x - 1.0))


def ends(write: Callable[[popxl.Tensor], popxl.Tensor], x: Any, dtype: Any, replicas: int) -> Any:
    """The result of a program."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((2,), dtype, "x")
        y = write(ops.host_load(stream))
        out = popxl.d2h_stream(y.shape, y.dtype, "y")
        ops.host_store(out, y)
    with popxl.Session(ir) as session:
        return session.run({stream: np.asarray(x, np.float32).astype(dtype.as_numpy())})[out]


FINE, BAD = [4.0, 4.0], [0.5, 4.0]  # of BAD, 0.5 - 1 is negative
WRITERS = [straight, called, repeated, chosen, loaded, reduced]


@pytest.mark.parametrize(
    ("write", "dtype"),
    [(straight, popxl.bfloat16), (loaded, popxl.bfloat16), slow(loaded, popxl.float32),
     *((write, popxl.float32) for write in WRITERS if write is not loaded),
     *(slow(write, popxl.bfloat16) for write in (called, repeated, chosen, reduced))],
)  # fmt: skip
def test_the_op_that_made_the_first_nan_is_named(write, dtype, switch):
    replicas = 2 if write is reduced else 1
    fine, bad = [FINE] * replicas, [FINE] * (replicas - 1) + [BAD]
    assert np.isnan(ends(write, bad, dtype, replicas).astype(np.float32)).any()
    switch("CHECK", "nan")
    assert np.isfinite(ends(write, fine, dtype, replicas).astype(np.float32)).all()
    named = rf"replica {replicas - 1}: `%\S+ \S+ = log\(%.*{HERE}\): its result has NaN"
    with pytest.raises(poplar_application_runtime_error, match=named):
        ends(write, bad, dtype, replicas)


def slope(x: popxl.Tensor) -> popxl.Tensor:
    """The gradient of the square root, at 0."""
    graph = popxl.gir().create_graph(lambda x: ops.sqrt(x), x)
    gradient = autodiff(graph)
    call = ops.call_with_info(graph, x)
    return ops.call(gradient.graph, x * 0.0, inputs_dict=gradient.inputs_dict(call))[0]


def test_an_op_of_a_gradient_is_named(switch):
    switch("CHECK", "nan")
    with pytest.raises(poplar_application_runtime_error, match=r"sqrt|vjp|div|mul"):
        ends(slope, [0.0, 1.0], popxl.float32, 1)


def test_infinities_are_looked_for_if_asked(switch):
    switch("CHECK", "nan")
    assert np.isinf(ends(logarithm, [0.0, 1.0], popxl.float32, 1)).any()
    switch("CHECK", "inf")
    with pytest.raises(poplar_application_runtime_error, match=r"log\(%.*NaN or infinity"):
        ends(logarithm, [0.0, 1.0], popxl.float32, 1)


def test_data_that_are_not_finite_are_the_loads(switch):
    switch("CHECK", "nan")
    with pytest.raises(poplar_application_runtime_error, match="host_load"):
        ends(straight, [np.nan, 1.0], popxl.float32, 1)


def told(x: popxl.Tensor) -> popxl.Tensor:
    """NaN that the program means: of a constant, in a branch and without."""
    nan = popxl.constant(np.full(2, np.nan, np.float32))
    no = popxl.gir().create_graph(lambda: popxl.constant(np.full(2, np.nan, np.float32)) + 0.0)
    yes = popxl.gir().create_graph(lambda: popxl.constant(np.ones(2, np.float32)) + 0.0)
    (y,) = ops.conditional(popxl.constant(False), yes, no)
    return ops.where(ops.greater(x, nan), x, nan) + y


def test_nan_that_the_program_means_passes(switch):
    switch("CHECK", "inf")
    assert np.isnan(ends(told, FINE, popxl.float32, 1)).all()


def test_the_session_goes_on_after_nan(switch):
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones(2, np.float32), name="x")
        y = popxl.variable(np.ones(2, np.float32), name="y")
        ops.var_updates.copy_var_update_(y, ops.log(x))
        ops.var_updates.accumulate_(x, popxl.constant(np.full(2, -2, np.float32)))
    switch("CHECK", "nan")
    with popxl.Session(ir) as session:
        session.run()
        with pytest.raises(poplar_application_runtime_error, match="log"):
            session.run()
        assert session.get_tensor_data(x).tolist() == [-3, -3]


def test_a_check_that_does_not_exist_is_refused(switch):
    switch("CHECK", "everything")
    with pytest.raises(ValueError, match="POPXL_CHECK is 'everything'"):
        ends(straight, FINE, popxl.float32, 1)
