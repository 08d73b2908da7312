"""What Prometheus reads of a run, by its own client's parser."""

from __future__ import annotations

import math
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from config.errors import UserError
from config.families import config_class_of
from config.presets import preset_data
from files.run_folder import RunFolder
from run.options import RunOptions
from run.records.prometheus_page import PrometheusPage
from run.records.recorder import Recorder
from tests.children import free_port


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {f.name: f.samples[0].value for f in text_string_to_metric_families(text)}


def test_the_values_of_the_last_step(tmp_path):
    port, data = free_port(), preset_data("finetuning", "tiny")
    config = config_class_of(data, "tiny").from_dict(data)
    options = RunOptions("tiny", metrics_port=port)
    with Recorder(config, RunFolder(tmp_path), options) as records:
        assert read(port) == {}
        records.step(1, loss=3.5, learning_rate=0.1, **{"rewards/chosen": 0.25})
        assert read(port)["popxl_rewards_chosen"] == 0.25
        records.step(1, loss=3.5, learning_rate=0.1)
        records.step(2, loss=math.nan, learning_rate=0.2, saved_step=1, save_stall_seconds=0.25)
        records.saved(2, {"saved_step": 2})
        found = read(port)
    assert math.isnan(found["popxl_loss"])
    assert found["popxl_step"] == found["popxl_saved_step"] == 2
    assert found["popxl_learning_rate"] == 0.2
    assert found["popxl_save_stall_seconds"] == 0.25
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
