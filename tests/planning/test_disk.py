"""What plans and simulated runs say of entries on disk."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import popxl
from config.presets import load_config
from config.t5 import T5Config
from planning.hardware.disk_offload import IO_BUFFERS, PROCESS_BYTES, offload_to_disk
from planning.hardware.machines import machines
from planning.placement_search import may_fit
from planning.program_variants import ProgramVariants, default_variant
from tests.popxl.on_disk import ROWS, SIZE, program

ENTRY = 4 * SIZE
RATES = popxl.plan.Rates(
    flops=1e12,
    float8_flops=1e12,
    bandwidth=1e12,
    host_link=1e12,
    link=1e12,
    network=1e12,
    disk_read=1e6,
    disk_write=5e5,
)


def traffic(ir: popxl.Ir) -> tuple[int, int]:
    parts = popxl.plan.plan_of(ir).parts
    return sum(p.disk_read for p in parts), sum(p.disk_written for p in parts)


@pytest.mark.parametrize("on_disk", [2, ROWS])
def test_the_planned_traffic_is_what_a_session_does(tmp_path: Path, on_disk: int) -> None:
    """But for loads of what waits to be written, and stores that a newer one overtakes."""
    ir, _ = program(on_disk)
    read, written = traffic(ir)
    assert (read, written) == (3 * on_disk * ENTRY, 3 * on_disk * ENTRY)
    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        session.run()
        session._state.disk_queue.wait_all()
        before = session.disk_traffic
        session.run()
        session._state.disk_queue.wait_all()
        done = session.disk_traffic
    # Of the two stores to a row of x, and the load between them, the disk may see none.
    assert 2 * on_disk * ENTRY <= done.read - before.read <= read
    assert 2 * on_disk * ENTRY <= done.written - before.written <= written


@pytest.mark.parametrize("has_own_memory", [True, False])
def test_a_simulated_run_waits_for_the_disk(has_own_memory: bool) -> None:
    """It reads and writes one after the other, and what waits to be written is in memory."""
    rates = replace(RATES, has_own_memory=has_own_memory)
    without = popxl.plan.trace_program(program(0)[0]).timeline(rates).seconds
    found = popxl.plan.trace_program(program(ROWS)[0]).timeline(rates)
    of_disk = [span for span in found.spans if span.stream == "disk"]
    read = sum(span.nbytes for span in of_disk if span.name == "read")
    written = sum(span.nbytes for span in of_disk if span.name == "write")
    assert read >= 2 * ROWS * ENTRY
    assert written <= 3 * ROWS * ENTRY
    busy = read / rates.disk_read + written / rates.disk_write
    assert busy <= found.seconds <= busy + without + 1e-3
    for one, other in pairwise(of_disk):
        assert one.end <= other.start + 1e-9


def test_entries_need_room_wherever_they_are() -> None:
    stored = popxl.plan.trace_program(program(2)[0]).permanent_storage()
    assert stored.remote > 0 < stored.disk
    built: Any = SimpleNamespace(ir=program(2)[0])
    one = load_config(T5Config, "finetuning", "tiny").with_values({"execution.data_parallel": 1})
    variants = ProgramVariants(lambda _: built, default_variant(one), "cpu")

    def fits(nbytes: int) -> bool:
        """Half of them on the device."""
        half = machines()["h200"].with_usable_bytes(nbytes / 2)
        return may_fit(variants, one, replace(half, host_memory=nbytes / 2, devices=1))

    entries = 2 * ROWS * ENTRY
    assert (fits(entries), fits(entries - 4)) == (True, False)


def test_a_simulated_run_reads_while_it_computes() -> None:
    slow = replace(RATES, bandwidth=1e6, disk_read=3e5, disk_write=1e12)
    found = popxl.plan.trace_program(program(ROWS)[0]).timeline(slow)
    reading = sum(s.end - s.start for s in found.spans if s.stream == "disk")
    assert min(reading, found.compute_seconds) > 0.4
    assert found.seconds < max(reading, found.compute_seconds) + 0.2


def test_entries_of_a_gpu_are_copied_once_more_in_host_memory_each_way() -> None:
    """The disk reads into and writes from memory that the device does not reach."""
    quick = replace(RATES, disk_read=1e12, disk_write=1e12, host_copy=1e6)
    program_on_disk = popxl.plan.trace_program(program(ROWS)[0])
    found = program_on_disk.timeline(quick)
    moved = sum(span.nbytes for span in found.spans if span.stream == "disk")
    assert found.seconds >= moved / quick.host_copy
    assert (
        program_on_disk.timeline(replace(quick, has_own_memory=False)).seconds < 0.1 * found.seconds
    )


def test_what_stays_on_devices_never_goes_to_disk() -> None:
    """Wherever it is, so host memory holds no more than there is room for."""
    ir, _ = program(0, size=2**15)
    x, m = ir.remote_buffers
    x.resident, m.resident = {1, ROWS - 1, ROWS - 2}, 2
    x.on_disk = 1
    offload_to_disk(ir, PROCESS_BYTES + IO_BUFFERS + 3 * 2**17, replicas=1)
    stored = popxl.plan.storage_of(ir)
    assert (stored.resident, stored.remote, stored.disk) == (5 * 2**17, 3 * 2**17, 4 * 2**17)
    assert (list(x.on_disk_entries), list(m.on_disk_entries)) == ([0, 2, 3], [ROWS - 1])
