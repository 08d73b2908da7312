"""The smallest runs of the scripts, whose programs several files of tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import run_export
import run_finetuning
from config.base import nest_by_path
from config.sections import RunConfig
from data.task import Task
from run import model_card
from run.records import metrics_logger
from tests.children import PYTHON_PATH, child, free_port

ROOT = Path(__file__).parents[1]

MODEL = ("--config", "tiny", "--layers", "1", "--hidden_size", "32", "--d_ff", "32", "--heads", "2")
BATCH = ("--global_batch_size", "8", "--micro_batch_size", "4")
# A rate that does not depend on the number of steps lets a shorter run be lengthened.
RATE = (
    *("--training.optimizer.learning_rate.function", "constant", "--learning_rate", "1e-3"),
    *("--training.optimizer.learning_rate.warmup_proportion", "0"),
)
TRAINING = (*MODEL, *BATCH, *RATE, "--dropout_prob", "0.1")

GPTJ = (
    *("--config", "gptj_tiny", "--layers", "1", "--hidden_size", "32", "--heads", "4"),
    *("--device", "cpu", "--data_parallel", "2", "--tensor_parallel", "2"),
    *("--global_batch_size", "8", "--micro_batch_size", "2"),
)
"""On four devices, which up to four processes share."""


def vocabulary(config: type[RunConfig], rows: int) -> dict[str, Any]:
    """The fields of a family's model that say how many rows its embedding has."""
    return nest_by_path({config().model.field_path("vocab_size"): rows})["model"]


# Few examples, so that runs start soon and pass the end of an epoch often.
_FINETUNING = """
import sys
from itertools import islice
import run_finetuning
from config.base import nest_by_path
from config.sections import RunConfig
from data.task import Task

examples = Task.convert_rows
Task.convert_rows = lambda *given: islice(examples(*given), 40)
sys.exit(run_finetuning.main(sys.argv[1:]))
"""


@contextmanager
def few_examples(executables: Path) -> Iterator[None]:
    """A context for runs in this process, on forty examples, whose programs are compiled once. No
    loss curve is drawn: tests of records and of the command line look at it."""
    examples = Task.convert_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POPXL_CACHE_DIR", str(executables))
        patch.setattr(Task, "convert_rows", lambda *given: islice(examples(*given), 40))
        for drawing in (metrics_logger, model_card):
            patch.setattr(drawing, "draw_loss_curve", lambda *_: None)
        yield


def random_model(folder: Path, *model: str) -> Path:
    """A new folder with a model of Hugging Face's form."""
    assert run_export.main([*model, "--load", "random", "--save-hf", str(folder)]) == 0
    return folder


def train(folder: Path, *arguments: str) -> int:
    """Train with a checkpoint at each second step."""
    saving = ("--checkpoint.steps", "2", "--save", str(folder))
    return run_finetuning.main([*arguments, *saving])


def finetuning(
    processes: int, executables: Path, *arguments: str, first: str = ""
) -> list[subprocess.Popen[str]]:
    """run_finetuning.py on few examples, in processes that nobody watches but they themselves.

    Args:
        executables: the folder of compiled programs.
        first: what each process does first, in Python.
    """
    meeting = f"127.0.0.1:{free_port()}"
    return [
        child(
            [sys.executable, "-c", first + _FINETUNING, *arguments], cwd=ROOT,
            env={
                **os.environ, "PYTHONPATH": PYTHON_PATH,
                "POPXL_CACHE_DIR": str(executables),
                "POPDIST_NUM_INSTANCES": str(processes), "POPDIST_INSTANCE_INDEX": str(index),
                "POPDIST_COORDINATOR": meeting,
            },
        )
        for index in range(processes)
    ]  # fmt: skip
