"""Prometheus endpoint of a run, read by Prometheus' own parser."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from config.errors import UserError
from config.families import config_class_of_preset
from config.presets import load_preset
from files.run_folder import RunFolder
from run.options import RunOptions
from run.records.metrics_logger import MetricsLogger
from run.records.prometheus_page import MAX_CONNECTIONS, PrometheusPage, QuietRequestHandler
from tests.children import free_port


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {f.name: f.samples[0].value for f in text_string_to_metric_families(text)}


def test_the_values_of_the_last_step(tmp_path):
    port, data = free_port(), load_preset("finetuning", "tiny")
    config = config_class_of_preset(data, "tiny").from_dict(data)
    options = RunOptions("tiny", metrics_port=port)
    with MetricsLogger(config, RunFolder(tmp_path), options) as records:
        assert read(port) == {}
        records.log_step(1, loss=3.5, learning_rate=0.1, **{"rewards/chosen": 0.25})
        assert read(port)["popxl_rewards_chosen"] == 0.25
        records.log_step(1, loss=3.5, learning_rate=0.1)
        records.log_step(
            2,
            loss=math.nan,
            learning_rate=0.2,
            **{"checkpoint/step": 1, "checkpoint/blocked_seconds": 0.25},
        )
        records.log_save(2, {"checkpoint/step": 2})
        found = read(port)
    assert math.isnan(found["popxl_loss"])
    assert found["popxl_step"] == found["popxl_checkpoint_step"] == 2
    assert found["popxl_learning_rate"] == 0.2
    assert found["popxl_checkpoint_blocked_seconds"] == 0.25
    assert found["popxl_seconds_per_step"] > 0
    with pytest.raises(urllib.error.URLError):  # the run is over
        read(port)


def test_this_machine_alone_reaches_it():
    page = PrometheusPage("127.0.0.1", port := free_port())
    try:
        assert page._server.server_address == ("127.0.0.1", port)
        with pytest.raises(UserError, match=f"cannot be served at 127.0.0.1:{port} .*in use"):
            PrometheusPage("127.0.0.1", port)
    finally:
        page.close()


@pytest.fixture
def page() -> Iterator[PrometheusPage]:
    page = PrometheusPage("127.0.0.1", free_port())
    page.log({"loss": 2.5})
    yield page
    page.close()


def idle(
    page: PrometheusPage, count: int, stack: ExitStack, says: bytes = b""
) -> list[socket.socket]:
    """Connections whose ends at this side say no more than `says`."""
    lines = [socket.create_connection(page._server.server_address[:2], 10) for _ in range(count)]
    for line in lines:
        stack.enter_context(line)
        line.sendall(says)
    return lines


def within(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


@pytest.mark.parametrize("says", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_idle_connections_cost_few_files_and_threads(page, says):
    """A reader is answered all the same: it takes the place of the oldest."""
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with ExitStack() as stack:
        lines = idle(page, 100, stack, says)
        assert read(page._server.server_port) == {"popxl_loss": 2.5}
        assert len(os.listdir("/proc/self/fd")) - files - len(lines) <= MAX_CONNECTIONS
        assert threading.active_count() - threads <= MAX_CONNECTIONS


def test_a_connection_that_says_nothing_is_closed_after_a_while(page, monkeypatch, capsys):
    monkeypatch.setattr(QuietRequestHandler, "timeout", 0.2)
    with ExitStack() as stack:
        (line,) = idle(page, 1, stack, b"GET /metrics")
        assert line.recv(1) == b""
        assert within(10, lambda: not page._server.open_connections)
    assert capsys.readouterr().err == ""


def test_a_page_that_is_closed_closes_its_connections():
    page = PrometheusPage("127.0.0.1", free_port())
    with ExitStack() as stack:
        lines = idle(page, 3, stack)
        assert within(10, lambda: len(page._server.open_connections) == 3)
        page.close()
        assert [line.recv(1) for line in lines] == [b""] * 3
