"""Histories drawn at random: sessions entered inside each other and left in any order, runs that
stop in the middle, values written and read, programs in sequence; against a model in plain Python.

Whole numbers begin at the ends of their types, so that every sum wraps around.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import popart_exception
from tests.popxl.programs import store, together
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")
SEEDS = [*range(3), *(slow(i) for i in range(3, 400))]
ACTIONS = 25
DTYPES = [popxl.float32, popxl.float16, popxl.int8, popxl.int16, popxl.int32, popxl.uint32]
KINDS = ["variable", "remote", "sharded", "remote sharded"]
Values = dict[popxl.Variable, np.ndarray]


class Stop(BaseException):
    """Stops a run; not an `Exception`, like an interrupt."""


# ---- programs -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """In each run `times` times the number `by` is added to a variable."""

    variable: popxl.Variable
    by: int
    times: int

    def do(self, value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return value + (np.array(self.by) * self.times).astype(value.dtype)


class Program:
    """A few variables of all kinds, what a run adds to them, and one that it reads alone."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, replicas = draw, draw.choice([1, 1, 2])
        self.ir = popxl.Ir(replication=replicas)
        self.steps: list[Step] = []
        with self.ir.main_graph:
            self.fixed = popxl.variable(np.arange(3, dtype=np.float32))
            self.count = draw.randint(1, 3)
            for _ in range(self.count):
                self._step()
            self.out = store(self.fixed * 2.0)
        self.initial = {v: v._data.copy() for v in self.variables}
        self.replicas = replicas

    @property
    def variables(self) -> list[popxl.Variable]:
        return [self.fixed, *(step.variable for step in self.steps)]

    def _step(self) -> None:
        draw, dtype = self.draw, self.draw.choice(DTYPES)
        by, times = draw.choice([1, 2, 3]), draw.choice([0, 1, 3])
        make: dict[str, Callable[[np.ndarray], tuple[Any, Callable[[Any], None]]]] = {
            "variable": self._plain,
            "sharded": self._sharded,
            "remote": lambda data: self._remote(data, False),
            "remote sharded": lambda data: self._remote(data, True),
        }
        variable, add = make[draw.choice(KINDS)](_first(dtype, draw))
        add(lambda t: _added(t, by, times))
        self.steps.append(Step(variable, by, times))

    def _plain(self, data: np.ndarray) -> tuple[Any, Any]:
        v = popxl.variable(data)
        return v, lambda f: ops.var_updates.copy_var_update_(v, f(v))

    def _sharded(self, data: np.ndarray) -> tuple[Any, Any]:
        v, shard = popxl.replica_sharded_variable(data)
        return v, lambda f: ops.var_updates.copy_var_update_(shard, f(shard))

    def _remote(self, data: np.ndarray, sharded: bool) -> tuple[Any, Any]:
        dtype = popxl.dtype.as_dtype(data.dtype)
        create = popxl.remote_replica_sharded_variable if sharded else popxl.remote_variable
        make = popxl.replica_sharded_buffer if sharded else popxl.remote_buffer
        buffer = make(data.shape, dtype)
        v = create(data, buffer)
        return v, lambda f: ops.remote_store(buffer, 0, f(ops.remote_load(buffer, 0)))


def _first(dtype: popxl.dtype, draw: random.Random) -> np.ndarray:
    """Values to begin with; of whole numbers the last before they wrap around."""
    if not dtype.is_int:
        return np.array([draw.randrange(8) for _ in range(3)], dtype.as_numpy())
    info = np.iinfo(dtype.as_numpy())
    return np.array([info.max, info.min, info.max - 2], dtype.as_numpy())


def _added(t: popxl.Tensor, by: int, times: int) -> popxl.Tensor:
    number = popxl.constant(by, t.dtype)
    graph = popxl.gir().create_graph(lambda t, n: t + n, t, number)
    return ops.repeat(graph, times, t, number)[0]


# ---- the model ----------------------------------------------------------------------------------
@dataclass
class Model:
    """Reference model of a session.

    Attributes:
        begin: the program's data, with which new sessions begin.
        brings_back: values come to the host when the session is left.
        device: values on the devices; None: there are none.
        sourced: variables whose value was written as a function and is in no array yet.
    """

    program: Program
    begin: Values
    brings_back: bool
    depth: int = 0
    host: Values = field(default_factory=dict)
    device: Values | None = None
    stale: set[popxl.Variable] = field(default_factory=set)
    lost: set[popxl.Variable] = field(default_factory=set)
    sourced: set[popxl.Variable] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.host = dict(self.begin)

    def fault(self) -> type[BaseException] | None:
        """Returns the error that a run, or a transfer of all weights, must raise."""
        if not self.depth:
            return ValueError
        return popart_exception if self.lost or self.device is None else None

    def attach(self) -> None:
        if self.device is None:
            self.device = dict(self.host)
            self.stale.clear()

    def bring(self, variables: list[popxl.Variable]) -> None:
        for v in variables:
            if v in self.stale:
                assert self.device is not None
                self.host[v] = self.begin[v] = self.device[v]
                self.stale.discard(v)
                self.sourced.discard(v)

    def show(self, v: popxl.Variable) -> np.ndarray:
        """Models `get_tensor_data`: the value gets into the array with which later sessions
        start."""
        if self.device is not None:
            self.bring([v])
        if v in self.sourced:
            self.begin[v] = self.host[v]
            self.sourced.discard(v)
        return self.read(v)

    def read(self, v: popxl.Variable) -> np.ndarray:
        return self.host[v] if self.device is None else self.device[v]

    def run(self) -> None:
        assert self.device is not None
        for step in self.program.steps:
            self.device[step.variable] = step.do(self.device[step.variable])
            self.stale.add(step.variable)

    def stop(self) -> None:
        self.device = None
        self.lost = {step.variable for step in self.program.steps}
        self.stale.clear()

    def write(self, v: popxl.Variable, value: np.ndarray, as_function: bool) -> None:
        self.host[v] = value
        if as_function:
            self.sourced.add(v)
        else:
            self.begin[v] = value
            self.sourced.discard(v)
        if self.device is not None:
            self.device[v] = value
        self.stale.discard(v)
        self.lost.discard(v)

    def leave(self) -> None:
        self.depth -= 1
        if self.depth:
            return
        if self.brings_back and self.device is not None:
            self.bring(self.program.variables)
        if not self.brings_back:
            self.lost.clear()
        self.device = None
        self.stale.clear()


@dataclass
class Both:
    """A session, and what it must do."""

    session: popxl.Session
    model: Model

    # Each action does the same on both sides, and compares.
    def enter(self, draw: random.Random) -> None:
        if self.model.depth > 2:
            return
        if self.model.device is None and self.model.lost:
            with pytest.raises(popart_exception, match="lost"):
                self.session.__enter__()
        else:
            self.session.__enter__()
            self.model.attach()
            self.model.depth += 1

    def leave(self, draw: random.Random) -> None:
        if self.model.depth:
            self.session.__exit__(None, None, None)
            self.model.leave()

    def run(self, draw: random.Random) -> None:
        fault = self.model.fault()
        if fault is not None:
            with pytest.raises(fault):
                self.session.run()
            return
        found = self.session.run()[self.model.program.out]
        self.model.run()
        for row in found.reshape(-1, 3):
            np.testing.assert_array_equal(row, 2 * self.model.read(self.model.program.fixed))

    def stop(self, draw: random.Random) -> None:
        """A run that stops, if it gets as far as that."""
        if self.model.fault() is not None:
            return
        program, at, calls = self.session._program, draw.randrange(3), 0
        call = program._call_segment

        def failing(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Stop
            return call(*args)

        program._call_segment = failing  # type: ignore[method-assign]
        try:
            self.session.run()
        except Stop:
            self.model.stop()
        else:
            self.model.run()
        finally:
            program._call_segment = call  # type: ignore[method-assign]

    def read(self, draw: random.Random) -> None:
        v = draw.choice(self.model.program.variables)
        way = draw.choice(["live", "copy", "parts"])
        ask: dict[str, Callable[[], np.ndarray]] = {
            "live": lambda: self.session.get_tensor_data(v),
            "copy": lambda: self.session.read_variable_data(v),
            "parts": lambda: np.concatenate(
                [self.session.read_variable_shard(v, p) for p in self.session.variable_shards(v)]
            ),
        }
        if v in self.model.lost:
            with pytest.raises(popart_exception, match="lost"):
                ask[way]()
            return
        expected = self.model.show(v) if way == "live" else self.model.read(v)
        np.testing.assert_array_equal(ask[way](), expected, err_msg=f"{way} {v!r}")

    def write(self, draw: random.Random) -> None:
        variables = list(self.model.lost) or self.model.program.variables
        v = draw.choice(sorted(variables, key=lambda v: v.id))
        value = np.array([draw.randrange(100) for _ in range(3)], v.dtype.as_numpy())
        as_function = draw.random() < 0.5
        self.session.write_variable_data(v, (lambda: value) if as_function else value)
        self.model.write(v, value, as_function)

    def to_host(self, draw: random.Random) -> None:
        fault = self.model.fault()
        if fault is not None:
            with pytest.raises(fault):
                self.session.weights_to_host()
        else:
            self.session.weights_to_host()
            self.model.bring(self.model.program.variables)

    def from_host(self, draw: random.Random) -> None:
        if not self.model.depth or self.model.lost:
            with pytest.raises((ValueError, popart_exception)):
                self.session.weights_from_host()
        else:
            self.session.weights_from_host()
            self.model.device = None
            self.model.attach()


def _new(program: Program, begin: Values, draw: random.Random) -> Both:
    brings_back = draw.random() < 0.8
    session = popxl.Session(program.ir, "cpu", weights_to_host_on_exit=brings_back)
    return Both(session, Model(program, begin, brings_back))


@pytest.mark.parametrize("seed", SEEDS)
def test_sessions_do_what_the_model_does(seed):
    draw = random.Random(seed)
    for _ in range(2):  # programs in sequence
        program = Program(draw)
        begin = dict(program.initial)
        sessions = [_new(program, begin, draw) for _ in range(2)]
        for _ in range(ACTIONS):
            if len(sessions) < 3 and draw.random() < 0.05:
                sessions.append(_new(program, begin, draw))
            chosen = draw.choice(sessions)
            names = ["enter", "enter", "leave", "run", "run", "run", "read", "read", "write"]
            action = draw.choice([*names, "stop", "to_host", "from_host"])
            getattr(chosen, action)(draw)
        for both in sessions:
            for _ in range(4):
                both.read(draw)
            while both.model.depth:
                both.leave(draw)
            both.read(draw)


@pytest.mark.parametrize("seed", [*range(2), *SEEDS[5:]])
def test_sessions_in_threads_do_what_their_models_do(seed):
    """Each thread has one of the sessions of a program, and they begin with the same values."""
    draw = random.Random(seed)
    program = Program(draw)
    sessions = [_new(program, dict(program.initial), draw) for _ in range(2)]

    def act(both: Both, draw: random.Random) -> None:
        names = ["enter", "leave", "run", "read", "write", "stop", "to_host", "from_host"]
        for _ in range(ACTIONS):
            getattr(both, draw.choice(names))(draw)
        while both.model.depth:
            both.leave(draw)
        both.read(draw)

    each = zip(sessions, draw.sample(range(2**30), 2), strict=True)
    together(*(partial(act, both, random.Random(own)) for both, own in each))
