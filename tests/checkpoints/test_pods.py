"""Manifests and records of large presets: small on disk, and read back."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import popdist
from checkpoints import CheckpointStore, load_checkpoint, safetensors_files
from checkpoints.lazy_arrays import ArraysView
from checkpoints.manifest import Manifest
from checkpoints.safetensors_files import StoredTensor, chunk_bytes
from checkpoints.shard_assignment import ShardAssigner, ShardAssignment
from checkpoints.sharded_files import stored_name
from checkpoints.tensor_files import MAX_RECORDS, TensorRecord, read_records, write_records
from checkpoints.tensor_shards import shard_mask
from config.families import config_class_of_preset
from config.presets import load_preset, merge_over, preset_names
from config.sections import RunConfig
from modelling.model_family import get_family
from modelling.phases.training import build_training_program
from modelling.weights import ShardReader
from popxl._run import device_variables
from popxl._storage.replica_arrays import replica_value

DEVICES_OF_A_HOST = 8
SMALL = {"model": {"hidden_size": 64, "attention": {"heads": 16}, "sequence_length": 16}}
SMALL_T5 = {"model": {"d_ff": 64, "decoder_sequence_length": 8, "attention": {"d_kv": 4}}}


def preset(name: str, *changes: dict) -> RunConfig:
    data = load_preset("finetuning", name)
    for change in changes:
        data = merge_over(data, change)
    return config_class_of_preset(data, name).from_dict(data)


def mesh_of(replicas: int, processes: int) -> SimpleNamespace:
    """Devices that are not here, shared out to processes."""
    each = replicas // processes
    devices = np.array([SimpleNamespace(process_index=r // each) for r in range(replicas)])
    return SimpleNamespace(mesh=SimpleNamespace(devices=devices))


def listed(config: RunConfig, processes: int):
    """The tensors of a program that nobody compiles, as so many processes would have them."""
    family = get_family(config)
    weight_map = family.weight_map(config)
    program = build_training_program(config, family.build_phases, False, weight_map)
    mesh = mesh_of(config.num_replicas, processes)
    held = ShardReader(
        lambda v: device_variables.shards_of_variable(mesh, v),
        lambda v, part: np.zeros(part.size, v.dtype.as_numpy()),
    )
    return weight_map.to_logical_tensors(lambda v: np.zeros(0), program.variables, True, held)


def shares_by_process(tensors, processes: int, monkeypatch) -> list[ShardAssignment]:
    monkeypatch.setattr(popdist, "getNumInstances", lambda: processes)
    found = []
    for process in range(processes):
        monkeypatch.setattr(popdist, "getInstanceIndex", lambda p=process: p)
        found.append(ShardAssigner().assign_shards(tensors))
    monkeypatch.undo()
    return found


def written(folder: Path, tensors, shares: list[ShardAssignment], every: int = 1) -> Manifest:
    """The manifest and the tables of a step, with other digests; `every`: of how many processes
    one table is written."""
    sizes = {one.name: (one.layout, one.dtype) for one in tensors.sharded_tensors()}
    record_files = {}
    for process, share in enumerate(shares):
        records = {}
        for name, parts in share.local_shards.items():
            layout, dtype = sizes[name]
            shape = [sum(layout[i].length for i in parts)]
            file = f"tensors-{process:05d}-00001.safetensors"
            nbytes = shape[0] * dtype.itemsize
            each = [f"{hash((name, process, i)) % 2**256:064x}"
                    for i in range(-(-nbytes // chunk_bytes(nbytes)))]  # fmt: skip
            records[stored_name(name, process)] = TensorRecord(file, dtype.name, shape, each)
        file = f"tensors-{process:05d}.json"
        if process % every == 0:
            record_files[file] = write_records(folder / file, records)
    record_files |= {f"{i}": "" for i in range(len(record_files), len(shares))}
    manifest = Manifest(1, {}, record_files=record_files, sharded=shares[0].sharded)
    manifest.write(folder)
    return manifest


def check_preset(name: str, folder: Path, monkeypatch) -> None:
    config = preset(name)
    processes = max(config.num_replicas // DEVICES_OF_A_HOST, 2 if config.num_replicas > 1 else 1)
    tensors = listed(config, processes)
    shares = shares_by_process(tensors, processes, monkeypatch)
    written(folder, tensors, shares)
    read = Manifest.read(folder)
    record_files = [
        read_records(folder / file, sha256) for file, sha256 in read.record_files.items()
    ]
    assert read.sharded.keys() == {one.name for one in tensors.sharded_tensors()}
    for process, (table, share) in enumerate(zip(record_files, shares, strict=True)):
        assert table.keys() == {stored_name(name, process) for name in share.local_shards}
        for name, parts in share.local_shards.items():
            cut = read.sharded[name]
            assert parts == [i for i, owner in enumerate(cut.owners) if owner == process]
            assert table[stored_name(name, process)].shape == [
                sum(cut.layout[i].length for i in parts)
            ]
    assert (folder / "manifest.json").stat().st_size < MAX_RECORDS / 16
    for file in read.record_files:
        assert (folder / file).stat().st_size < MAX_RECORDS / 16


@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names("finetuning"))
def test_what_every_preset_saves_can_be_read(name, tmp_path, monkeypatch):
    check_preset(name, tmp_path, monkeypatch)


def test_a_manifest_grows_with_tensors_and_not_with_replicas(tmp_path, monkeypatch):
    """xxl_pod64 with half of its layers, 64 wide, its weights sharded: 54,000 parts."""
    sharded = {"execution": {"rts_weights_threshold": 0}}
    config = preset("xxl_pod64", SMALL, SMALL_T5, {"model": {"layers": 12}}, sharded)
    tensors = listed(config, 8)
    start = time.process_time()
    found = list(tensors.sharded_tensors())
    seconds = time.process_time() - start
    parts = sum(len(one.layout) for one in found)
    assert parts > 50_000
    assert seconds < 0.5  # 3.7 when each part was described anew
    shares = shares_by_process(tensors, 8, monkeypatch)
    written(tmp_path, tensors, shares, every=8)
    # 33 MiB with each part.
    assert (tmp_path / "manifest.json").stat().st_size < 2**20
    assert (tmp_path / "tensors-00000.json").stat().st_size < 2**20
    stored = sum(math.prod(r.shape) for r in read_records(
        tmp_path / "tensors-00000.json", Manifest.read(tmp_path).record_files["tensors-00000.json"]
    ).values())  # fmt: skip
    whole = sum(math.prod(one.layout[0].shape) for one in found)
    assert stored == pytest.approx(whole / 8, rel=0.02)


def test_a_host_reads_the_ranges_of_its_devices_once(tmp_path, monkeypatch):
    """Of files that 8 hosts have saved, and 8 or 2 hosts continue from."""
    monkeypatch.setattr(safetensors_files, "_MIN_CHUNK", 256)
    layers = {"model": {"layers": 1}, "execution": {"rts_weights_threshold": 0}}
    config = preset("xxl_pod64", SMALL, SMALL_T5, layers)
    tensors = listed(config, 8)
    save_as(8, tensors, tmp_path, monkeypatch)
    read, read_into = [], StoredTensor.read_into
    monkeypatch.setattr(StoredTensor, "read_into", lambda self, memory, offset: (
        read.append((self.name, offset, len(memory))), read_into(self, memory, offset)
    ))  # fmt: skip
    found = load_checkpoint(tmp_path, verify=False).tensors
    assert not read
    family = get_family(config)
    weight_map, program = (
        family.weight_map(config),
        build_training_program(config, family.build_phases, False),
    )
    sources = weight_map.to_variables(found, program.variables)
    for processes, process in ((8, 0), (8, 5), (2, 1)):
        mesh, held = mesh_of(config.num_replicas, processes), 0
        read.clear()
        for variable, source in sources.items():
            own = device_variables._local_shards(
                device_variables.shards_of_variable(mesh, variable), process
            )
            source.make_shards(own)
            held += sum(part.size for part in own) * variable.dtype.itemsize
        assert len(set(read)) == len(read)
        nbytes = sum(size for _, _, size in read)
        assert 0.9 * held < nbytes < 1.1 * held, (processes, process, nbytes / held)


def save_as(processes: int, tensors, folder: Path, monkeypatch) -> None:
    """A step of so many processes."""
    store, record_files = CheckpointStore(folder), {}
    for process, shares in enumerate(shares_by_process(tensors, processes, monkeypatch)):
        with monkeypatch.context() as patch:
            patch.setattr(popdist, "getNumInstances", lambda: processes)
            patch.setattr(popdist, "getInstanceIndex", lambda p=process: p)
            record_files |= store._write_local_tensors(folder, shares.local_arrays())[1]
    Manifest(1, {}, record_files=record_files, sharded=shares.sharded).write(folder)


class Ranges(ArraysView):
    """Tensors of which only the wanted elements are there; the others are NaN."""

    taken = 0

    def read_shards(self, name, wanted):
        there = shard_mask(self[name].shape, wanted)
        self.taken += int(there.sum())
        return np.where(there, self[name], np.nan)


def test_each_of_8_hosts_reads_what_its_devices_hold(monkeypatch):
    """Of every variable of the 64-replica program, under shards, transposes and joined rows."""
    layers = {"model": {"layers": 2}, "execution": {"rts_weights_threshold": 0}}
    config = preset("xxl_pod64", SMALL, SMALL_T5, layers)
    family = get_family(config)
    weight_map, mesh = family.weight_map(config), mesh_of(config.num_replicas, 8)
    program = build_training_program(config, family.build_phases, False, weight_map)
    rng = np.random.default_rng(0)
    tensors = Ranges(
        {
            one.name: rng.standard_normal(one.layout[0].shape)
            for one in listed(config, 8).sharded_tensors()
        }
    )
    sources = weight_map.to_variables(tensors, program.variables)
    assert len(sources) > 100
    for process in (0, 5):
        tensors.taken = held = 0
        for variable, source in sources.items():
            own = device_variables._local_shards(
                device_variables.shards_of_variable(mesh, variable), process
            )
            whole, some = source(), source.make_shards(own)
            held += sum(part.size for part in own)
            for replica in range(8 * process, 8 * process + 8):
                entry = replica_value(variable, whole, replica)
                assert np.array_equal(replica_value(variable, some, replica), entry), variable
        # Padding is held and not read; tensors that one variable joins are read once each.
        assert 0.9 * held < tensors.taken <= held
    # The whole state is 64 times what a replica holds of it, if nothing is held twice.
    assert tensors.taken < 0.2 * sum(array.size for array in tensors.values())
