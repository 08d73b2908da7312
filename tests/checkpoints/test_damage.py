"""Damage of any kind to the newest step is found, told, and the step before it is used."""

from __future__ import annotations

import json
import re
import shutil
import warnings

import numpy as np
import pytest

from checkpoints import (
    CheckpointError,
    CheckpointStore,
    CheckpointWarning,
    load_checkpoint,
)


def tensors_of(step):
    rng = np.random.default_rng(step)
    return {f"t{i}": rng.standard_normal((8, 9)).astype(np.float32) for i in range(4)}


@pytest.fixture
def store(tmp_path):
    """Steps 1, 2 and 3, of two tensor files each."""
    with CheckpointStore(tmp_path, shard_bytes=600) as store:
        for step in (1, 2, 3):
            store.save(step, tensors_of(step), {"step": step}, wait=True)
        yield store


def folder_of(store, step):
    return store.load(step).path


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0b100
    path.write_bytes(data)


def cut(path, length):
    path.write_bytes(path.read_bytes()[:length])


def lengthen_header(path, length):
    """With blanks, which safetensors allows."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + data[8:end].ljust(length) + data[end:])


def edit_manifest(path, change):
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))


FILE, MANIFEST = "tensors-00002.safetensors", "manifest.json"
DAMAGES = {
    "flipped bit of a tensor": (lambda f: flip(f / FILE, -1), "tensor t3 in .* not what was saved"),
    "flipped bit of a header": (lambda f: flip(f / FILE, 20), FILE),
    "header of 80 MB": (lambda f: lengthen_header(f / FILE, 80_000_000), "more than 16,777,216"),
    "flipped bit of a header's length": (lambda f: flip(f / FILE, 7), f"{FILE} is damaged"),
    "file cut short": (lambda f: cut(f / FILE, 300), f"{FILE} is damaged"),
    "file emptied": (lambda f: cut(f / FILE, 0), f"{FILE} is damaged"),
    "file deleted": (lambda f: (f / FILE).unlink(), f"{FILE} is missing"),
    "file of another step": (
        lambda f: shutil.copy(f.with_name("000001-step-2") / FILE, f / FILE),
        "tensor t[23] in .* not what was saved",
    ),
    "file twice": (
        lambda f: shutil.copy(f / "tensors-00001.safetensors", f / FILE),
        "tensor t0 is in .* and also",
    ),
    "manifest deleted": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "manifest cut short": (lambda f: cut(f / MANIFEST, 100), f"{MANIFEST} is damaged"),
    "manifest emptied": (lambda f: cut(f / MANIFEST, 0), f"{MANIFEST} is damaged"),
    "manifest with bytes that are no text": (
        lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\xfd"),
        f"{MANIFEST} is damaged",
    ),
    "manifest that is other JSON": (
        lambda f: (f / MANIFEST).write_text("[1]"),
        f"{MANIFEST} is damaged",
    ),
    "manifest changed": (
        lambda f: edit_manifest(f / MANIFEST, lambda m: m["content"]["metadata"].update(step=4)),
        f"{MANIFEST} is not what was saved",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_step_before_is_used(store, damage):
    do, reason = DAMAGES[damage]
    do(folder_of(store, 3))
    message = rf"^the checkpoint of step 3 is damaged \(.*{reason}.*\); using that of step 2$"
    with pytest.warns(CheckpointWarning, match=message) as caught:
        checkpoint = store.load()
    assert len(caught) == 1
    assert checkpoint.step == 2
    assert checkpoint.metadata == {"step": 2}
    for name, array in tensors_of(2).items():
        assert checkpoint.tensors[name].tobytes() == array.tobytes()


def test_any_flipped_bit_is_found(tmp_path):
    """Every byte of both files of a small step."""
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"x": np.arange(6, dtype=np.float16)}, {"seed": 1}, wait=True)
        path = store.load().path
    harmless = 0
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for position in range(len(good)):
            flip(file, position)
            try:
                checkpoint = load_checkpoint(path)
            except CheckpointError:
                continue
            finally:
                file.write_bytes(good)
            # White space of JSON, or text nobody reads; what is given back must be right.
            harmless += 1
            assert checkpoint.step == 1
            assert checkpoint.metadata == {"seed": 1}
            assert list(checkpoint.tensors) == ["x"]
            assert checkpoint.tensors["x"].tobytes() == np.arange(6, dtype=np.float16).tobytes()
    assert harmless < 40


def test_two_damaged_steps_are_told_in_one_warning(store):
    for step in (3, 2):
        (folder_of(store, step) / FILE).unlink()
    with pytest.warns(CheckpointWarning, match="step 3 is damaged .*; .*step 2 .*using .*step 1"):
        assert store.load().step == 1


def test_nothing_good(store):
    for step in (1, 2, 3):
        flip(folder_of(store, step) / FILE, -1)
    with pytest.raises(CheckpointError) as error:
        store.load()
    message = str(error.value)
    assert len(re.findall(r"the checkpoint of step \d is damaged", message)) == 3
    assert "\n" not in message


def test_a_damaged_step_that_was_asked_for_is_not_replaced_by_another(store):
    (folder_of(store, 2) / FILE).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=f"step 2 is damaged .*{FILE} is missing"):
            store.load(2)
        assert store.load().step == 3


def test_damage_after_loading_is_found(store):
    checkpoint = store.load()
    path = checkpoint.path / FILE
    good = path.read_bytes()
    with path.open("r+b") as file:  # in place: the file is open already
        file.seek(-1, 2)
        file.write(bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="tensor t3 in .* is not what was saved"):
        checkpoint.tensors["t3"]
    with path.open("r+b") as file:
        file.truncate(len(good) - 200)
    with pytest.raises(CheckpointError, match="cannot read tensor t3"):
        checkpoint.tensors["t3"]


def test_a_damaged_step_does_not_push_out_a_good_one(tmp_path):
    with CheckpointStore(tmp_path, to_keep=2) as store:
        for step in (1, 2):
            store.save(step, tensors_of(step), {}, wait=True)
        flip(folder_of(store, 2) / "tensors-00001.safetensors", -1)
        with pytest.warns(CheckpointWarning, match="using that of step 1"):
            store.load()
        store.save(3, tensors_of(3), {}, wait=True)
        assert store.steps() == [1, 2, 3]
        store.save(4, tensors_of(4), {}, wait=True)
        assert store.steps() == [3, 4]


@pytest.mark.parametrize(("written", "age"), [(99, "newer"), (5, "older"), (1, "older")])
def test_another_format_is_named(store, written, age):
    from checkpoints import manifest

    path = folder_of(store, 3) / MANIFEST
    content = json.loads(path.read_text())["content"] | {"format": written}
    path.write_text(json.dumps({"sha256": manifest._sha256_of_json(content), "content": content}))
    for step in (3, None):  # nor is an earlier step taken for it
        with pytest.raises(CheckpointError, match=f"has format {written}, {age} than the 7"):
            store.load(step)


# ---- tensors in parts, as several processes save them ------------------------------------------
HALVES = [{"axes": [0, 1], "corner": [0, 0], "box": [4, 3], "sizes": [5, 7]}]
BOXES = [{"axes": [1, 0], "corner": [0, c], "box": [3, n], "sizes": [3 * n]}
         for c, n in [(0, 1), (1, 3)]]  # fmt: skip


def save_in_parts(folder, change=lambda content: None, tables=lambda tables: None, boxes=HALVES):
    """Two steps; the second as two processes would store it, `a` in two parts.

    Args:
        change: changes the content of the manifest.
        tables: changes what the tables say.
        boxes: how `a` is cut.
    """
    from checkpoints import manifest
    from checkpoints.tensor_files import TensorRecord, write_records

    first = boxes[0]["sizes"][0]
    values = np.arange(12, dtype=np.float32)
    stored = {"a@0": values[:first], "a@1": values[first:]}
    with CheckpointStore(folder, shard_bytes=1) as store:  # a file for each
        for step in (1, 2):
            store.save(step, stored, {}, wait=True)
    path = folder_of(store, 2)
    content = json.loads((path / MANIFEST).read_text())["content"]
    found = [
        {name: TensorRecord.from_array(array, content["tensors"][name]["file"])}
        for name, array in stored.items()
    ]
    tables(found)
    digests = {f"{i}.json": write_records(path / f"{i}.json", own) for i, own in enumerate(found)}
    layouts = [{"shape": [4, 3], "boxes": json.loads(json.dumps(boxes))}]
    content |= {"tensors": {}, "tables": digests, "layouts": layouts, "owners": [[0, 1]]}
    content["cut"] = {"a": {"dtype": "float32", "layout": 0, "owners": 0}}
    change(content)
    text = json.dumps({"sha256": manifest._sha256_of_json(content), "content": content})
    (path / MANIFEST).write_text(text)
    return store


@pytest.mark.parametrize("boxes", [HALVES, BOXES])
def test_tensors_in_parts_come_back_whole(boxes, tmp_path):
    tensors = save_in_parts(tmp_path, boxes=boxes).load(2).tensors
    values = np.arange(12)
    expected = np.reshape(values, (4, 3))
    if boxes is BOXES:
        expected = np.concatenate([values[:3].reshape(1, 3), values[3:].reshape(3, 3).T])
    assert list(tensors) == ["a"]
    assert tensors.spec("a") == (np.float32, (4, 3))
    np.testing.assert_array_equal(tensors["a"], expected)


def change_layout(**fields):
    return lambda content: content["layouts"][0].update(fields)


def change_box(**fields):
    """Of the last one."""
    return lambda content: content["layouts"][0]["boxes"][-1].update(fields)


@pytest.mark.parametrize(
    ("boxes", "change", "said"),
    [
        (HALVES, change_box(sizes=[5]), "shards are missing"),
        (HALVES, change_box(sizes=[5, 6]), "shards are missing"),
        (HALVES, change_box(sizes=[5, 2**62]), "shards are missing"),
        (HALVES, change_layout(boxes=[]), "no shards"),
        (HALVES, change_layout(shape=[12]), "not a box of a tensor"),
        (HALVES, change_layout(shape=[4, 3, 1]), "not a box of a tensor"),
        (HALVES, change_layout(shape=[2**40, 2**40]), "shards are missing"),
        (HALVES, change_layout(shape=[3, 4]), "a shard is outside"),
        (HALVES, change_layout(boxes=HALVES * 2), "do not follow each other|shards are missing"),
        (BOXES, change_box(corner=[0, 0]), "overlap"),
        (BOXES, change_box(corner=[0, 2]), "a shard is outside"),
        (BOXES, change_box(axes=[0, 1]), "a shard is outside"),
        (BOXES, change_box(box=[2**40, 3]), "shards are missing"),
        (BOXES, lambda c: c["layouts"][0]["boxes"].pop(), "shards are missing"),
    ],
)  # fmt: skip
def test_parts_that_are_no_whole_tensor(boxes, change, said, tmp_path):
    """With a right digest; the step before is used."""
    store = save_in_parts(tmp_path, change, boxes=boxes)
    with pytest.warns(CheckpointWarning, match=f"step 2 is damaged .*({said})"):
        assert store.load().step == 1


def change_cut(**fields):
    return {"change": lambda content: content["cut"]["a"].update(fields)}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (change_cut(layout=1), "no layout, owners or dtype"),
        (change_cut(owners=1), "no layout, owners or dtype"),
        (change_cut(dtype="complex64"), "no layout, owners or dtype"),
        (change_cut(dtype="int32"), "another dtype or other sizes"),
        ({"change": lambda c: c.update(owners=[[0]])}, "lacks the owner of a shard"),
        ({"change": lambda c: c.update(owners=[[0, 2]])}, "lacks the owner of a shard"),
        ({"change": lambda c: c.update(owners=[[1, 0]])}, "other sizes"),
        ({"change": lambda c: c.update(owners=[[0, 0]])}, "other sizes"),
        ({"change": lambda c: c["cut"].update(b=c["cut"]["a"])}, "should lack, tensor b@"),
        ({"change": lambda c: c["tables"].update({"0.json": "0"})}, "0.json is not what was saved"),
        ({"change": lambda c: c["tables"].update({"../0": "0"})}, "not of the checkpoint"),
        ({"tables": lambda t: t[1].update(t[0])}, "lacks, or should lack, tensor"),
        ({"tables": lambda t: t[1].clear()}, "lacks, or should lack"),
        ({"tables": lambda t: vars(t[1]["a@1"]).update(file="../x")}, "not a file name"),
    ],
)  # fmt: skip
def test_manifests_that_make_up_no_whole_tensor(how, said, tmp_path):
    """With right digests; the step before is used."""
    store = save_in_parts(tmp_path, **how)
    with pytest.warns(CheckpointWarning, match=f"step 2 is damaged .*({said})"):
        assert store.load().step == 1


def test_tables_are_read_when_their_parts_are_asked_for(tmp_path, monkeypatch):
    """Of several processes; what is wrong with one is found by who needs it."""
    import popdist
    from checkpoints import DamagedCheckpointError
    from checkpoints.tensor_shards import TensorShard

    path = folder_of(save_in_parts(tmp_path), 2)
    (path / "1.json").write_text("{}")
    monkeypatch.setattr(popdist, "getNumInstances", lambda: 2)
    tensors = load_checkpoint(path, verify=False).tensors
    assert len(tensors._process_files) == 0
    assert tensors.spec("a") == (np.float32, (4, 3))
    first = TensorShard((4, 3), (0, 1), (0, 0), (4, 3), 0, 5)
    assert tensors.read_shards("a", [first]).reshape(-1)[:5].tolist() == [0, 1, 2, 3, 4]
    assert len(tensors._process_files) == 1
    with pytest.raises(DamagedCheckpointError, match=r"1\.json is not what was saved"):
        tensors["a"]
