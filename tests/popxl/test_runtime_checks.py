"""Rules on values: a run that breaks one fails with the op, the replica and the user's line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import popart
import popxl
from popxl import ops
from popxl._compile.executable_cache import statistics

pytestmark = pytest.mark.usefixtures("cached")
OPTION = "throwIfLog2ScaleTensorNotInRange"


class Scaled:
    """A program that casts ones to float8 and back, with scales from a stream."""

    def __init__(
        self, write: Callable[..., popxl.Tensor], replicas: int = 1, transfers: int = 1
    ) -> None:
        self.ir = popxl.Ir(replication=replicas)
        self.ir.num_host_transfers = transfers
        with self.ir.main_graph:
            self.scales = popxl.h2d_stream((), popxl.int32, "scale")
            self.x = popxl.variable(np.ones(2, np.float32), name="x")
            self.out = popxl.d2h_stream((2,), popxl.float32, "out")
            ops.host_store(self.out, write(self))

    def check(self, on: bool) -> None:
        setattr(self.ir._pb_ir.getSessionOptions(), OPTION, on)

    def run(self, scales: object) -> np.ndarray:
        with popxl.Session(self.ir) as session:
            return session.run({self.scales: np.asarray(scales, np.int32)})[self.out]


def round_trip(x: popxl.Tensor, scale: popxl.Tensor) -> popxl.Tensor:
    cast = ops.pow2scale_cast_to_fp8(x, scale, popxl.float8_143)
    return ops.pow2scale_cast_from_fp8(cast, ops.negate(scale), popxl.float32)


def straight(p: Scaled) -> popxl.Tensor:
    return round_trip(p.x, ops.host_load(p.scales))


def called(p: Scaled) -> popxl.Tensor:
    scale = ops.host_load(p.scales)
    return ops.call(p.ir.create_graph(round_trip, p.x, scale), p.x, scale)[0]


def repeated(p: Scaled) -> popxl.Tensor:
    """Three iterations, each with a scale of its own."""

    def body(x: popxl.Tensor) -> popxl.Tensor:
        return round_trip(x, ops.host_load(p.scales))

    return ops.repeat(p.ir.create_graph(body, p.x), 3, p.x)[0]


def chosen(p: Scaled) -> popxl.Tensor:
    """Casts with scales other than 7."""
    scale = ops.host_load(p.scales)
    yes = p.ir.create_graph(round_trip, p.x, scale)
    no = p.ir.create_graph(lambda x: x * 1.0, p.x)
    wanted = ops.logical_not(ops.equal(scale, popxl.constant(7, popxl.int32)))
    return ops.conditional(wanted, yes, no, [p.x, scale], [p.x])[0]


@pytest.mark.parametrize("write", [straight, called, chosen])
@pytest.mark.parametrize("scale", [-33, 32, 1000])
def test_a_scale_out_of_range_stops_the_run(write, scale):
    program = Scaled(write)
    message = r"replica 0: .*pow2scale_cast_to_fp8\(.*test_runtime_checks\.py:\d+.*\[-32, 32\)"
    with pytest.raises(popart.poplar_application_runtime_error, match=message):
        program.run(scale)


@pytest.mark.parametrize("write", [straight, called, chosen])
def test_scales_in_range_pass(write):
    assert Scaled(write).run(7).tolist() == [1, 1]


def test_the_ends_of_the_range():
    """-32 is in it, for the cast back as well, which is given 32."""
    with pytest.raises(popart.poplar_application_runtime_error, match="cast_from_fp8"):
        Scaled(straight).run(-32)
    assert Scaled(straight).run(31).shape == (2,)


def test_each_iteration_is_checked():
    program = Scaled(repeated, transfers=3)
    assert program.run([1, 2, 3]).tolist()[0] == [1, 1]
    for scales in ([99, 1, 1], [1, 99, 1], [1, 1, 99]):
        with pytest.raises(popart.poplar_application_runtime_error, match="cast_to_fp8"):
            program.run(scales)


def test_each_replica_is_checked_and_the_first_one_named():
    program = Scaled(straight, replicas=4)
    with pytest.raises(popart.poplar_application_runtime_error, match="replica 2"):
        program.run([0, 0, 40, 40])


def test_sessions_of_one_program_may_check_or_not():
    program = Scaled(straight)
    for _ in range(2):
        program.check(False)
        assert program.run(40).shape == (2,)
        program.check(True)
        with pytest.raises(popart.poplar_application_runtime_error):
            program.run(40)


def test_the_session_goes_on():
    program = Scaled(straight)
    with popxl.Session(program.ir) as session:
        with pytest.raises(popart.poplar_application_runtime_error):
            session.run({program.scales: np.int32(40)})
        assert session.run({program.scales: np.int32(0)})[program.out].tolist() == [1, 1]


def test_a_loaded_executable_checks_too(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    Scaled(straight).run(0)
    hits = statistics.hits
    with pytest.raises(popart.poplar_application_runtime_error):
        Scaled(straight).run(40)
    assert statistics.hits > hits


def test_gradients_of_loops_and_branches_with_checked_ops():
    """Gradients run the graphs again, whose values were checked the first time."""

    def body(x: popxl.Tensor, scale: popxl.Tensor) -> popxl.Tensor:
        return round_trip(x, scale)

    def write(p: Scaled) -> popxl.Tensor:
        def model(x: popxl.Tensor, scale: popxl.Tensor) -> popxl.Tensor:
            return ops.repeat(p.ir.create_graph(body, x, scale), 2, x, scale)[0]

        scale = ops.host_load(p.scales)
        graph = p.ir.create_graph(model, p.x, scale)
        info = popxl.transforms.autodiff(graph, grads_required=[graph.inputs[0]])
        call = ops.call_with_info(graph, p.x, scale)
        inputs = info.inputs_dict(call)
        seed = popxl.constant(np.ones(2, np.float32))
        return ops.call(info.graph, seed, inputs_dict=inputs)[0]

    assert Scaled(write).run(1).tolist() == [1, 1]
    with pytest.raises(popart.poplar_application_runtime_error):
        Scaled(write).run(40)


def test_programs_without_such_ops_return_nothing_more():
    ir = popxl.Ir()
    with ir.main_graph:
        ops.add_(popxl.variable(1.0), popxl.constant(1.0))
    program = popxl.Session(ir)._program
    (segment,) = program.schedule.segments
    assert not segment.has_checks
    assert [s.shape for s in program.specs_of(segment)[1]] == [(1,)]  # the variable
