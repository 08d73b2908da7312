"""Ways to write entries to a disk and read them back: rates, and what they leave in memory.

    python3 -m benchmarks.disk --folder /scratch/mine

Each way writes the same entries from memory that is not aligned, as XLA's is not, waits until the
disk has them, and reads them back in another order. `direct` is what entries on disk use;
`buffered` goes through the page cache; `tensorstore` (if it is installed) is that library's
driver of files, each entry a key. The ways take turns; medians are shown. `checksums` are
those that requests are checked by, whatever the disk. Ends with one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import google_crc32c
import numpy as np

from terminal.entry_point import entry_point
from terminal.parser import Parser

THREADS = 4
MIB = 2**20

Way = Callable[[Path, Sequence[np.ndarray]], tuple[float, float]]
"""Writes and reads entries in a folder; returns the seconds of each."""


def _timed(each: Callable[[int], object], count: int, after: Callable[[], object]) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(each, range(count)))
    after()
    return time.perf_counter() - start


def direct(folder: Path, entries: Sequence[np.ndarray]) -> tuple[float, float]:
    """Requests past the page cache, where the file system allows them."""
    from popxl.plan import scratch_file

    with scratch_file(folder, len(entries), entries[0].nbytes) as (file, each):
        copies = [np.empty_like(entry) for entry in entries]
        write = _timed(lambda i: file.write(i * each, entries[i]), len(entries), lambda: None)
        read = _timed(
            lambda i: file.read(_shuffled(i, entries) * each, copies[i]), len(entries), _no
        )
    return write, read


def buffered(folder: Path, entries: Sequence[np.ndarray]) -> tuple[float, float]:
    """One file through the page cache, which is emptied between writing and reading."""
    size, path = entries[0].nbytes, folder / "entries"
    with path.open("wb+", buffering=0) as file:
        number = file.fileno()
        os.posix_fallocate(number, 0, size * len(entries))
        write = _timed(
            lambda i: os.pwrite(number, entries[i], i * size),
            len(entries),
            lambda: os.fsync(number),
        )
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        read = _timed(
            lambda i: os.pread(number, size, _shuffled(i, entries) * size), len(entries), _no
        )
    return write, read


def tensorstore(folder: Path, entries: Sequence[np.ndarray]) -> tuple[float, float]:
    """A key-value store of files."""
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    write = _timed(
        lambda i: store.write(str(i), entries[i].tobytes()).result(), len(entries), os.sync
    )
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read = _timed(lambda i: store.read(str(_shuffled(i, entries))).result(), len(entries), _no)
    return write, read


def checksums(entries: Sequence[np.ndarray], rounds: int) -> dict[str, float]:
    """Gigabytes of checksums in a second of one processor: median of `rounds`."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        for entry in entries:
            google_crc32c.value(entry)
        seconds.append(time.process_time() - start)
    total = sum(entry.nbytes for entry in entries) / 1e9
    return {"gb_per_processor_second": total / statistics.median(seconds)}


def _shuffled(i: int, entries: Sequence[np.ndarray]) -> int:
    return (i * 7 + 3) % len(entries)


def _no() -> None:
    """Nothing is left to wait for."""


def _cached() -> int:
    """Bytes of the page cache."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("Cached:"))


def entries_of(size: int, count: int) -> list[np.ndarray]:
    """Random bytes that are not aligned."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size + 64, np.uint8)[64:] for _ in range(count)]


def measure(folder: Path, ways: dict[str, Way], entries: Sequence[np.ndarray], rounds: int) -> dict:
    """Gigabytes per second, and of the page cache that a way adds, by way: medians of `rounds`."""
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    total = sum(entry.nbytes for entry in entries) / 1e9
    for _ in range(rounds):
        for name, way in ways.items():
            with TemporaryDirectory(dir=folder) as place:
                before = _cached()
                write, read = way(Path(place), entries)
                measured[name].append((total / write, total / read, (_cached() - before) / 1e9))
    names = ("write_gb_per_second", "read_gb_per_second", "page_cache_gb")
    return {
        way: {n: statistics.median(x) for n, x in zip(names, zip(*rows, strict=True), strict=True)}
        for way, rows in measured.items()
    }


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="where, on the disk to measure")
    parser.add_argument("--mib", type=int, default=16, help="size of an entry")
    parser.add_argument("--entries", type=int, default=32, help="how many there are")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way has its turn")
    given = parser.parse_args(arguments)
    ways: dict[str, Way] = {"direct": direct, "buffered": buffered}
    if find_spec("tensorstore"):
        ways["tensorstore"] = tensorstore
    entries = entries_of(given.mib * MIB, given.entries)
    rates = measure(given.folder, ways, entries, given.rounds)
    rates["checksums"] = checksums(entries, given.rounds)
    for name, facts in rates.items():
        print(f"{name:12}" + "  ".join(f"{what} {x:.2f}" for what, x in facts.items()))
    print(json.dumps({"benchmark": "disk", "entry_mib": given.mib, **rates}))


if __name__ == "__main__":
    sys.exit(main())
