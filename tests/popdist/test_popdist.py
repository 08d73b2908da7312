"""Who a process is in a distributed run."""

from __future__ import annotations

import io
import itertools

import pytest

import popdist
import popxl
from popdist._stdout import without_gloo

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
    with pytest.raises(ValueError, match="POPDIST_NUM_INSTANCES is 'two'"):
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
        assert b"".join(without_gloo(written)) == b"before\n\nafter\n", mixed
