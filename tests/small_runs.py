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

DECODER = ("--config", "gptj_tiny", "--layers", "1", "--hidden_size", "32", "--heads", "4")
DECODER_TRAINING = (*DECODER, *BATCH, *RATE, "--dropout_prob", "0.1")
"""A program that is built and compiled in half the time of T5's."""

GPTJ = (
    *("--config", "gptj_tiny", "--layers", "1", "--hidden_size", "32", "--heads", "4"),
    *("--device", "cpu", "--data_parallel", "2", "--tensor_parallel", "2"),
    *("--global_batch_size", "8", "--micro_batch_size", "2"),
)
"""On four devices, which up to four processes share."""


def _bart(model_type: str, *more: str) -> tuple[str, ...]:
    """The flags of a small model of BART's family."""
    stacks = [
        (f"--model.{stack}_{name}", size)
        for stack in ("encoder", "decoder")
        for name, size in (("layers", "1"), ("attention_heads", "2"), ("ffn_dim", "32"))
    ]
    sizes = (
        "--config",
        "bart_tiny",
        "--hidden_size",
        "32",
        *(word for pair in stacks for word in pair),
    )
    return (*sizes, "--model.model_type", model_type, *more)


def _t5gemma(model_type: str, *more: str) -> tuple[str, ...]:
    """The flags of a small model of T5Gemma's family."""
    stacks = [
        (f"--model.{stack}.{name}", size)
        for stack in ("encoder", "decoder")
        for name, size in (
            *(("num_hidden_layers", "1"), ("layer_types", "sliding_attention")),
            *(("hidden_size", "32"), ("head_dim", "8")),
        )
    ]
    sizes = ("--config", "t5gemma_tiny", *(word for pair in stacks for word in pair))
    return (*sizes, "--model.model_type", model_type, *more)


ENCODER_DECODERS = {
    "umt5": (*MODEL, "--model.architecture", "umt5"),
    **{kind: _bart(kind) for kind in ("bart", "mbart", "marian", "pegasus")},
    "m2m_100": _bart("m2m_100", "--model.decoder_start_token_id", "1"),
    "t5gemma": _t5gemma("t5gemma"),
    "t5gemma2": _t5gemma(
        "t5gemma2",
        *("--model.encoder.attn_logit_softcapping", "null"),
        *("--model.decoder.attn_logit_softcapping", "null"),
        *("--model.eoi_token_index", "99"),
    ),
}
"""Flags of a small model of each kind beside T5."""


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
