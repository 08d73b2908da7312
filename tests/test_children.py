"""Processes of tests end with them."""

from __future__ import annotations

import signal

from tests.children import child, end_children


def test_what_a_test_leaves_running_is_ended():
    sleeps, is_done = child(["sleep", "300"]), child(["true"])
    is_done.wait()
    end_children()
    assert (sleeps.returncode, is_done.returncode) == (-signal.SIGTERM, 0)
