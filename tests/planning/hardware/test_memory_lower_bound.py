"""What is checked against memory before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from planning.hardware import memory_check
from planning.hardware.memory_check import NotEnoughMemoryError, check_lower_bound
from tests.planning.presets import preset

DEVICE = 10**5


@pytest.mark.parametrize(
    ("placement", "replicas", "held"), [("auto", 1, 1), ("auto", 2, 2), ("host", 1, 0)]
)
def test_devices_hold_what_the_host_cannot(
    placement: str, replicas: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XXL's state is larger than the host memory of many machines with one large GPU."""
    execution: dict[str, Any] = {
        "placement": placement,
        "data_parallel": replicas,
        "micro_batch_size": 16,
    }
    config = preset("tiny", execution=execution)
    least = sum(config.min_bytes().values()) - held * DEVICE
    monkeypatch.setattr(memory_check.devices, "resolve_platform", lambda config: "gpu")
    monkeypatch.setattr(memory_check.popxl.plan, "device_memory", lambda *_: DEVICE)
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: least)
    check_lower_bound(config)
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: least - 1)
    with pytest.raises(NotEnoughMemoryError) as error:
        check_lower_bound(config)
    assert (error.value.place, error.value.needed) == ("host", least)
