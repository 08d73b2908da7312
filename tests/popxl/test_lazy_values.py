"""Values that functions make: several at a time, few ahead of their use."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import popxl
from popxl._run import device_variables

SIZES = (3, 3, 3, 12, 3, 3, 3, 3)


def program() -> tuple[popxl.Ir, list[popxl.Variable]]:
    ir = popxl.Ir()
    with ir.main_graph:
        return ir, [popxl.variable(np.zeros(size, np.float32)) for size in SIZES]


@pytest.mark.parametrize("entered", [True, False])
def test_they_are_made_at_the_same_time_within_the_room_of_the_largest(entered, monkeypatch):
    monkeypatch.setattr(device_variables.os, "cpu_count", lambda: 4)
    ir, variables = program()
    lock, alive, most, threads = threading.Lock(), 0, 0, 0

    def maker(i):
        def make():
            nonlocal alive, most, threads
            with lock:
                alive += 1
                threads = max(threads, alive)
            time.sleep(0.02)
            with lock:
                alive -= 1
            return np.full(SIZES[i], i, np.float32)

        return make

    values = {v: maker(i) for i, v in enumerate(variables)}
    session = popxl.Session(ir, "cpu")
    if not entered:
        session.write_variables_data(values, concurrent=True)
    with session:
        if entered:
            session.write_variables_data(values, concurrent=True)
        assert 2 <= threads <= 4
        for i, v in enumerate(variables):
            assert session.read_variable_data(v).tolist() == [i] * SIZES[i]


def test_without_leave_they_are_made_in_turn():
    ir, variables = program()
    made = []

    def maker(i):
        def make():
            made.append((i, threading.current_thread()))
            return np.full(SIZES[i], i, np.float32)

        return make

    session = popxl.Session(ir, "cpu")
    session.write_variables_data({v: maker(i) for i, v in enumerate(variables)})
    with session:
        assert made == [(i, threading.main_thread()) for i in range(len(SIZES))]


def test_an_error_of_one_is_raised():
    ir, variables = program()
    values = {v: lambda: np.zeros(1, np.float32) for v in variables}
    session = popxl.Session(ir, "cpu")
    session.write_variables_data(values, concurrent=True)
    with pytest.raises(ValueError, match="needs data of shape"), session:
        pass
