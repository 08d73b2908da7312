"""A run's records: directory, picture, Weights & Biases."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

import run_finetuning
from config.errors import UserError
from config.gptj import GPTJConfig
from config.presets import load_config
from config.t5 import T5Config
from files.run_folder import RunFolder
from run.options import RunOptions
from run.records.metrics_jsonl import read_metrics
from run.records.metrics_logger import MetricsLogger


@pytest.fixture
def config():
    return load_config(T5Config, "finetuning", "tiny", {"training": {"steps": 3}})


class FakeRun:
    """Stands in for a W&B run: starting a real one starts a server process."""

    def __init__(self, **settings):
        self.settings = settings
        self.logged = []
        self.exit_code = None

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch):
    started = []

    def init(**settings):
        started.append(FakeRun(**settings))
        return started[-1]

    monkeypatch.setattr(wandb, "init", init)
    return started


def test_a_run_leaves_its_records(tmp_path, config, capsys):
    path = tmp_path / "deep" / "run"
    with MetricsLogger(config, RunFolder(path), RunOptions("tiny")) as report:
        for step in range(3):
            report.log_step(step + 1, loss=2.0 - step, learning_rate=1e-3, grad_norm=0.5, tokens=9)
    assert load_config(T5Config, "finetuning", str(path / "config.yml")) == config
    rows = read_metrics(path / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [2.0, 1.0, 0.0]
    assert [row["perplexity"] for row in rows] == [math.exp(2.0), math.exp(1.0), 1.0]
    assert set(rows[-1]) == {
        "step",
        "loss",
        "learning_rate",
        "perplexity",
        "grad_norm",
        "samples_per_second",
        "tokens_per_second",
        "seconds_per_step",
        "time",
        "peak_host_bytes",
    }
    assert (path / "loss_curve.png").stat().st_size > 10_000
    captured = capsys.readouterr()
    assert "step 3/3: loss 0.0000" in captured.err
    assert captured.out == ""


def test_a_run_without_steps_leaves_no_picture(tmp_path, config):
    with MetricsLogger(config, RunFolder(tmp_path), RunOptions("tiny")):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yml",
        "metrics.jsonl",
        "run.json",
    ]


def test_a_directory_that_cannot_be(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the run directory .*file"):
        MetricsLogger(config, RunFolder(tmp_path / "file"), RunOptions("tiny"))


@pytest.mark.parametrize(
    ("family", "preset", "project"),
    [(T5Config, "tiny", "popxl-t5"), (GPTJConfig, "gptj_tiny", "popxl-gptj")],
)
def test_wandb_gets_config_versions_and_steps(tmp_path, runs, family, preset, project):
    config = load_config(family, "finetuning", preset)
    options = RunOptions("tiny", wandb=True, wandb_name="mine")
    with MetricsLogger(config, RunFolder(tmp_path), options) as report:
        report.log_step(1, loss=2.0, learning_rate=1e-3)
    (run,) = runs
    assert run.settings["project"] == project
    assert run.settings["name"] == "mine"
    assert run.settings["config"]["model"] == config.to_dict()["model"]
    versions = run.settings["config"]["versions"]
    named = ("popxl", "popxl_addons", "popxl-xla", "jax", "python")
    assert all(versions[name][0].isdigit() for name in named)
    ((step, values),) = run.logged
    assert values["perplexity"] == pytest.approx(math.exp(2.0))
    assert (step, values["loss"], values["learning_rate"]) == (1, 2.0, 1e-3)
    assert run.exit_code == 0


@pytest.mark.parametrize(
    ("flag", "variable", "project"),
    [
        ("mine", None, "mine"),
        ("mine", "theirs", "mine"),
        (None, "theirs", "theirs"),
        (None, "", "popxl-t5"),
        (None, None, "popxl-t5"),
    ],
)
def test_the_project_of_wandb(flag, variable, project, tmp_path, runs, config, monkeypatch):
    """The flag's, else WANDB_PROJECT, else the family's."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    options = RunOptions("tiny", wandb=True, wandb_project=flag)
    with MetricsLogger(config, RunFolder(tmp_path), options):
        pass
    assert runs[0].settings["project"] == project


@pytest.mark.parametrize(("loss", "perplexity"), [(math.nan, math.nan), (1e4, math.inf)])
def test_perplexity_of_a_loss_that_is_not_usual(loss, perplexity, tmp_path, config):
    with MetricsLogger(config, RunFolder(tmp_path), RunOptions("tiny")) as report:
        report.log_step(1, loss=loss, learning_rate=1e-3)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["perplexity"] == pytest.approx(perplexity, nan_ok=True)


def test_preferences_have_no_perplexity(tmp_path):
    changes = {"training": {"objective": "dpo", "steps": 1}, "data": {"packing": False}}
    config = load_config(GPTJConfig, "finetuning", "gptj_tiny", changes)
    with MetricsLogger(config, RunFolder(tmp_path), RunOptions("gptj_tiny")) as report:
        report.log_step(1, loss=0.69, learning_rate=1e-3)
    assert "perplexity" not in read_metrics(tmp_path / "metrics.jsonl")[0]


@pytest.mark.parametrize("given", [["--wandb-project", "x"], ["--wandb-name=x"]])
def test_names_for_wandb_without_it_are_said_to_be_unused(given, capsys):
    assert run_finetuning.main(["--config", "tiny", *given]) == 2
    said = f"error: {given[0].partition('=')[0]} is for --wandb: give that too, or leave it out\n"
    assert capsys.readouterr().err == said


SAMPLES = [
    {"prompt": "one | two", "generated": "<b>1</b>", "expected": "3\n4"},
    {"prompt": "five", "generated": "", "expected": "6"},
]


def test_samples_are_a_table_of_wandb(tmp_path, runs, config):
    with MetricsLogger(config, RunFolder(tmp_path), RunOptions("tiny", wandb=True)) as report:
        report.log_step(1, loss=2.0, learning_rate=1e-3, samples=SAMPLES)
        report.log_step(2, loss=1.0, learning_rate=1e-3)
    (_, first), (_, second) = runs[0].logged
    assert first["samples"].columns == ["prompt", "generated", "expected"]
    assert first["samples"].data == [list(sample.values()) for sample in SAMPLES]
    assert "samples" not in second


def test_samples_are_text_of_tensorboard(tmp_path, config):
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    options = RunOptions("tiny", tensorboard=True)
    with MetricsLogger(config, RunFolder(tmp_path), options) as report:
        report.log_step(7, loss=2.0, learning_rate=1e-3, samples=SAMPLES)
    (path,) = (tmp_path / "tensorboard").iterdir()
    texts = [
        (event.step, value.tensor.string_val[0].decode())
        for event in map(Event.FromString, events_of(path.read_bytes(), masked_crc32c))
        for value in event.summary.value
        if value.tag.startswith("samples/")
    ]
    assert texts == [
        (
            7,
            "| prompt | generated | expected |\n| --- | --- | --- |\n"
            "| one &#124; two | &lt;b&gt;1&lt;/b&gt; | 3<br>4 |\n| five |  | 6 |",
        )
    ]


def events_of(data: bytes, checksum) -> list[bytes]:
    """The records of TensorBoard's file: length, checksum, content, checksum."""
    found = []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(data[12 : 12 + size])
        assert checksum(found[-1]) == int.from_bytes(data[12 + size : 16 + size], "little")
        data = data[16 + size :]
    return found


def fail_after_a_step(config, path):
    with MetricsLogger(config, RunFolder(path), RunOptions("tiny", wandb=True)) as report:
        report.log_step(1, loss=2.0, learning_rate=1e-3)
        raise RuntimeError("the device is gone")


def test_a_failed_run_keeps_its_records_and_says_so(tmp_path, config, runs):
    with pytest.raises(RuntimeError, match="the device is gone"):
        fail_after_a_step(config, tmp_path)
    assert runs[0].exit_code == 1
    assert (tmp_path / "loss_curve.png").exists()


def test_wandb_without_login(tmp_path, config, monkeypatch):
    def init(**settings):
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match=r"No API key.*WANDB_MODE=offline, or leave out --wandb$"):
        MetricsLogger(config, RunFolder(tmp_path), RunOptions("tiny", wandb=True))


def warnings_in(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("warning")]


def test_a_run_goes_on_without_wandb(tmp_path, config, runs, monkeypatch, capsys):
    """wandb fails in the middle of the run, and is not called again, also not at exit."""
    ends = []
    monkeypatch.setattr(wandb, "teardown", lambda exit_code: ends.append(exit_code))
    with MetricsLogger(config, RunFolder(tmp_path), RunOptions("tiny", wandb=True)) as report:
        report.log_step(1, loss=2.0, learning_rate=1e-3)
        monkeypatch.setattr(FakeRun, "log", raise_connection_error)
        for step in (1, 2):
            report.log_step(step + 1, loss=2.0, learning_rate=1e-3)
    said = warnings_in(capsys.readouterr().err)
    assert said == ["warning: Weights & Biases is not written, the run continues: Connection lost"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert (runs[0].exit_code, ends) == (None, [1])


def raise_connection_error(*_: object, **__: object) -> None:
    raise ConnectionResetError("Connection lost")


# After the third step wandb's own process is killed, as by a lack of memory.
WITHOUT_WANDB = """
import os, signal, sys, time
from pathlib import Path
from config.presets import load_config
from config.t5 import T5Config
from files.run_folder import RunFolder
from run.records.metrics_logger import MetricsLogger
from run.options import RunOptions

def its_process():
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"wandb-core" in (path / "cmdline").read_bytes():
                if (path / "stat").read_text().rsplit(")")[1].split()[1] == str(os.getpid()):
                    return int(path.name)
        except OSError:
            pass

config = load_config(T5Config, "finetuning", "tiny", {"training": {"steps": 6}})
with MetricsLogger(config, RunFolder(Path(sys.argv[1])), RunOptions("tiny", wandb=True)) as report:
    for step in range(6):
        report.log_step(step + 1, loss=2.0, learning_rate=1e-3)
        if step == 2:
            os.kill(its_process(), signal.SIGKILL)
            time.sleep(1)
"""


@pytest.mark.slow
def test_wandb_offline_for_real(tmp_path, config):
    with MetricsLogger(config, RunFolder(tmp_path), RunOptions("tiny", wandb=True)) as report:
        report.log_step(1, loss=2.0, learning_rate=1e-3)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_the_process_of_wandb_is_killed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WANDB, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(warnings_in(done.stderr)) == 1
    assert "Traceback" not in done.stderr
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6


def test_where_a_run_goes():
    assert RunFolder.from_options("here", "there", "tiny").path == Path("here")
    assert RunFolder.from_options(None, "there", "tiny").path == Path("there")
    assert RunFolder.from_options(None, None, "old/config.yml").path.parts[0] == "runs"
    assert RunFolder.from_options(None, None, "tiny").path.name.startswith("tiny-")
