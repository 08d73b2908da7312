"""Private names of a session that applications use to keep it attached by hand."""

from __future__ import annotations

import numpy as np
import pytest

import popart
import popxl
from popxl import ops


@pytest.fixture
def counter():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(0.0, name="x")
        ops.add_(x, popxl.constant(1.0))
    return popxl.Session(ir), x


def test_a_session_attached_through_its_handle_runs_and_leaves(counter):
    session, x = counter
    assert isinstance(session._device, popart.DeviceInfo)
    assert not session._device.isAttached
    session._was_attached_stack.append(False)
    session._pb_session.prepareDevice(loadEngine=False)
    assert not session.is_attached
    session._pb_session.prepareDevice()
    assert session._device.attach()
    assert session._device.isAttached
    session._pb_session.weightsFromHost()
    session.run()
    session._pb_session.weightsToHost()
    np.testing.assert_array_equal(session.get_tensor_data(x), 1)
    session.__exit__(None, None, None)
    session._device.detach()
    assert not session.is_attached


def test_sessions_share_a_device(counter):
    first, _ = counter
    second = popxl.Session(first.ir)
    second._set_device(first._device)
    with second:
        assert first._device.isAttached
        assert not first.is_attached
