"""Which file system holds a folder, compared with what the system's own tool says."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from config.presets import load_config
from config.t5 import T5Config
from planning.hardware.announce_devices import announce_devices
from planning.hardware.file_systems import is_in_memory


def kind_of(folder: str) -> str:
    return subprocess.check_output(["stat", "-f", "-c", "%T", folder], text=True).strip()


@pytest.mark.parametrize("folder", ["/", "/dev/shm", "/proc", ".", "/dev/shm/nothing/yet"])
def test_the_kind_of_file_system(folder):
    there = folder.removesuffix("/nothing/yet")
    assert is_in_memory(folder) == (kind_of(there) in {"tmpfs", "ramfs"})


def test_a_disk_in_memory_is_told(capsys, tmp_path):
    config = load_config(T5Config, "finetuning", "tiny")
    for folder in ("/dev/shm", str(tmp_path)):
        announce_devices(replace(config, execution=replace(config.execution, disk=folder)))
        told = f"warning: --execution.disk {folder} is in memory" in capsys.readouterr().err
        assert told == (kind_of(folder) in {"tmpfs", "ramfs"})
