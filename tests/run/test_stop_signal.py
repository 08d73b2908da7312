"""Signals end a run at its next step, a second one at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from run.stop_signal import StopSignal
from terminal.interrupts import SIGNALS
from tests.children import child

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_the_flag(number):
    with StopSignal() as stop:
        assert stop.name is None
        signal.raise_signal(number)  # of this thread: it is there at once
        assert stop.name is None  # another process would not know of it
        assert stop.poll_all_processes()
        assert stop.name == number.name


def test_what_comes_while_processes_look_is_for_the_next_time(monkeypatch):
    """Else one of them would end, and the others would wait for it in the next step."""

    def gather(value):
        os.kill(os.getpid(), signal.SIGTERM)
        return [value, [None, False, False]]

    with StopSignal() as stop:
        monkeypatch.setattr("popdist.all_gather_object", gather)
        assert not stop.poll_all_processes()
        assert stop.name is None
        monkeypatch.setattr(
            "popdist.all_gather_object", lambda value: [[None, False, False], value]
        )
        assert stop.poll_all_processes()


def test_processes_agree_on_what_one_of_them_finds(monkeypatch):
    """One process finds that training is over, or that a save is due by its clock."""
    with StopSignal() as stop:
        stop.poll_all_processes()
        assert [stop.finished, stop.save] == [False, False]
        for others in ([None, True, False], [None, False, True]):
            monkeypatch.setattr("popdist.all_gather_object", lambda value, o=others: [value, o])
            assert not stop.poll_all_processes()
            assert [stop.finished, stop.save] == others[1:]


@pytest.fixture
def handle_signals():
    """Ctrl-C raises: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handle_signals")
def test_a_second_signal_does_what_it_did_before():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.poll_all_processes()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("handle_signals")
def test_a_signal_that_comes_twice_is_one(monkeypatch):
    """`scancel` signals the tasks of a job itself, and `srun` hands on the one that it got."""
    with StopSignal() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.poll_all_processes()
        monkeypatch.setattr("run.stop_signal.DUPLICATE_WINDOW", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.poll_all_processes()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_given_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert before == {number: signal.getsignal(number) for number in before}


def test_outside_the_main_thread_the_flag_stays_down():
    flags = []

    def work():
        with StopSignal() as stop:
            flags.append(stop.poll_all_processes())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert flags == [False]


TRAINING = """
import itertools, sys, time
import numpy as np
from checkpoints import CheckpointStore
from run.stop_signal import StopSignal

with StopSignal() as stop, CheckpointStore(sys.argv[1]) as store:
    for step in itertools.count(1):
        time.sleep(0.01)
        print(step, flush=True)
        if stop.poll_all_processes():
            store.save(step, {"x": np.full(3, step)}, {"signal": stop.name})
            break
"""


def test_a_terminated_run_saves_and_ends(tmp_path):
    from checkpoints import load_checkpoint

    process = child([sys.executable, "-c", TRAINING, tmp_path], cwd=ROOT)
    assert process.stdout.readline() == "1\n"
    process.terminate()
    steps = ["1", *process.communicate(timeout=120)[0].split()]
    assert process.returncode == 0
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.metadata == {"signal": "SIGTERM"}
    assert checkpoint.tensors["x"][0] == checkpoint.step == int(steps[-1])
