"""Read the activity of a GPU's streams from a JAX profile.

JAX writes `*.trace.json.gz`, in the Trace Event Format: complete events ("ph": "X") with `ts` and
`dur` in microseconds; of a GPU, one thread for each stream. Copies name their size and which memory
they go from and to in `memcpy_details`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GPU = re.compile(r"/device:GPU:\d+")
_COPY = re.compile(r"kind_src:(\w+) kind_dst:(\w+) size:(\d+)")
_NUMBERS = re.compile(r"(_\d+)+$")
_SHOWN = 12  # kinds of kernels

Event = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class CopyStream:
    """Memory copies of a profile in one direction: their number, bytes and seconds.

    Attributes:
        seconds: in which at least one is on its way.
        hidden: the fraction of these in which a kernel runs.
    """

    count: int
    nbytes: int
    seconds: float
    hidden: float


@dataclass(frozen=True)
class DeviceStreams:
    """Kernels and memory copies of one GPU in a profile; times in seconds.

    Attributes:
        seconds: from the first event to the end of the last.
        computing: in which a kernel runs.
        kernels: how many.
        kinds: seconds of those that take most, by what they do.
    """

    seconds: float
    computing: float
    kernels: int
    kinds: dict[str, float]
    loads: CopyStream
    stores: CopyStream


def read_streams(folder: Path) -> DeviceStreams:
    """Read the kernels and copies of the first GPU from the profile in a folder.

    Raises:
        ValueError: it has no events of a GPU.
    """
    events = _stream_events(folder)
    if not events:
        raise ValueError(f"{folder}: the profile has no events of a GPU")
    moved = [(e, _COPY.search(str(e.get("args", {}).get("memcpy_details", "")))) for e in events]
    kernels = [e for e, copy in moved if copy is None or copy[1] == copy[2]]
    computing = _merge_intervals([_event_interval(e) for e in kernels])

    def copies(source: str, target: str) -> CopyStream:
        found = [(e, m) for e, m in moved if m is not None and (m[1], m[2]) == (source, target)]
        taken = _merge_intervals([_event_interval(e) for e, _ in found])
        seconds = _total_length(taken)
        hidden = _overlap_length(taken, computing) / seconds if seconds else 0.0
        return CopyStream(len(found), sum(int(m[3]) for _, m in found), seconds, hidden)

    kinds: Counter[str] = Counter()
    for event in kernels:
        kinds[_kernel_kind(event["name"])] += event["dur"] / 1e6
    whole = [_event_interval(e) for e in events]
    return DeviceStreams(
        seconds=max(end for _, end in whole) - min(start for start, _ in whole),
        computing=_total_length(computing),
        kernels=len(kernels),
        kinds=dict(kinds.most_common(_SHOWN)),
        loads=copies("pinned", "device"),
        stores=copies("device", "pinned"),
    )


def _stream_events(folder: Path) -> list[Event]:
    """Returns the profiler events on the first GPU's streams."""
    found: list[Event] = []
    for path in sorted(folder.rglob("*.trace.json.gz"))[:1]:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)["traceEvents"]
    named = [e for e in found if e.get("ph") == "M" and "name" in e.get("args", {})]
    gpus = {e["pid"] for e in named
            if e["name"] == "process_name" and _GPU.fullmatch(e["args"]["name"])}  # fmt: skip
    first = min(gpus, default=None)
    stream_ids = {(e["pid"], e["tid"]) for e in named
               if e["name"] == "thread_name" and e["args"]["name"].startswith("Stream")
               and e["pid"] == first}  # fmt: skip
    return [e for e in found if e.get("ph") == "X" and (e["pid"], e["tid"]) in stream_ids]


def _kernel_kind(name: str) -> str:
    """Returns a GPU kernel's category: "products", "cuDNN", or XLA's name without numbers."""
    if name.startswith("cudnn") or "cudnn" in name:
        return "cuDNN"
    if name.startswith("nvjet") or "gemm" in name or "cutlass" in name:
        return "products"
    return _NUMBERS.sub("", name.split("(")[0])[:60]


def _event_interval(event: Event) -> Interval:
    """Returns the start and end time of a profiler event."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _merge_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _total_length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap_length(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Returns the length of the intersection of two lists of disjoint intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]), 0.0)
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
