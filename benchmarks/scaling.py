"""Measure how messages, bytes and seconds of a run grow with the number of processes.

    python3 -m benchmarks.scaling --processes 1 2 4 8 16 32 64
    python3 -m benchmarks.scaling --hosts 8 16 64 256 1024

`--record FILE` writes both as JSON Lines; `benchmarks/results/growth.jsonl` is such a file, which
`imgs/figures/scaling.py` draws.

The first measures what processes of this machine do besides compute: they meet, exchange small
values as after each step, watch each other, save and load a state of which each holds a row of
300 tensors. `service` is the processor time of the coordination service, of which a run has one.
The last line is computed, for 1,024 processes.

The second needs no processes. It lists what `xxl_pod64` would save on so many hosts of 8 devices,
by more data parallelism, and measures what one host does with that: bytes and seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import popdist
from benchmarks import run_in_processes
from terminal.entry_point import entry_point
from terminal.parser import Parser, parse_count_option

if TYPE_CHECKING:
    from checkpoints.tensor_shards import ShardedTensor

TENSORS, ROW = 300, 64  # of the state that is saved; elements of a row
ROUNDS, WATCHED = 20, 5.0  # exchanges that are timed; seconds of watching
MAX_PROCESSES = 1024
DEVICES_OF_A_HOST = 8


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a run with each number of processes or hosts, and print one row for each."""
    parser = Parser.of_script(__doc__)
    parser.add_argument("--processes", type=parse_count_option, nargs="*", default=[])
    parser.add_argument("--hosts", type=parse_count_option, nargs="*", default=[])
    parser.add_argument("--record", type=Path, help="a file that takes what was found")
    args = parser.parse_args(arguments)
    rows: list[dict[str, float]] = []
    computed_rows = []
    for count in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            tensor = run_in_processes(count, "benchmarks.scaling", "--be-one", folder)
        rows.append({"processes": count} | tensor)
        _print_row(rows)
    if len(rows) > 3:
        computed_rows.append(_extrapolate(rows[1:]))
        print(json.dumps(computed_rows[-1]))
    for hosts in args.hosts:
        computed_rows.append(_measure_checkpoint_tables(hosts))
        print(json.dumps(computed_rows[-1]), flush=True)
    if args.record is not None:
        lines = [json.dumps(row) for row in (*rows, *computed_rows)]
        args.record.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _print_row(rows: Sequence[Mapping[str, float]]) -> None:
    if len(rows) == 1:
        print("  ".join(rows[0]))
    print("  ".join(f"{v:{len(n)}.4g}" for n, v in rows[-1].items()), flush=True)


def _extrapolate(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Extrapolate the messages, bytes and seconds of coordination to `MAX_PROCESSES` processes.

    Messages and bytes by a polynomial; the time per message is that of the most processes
    measured.
    """
    count = [row["processes"] for row in rows]
    result: dict[str, float] = {"processes": MAX_PROCESSES}
    for name, degree in (("messages", 1), ("bytes", 2)):
        values = np.polyfit(count, [row[name] for row in rows], degree)
        result[name] = float(np.polyval(values, MAX_PROCESSES))
    last = rows[-1]
    result["service_s"] = last["service_s"] / last["messages"] * result["messages"]
    beats = MAX_PROCESSES + MAX_PROCESSES / (
        1 + MAX_PROCESSES // 64
    )  # as `popdist._failure_detection` has it
    result["watch_messages"] = beats
    result["watch_service_s"] = last["watch_service_s"] / last["watch_messages"] * beats
    return result


# ---- one of the processes -----------------------------------------------------------------------
def run_as_process(folder: str) -> None:
    """Measure as one of several processes; process 0 prints the result as JSON."""
    start = time.monotonic()
    popdist.init()
    end = time.monotonic()
    times = popdist.all_gather_object([start, end])
    row = {"meet_s": max(e for _, e in times) - max(b for b, _ in times)}
    row |= _measure_step_messages() | _measure_heartbeats() | _measure_saving(folder)
    if popdist.getInstanceIndex() == 0:
        print(json.dumps(row))


def _measure_step_messages() -> dict[str, float]:
    """Measure the messages between processes in a training step: stop signals and token counts."""
    seconds, before, busy = [], _rpc_traffic("exchange"), _service_seconds()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        popdist.all_gather_object([None, False, False])
        popdist.all_gather_object([[512, 96]])
        seconds.append(time.perf_counter() - start)
    busy = (_service_seconds() - busy) / ROUNDS
    traffic = (_rpc_traffic("exchange") - before) / ROUNDS
    slowest = max(popdist.all_gather_object(statistics.median(seconds)))
    return {"step_s": slowest, "service_s": busy} | _sum_traffic("", traffic)


def _measure_heartbeats() -> dict[str, float]:
    """Measure the heartbeat messages between processes in one second."""
    popdist.all_gather_object("watching begins")
    before, busy, start = _rpc_traffic("watch"), _service_seconds(), time.perf_counter()
    time.sleep(WATCHED)
    seconds = time.perf_counter() - start
    busy = (_service_seconds() - busy) / seconds
    traffic = (_rpc_traffic("watch") - before) / seconds
    return {"watch_service_s": busy} | _sum_traffic("watch_", traffic)


def _measure_saving(folder: str) -> dict[str, float]:
    """Measure the messages, bytes and seconds of saving and loading a checkpoint."""
    from checkpoints import CheckpointStore

    with CheckpointStore(folder) as store:
        popdist.all_gather_object("saving begins")
        save = _time_slowest(lambda: store.save(1, _RowShards(), {}, wait=True))
    loads = []
    load = _time_slowest(lambda: loads.append(_load_local_row(folder)))
    sizes = {p.name: p.stat().st_size for p in loads[0].path.glob("*.json")}
    return {"save_s": save, "load_s": load, "manifest_bytes": sizes.pop("manifest.json"),
            "tables_bytes": sum(sizes.values())}  # fmt: skip


def _load_local_row(folder: str) -> Any:
    """Load a checkpoint and read the row of each tensor that this process holds."""
    from checkpoints import load_checkpoint
    from checkpoints.tensor_shards import TensorShard

    checkpoint = load_checkpoint(folder, verify=False)
    count, index = popdist.getNumInstances(), popdist.getInstanceIndex()
    row = TensorShard((count, ROW), (0, 1), (index, 0), (1, ROW), 0, ROW)
    for number, name in enumerate(checkpoint.tensors):
        assert (checkpoint.tensors.read_shards(name, [row])[index] == number).all()
    return checkpoint


class _RowShards(Mapping[str, np.ndarray]):
    """Source of checkpoint tensors that are sharded by rows, one row per process."""

    def sharded_tensors(self) -> Iterator[ShardedTensor]:
        from checkpoints.tensor_shards import ShardedTensor, TensorShard

        count = popdist.getNumInstances()
        shape, axes = (count, ROW), (0, 1)
        layout = tuple(TensorShard(shape, axes, (i, 0), (1, ROW), 0, ROW) for i in range(count))
        holders = tuple((i,) for i in range(count))
        for number in range(TENSORS):
            value = np.full(ROW, number, np.float32)
            yield ShardedTensor(
                f"tensor.{number}", value.dtype, layout, holders, lambda _, v=value: v
            )

    def __getitem__(self, name: str) -> np.ndarray:
        return np.full((1, ROW), int(name.partition(".")[2]), np.float32)

    def __iter__(self) -> Iterator[str]:
        return (f"tensor.{number}" for number in range(TENSORS))

    def __len__(self) -> int:
        return TENSORS


def _time_slowest(function: Callable[[], Any]) -> float:
    """Call a function on all processes; returns the seconds of the slowest process."""
    popdist.all_gather_object("ready")
    start = time.perf_counter()
    function()
    return float(max(popdist.all_gather_object(time.perf_counter() - start)))


def _sum_traffic(prefix: str, traffic: np.ndarray) -> dict[str, float]:
    """Returns the messages and bytes that all processes together sent."""
    messages, *nbytes = np.sum(popdist.all_gather_object(traffic.tolist()), axis=0)
    return {f"{prefix}messages": float(messages), f"{prefix}bytes": float(sum(nbytes))}


def _rpc_traffic(purpose: str) -> np.ndarray:
    return np.array(popdist.rpc_stats().get(purpose, (0, 0, 0)), float)


def _service_seconds() -> float:
    """Returns the CPU time of the coordination service, a child process of process 0."""
    task = Path("/proc/self/task") / str(os.getpid()) / "children"
    seconds = 0.0
    for child in task.read_text(encoding="ascii").split():
        fields = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


# ---- many hosts, on paper -----------------------------------------------------------------------
def _measure_checkpoint_tables(hosts: int) -> dict[str, float]:
    """Measure the sharding tables that one of `hosts` hosts builds to save preset `xxl_pod64`."""
    from checkpoints.manifest import Manifest
    from checkpoints.shard_assignment import ShardAssigner
    from checkpoints.step_folders import MANIFEST
    from checkpoints.tensor_files import read_records, write_records

    tensors, divided = _build_tensors(hosts), ShardAssigner()
    listing, parts = _time_cpu(lambda: sum(len(t.layout) for t in tensors.sharded_tensors()))
    # As process 0 of so many.
    count, popdist.getNumInstances = popdist.getNumInstances, lambda: hosts
    sharing, shares = _time_cpu(lambda: divided.assign_shards(tensors))
    second_sharing, _ = _time_cpu(lambda: divided.assign_shards(tensors))
    popdist.getNumInstances = count
    records = _create_records(tensors, shares.local_shards)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.json"
        writing, sha256 = _time_cpu(lambda: write_records(path, records))
        reading, _ = _time_cpu(lambda: read_records(path, sha256))
        table = path.stat().st_size
        Manifest(
            1, {}, record_files={f"{i}": sha256 for i in range(hosts)}, sharded=shares.sharded
        ).write(Path(folder))
        manifest = (Path(folder) / MANIFEST).stat().st_size
        reading_manifest, _ = _time_cpu(lambda: Manifest.read(Path(folder)))
    needed = len(_find_storing_processes(tensors, shares.sharded, hosts // 2))
    return {
        "hosts": hosts, "parts": parts, "listing_s": round(listing, 3),
        "sharing_s": round(sharing, 3), "again_s": round(second_sharing, 3),
        "table_bytes": table, "manifest_bytes": manifest,
        "read_manifest_s": round(reading_manifest, 3),
        "write_table_s": round(writing, 3), "tables_bytes": table * hosts,
        "read_tables_s": round(reading * hosts, 2), "tables_needed": needed,
    }  # fmt: skip


def _time_cpu(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function; returns the CPU seconds that it took, and its result."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def _find_storing_processes(tensors: Any, sharded_specs: Mapping[str, Any], host: int) -> set[int]:
    """Returns the processes that stored the shards which one host loads when a run resumes."""
    processes: set[int] = set()
    seen = set()
    for tensor in tensors.sharded_tensors():
        owners = sharded_specs[tensor.name].owners
        if (id(owners), id(tensor.processes)) not in seen:
            seen.add((id(owners), id(tensor.processes)))
            pairs = zip(owners, tensor.processes, strict=True)
            processes |= {owner for owner, holders in pairs if host in holders}
    return processes


def _build_tensors(hosts: int) -> Any:
    """Returns the checkpoint tensors of a training program on `hosts` hosts, not compiled."""
    import popxl
    from config.families import load_finetuning_config
    from config.presets import load_preset
    from modelling.model_family import get_family
    from modelling.phases.training import build_training_program
    from modelling.weights import ShardReader

    preset = "xxl_pod64"
    tensor_parallel = load_preset("finetuning", preset)["execution"]["tensor_parallel"]
    copies = hosts * DEVICES_OF_A_HOST // tensor_parallel
    changes = {"training": {"global_batch_size": 32 * copies},
               "execution": {"data_parallel": copies}}  # fmt: skip
    config = load_finetuning_config(preset, changes)
    family = get_family(config)
    weight_map = family.weight_map(config)
    program = build_training_program(config, family.build_phases, False, weight_map)
    owners = tuple(replica // DEVICES_OF_A_HOST for replica in range(config.num_replicas))
    held = ShardReader(
        lambda v: popxl.plan.variable_shards(v, owners), lambda v, part: np.zeros(part.size)
    )
    return weight_map.to_logical_tensors(lambda v: np.zeros(0), program.variables, True, held)


def _create_records(tensors: Any, local_shards: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Returns checkpoint records, without hashes, of the tensors that process 0 stores."""
    from checkpoints.safetensors_files import chunk_count
    from checkpoints.sharded_files import stored_name
    from checkpoints.tensor_files import TensorRecord

    records = {}
    for tensor in tensors.sharded_tensors():
        if tensor.name in local_shards:
            size = sum(tensor.layout[i].length for i in local_shards[tensor.name])
            nbytes = size * tensor.dtype.itemsize
            digests = ["0" * 64] * chunk_count(nbytes)
            record = TensorRecord(
                "tensors-00000-00001.safetensors", tensor.dtype.name, [size], digests
            )
            records[stored_name(tensor.name, 0)] = record
    return records


if __name__ == "__main__":
    sys.exit(run_as_process(sys.argv[2]) if sys.argv[1:2] == ["--be-one"] else main())
