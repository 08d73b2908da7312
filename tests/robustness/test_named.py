"""Each class of mistake, once by name. The generated tests try the same places with much more."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import run_finetuning
import run_validation
from checkpoints import CheckpointError, CheckpointStore, collective_io
from config.errors import ConfigError, UserError, UserNotice
from config.gptj import GPTJConfig
from config.presets import load_config, load_preset
from config.t5 import T5Config
from data.file_readers import read_rows
from data.loader import Loader
from data.pipeline import Pipeline
from data.sources import DataError
from data.task import SAMPLE_FOLDER
from data.token_store import TokenStore
from data.tokenizer import Tokenizer, save_tokenizer
from files import temp_folders
from files.atomic_writing import (
    check_can_write_file,
    check_can_write_folder,
    write_file_atomically,
    write_text_atomically,
)
from files.errors import FileError, WriteError
from files.folder_lock import lock_folder
from files.json_files import read_json
from files.run_folder import RunFolder
from huggingface.hub import DataUnavailable, load_tokenizer
from huggingface.model_folders import write_hf_directory
from modelling.model_family import get_family
from run.answers.generate import read_stdin_lines
from run.model_weights import MODEL
from run.options import RunOptions
from run.records.metrics_jsonl import MetricsFile, read_metrics
from run.records.metrics_logger import MetricsLogger
from run.resume import resolve_initial_state
from run.weight_loading import load_weights
from tests.children import child
from tests.data.corpora import sample_tokenizer
from tests.full_disk import full_disk

ROOT = Path(__file__).parents[2]
TINY = ["--config", "tiny"]


@pytest.fixture
def refused(capsys, monkeypatch) -> Callable[..., str]:
    """Runs a script, which must end with one sentence before it reads any data."""

    def no_data(*_: object) -> None:
        raise AssertionError("data are read before the mistake is said")

    monkeypatch.setattr(Pipeline, "make_training_samples", no_data)

    def run(main: Callable[..., int], *arguments: str) -> str:
        assert main([*TINY, *arguments]) == 2
        *_, last = capsys.readouterr().err.strip().splitlines()
        assert last.startswith("error: ")
        return last

    return run


# ---- records -------------------------------------------------------------------------------------
def test_damaged_metrics_are_set_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 0, "loss": 3.0}', b'{"step": 1, "loss": 2.0}']
    bad = [
        b"\0" * 40,
        b'{"step": 1, "lo',
        b'{"loss": \xff}',
        b'{"step": true}',
        b"[1]",
        b"\xe2\x80",
    ]
    path.write_bytes(b"\n".join([good[0], *bad, good[1], b'{"step": 2, "l']))
    with pytest.warns(
        UserNotice, match="6 damaged lines of .* went to metrics.damaged.jsonl"
    ) as said:
        MetricsFile(path, first_step=2)
    assert len(said) == 1
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == b"".join(b + b"\n" for b in bad)


def test_metrics_that_are_a_pipe_are_not_waited_for(refused, tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "it is not a regular file" in refused(run_finetuning.main, "--save", str(tmp_path))


@pytest.fixture
def config() -> T5Config:
    return load_config(T5Config, "finetuning", "tiny")


def test_a_run_goes_on_without_records_that_cannot_be_written(tmp_path, config, capsys):
    """/dev/full gives what a full disk gives; the picture's place is taken by a folder."""
    with MetricsLogger(config, RunFolder(tmp_path), RunOptions("tiny")) as report:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        (tmp_path / "loss_curve.png").mkdir()
        for step in range(3):
            report.log_step(step + 1, loss=1.0, learning_rate=0.1)
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0, "learning_rate": 0.1}\n')
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(said) == 2
    assert "metrics.jsonl is not written, the run continues: cannot write" in said[0]
    assert "No space left" in said[0]
    assert "the loss curve is not written" in said[1]


def test_a_disk_that_fills_up_leaves_the_newest_good_step(tmp_path):
    """The kernel refuses the second save: a file may not grow past what is allowed."""
    program = f"""
import resource, sys
import numpy as np
from checkpoints import CheckpointStore, collective_io
from terminal.entry_point import entry_point

@entry_point()
def main(arguments=None):
    collective_io.RETRY_SECONDS = (0.1, 0.4, 1.0)
    with CheckpointStore({str(tmp_path)!r}) as store:
        store.save(1, {{"a": np.ones(100_000, np.float32)}}, {{}}, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store.save(2, {{"a": np.zeros(100_000, np.float32)}}, {{}}, wait=True)

sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert collective_io.RETRY_SECONDS == (1.0, 4.0, 10.0)
    *retries, error = done.stderr.splitlines()
    assert error.startswith(f"error: cannot save step 2 in {tmp_path}: ")
    assert [line.split("; ")[-1] for line in retries] == [
        f"trying again in {pause} s" for pause in ("0.1", "0.4", "1")
    ]
    found = CheckpointStore(tmp_path).load()
    assert found.step == 1
    np.testing.assert_array_equal(found.tensors["a"], np.ones(100_000, np.float32))
    assert not list(tmp_path.glob(".draft*"))


LARGE = {"w": np.ones(100_000, np.float32)}


def write_tokenizer(folder: Path) -> None:
    save_tokenizer(Tokenizer(sample_tokenizer("t5")), RunFolder(folder))


def write_columns(folder: Path) -> None:
    TokenStore(texts=[b"a" * 100_000]).write_columns(folder / "prepared" / "train.safetensors", {})


def write_model(folder: Path) -> None:
    write_hf_directory(folder / "model", LARGE, {})


def write_model_with_tokenizer(folder: Path) -> None:
    save_tokenizer = sample_tokenizer("t5").save_pretrained
    write_hf_directory(folder / "model", {}, {}, add_files=save_tokenizer)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_tokenizer, "the tokenizer {}/tokenizer"),
        (write_columns, "prepared data {}/prepared/train.safetensors"),
        (write_model, "the model folder {}/model"),
        (write_model_with_tokenizer, "the model folder {}/model"),
    ],
)
def test_a_library_finds_the_disk_full(write, said, tmp_path):
    """One sentence, also from libraries written in Rust, which raise exceptions of their own."""
    with full_disk(), pytest.raises(FileError) as raised:
        write(tmp_path)
    assert str(raised.value) == f"cannot write {said.format(tmp_path)}: File too large"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_configuration_beside_the_tensors_is_covered_by_the_digest(tmp_path):
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"a": np.ones(3)}, {}, wait=True, texts={"config.yml": "a: 1\n"})
    (newest,) = tmp_path.glob("*-step-2")
    (newest / "config.yml").write_text("a: 2\n")
    with pytest.warns(UserNotice, match=r"step 2 is damaged .*config.yml is not what was saved"):
        assert CheckpointStore(tmp_path).load().step == 1


# ---- checked before work begins ------------------------------------------------------------------
PLACES = [("--run-dir", "the run directory"), ("--save", "the run directory"),
          ("--save-hf", "the model folder"), ("--plan-json", "the plan"),
          ("--plan-picture", "the picture")]  # fmt: skip


@pytest.mark.parametrize(("option", "what"), PLACES)
@pytest.mark.parametrize(
    ("place", "reason"),
    [("/proc/x", "No such file"), ("{}/file/x", "is not a folder"), ("{}/" + "n" * 256, "")],
)
def test_places_that_cannot_be_written(option, what, place, reason, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    said = refused(run_finetuning.main, option, place.format(tmp_path))
    assert reason in said
    assert what in said or "must be text that can be a path" in said
    assert "n" * 100 not in said


def test_a_link_to_itself_gives_way_to_the_file(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    write_text_atomically("the metrics", tmp_path / "loop", "rows")
    assert (tmp_path / "loop").read_text() == "rows"


def test_what_is_no_folder_is_no_step(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"a": np.ones(3)}, {}, wait=True)
        (tmp_path / "000010-step-6").write_text("")
        (tmp_path / "000011-step-7").symlink_to("000011-step-7")
        store.save(2, {"a": np.ones(3)}, {}, wait=True)
    assert CheckpointStore(tmp_path).load().step == 2


def test_a_link_to_nothing_is_no_folder(refused, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for option in ("--save", "--save-hf"):
        assert "it is a link to nothing" in refused(
            run_finetuning.main, option, str(tmp_path / "link")
        )


def test_the_exported_model_has_a_folder_of_its_own(refused, tmp_path):
    """Else it would be refused after training, when the run has filled the folder."""
    same = [str(tmp_path / "run"), str(tmp_path / "x" / ".." / "run")]
    for option in ("--save", "--run-dir"):
        said = refused(run_finetuning.main, option, same[0], "--save-hf", same[1])
        assert "is the folder of the run, which is not empty at the end" in said


def test_a_picture_is_not_written_into_the_name_of_a_folder(refused, tmp_path):
    (tmp_path / "plans").mkdir()
    said = refused(run_finetuning.main, "--plan-picture", str(tmp_path / "plans"))
    assert "it is a folder: name a file in it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["plans"]


def test_checks_leave_nothing_behind(tmp_path):
    check_can_write_folder("x", tmp_path / "a" / "b")
    check_can_write_file("x", tmp_path / "a" / "b.json")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_text_atomically("the report", path, "first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(WriteError, match="cannot write the report .*: full"):
            write_text_atomically("the report", path, "second")
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layers", "1000000"], "must be an integer from 1 to 1024"),
        (["--d_ff", "10000000000"], "GB of host memory"),
        (["--hidden_size", str(2**62)], "gradients and moments would take 3.68e+11 TB"),
        (["--hidden_size", str(2**63)], "must be an integer below 2^63"),
        (["--sequence_length", "1000000"], "GB the activations"),
        (["--sequence_length", "1000000", "--execution.attention", "scores"],
         "the attention scores would take"),
        (["--decoder_sequence_length", "1000000"], "positions of the answers"),
        (["--examples_per_sample", "1000000000000"], "the answers of a run"),
        (["--global_batch_size", str(2**40)], "activations"),
        (["--device_iterations", str(2**40), "--steps", str(2**40)], "the inputs of a run"),
        (["--data_parallel", "4096", "--global_batch_size", "4096", "--micro_batch_size", "1"],
         "a CPU stands in for 1024 at most"),
        (["--data_parallel", "100000", "--micro_batch_size", "1"], "at most 16,384 devices"),
        (["--seed", str(2**64)], "must be an integer below 2^63"),
    ],
)  # fmt: skip
def test_sizes_that_fit_no_memory(flags, said, refused):
    assert said in refused(run_finetuning.main, *flags)


def test_training_of_a_model_for_generation(refused):
    assert "model.eval is true" in refused(run_finetuning.main, "--model.eval", "true")


# ---- one writer ----------------------------------------------------------------------------------
HOLD = """
import sys, time
from pathlib import Path
from files.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_writer(tmp_path, refused):
    holder = child([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    said = refused(run_finetuning.main, "--save", str(tmp_path))
    assert f"is in use: process {holder.pid} on" in said
    holder.kill()
    holder.communicate()
    with lock_folder(tmp_path):  # what is killed holds nothing
        pass


LEAVE = """
import os, signal, sys
from pathlib import Path
from files.atomic_writing import write_file_atomically, write_folder_atomically

def killed(draft):
    (draft / "part" if draft.is_dir() else draft).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

kind, path = sys.argv[1:]
write = {"file": write_file_atomically, "folder": write_folder_atomically}[kind]
write("the draft", Path(path), killed)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_draft_goes_when_its_process_is_gone(kind, tmp_path):
    """With the next write into the folder, or when a run opens the folder or the one above it."""
    folder = tmp_path / "packed"
    folder.mkdir()
    opens = (
        lambda: write_text_atomically("x", folder / "x", ""),
        lambda: lock_folder(folder).__enter__(),
        lambda: lock_folder(tmp_path).__enter__(),
    )
    for opened in opens:
        command = [sys.executable, "-c", LEAVE, kind, str(folder / "made")]
        assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == -signal.SIGKILL
        assert len(list(folder.glob(".*"))) == 1
        opened()
        assert not list(folder.glob(".*"))
    assert not (folder / "made").exists()


def test_the_draft_of_a_living_process_stays(tmp_path):
    """A file beside it is not taken for one, and a link is not followed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / f".{'0' * 16}.draft").symlink_to(tmp_path / "mine")
    (tmp_path / f".{'1' * 16}.draft").write_text("a file")

    def write(draft: Path) -> None:
        write_text_atomically("another", tmp_path / "other", "")
        draft.write_text("whole")

    write_file_atomically("one", tmp_path / "one", write)
    assert (tmp_path / "one").read_text() == "whole"
    assert (tmp_path / "mine").is_dir()
    assert (tmp_path / f".{'1' * 16}.draft").is_file()


def test_a_draft_that_is_taken_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    opened, taken = temp_folders.open_lock, []

    def slow(path: Path) -> int:
        if not taken:
            taken.append(path)
            temp_folders.remove_stale_folders(tmp_path)
        return opened(path)

    monkeypatch.setattr(temp_folders, "open_lock", slow)
    write_text_atomically("one", tmp_path / "one", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_lock_is_no_link(tmp_path):
    """What it leads to is not written."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "writer.lock").symlink_to(tmp_path / "mine")
    with (
        pytest.raises(WriteError, match="Too many levels of symbolic links"),
        lock_folder(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


# ---- YAML and JSON from outside ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {layers: [1, 2]}", r"line 2: model.layers is \[1, 2\], but must be"),
        ("model: {layers: 2026-11-21}", "line 2: model.layers is '2026-11-21'"),
        ("model: {layers: " + "9" * 5000 + "}", "line 2: model.layers is '9999"),
        ("model: {layers: 0x" + "f" * 3000 + "}", "is an integer of about 3613 digits"),
        ("model: {layers: 0x" + "f" * 5000 + "}", "layers is '0xffff"),
        ("model: {layers: 0b" + "1" * 20_000 + "}", "layers is '0b1111"),
        ("training: {epochs: 0x" + "f" * 5000 + "}", "epochs is '0xffff"),
        ("model: " + "[" * 100_000, "line 2: nested deeper than 20 levels"),
        ("a: &a [x]\nb: [*a, *a]", "line 2: &a is an anchor"),
        ("model: {layers: \0}", "line 2: has a zero character"),
        ("model: {layers: 1}\nmodel: {layers: 2}", "line 3: the key 'model' stands twice"),
        ("model: !!set {a}", "line 2: the tag .*set is not read"),
        ("model: {seed: 36893488147419103232}", "line 2: model.seed is 36893488147419103232, but"),
        ("? [a]\n: b", "line 2: a name must be text"),
        ("checkpoint: {load: ''}", "line 2: checkpoint.load is '', but must be text that can be"),
    ],
)
def test_yaml_from_outside(text, said, tmp_path):
    path = tmp_path / "some.yml"
    path.write_text(f"family: t5\n{text}\n")
    start = time.process_time()
    with pytest.raises(ConfigError, match=said) as error:
        T5Config.from_dict(load_preset("finetuning", str(path)))
    assert time.process_time() - start < 1
    assert len(str(error.value)) < 300
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1,\n "a": 2}', "the name 'a' stands twice"),
        (b'{"a":\n 1', "line 2 is not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"9" * 5000, "is not JSON: Exceeds the limit"),
        (b'"\\ud800"', "half a character"),
        (b"\xff", "line 1: is not UTF-8"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": 1e999}', "line 1 is not JSON: the number 1e999 is too large"),
    ],
)
def test_json_from_outside(content, said, tmp_path):
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(FileError, match=said) as error:
        read_json(tmp_path / "some.json")
    assert len(str(error.value)) < 300
    assert "some.json" in str(error.value)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="pipe: it is not a regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(FileError, match="it is a folder"):
        read_json(tmp_path)


# ---- data and tokenizers -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": "\xe2\x80\xa8"}\n\n{"a": ', "rows.jsonl, line 3 is not JSON"),
        (b'{"a": "x"}\n\xff\xfe', "line 2: is not UTF-8"),
        (b'\xef\xbb\xbf{"a": "x"}\n{"a": }', "rows.jsonl, line 2 is not JSON"),
        (b'{"a": "x"}\n3', "line 2 is 3, but must be an object"),
    ],
)
def test_rows_from_outside(content, said, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=said):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_a_tokenizer_runs_no_code_of_its_folder(tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"AutoTokenizer": ["own.Tokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(DataUnavailable, match="asks to run code of its own"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


VOCABULARY = {word: number for number, word in enumerate(["a", "</s>", *map(str, range(300))])}
WORDS = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "a"}
DOUBLED = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
BETWEEN = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * 2000}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
            "the tokenizer fails on a text",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": DOUBLED}},
            "the replacements of its normalizer lengthen a text more than 1,000 times",
        ),
        ({"normalizer": BETWEEN}, "replacements of its normalizer"),
        ({"decoder": {"type": "Sequence", "decoders": [BETWEEN]}}, "replacements of its decoder"),
    ],
)
def test_a_tokenizer_made_to_harm(part, said, tmp_path):
    file = {"version": "1.0", "added_tokens": [], "model": WORDS, **part}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(UserError, match=said):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_fails_on_a_text(tmp_path):
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
    file = {"version": "1.0", "added_tokens": [], "model": WORDS}
    file |= {"pre_tokenizer": pattern | {"invert": False}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = Tokenizer(load_tokenizer(str(tmp_path)), 400)
    with pytest.raises(UserError, match="fails on a text .*retry-limit-in-match over"):
        list(tokenizer.encode(["a" * 40 + "!"]))


def test_a_damaged_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model":\n')
    with pytest.raises(FileError, match="tokenizer.json, line 2 is not JSON"):
        load_tokenizer(str(tmp_path))


# ---- accepted in silence -------------------------------------------------------------------------
SIZES = {"layers": 1, "hidden_size": 16, "embedding": {"vocab_size": 32}, "eos_token_id": 1,
         "pad_token_id": 0}  # fmt: skip


def gptj(heads: int, rotary_dim: int, **checkpoint: object) -> GPTJConfig:
    attention = {"heads": heads, "rotary_dim": rotary_dim}
    return GPTJConfig.from_dict(
        {"family": "gptj", "model": SIZES | {"attention": attention}, "checkpoint": checkpoint}
    )


def initial(config: GPTJConfig) -> dict[str, np.ndarray]:
    return dict(get_family(config).weight_map(config).init_weights(1))


@pytest.mark.parametrize("kind", ["Hugging Face", "checkpoint"])
@pytest.mark.parametrize(("heads", "rotary", "name"), [(4, 4, "n_head"), (2, 2, "rotary_dim")])
def test_weights_of_a_model_with_other_heads(kind, heads, rotary, name, tmp_path):
    """All shapes are equal, and every number that comes out would be wrong."""
    made = gptj(2, 4)
    hf_config = get_family(made).to_config_json(made)
    if kind == "checkpoint":
        with CheckpointStore(tmp_path) as store:
            store.save(1, initial(made), {MODEL: hf_config}, wait=True)
    else:
        write_hf_directory(tmp_path / "hf", initial(made), hf_config)
    load = str(tmp_path / "hf" if kind == "Hugging Face" else tmp_path)
    weight_map = get_family(made).weight_map(made)
    load_weights(gptj(2, 4, load=load), weight_map)
    with pytest.raises(CheckpointError, match=f"a model with {name} "):
        load_weights(gptj(heads, rotary, load=load), weight_map)


@pytest.mark.parametrize(
    ("value", "precision", "said"),
    [
        (np.nan, "float32", "NaN or infinity"),
        (np.inf, "float32", "NaN or infinity"),
        (-65520, "float16", "values beyond 65504, the maximum of float16"),
    ],
)
def test_weights_that_are_not_finite(value, precision, said, tmp_path):
    config = gptj(2, 4, load=str(tmp_path / "hf")).with_values({"model.precision": precision})
    weight_map, hf_config = (
        get_family(config).weight_map(config),
        get_family(config).to_config_json(config),
    )
    write_hf_directory(tmp_path / "hf", initial(config), hf_config)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.bias"][3] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"lm_head.bias in .* has {said}"):
        dict(resolve_initial_state(config, weight_map).tensors)
    asked = gptj(2, 4, load=str(tmp_path / "hf"), allow_nonfinite=True)
    assert len(dict(resolve_initial_state(asked, weight_map).tensors)) == len(tensors)


@pytest.mark.parametrize("odd", [np.zeros((3, 3), np.float32), np.zeros((32, 16), np.int32), None])
def test_state_of_another_optimizer(odd, tmp_path):
    config = gptj(2, 4, load=str(tmp_path))
    weight_map, weights = get_family(config).weight_map(config), initial(config)
    state = {
        f"optimizer/{n}/{w}": v for w, v in weights.items() for n in ("first_order", "second_order")
    }
    name = "optimizer/first_order/transformer.wte.weight"
    with CheckpointStore(tmp_path) as store:
        store.save(1, weights | state, {}, wait=True)
        assert resolve_initial_state(config, weight_map).step == 1
        changed = {n: v for n, v in (state | {name: odd}).items() if v is not None}
        store.save(2, weights | changed, {}, wait=True)
    with pytest.raises(CheckpointError, match=rf"has no {name} of shape \(32, 16\), which adamw"):
        resolve_initial_state(config, weight_map)


class Ten:
    truncated = 0
    digest = "of ten samples"

    def __len__(self) -> int:
        return 10

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"indices": indices}


@pytest.mark.parametrize(
    "change",
    [
        {"position": 10}, {"position": -1}, {"epoch": "1"}, {"seed": None}, {"samples": 9},
        {"digest": "of ten others"},
    ],
)  # fmt: skip
def test_a_place_in_the_data_that_cannot_be(change):
    """A position past the end would look for the next sample for ever."""
    loader = Loader(Ten(), 4, seed=1)
    with pytest.raises((ValueError, FileError)):
        loader.restore(loader.state() | change)


# ---- signals during start-up ---------------------------------------------------------------------
def wait_until_it(run: subprocess.Popen[str], what: str) -> None:
    """Imports JAX, or compiles: moments, not seconds, which depend on the machine."""
    assert run.stderr is not None
    if what == "compiles":
        while not run.stderr.readline().startswith("compiling"):
            assert run.poll() is None
        return
    while "_jax" not in Path(f"/proc/{run.pid}/maps").read_text():
        assert run.poll() is None
        time.sleep(0.01)


@pytest.mark.slow  # four starts of a run
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", ["imports", "compiles"])
def test_a_signal_while_a_run_starts(number, what, tmp_path):
    run = child(
        [sys.executable, str(ROOT / "run_finetuning.py"), *TINY, "--save", str(tmp_path / "run")],
        env=os.environ | {"POPXL_CACHE_DIR": ""},
    )
    wait_until_it(run, what)
    time.sleep(0.2)
    run.send_signal(number)
    _, said = run.communicate(timeout=120)
    assert "Traceback" not in said
    assert said.splitlines()[-1] == (
        f"interrupted by {number.name}: what was saved before is intact"
    )
    assert run.returncode == 128 + number
    assert not list(tmp_path.glob("run/*-step-*"))


def test_a_script_reads_its_command_line_before_it_loads_jax():
    """So mistakes are said at once, and signals are answered from the first half second on."""
    scripts = "run_finetuning, run_validation, run_generation, run_inference"
    program = f"import sys, {scripts}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


AWAY = """
import hashlib, sys
from terminal.entry_point import entry_point

@entry_point()
def main(arguments=None):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes outside Python, as XLA compiles

sys.exit(main())
"""


def test_a_signal_while_python_is_away():
    run = child([sys.executable, "-c", AWAY], cwd=ROOT)
    assert run.stdout is not None
    run.stdout.readline()
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=120)
    assert said == "interrupted by SIGTERM: what was saved before is intact\n"
    assert run.returncode == 143


WRITES = """
import os, sys
from pathlib import Path
from terminal.entry_point import entry_point

@entry_point()
def main(arguments=None):
    with Path(sys.argv[1]).open("wb"):
        for stream in (1, 2):
            os.write(stream, b"a message of XLA\\n")
    print("an answer")

sys.exit(main())
"""


SIGNALLED = """
import os, signal, sys, time
from terminal.entry_point import entry_point

class Tidy:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)

def destroy():
    tidy = Tidy()
    del tidy

def load():
    try:
        import signalled
    except BaseException:  # as a half initialised extension meets it
        os.abort()

@entry_point()
def main(arguments=None):
    {"destroy": destroy, "load": load}[sys.argv[1]]()
    time.sleep(20)

sys.path.insert(0, sys.argv[2])
sys.exit(main())
"""


@pytest.mark.parametrize("what", ["destroy", "load"])
def test_a_signal_where_nothing_can_be_raised(what, tmp_path):
    """Python drops what is raised in a destructor, and in callbacks of the garbage collector, as
    JAX has; what is raised while its extension is imported ends the process by SIGSEGV."""
    module = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(20)\n"
    (tmp_path / "signalled.py").write_text(module)
    command = [sys.executable, "-c", SIGNALLED, what, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr == "interrupted by SIGTERM: what was saved before is intact\n"
    assert done.returncode == 143


def test_streams_that_are_closed_get_into_no_file(tmp_path):
    """Else the file would have the number of standard error, and get what is written there."""
    command = [sys.executable, "-c", WRITES, str(tmp_path / "checkpoint")]
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=ROOT)
    assert closed.returncode == 0
    assert (tmp_path / "checkpoint").read_bytes() == b""
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("given", [5, 1.5, True, [], ["T5Tokenizer"], {"a": 1}])
def test_a_tokenizer_whose_class_is_no_text_is_said_in_our_words(given, tmp_path):
    folder = Path(shutil.copytree(SAMPLE_FOLDER / "t5_tokenizer", tmp_path / "tokenizer"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": given}))
    with pytest.raises(DataUnavailable, match="tokenizer_class .*, but it must"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("size", [10, 10**5])
def test_a_full_standard_output_is_named_and_its_code_stays(size):
    """Python's own flush at the end would make it 120."""
    program = f"""
import sys
from terminal.entry_point import entry_point

@entry_point(single_process=True)
def main(arguments=None):
    print("x" * {size})

sys.exit(main())
"""
    command = [sys.executable, "-c", program]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "error: standard output: No space left on device\n"
    assert done.returncode == 2


SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in (".", "planning", "huggingface", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if "\n@entry_point(" in path.read_text()
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
@pytest.mark.parametrize("name", [*SCRIPTS, "popdist.run"])
def test_help_that_cannot_be_written_is_said(name, monkeypatch, capsys):
    """argparse goes on silently, and the code is 0."""
    main = importlib.import_module(name).main
    with suppress(OSError), open("/dev/full", "w") as full:  # closing it writes once more
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 2
        assert capsys.readouterr().err.endswith(": standard output: No space left on device\n")
        sys.stdout.close()  # what took its place


def test_validation_checks_its_place_first(refused, monkeypatch):
    monkeypatch.setattr(
        "run.evaluation.evaluate_checkpoint.load_inference_weights",
        lambda *_: pytest.fail("too late"),
    )
    assert "cannot write the report to" in refused(run_validation.main, "--out", "/proc/x")


# ---- what surrounds a run -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"POPDIST_NUM_INSTANCES": "x"}, "POPDIST_NUM_INSTANCES is 'x': set it to a number"),
        ({"POPDIST_NUM_INSTANCES": "0"}, "a run has 1 to 16384 processes, but is given 0"),
        (
            {"POPDIST_NUM_INSTANCES": "2", "POPDIST_INSTANCE_INDEX": "5"},
            "process 5 is not one of 2 processes",
        ),
        (
            {
                "POPDIST_NUM_INSTANCES": "2",
                "POPDIST_COORDINATOR": "127.0.0.1:9",
                "POPDIST_SILENCE": "1",
            },
            "POPDIST_SILENCE is 1: set it to seconds from 3 to 86400",
        ),
    ],
)
def test_numbers_of_processes_in_the_environment_that_cannot_be(
    variables, said, monkeypatch, capsys
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_finetuning.main(["--config", "tiny"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given", ["x", "-1", "nan", "1e999", "\udcff"])
def test_a_limit_of_the_cache_that_is_none(given, refused, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_GB", given)
    said = refused(run_finetuning.main)
    assert "the environment variable POPXL_CACHE_GB is '" in said
    assert "must be a number, 0 or more: correct or unset it" in said


@pytest.mark.parametrize("mode", ["foo", "Online", "\udcff", "x" * 10_000])
def test_a_mode_of_wandb_that_there_is_not(mode, refused, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", mode)
    said = refused(run_finetuning.main, "--wandb")
    assert "WANDB_MODE is '" in said
    assert "must be one of online, offline, disabled: set it, or leave out --wandb" in said
    assert len(said) < 300


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # by the locale
def test_standard_input_that_is_no_text(errors, monkeypatch):
    given = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8", errors)
    monkeypatch.setattr(sys, "stdin", given)
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_stdin_lines()
