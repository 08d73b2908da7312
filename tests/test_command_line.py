"""The scripts as a person runs them: one sentence for a mistake, runs that continue, quiet screens.

A mistake is one line on stderr, the last one, and exit code 2.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import datasets
import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

import finetuning
import inference
import run_export
import run_finetuning
import run_generation
import run_validation
from benchmarks import device as device_benchmark
from checkpoints import CheckpointWarning, load_checkpoint
from data.task import SAMPLE_FOLDER
from planning.hardware.matrix_rate import measure_matmul_rate
from run import generated_data_benchmark, model_card
from run.records import metrics_logger
from run.records.loss_curve import draw_loss_curve
from run.records.metrics_jsonl import read_metrics
from tests.children import PYTHON_PATH
from tests.data.corpora import few_rows, sample_examples, sample_tokenizer
from tests.slow import slow
from tests.small_runs import BATCH, MODEL, TRAINING

ROOT = Path(__file__).parent.parent
VALIDATION = (*MODEL, "--micro_batch_size", "32", "--eval.metrics", "accuracy")
FIRST = (*TRAINING, "--steps", "8", "--checkpoint.steps", "4")
ROWS = {"train": 400, "validation": 90}


@pytest.fixture(scope="module", autouse=True)
def what_is_shared(executables, tmp_path_factory) -> Iterator[None]:
    """Programs are compiled once. In this process the sample corpus has few rows, and curves are
    drawn where a test asks for `curves`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POPXL_CACHE_DIR", str(executables))
        few_rows(patch, tmp_path_factory.mktemp("sample"), **ROWS)
        for drawing in (metrics_logger, model_card):
            patch.setattr(drawing, "draw_loss_curve", lambda *_: None)
        yield


@pytest.fixture
def curves(monkeypatch) -> None:
    """Draw the loss curves of runs."""
    for drawing in (metrics_logger, model_card):
        monkeypatch.setattr(drawing, "draw_loss_curve", draw_loss_curve)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """What `FIRST` leaves, with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run_finetuning.main([*FIRST, "--save", str(folder), *exported(folder)]) == 0
    return folder


def exported(run: Path) -> tuple[str, str]:
    """The flag by which the first run writes its model for Hugging Face."""
    return "--save-hf", str(run.parent / "new" / "at-end")


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def step_folder(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"*-step-{step}")
    return found


def sentence(stderr: str) -> str:
    """The one sentence that a failed script ends with, without "error: "."""
    assert "Traceback" not in stderr
    *before, last = stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert not any(line.startswith("error") for line in before)
    text = last.removeprefix("error: ")
    assert not re.search(r"[.!?]\s+[A-Z]", text), f"more than one sentence: {text}"
    return text


@pytest.fixture
def mistake(capsys) -> Callable[..., str]:
    """Runs a script's main, which must fail by a person's mistake; returns the sentence."""

    def run(main: Callable[..., int], *arguments: str) -> str:
        capsys.readouterr()
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return sentence(err)

    return run


def process(
    script: str, *arguments: str, stdout: int | IO[str] = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as a shell of a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **environment},
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )


# ---- models for Hugging Face ---------------------------------------------------------------------
def test_a_run_exports_at_its_end_what_it_saved(trained, tmp_path, mistake):
    at_end, later = Path(exported(trained)[1]), tmp_path / "later"
    load = ["--load", str(trained), "--save-hf", str(later)]
    assert run_export.main([*MODEL, "--dropout_prob", "0.1", *load]) == 0
    written, again = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (at_end, later)
    )
    assert set(written) == set(again)
    card, curve = "README.md", "loss_curve.png"  # they name the folder
    names = [files[card].replace(b"at-end", b"later") for files in (written, again)]
    assert names[0] == names[1]
    assert all(written[name] == again[name] for name in set(written) - {card, curve})
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(written)
    run = [*FIRST, "--save", str(tmp_path / "run"), *exported(trained)]
    assert "at-end is there and is not empty" in mistake(run_finetuning.main, *run)
    assert "--save-hf DIR" in mistake(run_export.main, *MODEL, "--load", str(tmp_path))


# ---- what is wrong with the arguments themselves -------------------------------------------------
@pytest.mark.parametrize("main", [run_finetuning.main, run_validation.main])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "tinny"], r"unknown preset 'tinny' in \w+\.yml; did you mean tiny\b"),
        (["--config", "no/such.yml"], r"cannot read no/such\.yml: No such file"),
        (["--config", "tiny", "--hiden_size", "32"], r"--hiden_size; did you mean --hidden_size"),
        (["--config", "tiny", "--layers", "two"], r"model\.layers is 'two', but must be .*integer"),
        (
            ["--config", "tiny", "--layers", "0"],
            r"model\.layers is 0, but must be an integer from 1",
        ),
        (["--config", "tiny", "--precision", "f16"], r"one of float32, float16, bfloat16"),
        (["--config", "tiny", "--layers"], r"--layers: expected one argument; see --help"),
        (["--config", "tiny", "--tensor_parallel", "3"], r"128 must be divisible by .*parallel 3"),
    ],
)
def test_bad_arguments(main, arguments, said, mistake):
    assert re.search(said, mistake(main, *arguments))


def test_a_global_batch_that_cannot_be_split(mistake):
    said = mistake(run_finetuning.main, *MODEL, "--global_batch_size", "10", "--data_parallel", "3")
    assert "training.global_batch_size 10 must be divisible by" in said
    assert "× execution.data_parallel 3 = 192" in said


def test_steps_that_cannot_be_split(mistake, tmp_path):
    said = mistake(
        run_finetuning.main, *TRAINING, "--steps", "3", "--device_iterations", "2",
        "--run-dir", str(tmp_path),
    )  # fmt: skip
    assert "training.steps 3 must be divisible by execution.device_iterations 2" in said


def test_a_model_too_small_for_the_tokenizer(mistake):
    said = mistake(run_finetuning.main, *TRAINING, "--vocab_size", "128")
    assert "tokenizer has 256 tokens" in said
    assert "set it to 256 or more" in said


# ---- devices ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("main", "arguments"),
    [(run_finetuning.main, TRAINING), (finetuning.main, MODEL)],
)
def test_no_device_of_the_kind(main, arguments, mistake):
    said = mistake(main, *arguments, "--device", "tpu", "--tensor_parallel", "2")
    assert "preset 'tiny' needs 2 tpu device(s)" in said
    assert "there are 0" in said
    assert "--device cpu" in said


def test_too_few_devices(mistake, tmp_path, monkeypatch):
    """As the flag of XLA says, which this process would have had to be started with."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(jax, "local_devices", lambda backend: jax.devices(backend)[:1] * 2)
    said = mistake(
        run_finetuning.main, *TRAINING, "--data_parallel", "2", "--tensor_parallel", "2",
        "--run-dir", str(tmp_path),
    )  # fmt: skip
    assert "preset 'tiny' needs 4 cpu device(s), data_parallel 2 × tensor_parallel 2" in said
    assert "there are 2: lower --data_parallel or --tensor_parallel" in said


# ---- checkpoints and the network ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("main", "arguments"), [(run_finetuning.main, TRAINING), (run_validation.main, VALIDATION)]
)
def test_no_checkpoint(main, arguments, mistake, tmp_path):
    nowhere = tmp_path / "nowhere"
    said = mistake(main, *arguments, "--load", str(nowhere))
    assert str(nowhere) in said
    assert "check the path" in said
    said = mistake(main, *arguments, "--load", str(tmp_path))
    assert f"neither a checkpoint nor a Hugging Face model in {tmp_path}" in said
    said = mistake(main, *arguments, "--load", "nobody/no-such-model")
    assert "nobody/no-such-model" in said
    assert "connect to the network" in said


def test_validation_of_nothing(mistake):
    assert "give --load DIR" in mistake(run_validation.main, *VALIDATION)


def test_a_checkpoint_of_another_model(mistake, trained):
    said = mistake(run_validation.main, *VALIDATION, "--d_ff", "64", "--load", str(trained))
    assert str(trained) in said
    assert "configuration" in said


def spoil(step: Path) -> None:
    """Change one bit of a step's tensors."""
    (file,) = step.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def test_the_newest_good_checkpoint_stands_in_for_a_damaged_one(mistake, copy):
    spoil(step_folder(copy, 8))
    with pytest.warns(CheckpointWarning, match=r"step 8 is damaged .*; using that of step 4"):
        assert run_validation.main([*VALIDATION, "--load", str(copy)]) == 0
    assert json.loads((copy / "eval.json").read_text())["step"] == 4
    spoil(step_folder(copy, 4))
    with pytest.warns(CheckpointWarning, match="step 8 is damaged"):
        said = mistake(run_validation.main, *VALIDATION, "--load", str(copy))
    assert "the checkpoint of step 4 is damaged" in said


def test_an_unknown_tokenizer(mistake):
    said = mistake(run_finetuning.main, *TRAINING, "--tokenizer", "nobody/no-such-tokenizer")
    assert "nobody/no-such-tokenizer" in said
    assert "connect to the network and unset HF_HUB_OFFLINE, or give a folder" in said


def test_mnli_needs_a_network(mistake, trained, tmp_path, monkeypatch):
    """As does its tokenizer, where no run has a copy."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "data")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    mnli = ("--dataset", "mnli")
    out = ("--load", str(trained), "--out", str(tmp_path))
    said = mistake(run_validation.main, *VALIDATION, *mnli, *out)
    assert "cannot get data set glue/mnli from the Hugging Face hub" in said
    assert "connect to the network and unset HF_HUB_OFFLINE, or use --data.dataset" in said
    said = mistake(run_finetuning.main, *TRAINING, *mnli, "--run-dir", str(tmp_path))
    assert "Hugging Face hub (HF_HUB_OFFLINE is set, and the cache" in said


@pytest.mark.slow  # two starts; data/test_seq2seq.py has a hub that refuses connections
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("run_validation.py", (*VALIDATION, "--load", "{trained}", "--out", "{folder}")),
        ("run_finetuning.py", (*TRAINING, "--run-dir", "{folder}")),
    ],
)
def test_a_hub_that_is_not_reached_is_one_sentence(script, arguments, trained, tmp_path):
    names = {"trained": trained, "folder": tmp_path}
    done = process(
        script, *(text.format(**names) for text in arguments), "--dataset", "mnli",
        HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0", HF_DATASETS_OFFLINE="0",
        HF_HOME=str(tmp_path / "hub"),
    )  # fmt: skip
    assert done.returncode == 2
    said = sentence(done.stderr)
    assert "cannot get data set glue/mnli" in said
    assert "Hugging Face hub (http://127.0.0.1:9 is not reachable, and the cache" in said


# ---- training -----------------------------------------------------------------------------------
def losses(folder: Path) -> list[float]:
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def assert_same_state(one: Path, other: Path) -> None:
    first, second = load_checkpoint(one), load_checkpoint(other)
    assert first.step == second.step
    assert first.metadata["data"] == second.metadata["data"]
    assert set(first.tensors) == set(second.tensors)
    assert any(name.startswith("optimizer/second_order/") for name in first.tensors)
    for name in first.tensors:
        np.testing.assert_array_equal(first.tensors[name], second.tensors[name], err_msg=name)


def test_a_stopped_run_continues_bit_for_bit(trained, tmp_path, capsys):
    """Stopped after 4 steps, as by a kill before the next save: rows after it are written anew. A
    run's config.yml is a preset, with which it starts again."""
    config, folder = ("--config", str(trained / "config.yml")), ("--save", str(tmp_path))
    assert run_finetuning.main([*config, "--steps", "4", *folder]) == 0
    assert losses(tmp_path) == losses(trained)[:4]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.0, "learning_rate": 0.0}\n{"step": 6, "lo')
    command = [*FIRST, *folder]
    capsys.readouterr()
    assert run_finetuning.main(command) == 0
    assert f"starting from step 4 in {tmp_path}" in capsys.readouterr().err
    assert losses(tmp_path) == losses(trained)
    assert_same_state(tmp_path, trained)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert run_finetuning.main(command) == 0
    assert f"nothing to train: step 8 in {tmp_path} is complete" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}


def resumed(folder: Path, capsys, *arguments: str) -> str:
    """What a run says to begin with; "": it trains nothing."""
    capsys.readouterr()
    assert run_finetuning.main([*arguments, "--run-dir", str(folder)]) == 0
    said = capsys.readouterr().err
    found = re.search(r"^(nothing to train|starting from) .*$|^nothing to train: .*$", said, re.M)
    assert found is not None
    return found[0]


def test_every_advice_on_a_run_that_is_complete(trained, copy, tmp_path, capsys):
    """Of one that is loaded, and of one that is saved; of that one advice is taken."""
    load, save = ("--load", str(trained)), ("--save", str(copy))
    said = resumed(tmp_path, capsys, *load)
    assert said == (
        f"nothing to train: step 8 in {trained} is complete, with training.steps 8: raise --steps "
        "to resume it; --checkpoint.load_optimizer false starts a new run from its weights"
    )
    assert resumed(tmp_path, capsys, *load, "--overwrite") == said, "which names no --overwrite"
    anew = ("--checkpoint.load_optimizer", "false", "--steps", "2")
    weights = f"starting from the weights of step 8 in {trained}"
    assert resumed(tmp_path, capsys, *load, *anew) == weights
    assert resumed(tmp_path, capsys, *save).endswith(
        "raise --steps to resume it; --overwrite starts over"
    )
    within = resumed(tmp_path, capsys, *save, "--load", str(copy))
    assert within.endswith("false, with another --save starts a new run from its weights")


@pytest.mark.slow  # three runs; by default other tests resume runs and start over
@pytest.mark.quickly
def test_other_advice_on_a_run_that_is_complete_is_taken(trained, copy, tmp_path, capsys):
    load, save = ("--load", str(trained)), ("--save", str(copy))
    assert resumed(tmp_path, capsys, *load, "--steps", "9") == f"starting from step 8 in {trained}"
    assert resumed(copy, capsys, *save, "--steps", "9") == f"starting from step 8 in {copy}"
    over = resumed(copy, capsys, *TRAINING, *save, "--overwrite", "--steps", "2")
    assert over == "starting from random weights"


@pytest.mark.slow  # as the one before, by epochs
def test_epochs_that_are_over_are_raised(tmp_path, capsys):
    command = (*TRAINING, "--epochs", "0.25", "--save", str(tmp_path))
    assert run_finetuning.main(list(command)) == 0
    assert "raise --epochs to resume it" in resumed(tmp_path, capsys, *command)
    more = resumed(tmp_path, capsys, "--save", str(tmp_path), "--epochs", "0.3")
    assert more.startswith("starting from step ")


def test_another_optimizers_state_is_answered_by_how_a_new_run_begins(
    trained, copy, mistake, tmp_path, capsys
):
    other = ("--training.optimizer.name", "adafactor", "--steps", "9")
    said = mistake(run_finetuning.main, *other, "--load", str(trained), "--run-dir", str(tmp_path))
    assert said.endswith("; --checkpoint.load_optimizer false starts a new run from its weights")
    anew = ("--load", str(trained), "--checkpoint.load_optimizer", "false", *other)
    assert resumed(tmp_path, capsys, *anew).startswith("starting from the weights of step 8")
    said = mistake(run_finetuning.main, *other, "--save", str(copy))
    assert said.endswith("; --overwrite starts over")


def test_a_folder_with_another_run_is_refused(copy, mistake):
    said = mistake(run_finetuning.main, *TRAINING, "--d_ff", "64", "--save", str(copy))
    assert f"{copy} has a run with model.d_ff 32, but this one has 64" in said
    assert "--overwrite" in said
    assert load_checkpoint(copy).step == 8


def test_weights_alone_start_a_new_run_and_cannot_be_continued(copy, tmp_path, mistake, capsys):
    start = ["--load", str(copy), "--checkpoint.load_optimizer", "false"]
    save = ["--save", str(tmp_path / "new"), "--checkpoint.save_optimizer", "false"]
    assert run_finetuning.main([*TRAINING, "--steps", "2", *start, *save]) == 0
    assert f"starting from the weights of step 8 in {copy}" in capsys.readouterr().err
    found = load_checkpoint(tmp_path / "new")
    assert found.step == 2
    assert not any(name.startswith("optimizer/") for name in found.tensors)
    said = mistake(run_finetuning.main, *TRAINING, "--steps", "4", *save)
    assert "has no optimizer state to resume from: --overwrite starts over" in said


def test_evaluation_best_weights_and_early_stopping(tmp_path, capsys, mistake):
    """At rate 0 nothing gets better: the first evaluation is the best, two more end the run."""
    flags = ["--eval.steps", "2", "--eval.samples", "40", "--eval.patience", "2"]
    metrics = ["--eval.metrics", "loss", "--checkpoint.keep_best", "loss"]
    still = ["--learning_rate", "1e-30", "--save", str(tmp_path)]
    steps = ["--steps", "40", "--checkpoint.steps", "2"]
    command = [*TRAINING, *still, *flags, *metrics, *steps]
    assert run_finetuning.main([*command, "--save-hf", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().err
    assert "2 evaluations in a row had no better loss" in said
    best = f"step 2 was the best by loss: --load {tmp_path / 'best'} takes it"
    assert best in said
    assert "wrote a model of step 6 for Hugging Face" in said  # the newest, as others take
    rows = read_metrics(tmp_path / "metrics.jsonl")
    evaluated = [row["step"] for row in rows if "eval_loss" in row]
    assert (evaluated, len(rows)) == ([2, 4, 6], 6)
    assert load_checkpoint(tmp_path / "best").step == 2
    assert run_finetuning.main(command) == 0  # which is over, and stays so
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6
    for place, step in ((tmp_path, 6), (tmp_path / "best", 2), (step_folder(tmp_path, 4), 4)):
        capsys.readouterr()
        export = ["--load", str(place), "--save-hf", str(tmp_path / f"hf{step}")]
        assert run_export.main(export) == 0
        said = capsys.readouterr().err
        assert f"the weights are those of step {step} in {place}\n" in said
        assert (best in said) == (step == 6)
        assert f"wrote a model of step {step} for Hugging Face" in said
    out = ["--load", str(tmp_path / "best"), "--eval.metrics", "loss", *flags[2:4]]
    assert run_validation.main([*out, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert report["loss"] == pytest.approx(rows[1]["eval_loss"], rel=1e-5)
    said = mistake(run_finetuning.main, *TRAINING, "--eval.patience", "2")
    assert "eval.patience needs evaluations while training: set eval.steps" in said


def test_answers_exports_and_a_tokenizer_that_is_gone(tmp_path, capsys, curves):
    """Answers to the first examples are recorded while a model is trained; stop texts hold for
    them, here so that they print a word at most. The run keeps its tokenizer, and exports have a
    card written from the run's record."""
    given, run = tmp_path / "tokenizer", tmp_path / "run"
    shutil.copytree(SAMPLE_FOLDER / "t5_tokenizer", given)
    letters = ",".join("abcdefghijklmnopqrstuvwxyz")
    command = [*TRAINING, "--steps", "4", "--tokenizer", str(given), "--save", str(run)]
    command += ["--eval.steps", "2", "--eval.samples", "8", "--stop_strings", letters]
    command += ["--eval.metrics", "accuracy", "--eval.log_samples", "3"]
    assert run_finetuning.main([*command, "--save-hf", str(tmp_path / "hf")]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line).get("samples") for line in lines]
    assert [bool(samples) for samples in found[:4]] == [False, True, False, True]
    examples = sample_examples("validation", 3)
    for samples in (found[1], found[3]):
        assert [s["prompt"] for s in samples] == [example.prompt for example in examples]
        assert [s["expected"] for s in samples] == [example.target for example in examples]
        assert all(len(re.findall("[a-z]+", s["generated"])) <= 1 for s in samples)
    shutil.rmtree(given)
    capsys.readouterr()
    assert run_finetuning.main(command) == 0
    said = capsys.readouterr().err
    assert f"tokenizer {given} is gone: the run's copy in {run / 'tokenizer'} is used" in said
    assert "nothing to train: step 4" in said
    assert run_export.main(["--load", str(run), "--save-hf", str(tmp_path / "again")]) == 0
    cards = [ModelCard.load(tmp_path / name / "README.md") for name in ("hf", "again")]
    for card in cards:
        assert [r.metric_type for r in card.data.eval_results] == ["accuracy"]
        assert "--steps 4 --tokenizer tokenizer" in card.text
    assert cards[0].text.partition("## Use")[2] == cards[1].text.partition("## Use")[2]
    for name in ("hf", "again"):
        assert (tmp_path / name / "loss_curve.png").stat().st_size > 10_000
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer("Nina slept.").input_ids == sample_tokenizer()("Nina slept.").input_ids
    capsys.readouterr()
    ask = ["--load", str(run), "--generation.max_tokens", "4", "Nina slept."]
    assert run_generation.main(ask) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow  # four runs
def test_a_split_changes_rounding_alone_unless_dropout_draws_other_masks(tmp_path):
    """As docs/configuration.md says of the section `execution`."""

    def losses(dropout: str, micro: str) -> list[float]:
        folder = tmp_path / f"{dropout}-{micro}"
        flags = ["--dropout_prob", dropout, "--micro_batch_size", micro, "--steps", "3"]
        assert run_finetuning.main([*TRAINING, *flags, "--run-dir", str(folder)]) == 0
        return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]

    assert losses("0", "4") == pytest.approx(losses("0", "2"), rel=1e-5)
    assert losses("0.3", "4") != pytest.approx(losses("0.3", "2"), rel=1e-3)


def test_divergence_ends_a_run_and_saves_its_last_good_state(mistake, copy, curves):
    """The rate makes weights from which nothing finite comes; the third skip is one too many."""
    limit, folder = ("--max_skipped_steps", "2"), ("--load", str(copy), "--save", str(copy))
    rate = ("--steps", "16", "--learning_rate", "1e30")
    said = mistake(run_finetuning.main, *TRAINING, *rate, *limit, *folder)
    assert re.match(r"3 steps in a row were skipped, since loss .* gradient norm (nan|inf)\)", said)
    assert f"the state before is saved as step 12 in {copy}" in said
    assert "lower the learning rate" in said
    assert "POPXL_CHECK=inf" in said
    checkpoint = load_checkpoint(copy)
    assert (checkpoint.step, checkpoint.metadata["skipped_steps"]) == (12, 3)
    counters = {n for n in checkpoint.tensors if n.startswith("optimizer/step/")}
    assert {float(checkpoint.tensors[n]) for n in counters} == {9.0}
    assert all(np.isfinite(x).all() for x in checkpoint.tensors.values())
    rows = read_metrics(copy / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0] * 9 + [1, 2, 3]
    assert (copy / "loss_curve.png").stat().st_size > 0


def test_divergence_without_a_place_to_save(mistake, trained, tmp_path):
    folder = ("--load", str(trained), "--run-dir", str(tmp_path))
    rate = ("--steps", "16", "--learning_rate", "1e30", "--max_skipped_steps", "0")
    said = mistake(run_finetuning.main, *TRAINING, *rate, *folder)
    assert said.startswith("a step was skipped, since loss or gradients are not finite")
    assert "the state before is lost, since --save was not given" in said


# ---- what is on the screen ----------------------------------------------------------------------
TRAINING_SAYS = [
    r"running on 1 × cpu",
    rf"{ROWS['train']} training samples",
    r"compiling the training program",
    r"ready after \d+\.\d s: the executable came from the cache \(0 traces, 0 compilations\)",
    r"starting from random weights",
    r"saving every 10 minutes, and at the end in .+: \d+\.\d\d kB each",
    r"step 1/2: loss \d+\.\d{4}, gradient norm \d+\.\d{4}, learning rate 1\.00e-03, epoch 0\.0\d",
    r"step 2/2: loss \d+\.\d{4}, gradient norm \d+\.\d{4}, learning rate 1\.00e-03, epoch 0\.0\d, "
    r"\d+\.\d samples/s, 00:00 left",
    r"saved step 2 in .+",
    r"records of the run are in .+",
]


def test_training_anew_says_this_and_nothing_else(copy, trained, capfd, curves):
    """The second start of a program neither traces nor compiles. Files that are not of a run stay
    where it starts over."""
    (copy / "mine.txt").write_text("not ours")
    command = [*TRAINING, "--steps", "2", "--save", str(copy), "--overwrite"]
    capfd.readouterr()
    assert run_finetuning.main(command) == 0
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == len(TRAINING_SAYS), err
    for line, pattern in zip(lines, TRAINING_SAYS, strict=True):
        assert re.fullmatch(pattern, line), line
    assert losses(copy) == losses(trained)[:2]
    assert load_checkpoint(copy).step == 2
    assert len(list(copy.glob("*-step-*"))) == 1
    files = {path.name for path in copy.iterdir()}
    assert {"config.yml", "metrics.jsonl", "loss_curve.png", "mine.txt"} < files


def test_a_run_continues_from_one_of_its_steps_and_a_profile_changes_nothing(
    trained, tmp_path, mistake
):
    """The profile takes 1 step to warm up and 3 that are measured; the run has 8, and 4 of them are
    done. It has every phase."""
    run = [*TRAINING, "--steps", "8", "--load", str(step_folder(trained, 4))]
    assert run_finetuning.main([*run, "--save", str(tmp_path), "--profile", "1"]) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [5, 6, 7, 8]
    assert [row["loss"] for row in rows] == losses(trained)[4:]
    assert_same_state(tmp_path, trained)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    table = (tmp_path / "profile" / "phases.txt").read_text()
    assert table.startswith("Time by phase of tiny on 1 × cpu\n")
    (head,) = re.findall(r"^head/update +.*", table, re.M)
    loads, stores = head.split()[3], head.split()[7]
    assert (loads, stores) == ("10", "8")  # two weights: values, gradients, moments, steps
    (share,) = re.findall(r"^total .* (\d+)%$", table, re.M)
    assert 50 < int(share) <= 100
    saved = ("--save", str(tmp_path / "saved"), "--profile", "2")
    said = mistake(run_finetuning.main, *run, *saved)
    assert "--profile 2 takes 7 steps of training, but 4 are left: raise --steps" in said


@pytest.mark.parametrize("length", [slow(("--steps", "2")), ("--epochs", "300")])
def test_a_profile_that_nobody_saves_ends_the_run(length, tmp_path, capsys):
    """And no evaluation follows it."""
    evaluates = ("--eval.steps", "2", "--checkpoint.keep_best", "loss")
    run = (*TRAINING, *length, *evaluates, "--run-dir", str(tmp_path), "--profile", "2")
    assert run_finetuning.main([*run]) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 7
    assert not any("eval_loss" in row for row in rows)
    said = capsys.readouterr().err
    assert "--profile 2 trains 7 steps, and nothing is saved: --save DIR trains all" in said
    assert "profiled runs 2 to 7 of the program: 2 as they are, 2 phase by phase, 2 " in said
    assert (tmp_path / "profile" / "phases.txt").is_file()


def test_validation_ends_with_the_accuracy(trained, tmp_path, capsys):
    out = ("--out", str(tmp_path))
    everything = ("--eval.metrics", "null")
    assert run_validation.main([*VALIDATION, "--load", str(trained), *everything, *out]) == 0
    first, f1, loss, perplexity = capsys.readouterr().out.splitlines()
    assert f1.startswith("macro_f1: 0.")
    found = re.fullmatch(r"accuracy: (0\.\d{4}) \((\d+)/90\)", first)
    assert loss.startswith("loss: ")
    assert perplexity.startswith("perplexity: ")
    assert found
    report = json.loads((tmp_path / "eval.json").read_text())
    assert (report["correct"], report["total"]) == (int(found[2]), 90)
    assert f"{report['accuracy']:.4f}" == found[1]
    assert report["perplexity"] == pytest.approx(np.exp(report["loss"]))
    assert report["step"] == 8


# ---- answers -------------------------------------------------------------------------------------
GENERATION_SAYS = [
    r"running on 1 × cpu",
    r"the weights are those of step 8 in .+",
    r"compiling the program that generates",
    r"ready after \d+\.\d s: .+",
    r"warning: the checkpoint of step 8 is damaged .*; using that of step 4",
    r"the weights are those of step 4 in .+",
    r"1 of 1 answers were cut at 4 tokens: .+",
]
PROMPTS = ["mnli hypothesis: Anna slept.", "mnli hypothesis: Nina moved the hat."]


def test_prompts_come_as_arguments_rows_or_lines(trained, tmp_path, capsys, monkeypatch):
    """And what is on the screen or in a file before stays there."""
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": i, "prompt": text} for i, text in enumerate(PROMPTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answers(*arguments: str) -> list[str]:
        capsys.readouterr()
        assert run_generation.main(["--load", str(trained), *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    given = answers(*PROMPTS)
    assert len(given) == 2
    wanted = [{**row, "generated": text} for row, text in zip(rows, given, strict=True)]
    assert [json.loads(line) for line in answers("--file", str(file))] == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{text}\n" for text in PROMPTS)))
    assert answers("--out", str(out)) == []
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written == [{"prompt": row["prompt"], "generated": row["generated"]} for row in wanted]


def test_answers_are_appended_to_what_a_file_holds(copy, tmp_path):
    """By a shell's >>, which opens the file and hands it on as standard output. A process says no
    more than its notices and what it does."""
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    out.write_text("what was here\n")
    spoil(step_folder(copy, 8))
    with out.open("a") as stream:
        done = process("run_generation.py", "--load", str(copy), "--file", str(file), stdout=stream)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == len(GENERATION_SAYS), done.stderr
    for line, pattern in zip(lines, GENERATION_SAYS, strict=True):
        assert re.fullmatch(pattern, line), line
    first, second = out.read_text().splitlines()
    assert first == "what was here"
    assert set(json.loads(second)) == {"prompt", "generated"}


def test_there_must_be_prompts_in_one_place(trained, mistake, monkeypatch):
    load = ("--load", str(trained))
    said = mistake(run_generation.main, *load, "--file", "rows.jsonl", "a prompt")
    assert "prompts as arguments and in --file: give one of them" in said
    assert "is not UTF-8 text" in mistake(run_generation.main, *load, "Gr\udcfc\udcdfe")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "there are no prompts" in mistake(run_generation.main, *load)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Gr\xfc\xdfe\n"), "utf-8"))
    assert "standard input is not UTF-8 text" in mistake(run_generation.main, *load)


# ---- benchmarks ----------------------------------------------------------------------------------
@pytest.mark.parametrize("benchmark", [finetuning, inference])
def test_a_benchmark_needs_a_run(benchmark, capsys):
    assert benchmark.main(["--config", "tiny", "--runs", "0"]) == 2
    assert "--runs: must be 1 or more, not 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("benchmark", "arguments", "unit"),
    [
        (finetuning, (*MODEL, *BATCH), "samples_per_second"),
        (inference, (*MODEL, "--micro_batch_size", "32"), "tokens_per_second"),
    ],
)
def test_benchmarks_end_with_one_json_line(benchmark, arguments, unit, capsys, monkeypatch):
    monkeypatch.setattr(
        generated_data_benchmark,
        "measure_matmul_rate",
        partial(measure_matmul_rate, size=512, products=8),
    )
    assert benchmark.main([*arguments, "--runs", "1"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["config"] == "tiny"
    assert facts[unit] > 0
    assert 0 < facts["of_matrix_rate"] < 1
    assert facts["compile_seconds"] < facts["startup_seconds"]
    if benchmark is finetuning:
        parts = facts["start_parts"]
        names = ["imports", "program", "compilation", "data and weights", "first step"]
        assert list(parts) == names
        assert min(parts.values()) > 0
    assert facts["peak_host_bytes"] > facts.get("compute_bytes", 0)


def test_benchmarks_measure_the_model_of_the_run_that_load_names(trained, tmp_path):
    def planned(benchmark, *arguments):
        path = tmp_path / "plan.json"
        assert benchmark.main([*arguments, "--plan-json", str(path)]) == 0
        return {**json.loads(path.read_text()), "preset": None}

    load, dropout = ("--load", str(trained)), ("--dropout_prob", "0.1")
    found = planned(finetuning, *load)
    assert found == planned(finetuning, *MODEL, *BATCH, *dropout)
    assert found != planned(finetuning, *load, "--micro_batch_size", "2")
    found = planned(inference, *load)
    assert found == planned(inference, *MODEL, "--micro_batch_size", "4")


@pytest.mark.parametrize("main", [finetuning.main, inference.main])
def test_benchmarks_take_a_preset_or_load(main, mistake):
    said = mistake(main, *MODEL, "--load", "/nonexistent")
    assert "--load: not used beside --config" in said
    assert "/nonexistent: no such folder" in mistake(main, "--load", "/nonexistent")


def test_the_benchmark_of_devices_tells_transfers_from_work(capsys):
    """On CPU, where host and device are one memory."""
    smaller = (
        *("model.layers=1", "model.hidden_size=32", "model.d_ff=32", "model.dropout_prob=0.1"),
        *("model.attention={heads: 2}", "training.global_batch_size=8"),
        "execution.micro_batch_size=4",
    )
    given = [f"--set={field}" for field in smaller]
    assert device_benchmark.main(["--config", "tiny", *given, "--runs", "1"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])["measured"]
    assert 0 < measured["loads_apart"] < measured["runs_apart"]
    assert 0 < measured["stores_apart"] < measured["runs_apart"]
    assert 0 <= measured["hidden_transfers"] <= 1
    assert measured["peak_device_bytes"] is None
