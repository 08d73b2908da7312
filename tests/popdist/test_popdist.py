"""Process info of a distributed run."""

from __future__ import annotations

import io
import itertools
import signal

import pytest

import popdist
import popdist.run
import popxl
from popdist._stdout_filter import drop_gloo_lines

VARIABLES = ("POPDIST_NUM_INSTANCES", "POPDIST_INSTANCE_INDEX", "POPDIST_NUM_TOTAL_REPLICAS")


@pytest.fixture
def environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def start(*values: str) -> None:
        for variable, value in zip(VARIABLES, values, strict=False):
            monkeypatch.setenv(variable, value)

    return start


def test_alone(environment):
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (1, 0)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (1, 1)
    assert popxl.Ir("popdist").replication_factor == 1


BAD_PLACES = [
    ((0, 0, "h:1"), "a run has 1 to 16384 processes, but is given 0"),
    ((10**400, 0, "h:1"), "but is given 1000"),
    ((2, 5, "h:1"), "process 5 is not one of 2 processes"),
    ((2, -1, "h:1"), "process -1 is not one of 2 processes"),
    ((2, 10**400, "h:1"), "process 1000"),
    ((2, None, None), "are given together or not at all"),
    *(((2, 1, bad), "is no HOST:PORT") for bad in
      ("", "h", ":1", "h:", "h:0", "h:65536", "h:x", "h:-1", "h:1:2", "a b:1", "\udc80:1",
       "h:" + "1" * 5000)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), BAD_PLACES)
def test_places_that_cannot_be(environment, given, said):
    with pytest.raises(popdist.DistributedError, match=said) as error:
        popdist.init(*given)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (("0",), "but is given 0"),
        (("2", "5"), "process 5 is not one of 2"),
        (("two",), "POPDIST_NUM_INSTANCES is 'two': set it to a number"),
        (("9" * 5000,), "set it to a number"),
    ],
)
def test_an_environment_that_cannot_be(environment, variables, said):
    environment(*variables)
    with pytest.raises(popdist.DistributedError, match=said) as error:
        popdist.init()
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "0", "--", "true"], "--processes is 0, but must be from 1 to 1024"),
        (["--processes", "1" * 400, "--", "true"], "--processes is 1111"),
        (["--processes", "2", "--replicas", "-3", "--", "true"], "--replicas is -3, but must be"),
        (["--processes", "2"], "give the command to start after --"),
        (["--processes", "2", "--", "/no/such"], "cannot start '/no/such': No such file"),
        (["--processes", "2", "--", "/"], "cannot start '/': Permission denied"),
        (["--processes", "2", "--", ""], "cannot start ''"),
    ],
)
def test_a_launcher_that_cannot_start(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert popdist.run.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_one_of_two(environment):
    environment("2", "1", "8")
    assert popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (2, 1)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (8, 4)
    ir = popxl.Ir("popdist")
    assert (ir.replication_factor, ir.instance_replication_factor) == (8, 4)


def test_a_replica_for_each_instance_by_default(environment):
    environment("4", "2")
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (4, 1)


def test_wrong_values_are_named(environment):
    environment("two")
    with pytest.raises(popdist.DistributedError, match="POPDIST_NUM_INSTANCES is 'two'"):
        popdist.getNumInstances()
    environment("2", "0", "3")
    with pytest.raises(ValueError, match="3 replicas .* 2 instances"):
        popdist.getNumLocalReplicas()


def test_pieces_of_gloo_in_any_order_are_left_out():
    """Two threads each write a message in four pieces, all 70 ways, between lines of others."""
    pieces = [b"[Gloo] Rank ", b"1", b" is connected to 3 peer ranks. Expected number: 3", b"\n"]
    for first in itertools.combinations(range(8), 4):
        threads = iter(pieces), iter(pieces)
        mixed = b"".join(next(threads[i in first]) for i in range(8))
        written = io.BytesIO(b"before\n" + mixed + b"\nafter\n")
        assert b"".join(drop_gloo_lines(written)) == b"before\n\nafter\n", mixed
