"""Stream activity of a GPU, read from a hand-written profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device_trace import CopyStream, read_streams

LOAD = "kind_src:pinned kind_dst:device size:{} dest:0 async:1"
STORE = "kind_src:device kind_dst:pinned size:{} dest:0 async:1"


def event(thread: int, start: float, end: float, name: str, moved: str = "", pid: int = 1) -> Any:
    """Returns a trace event; times are in milliseconds."""
    details = {"memcpy_details": moved} if moved else {}
    times = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}
    return {"ph": "X", "pid": pid, "tid": thread, "name": name, "args": details, **times}


def metadata_event(what: str, pid: int, name: str, thread: int | None = None) -> Any:
    return {"ph": "M", "pid": pid, "tid": thread, "name": what, "args": {"name": name}}


def profile(folder: Path, *events: Any) -> Path:
    names = [
        metadata_event("process_name", 1, "/device:GPU:0"),
        metadata_event("process_name", 2, "/device:GPU:1"),
        metadata_event("process_name", 701, "/host:CPU"),
        metadata_event("thread_name", 1, "Stream #14(Compute)", 14),
        metadata_event("thread_name", 1, "Stream #20(MemcpyH2D,MemcpyD2H)", 20),
        metadata_event("thread_name", 1, "XLA Modules", 99),
        metadata_event("thread_name", 2, "Stream #14(Compute)", 14),
        metadata_event("thread_name", 701, "python3", 7),
        {},  # JAX ends the list with one
    ]
    path = folder / "plugins/profile/2026/host.trace.json.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": [*names, *events]}, file)
    return folder


def test_times_of_kernels_and_copies(tmp_path: Path) -> None:
    found = read_streams(
        profile(
            tmp_path,
            event(14, 0, 2, "nvjet_sm90_tst_192x192_64x3"),
            event(14, 3, 4, "loop_add_fusion_7"),
            event(14, 4, 6, "loop_add_fusion_12"),
            event(20, 1, 5, "MemcpyH2D", LOAD.format(100)),
            event(20, 7, 8, "MemcpyD2H", STORE.format(50)),
            event(99, 0, 100, "a module, which holds what is counted"),
            event(14, 0, 100, "of another GPU", pid=2),
            event(7, 0, 100, "of the host", pid=701),
        )
    )
    assert (found.seconds, found.kernels) == (pytest.approx(8e-3), 3)
    assert found.computing == pytest.approx(5e-3)
    assert found.kinds == pytest.approx({"products": 2e-3, "loop_add_fusion": 3e-3})
    assert found.loads == CopyStream(1, 100, pytest.approx(4e-3), pytest.approx(3 / 4))
    assert found.stores == CopyStream(1, 50, pytest.approx(1e-3), 0.0)


def test_copies_that_overlap_count_once(tmp_path: Path) -> None:
    copies = [event(20, i, i + 2, "MemcpyH2D", LOAD.format(10)) for i in range(3)]
    found = read_streams(profile(tmp_path, event(14, 0, 1, "fusion"), *copies)).loads
    assert (found.count, found.nbytes) == (3, 30)
    assert (found.seconds, found.hidden) == (pytest.approx(4e-3), pytest.approx(1 / 4))


def test_a_profile_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no events of a GPU"):
        read_streams(profile(tmp_path, event(7, 0, 1, "of the host", pid=701)))
