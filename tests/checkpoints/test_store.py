"""A store gives back what was saved, keeps what it should, and needs little memory."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest

from checkpoints import (
    ArraySpec,
    CheckpointError,
    CheckpointStore,
    CheckpointWarning,
    has_checkpoint,
    load_checkpoint,
)
from checkpoints.manifest import Manifest


def values(dtype, shape=(3, 5)):
    """Every bit pattern may come up, also nan, infinities and subnormals; bool is 0 or 1."""
    rng = np.random.default_rng(1)
    if dtype is np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def bits(array):
    return array.dtype, array.shape, array.tobytes()


def assert_same(tensors, expected):
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        assert bits(tensors[name]) == bits(array), name


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path / "deep" / "run") as store:
        yield store


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.uint8, np.bool_],
    ids=lambda dtype: np.dtype(dtype).name,
)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (2, 1, 7)], ids=str)
def test_every_bit_comes_back(store, dtype, shape):
    array = values(dtype, shape)
    store.save(3, {"x": array}, {})
    checkpoint = store.load()
    assert bits(checkpoint.tensors["x"]) == bits(array)
    assert checkpoint.tensors.spec("x") == ArraySpec(array.dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "optimizer/first_order/shared.weight",
        "..",
        "/",
        "a//b/../c",
        "sha256",
        " with space\nand line ",
        "größe·√",
        "",
    ],
)
def test_names_are_only_names(store, name):
    tensors = {name: values(np.float32), "other": values(np.float16)}
    store.save(1, tensors, {})
    assert_same(store.load().tensors, tensors)


def test_arrays_in_any_memory_layout(store):
    array = values(np.float32, (4, 6))
    tensors = {"transposed": array.T, "strided": array[::2, ::3], "reversed": array[::-1]}
    store.save(1, tensors, {}, wait=True)
    assert_same(store.load().tensors, tensors)


def test_metadata(store):
    record = {
        "data": {"epoch": 1, "position": 640},
        "seed": 2**100 + 1,
        "rate": 0.1 + 0.2,
        "config": {"model": {"layers": [1, 2], "tied": False, "name": None}},
    }
    store.save(7, {}, record)
    checkpoint = store.load()
    assert checkpoint.metadata == record
    assert checkpoint.step == 7
    assert len(checkpoint.tensors) == 0


def test_what_was_saved_is_not_what_the_caller_does_afterwards(store):
    array, record = np.zeros(200_000, np.float32), {"seen": [1]}
    tensors = {"x": array, "gone": np.ones(3, np.float32)}
    store.save(1, tensors, record)
    array += 1
    record["seen"].append(2)
    del tensors["gone"]
    checkpoint = store.load()
    assert not checkpoint.tensors["x"].any()
    assert set(checkpoint.tensors) == {"x", "gone"}
    assert checkpoint.metadata == {"seen": [1]}


def test_what_was_loaded_belongs_to_the_caller(store):
    store.save(1, {"x": np.zeros(4, np.float32)}, {})
    tensors = store.load().tensors
    tensors["x"][:] = 1
    assert not tensors["x"].any()


def test_a_step_is_on_disk_when_save_has_waited(tmp_path):
    CheckpointStore(tmp_path).save(1, {"x": np.ones(3)}, {}, wait=True)
    assert CheckpointStore(tmp_path).steps() == [1]


def test_leaving_the_context_waits(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"x": np.ones(3_000_000)}, {})
    assert load_checkpoint(tmp_path).tensors["x"].all()


def test_tensors_are_split_over_files(tmp_path):
    tensors = {f"t{i}": values(np.float32, (i + 1, 10)) for i in range(10)}
    with CheckpointStore(tmp_path, shard_bytes=300) as store:
        store.save(1, tensors, {})
        checkpoint = store.load()
    assert_same(checkpoint.tensors, tensors)
    assert list(checkpoint.tensors) == list(tensors)
    assert len(list(checkpoint.path.glob("*.safetensors"))) == 8


def test_one_step_can_be_asked_for(store):
    for step in (10, 20, 30):
        store.save(step, {"x": np.full(3, step)}, {})
    assert store.load(20).tensors["x"][0] == 20
    assert store.load().step == 30
    assert load_checkpoint(store.load(10).path).step == 10
    with pytest.raises(CheckpointError, match=r"step 25 in .*run; there are: 10, 20, 30"):
        store.load(25)


def test_the_newest_are_kept(tmp_path):
    with CheckpointStore(tmp_path, to_keep=2) as store:
        for step in range(1, 6):
            store.save(step, {"x": np.full(3, step)}, {})
        store.wait()
        assert store.steps() == [4, 5]
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("at", ["before it is opened", "while it is read", "newer and damaged"])
def test_a_step_that_a_run_replaces_while_it_is_loaded(tmp_path, monkeypatch, at):
    """As the one of best/: the one in its place is loaded, and nothing called damaged."""
    saving, loading = CheckpointStore(tmp_path, to_keep=1), CheckpointStore(tmp_path)
    saving.save(1, {"x": np.full(3, 1)}, {}, wait=True)
    name = "check_text_files" if at == "while it is read" else "read"
    usual, replaced = getattr(Manifest, name), []

    def replace_first(*args):
        if not replaced:
            replaced.append(True)
            saving.save(2, {"x": np.full(3, 2)}, {}, wait=True)
            if at == "newer and damaged":
                (tmp_path / "000001-step-2" / "manifest.json").unlink()
        return usual(*args)

    monkeypatch.setattr(Manifest, name, replace_first)
    if at == "newer and damaged":
        with pytest.raises(CheckpointError) as error:
            loading.load()
        assert str(error.value).startswith("the checkpoint of step 2 is damaged")
        return
    checkpoint = loading.load()
    assert (checkpoint.step, checkpoint.tensors["x"][0]) == (2, 2)


def test_what_killed_runs_left_is_deleted_by_the_next_save(tmp_path):
    (tmp_path / ".draft-000004-step-9").mkdir(parents=True)
    (tmp_path / ".deleted-000003-step-8").mkdir()
    (tmp_path / ".shared-0123abcd").write_text("x")
    for name in (".shared-files", ".draft-mine", "notes"):
        (tmp_path / name).write_text("somebody's")
    with CheckpointStore(tmp_path) as store:
        store.save(10, {"x": np.zeros(3)}, {}, wait=True)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".draft-mine", ".shared-files", "000000-step-10", "notes"]


def test_saving_a_step_again_replaces_it(tmp_path):
    with CheckpointStore(tmp_path, to_keep=2) as store:
        for step, value in ((1, 0), (2, 0), (2, 7)):
            store.save(step, {"x": np.full(3, value)}, {})
        assert store.load().tensors["x"][0] == 7
        assert store.steps() == [1, 2]


def test_the_newest_is_the_last_saved_and_not_the_highest(tmp_path):
    """A run that goes on from step 10 has left behind the attempt that reached step 30."""
    with CheckpointStore(tmp_path, to_keep=2) as store:
        for step in (10, 30, 20):
            store.save(step, {"x": np.full(3, step)}, {})
        assert store.load().step == 20
        assert store.steps() == [30, 20]


def test_loaded_tensors_outlive_their_files(tmp_path):
    """As when a training deletes old steps while a validation reads one."""
    with CheckpointStore(tmp_path, to_keep=1) as store:
        store.save(1, {"x": np.arange(5)}, {})
        checkpoint = store.load()
        store.save(2, {"x": np.zeros(5)}, {}, wait=True)
    assert not checkpoint.path.exists()
    assert checkpoint.tensors["x"].tolist() == [0, 1, 2, 3, 4]


class Made(Mapping):
    """1 MB arrays that exist only when asked for, as those gathered from devices do."""

    def __init__(self, count):
        self.count = count

    def __getitem__(self, name):
        return np.full(2**18, int(name), np.float32)

    def __iter__(self):
        return map(str, range(self.count))

    def __len__(self):
        return self.count


def test_memory_for_one_file_is_enough(tmp_path):
    store = CheckpointStore(tmp_path, shard_bytes=3 * 2**20)
    tracemalloc.start()
    try:
        store.save(1, Made(40), {}, wait=True)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        tensors = store.load().tensors
        assert all(tensors[name][0] == int(name) for name in tensors)
        loading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 3 * 2**20 < saving < 6 * 2**20
    assert 2**20 < loading < 6 * 2**20


def test_nothing_there(tmp_path):
    message = "give a folder written by --save, or a Hugging Face model folder"
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        assert not has_checkpoint(path)
        with pytest.raises(CheckpointError, match=f"no checkpoint in {path}: {message}"):
            load_checkpoint(path)


def test_there_is_something(store):
    store.save(1, {}, {})
    path = store.load().path
    assert has_checkpoint(path)
    assert has_checkpoint(path.parent)


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "message"),
    [
        ({"x": np.zeros(2, np.complex64)}, {}, TypeError, "tensor x is complex64"),
        ({"x": np.zeros(2, ">f4")}, {}, TypeError, "tensor x is >f4"),
        ({"x": np.array([{}])}, {}, TypeError, "tensor x is object"),
        ({"__metadata__": np.zeros(2)}, {}, ValueError, "named __metadata__"),
        ({}, {"rng": np.random.default_rng(0)}, TypeError, "Generator is not JSON"),
    ],
)
@pytest.mark.parametrize("wait", [True, False], ids=["wait", "background"])
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, tensors, metadata, error, message, wait):
    with pytest.raises(error, match=message):
        CheckpointStore(tmp_path).save(1, tensors, metadata, wait=wait)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_told_at_the_next_occasion(tmp_path):
    (tmp_path / "file").touch()
    store = CheckpointStore(tmp_path / "file")
    store.save(1, {"x": np.ones(3)}, {})
    with pytest.raises(CheckpointError, match=r"cannot save step 1 in .*file: File exists"):
        store.close()


def test_a_failed_write_leaves_the_older_steps(tmp_path, monkeypatch):
    with CheckpointStore(tmp_path, to_keep=1) as store:
        store.save(1, {"x": np.ones(3)}, {}, wait=True)

        def full(*_args, **_kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("checkpoints.store.write_safetensors", full)
        monkeypatch.setattr("checkpoints.collective_io.RETRY_SECONDS", ())
        with pytest.raises(CheckpointError, match="cannot save step 2 .*: No space left"):
            store.save(2, {"x": np.zeros(3)}, {}, wait=True)
        assert store.load().step == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_once_is_done_again(tmp_path, monkeypatch):
    import checkpoints.store as stores

    usual, failures = stores.write_safetensors, [errno.EIO, errno.ESTALE]

    def once(*args):
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        usual(*args)

    monkeypatch.setattr(stores, "write_safetensors", once)
    monkeypatch.setattr("checkpoints.collective_io.RETRY_SECONDS", (0.0, 0.0))
    with CheckpointStore(tmp_path) as store, pytest.warns(CheckpointWarning) as said:
        store.save(1, {"x": np.ones(3)}, {}, wait=True)
    assert [str(w.message).split(": ")[1] for w in said] == [
        "Input/output error; trying again in 0 s", "Stale file handle; trying again in 0 s"
    ]  # fmt: skip
    assert load_checkpoint(tmp_path).tensors["x"].tolist() == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_that_cannot_be_listed_after_a_save_fails_no_save(tmp_path, monkeypatch, wait):
    def stale(*_args):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("checkpoints.store.remove_older_steps", stale)
    with pytest.warns(CheckpointWarning, match="cannot look for older steps .*: Stale file"):  # noqa: SIM117
        with CheckpointStore(tmp_path, to_keep=1) as store:
            store.save(1, {"x": np.ones(3)}, {}, wait=wait)
    assert load_checkpoint(tmp_path).step == 1


def test_to_keep_is_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="to_keep is 0"):
        CheckpointStore(tmp_path, to_keep=0)


def test_the_files_are_what_others_can_read(store):
    from safetensors.numpy import load_file

    store.save(1, {"x": np.arange(4, dtype=np.float32)}, {"seed": 3})
    path = store.load().path
    assert load_file(path / "tensors-00001.safetensors")["x"].tolist() == [0, 1, 2, 3]
    assert json.loads((path / "manifest.json").read_text())["content"]["metadata"] == {"seed": 3}


def test_a_step_that_cannot_be_deleted_stops_nothing(tmp_path, monkeypatch):
    """As after `chattr +i`, or on NFS while another host has a file open."""
    import checkpoints.step_folders as folders

    refused, usual = [True], folders.shutil.rmtree

    def rmtree(path, *args, **kwargs):
        if refused[0] and ".deleted" in str(path):
            raise OSError(39, "Directory not empty")
        usual(path, *args, **kwargs)

    monkeypatch.setattr(folders.shutil, "rmtree", rmtree)
    with CheckpointStore(tmp_path, to_keep=1) as store:
        store.save(1, {"x": np.ones(3)}, {}, wait=True)
        for step in (2, 3):
            with pytest.warns(CheckpointWarning, match="cannot delete .*Directory not empty"):
                store.save(step, {"x": np.ones(3)}, {}, wait=True)
        assert store.load().step == 3
        with pytest.warns(CheckpointWarning, match="cannot delete"):  # and no restart
            CheckpointStore(tmp_path, to_keep=1).save(4, {"x": np.ones(3)}, {}, wait=True)
        refused[0] = False
        store.save(5, {"x": np.ones(3)}, {}, wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["000004-step-5"]


def test_what_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    """A step was saved whose manifest was longer than what its reader takes."""
    tensors = {f"tensor.{i}": np.zeros(3) for i in range(100)}
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"x": np.zeros(3)}, {}, wait=True)
        monkeypatch.setattr("checkpoints.tensor_files.MAX_RECORDS", 5000)
        with pytest.raises(CheckpointError, match="more than the 5,000 that can be read"):
            store.save(2, tensors, {}, wait=True)
        assert store.steps() == [1]


def test_a_step_is_read_back_before_it_is_one(tmp_path, monkeypatch):
    """Whatever its reader refuses: here, what reached the disk is another file."""
    from checkpoints import store as module

    write = module.write_safetensors

    def cut_short(path, shard):
        write(path, shard)
        path.write_bytes(path.read_bytes()[:-8])

    with CheckpointStore(tmp_path) as store:
        store.save(1, {"x": np.zeros(3)}, {}, wait=True)
        monkeypatch.setattr(module, "write_safetensors", cut_short)
        with pytest.raises(CheckpointError, match="is damaged"):
            store.save(2, {"x": np.zeros(3)}, {}, wait=True)
        assert store.steps() == [1]
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_shares_are_found_once_for_tensors_that_are_cut_alike(monkeypatch):
    """The assignment takes seconds on a thousand hosts, so saves reuse it."""
    from checkpoints import shard_assignment as shares
    from checkpoints.tensor_shards import ShardedTensor, TensorShard

    layout = tuple(TensorShard((4, 3), (0, 1), (i, 0), (1, 3), 0, 3) for i in range(4))
    holders = tuple((i % 2,) for i in range(4))

    def tensors(*names, layout=layout):
        dtype = np.dtype(np.float32)
        cut = [ShardedTensor(n, dtype, layout, holders, lambda i: np.full(3, i)) for n in names]
        return type("Tensors", (), {"sharded_tensors": lambda self: iter(cut)})()

    taken = []
    take = shares._LoadBalancer.assign_shards
    monkeypatch.setattr(
        shares._LoadBalancer,
        "assign_shards",
        lambda self, one: taken.append(one.name) or take(self, one),
    )
    monkeypatch.setattr(shares.popdist, "getNumInstances", lambda: 2)
    divided = shares.ShardAssigner()
    first = divided.assign_shards(tensors("a", "b"))
    again = divided.assign_shards(tensors("a", "b"))
    assert taken == ["a", "b"]
    assert first.local_shards == again.local_shards == {"a": [0, 2], "b": [0, 2]}
    assert divided.assign_shards(tensors("a", "c")).local_shards == {"a": [0, 2], "c": [0, 2]}
    divided.assign_shards(tensors("a", "c", layout=tuple(reversed(layout))))
    assert taken[4:] == ["a", "c"]


def test_what_is_small_is_in_one_table(monkeypatch):
    """Else who continues would read the tables of all, for a norm here and a bias there."""
    from checkpoints import shard_assignment as shares
    from checkpoints.tensor_shards import ShardedTensor, TensorShard

    def cut(name, size, *holders):
        count = len(holders)
        parts = tuple(
            TensorShard((count, size), (0, 1), (i, 0), (1, size), 0, size) for i in range(count)
        )
        return ShardedTensor(name, np.dtype(np.float32), parts, holders, lambda i: np.zeros(size))

    large = [cut(f"large.{i}", 10**6, (0,), (1,), (2,), (3,)) for i in range(2)]
    alike = [cut(f"alike.{i}", 10**6, (0, 1, 2, 3)) for i in range(4)]
    small = [cut(f"small.{i}", 100, (0, 1, 2, 3)) for i in range(30)]
    monkeypatch.setattr(shares.popdist, "getNumInstances", lambda: 4)
    tensors = type(
        "Tensors", (), {"sharded_tensors": lambda self: iter([*large, *small, *alike])}
    )()
    owners = {
        name: one.owners
        for name, one in shares.ShardAssigner().assign_shards(tensors).sharded.items()
    }
    assert all(owners[one.name] == (0, 1, 2, 3) for one in large)
    assert all(owners[one.name] == (0,) for one in small)
    assert sorted(owners[one.name] for one in alike) == [(0,), (1,), (2,), (3,)]
